"""Adapters of many groups packed at once: the bits that each group would pack for itself, as they are now."""

from __future__ import annotations

import pytest
import torch
from ftkernels.lora_linear import lora_linear
from ftkernels.lowrank_plan import make_plan, pack_adapters
from ftkernels.projection import AdapterPacks, Packed, Projection


def projection(out: int, rank: int, scaling: float, inputs: int = 24) -> Projection:
    a = torch.randn(rank, inputs) if rank else None
    b = torch.randn(out, rank) if rank else None
    return Projection(torch.randn(out, inputs), a=a, b=b, scaling=scaling)


def with_pack(group: list[Projection], packed: Packed | None) -> list[Projection]:
    return [Projection(p.weight, p.bias, p.a, p.b, p.scaling, p.dropout, packed) for p in group]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(16, 16, 16), (8, 4, 20), (16, 0, 16), (0, 0, 0)])
def test_packs_are_those_of_each_group(ranks: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    groups = [
        [projection(out, rank, 0.7) for out, rank in zip((32, 8, 8), ranks, strict=True)],
        [projection(16, 16, 2.0)],
    ]
    packs = AdapterPacks(groups, dtype)
    x = torch.randn(3, 24, dtype=dtype)
    for _ in range(2):
        packs.refresh()
        for group, packed in zip(groups, packs.packs, strict=True):
            half = [Projection(p.weight.to(dtype), a=p.a, b=p.b, scaling=p.scaling) for p in group]
            wanted = pack_adapters(make_plan(x, half, None, "torch"), x.device)
            if wanted.a is None or wanted.b is None:
                assert packed is None
                continue
            assert packed is not None
            assert packed.a is not None
            assert packed.b is not None
            assert torch.equal(packed.a, wanted.a)
            assert torch.equal(packed.b, wanted.b)
            for p in group:  # as an optimizer would change them
                if p.a is not None and p.b is not None:
                    p.a.mul_(1.25)
                    p.b.add_(0.5)


def test_an_operation_takes_the_pack_that_it_is_given() -> None:
    torch.manual_seed(0)
    group = [projection(16, 4, 0.5)]
    packs = AdapterPacks([group], torch.float32)
    packs.refresh()
    x = torch.randn(2, 5, 24)
    given = with_pack(group, packs.packs[0])
    assert torch.equal(lora_linear(x, given[0]), lora_linear(x, group[0]))
    packs.packs[0].b.zero_()  # type: ignore[union-attr]
    assert not torch.equal(lora_linear(x, given[0]), lora_linear(x, group[0]))


@pytest.mark.parametrize("adapted", [(True, False, True), (False, True, False)])
def test_layers_without_an_adapter_carry_no_pack(adapted: tuple[bool, ...]) -> None:
    """As a model has them where not every module is a target."""
    torch.manual_seed(0)
    group = [projection(8, 4 if each else 0, 0.5) for each in adapted]
    packs = AdapterPacks([group], torch.float32)
    packs.refresh()
    x = torch.randn(2, 24)
    given = [q if p.a is not None else p for p, q in zip(group, with_pack(group, packs.packs[0]), strict=True)]
    found, wanted = (pack_adapters(make_plan(x, each, None, "torch"), x.device) for each in (given, group))
    assert found is packs.packs[0]
    assert wanted.a is not None
    assert wanted.b is not None
    assert torch.equal(packs.packs[0].a, wanted.a)  # type: ignore[union-attr, arg-type]
    assert torch.equal(packs.packs[0].b, wanted.b)  # type: ignore[union-attr, arg-type]


def test_packs_of_two_groups_in_one_are_refused() -> None:
    groups = [[projection(16, 4, 0.5)], [projection(16, 4, 0.5)]]
    first, second = AdapterPacks(groups, torch.float32).packs
    mixed = [*with_pack(groups[0], first), *with_pack(groups[1], second)]
    x = torch.randn(2, 24)
    with pytest.raises(ValueError, match="different groups"):
        pack_adapters(make_plan(x, mixed, None, "torch"), x.device)


def test_a_pack_in_another_dtype_is_left_aside() -> None:
    group = [projection(16, 4, 0.5)]
    packs = AdapterPacks([group], torch.bfloat16)
    x = torch.randn(2, 24)
    found = pack_adapters(make_plan(x, with_pack(group, packs.packs[0]), None, "torch"), x.device)
    assert found.a is not None
    assert found.a.dtype == torch.float32
