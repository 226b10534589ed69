"""Documents with branches: each sees the trunk and itself at positions of its own; what lies between costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles
from ftkernels.attention_mask import AttentionMask
from torch import Tensor

from tests.tiers import in_turn

# Tokens of trunk and branches of each document.
PAIR = ((9, 14, 11),)
ROW = ((5, 7, 6), (1, 3, 20), (12,), (30, 1, 1), (2, 9))
OBLONG = AttentionTiles(
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
)


def branches(*documents: tuple[int, ...], window: int | None = None, device: str = "cpu") -> AttentionMask:
    """The mask of one row of documents, each given by the tokens of its trunk and of its branches."""
    starts: list[int] = []
    begins: list[int] = []
    for document in documents:
        first = len(starts)
        for size in document:
            begins += [len(begins)] * size
        starts += [first] * sum(document)
    of = torch.tensor([starts, begins], dtype=torch.int32, device=device)
    return AttentionMask(window=window, document_starts=of[:1], length=len(starts), branch_starts=of[1:])


def seen_by_definition(documents: tuple[tuple[int, ...], ...], window: int | None) -> Tensor:
    """(S, S) from each path alone: trunk and one branch are an ordinary causal text."""
    total = sum(map(sum, documents))
    seen = torch.zeros(total, total, dtype=torch.bool)
    first = 0
    for trunk, *others in documents:
        begin = first + trunk
        for size in others or [0]:
            path = torch.tensor([*range(first, first + trunk), *range(begin, begin + size)])
            distance = torch.arange(len(path))[:, None] - torch.arange(len(path))
            near = (distance >= 0) & (distance < (window or total + 1))
            seen[path[:, None], path[None]] = near
            begin += size
        first = begin
    return seen


def inputs(device: str, length: int, heads: int = 2, kv_heads: int = 1, size: int = 16) -> tuple[Tensor, ...]:
    """q, k, v as projections leave them: (B, S, H, D)."""
    return tuple(torch.randn(1, length, h, size, device=device) for h in (heads, kv_heads, kv_heads))


def call(function: Callable[..., Tensor], mask: AttentionMask, **options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.25, **options).transpose(1, 2)

    return run


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 13, 40, 1000])
def test_intervals_and_holes_say_what_the_paths_say(window: int | None) -> None:
    for documents in (PAIR, ROW, ((3, 1, 1),), ((1, 1, 1), (1, 1, 1)), ((4,), (1,)), ((6, 2),)):
        wanted = seen_by_definition(documents, window)
        mask = branches(*documents, window=window)
        length = len(wanted)
        ranges = mask.ranges(length, length, "cpu")
        assert torch.equal(mask.dense(length, length)[0, 0], wanted), documents
        assert torch.equal(ranges.dense()[0, 0], wanted), documents
        assert ranges.query_holes is not None
        queries = torch.arange(length)[:, None]
        by_key = (queries >= ranges.query_lo) & (queries < ranges.query_hi)
        by_key &= (queries < ranges.query_holes[:, 0]) | (queries >= ranges.query_holes[:, 1])
        assert torch.equal(by_key, wanted), documents
        for tensor in ranges.tensors():
            assert tensor is not None
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()


def test_many_branches_without_a_window() -> None:
    documents = ((4, 3, 1, 5, 2), (3, 2, 2, 2))
    length = sum(map(sum, documents))
    ranges = branches(*documents).ranges(length, length, "cpu")
    assert torch.equal(ranges.dense()[0, 0], seen_by_definition(documents, None))


@pytest.mark.parametrize(
    ("form", "documents"),
    in_turn([(0.0, None), (5.0, None), (0.0, 12), (5.0, 33)], [PAIR, ROW, ((40, 50, 37),)]),
)
def test_output_and_gradients(
    device: str, tools: Any, form: tuple[float, int | None], documents: tuple[tuple[int, ...], ...]
) -> None:
    softcap, window = form
    mask = branches(*documents, window=window, device=device)
    tensors = inputs(device, sum(map(sum, documents)))
    for tiles in (None, OBLONG):
        kernels = call(attention, mask, backend="triton", softcap=softcap, tiles=tiles)
        tools.assert_float32(kernels, call(attention_reference, mask, softcap=softcap), tensors)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 3, 48), (2, 1, 96), (1, 1, 256)])
def test_heads(device: str, tools: Any, heads: int, kv_heads: int, size: int) -> None:
    mask = branches((20, 33, 18), device=device)
    tensors = inputs(device, 71, heads, kv_heads, size)
    tools.assert_float32(call(attention, mask, backend="triton"), call(attention_reference, mask), tensors)


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_bfloat16(device: str, tools: Any, softcap: float) -> None:
    mask = branches((20, 33, 18), (9, 12, 30), device=device)
    run = call(attention, mask, backend="triton", softcap=softcap)
    compared = tools.compare(
        run, call(attention_reference, mask, softcap=softcap), inputs(device, 122, 4, 2, 32), torch.bfloat16
    )
    assert compared.error <= 5e-3, compared


def test_views_of_one_projection_and_rows_of_their_own(device: str, tools: Any) -> None:
    fused = torch.randn(2, 21, 4 * 16, device=device)
    one, other = branches((5, 9, 7), device=device), branches((1, 4, 3), (13,), device=device)
    assert one.document_starts is not None
    assert other.document_starts is not None
    assert one.branch_starts is not None
    assert other.branch_starts is not None
    mask = AttentionMask(
        document_starts=torch.cat([one.document_starts, other.document_starts]),
        branch_starts=torch.cat([one.branch_starts, other.branch_starts]),
        length=21,
    )

    def split(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in x.split((32, 16, 16), dim=-1))
            return function(q, k, v, mask, scale=0.25, **options)

        return run

    tools.assert_float32(split(attention, backend="triton"), split(attention_reference), (fused,))


def test_a_shared_trunk_is_two_rows_that_have_it_each(device: str) -> None:
    """Output and gradients of separate rows, with the trunk's added up."""
    q, k, v = (x.transpose(1, 2) for x in inputs(device, 9 + 14 + 11))
    first, second = torch.arange(23), torch.cat([torch.arange(9), torch.arange(23, 34)])
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    shared = attention(*leaves, branches(*PAIR, device=device), scale=0.25, backend="triton")
    incoming = torch.randn_like(shared)
    found = torch.autograd.grad(shared, leaves, incoming)
    wanted = [torch.zeros_like(x) for x in leaves]
    for rows, weights in ((first, 1.0), (second, torch.cat([torch.zeros(9), torch.ones(11)])[:, None].to(device))):
        own = [x.detach()[:, :, rows].requires_grad_() for x in leaves]
        out = attention(*own, AttentionMask.causal_mask(), scale=0.25, backend="triton")
        assert torch.allclose(out, shared.detach()[:, :, rows], atol=1e-5)
        for total, each in zip(wanted, torch.autograd.grad(out, own, incoming[:, :, rows] * weights), strict=True):
            total[:, :, rows] += each
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_two_runs_give_the_same_bits(device: str) -> None:
    mask = branches(*ROW, window=9, device=device)
    results = []
    tensors = inputs(device, sum(map(sum, ROW)), 4, 2)
    for _ in range(2):
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in tensors]
        out = attention(*leaves, mask, scale=0.25, backend="triton")
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("joint", [False, True])
def test_tiles_in_the_hole_are_not_read(device: str, joint: bool) -> None:
    """NaN in a branch, in whole tiles of it, stays out of the other's output and gradients: 0 * NaN would not."""
    tile = AttentionTile(32, 32, 4, 1)
    tiles = AttentionTiles(tile, tile, tile, tile, tile if joint else None)
    mask = branches((32, 96, 64), device=device)
    clean = [x.transpose(1, 2) for x in inputs(device, 192)]
    poisoned = [x.clone() for x in clean]
    chosen, others = slice(32, 128), torch.cat([torch.arange(32), torch.arange(128, 192)])
    for x in poisoned:
        x[:, :, chosen] = float("nan")
    results = []
    for tensors in (clean, poisoned):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves, mask, scale=0.25, backend="triton", tiles=tiles)
        dq, _, _ = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append((out.detach()[:, :, others], dq[:, :, others]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    # The other way: queries of the second branch are nothing to the first one's keys.
    results = []
    for bad in (False, True):
        tensors = [x.clone() for x in clean]
        if bad:
            tensors[0][:, :, 128:] = float("nan")
        leaves = [x.requires_grad_() for x in tensors]
        out = attention(*leaves, mask, scale=0.25, backend="triton", tiles=tiles)
        _, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append((dk[:, :, chosen], dv[:, :, chosen]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


STARTS = torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.parametrize(("options", "message"), [
    ({"causal": False, "document_starts": STARTS, "length": 4}, "causal"),
    ({"document_starts": STARTS, "length": 4, "starts": STARTS[0, :1], "ends": STARTS[0, :1]}, "without padding"),
    ({}, "need document_starts"),
    ({"document_starts": STARTS[:, :2], "length": 2}, "of their shape"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMask(branch_starts=STARTS, **options)  # type: ignore[arg-type]


def test_queries_after_a_cached_prefix_are_refused() -> None:
    with pytest.raises(ValueError, match="2 queries, 4 keys"):
        AttentionMask(document_starts=STARTS, branch_starts=STARTS, length=4).ranges(2, 4, "cpu")
