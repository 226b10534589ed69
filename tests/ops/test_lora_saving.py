"""What the LoRA operations save: never more than they need, less where asked, and always with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lowrank import base_forward
from ftkernels.projection import Norm, Projection
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS, HIDDEN, INNER = 21, 64, 96
MODES = ["gate_up", "gate_up_once", "input"]


def _mlp(layers: Any, ranks: tuple[int, int, int] = (4, 4, 4)) -> list[Any]:
    sizes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    return [layers.make(*size, rank, bias=True) for size, rank in zip(sizes, ranks, strict=True)]


def _leaves(device: str, layers: Any, used: list[Any], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    first = [torch.randn(1, ROWS, HIDDEN, device=device, dtype=dtype), torch.ones(HIDDEN, device=device, dtype=dtype)]
    return [t.requires_grad_() for t in (*first, *layers.flat(*used))]


def _run(call: Callable[..., Any], leaves: list[Tensor], times: int = 1) -> list[Tensor]:
    """Outputs, and the gradients of the last of ``times`` backward passes through one graph."""
    out = call(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(3)
    incoming = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    for left in reversed(range(times)):
        gradients = torch.autograd.grad(outputs, leaves, incoming, retain_graph=left > 0)
    return [*(o.detach() for o in outputs), *gradients]


def _same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("ranks", [(4, 4, 4), (80, 2, 0)], ids=["in kernels", "in products"])
@pytest.mark.parametrize("residual", ["add", "return"])
def test_mlp_gives_the_same_bits_whatever_it_saves(
    device: str, layers: Any, residual: str, ranks: tuple[int, int, int], backend: str
) -> None:
    used = _mlp(layers, ranks)
    leaves = _leaves(device, layers, used)
    options: dict[str, Any] = {"norm": True, "residual": residual, "backend": backend}
    wanted = _run(layers.function(lora_mlp, used, **options), leaves)
    for mode in MODES[1:]:
        call = layers.function(lora_mlp, used, save=mode, **options)
        assert _same(_run(call, leaves), wanted), mode
        assert _same(_run(call, leaves, times=2), wanted), f"{mode}, a second backward through a retained graph"


def test_mlp_in_bfloat16_gives_the_same_bits_whatever_it_saves(device: str, layers: Any) -> None:
    used = _mlp(layers)
    leaves = _leaves(device, layers, used, torch.bfloat16)
    runs = [
        _run(layers.function(lora_mlp, used, save=m, norm=True, residual="add", backend="triton"), leaves)
        for m in MODES
    ]
    assert _same(runs[1], runs[0])
    assert _same(runs[2], runs[0])


def test_mlp_without_a_norm_and_with_a_frozen_input(device: str, layers: Any) -> None:
    """The first layer of a model with adapters on the MLP alone: nothing behind z wants a gradient."""
    used = _mlp(layers)
    z = torch.randn(1, ROWS, HIDDEN, device=device)
    leaves = [t.requires_grad_() for t in layers.flat(*used)]

    def of(mode: str) -> list[Tensor]:
        operation = layers.function(lora_mlp, used, save=mode, backend="triton")
        return _run(lambda *adapters: operation(z, *adapters), leaves)

    assert _same(of("input"), of("gate_up"))


def test_dropout_masks_are_the_same_when_the_mlp_is_formed_again(device: str, layers: Any) -> None:
    used = _mlp(layers)
    leaves = _leaves(device, layers, used)

    def dropping(z: Tensor, *projections: Projection, **kwargs: Any) -> Any:
        torch.manual_seed(5)
        return lora_mlp(z, *[Projection(p.weight, p.bias, p.a, p.b, p.scaling, 0.3) for p in projections], **kwargs)

    runs = [
        _run(layers.function(dropping, used, save=m, norm=True, residual="add", backend="torch"), leaves, times=2)
        for m in MODES
    ]
    assert _same(runs[1], runs[0])
    assert _same(runs[2], runs[0])


@pytest.mark.parametrize("norm", [False, True], ids=["bare", "norm"])
def test_linear_gives_the_same_bits_whatever_it_saves(device: str, layers: Any, norm: bool) -> None:
    used = [layers.make(HIDDEN, HIDDEN, 4)]
    leaves = _leaves(device, layers, used)
    leaves = leaves if norm else [leaves[0], *leaves[2:]]
    wanted = _run(layers.function(lora_linear, used, norm=norm, backend="triton"), leaves)
    call = layers.function(lora_linear, used, norm=norm, save="input", backend="triton")
    assert _same(_run(call, leaves, times=2), wanted)


@pytest.mark.parametrize(("mode", "kept"), [("gate_up", HIDDEN + 2 * INNER), ("input", HIDDEN)])
def test_what_the_mlp_saves(device: str, layers: Any, mode: str, kept: int) -> None:
    used = _mlp(layers)
    saved: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.numel() >= ROWS * HIDDEN and t.shape[-2] == ROWS:
            saved[t.untyped_storage().data_ptr()] = t.shape[-1]
        return t

    call = layers.function(lora_mlp, used, save=mode, norm=True, residual="add", backend="triton")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call(*_leaves(device, layers, used))
    assert sum(saved.values()) == kept


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Output features of the base products, in order."""
    products: list[int] = []

    def counting(plan: Any, x: Tensor, *rest: Any) -> Tensor:
        products.append(plan.out_features)
        return base_forward(plan, x, *rest)

    for module in ("ftkernels.lora_mlp", "ftkernels.lowrank"):
        monkeypatch.setattr(import_module(module), "base_forward", counting)
    return products


def test_a_checkpoint_stops_in_front_of_an_mlp_that_saves_its_input(
    device: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up are formed once more, in backward; the unit and down are not."""
    used = _mlp(layers)
    leaves = _leaves(device, layers, used)
    options: dict[str, Any] = {"norm": True, "residual": "add", "backend": "triton"}
    wanted = _run(layers.function(lora_mlp, used, **options), leaves)
    units: list[None] = []
    module = import_module("ftkernels.lora_mlp")
    forward = module.glu_forward

    def counting_unit(*args: Any, **kwargs: Any) -> Any:
        units.append(None)
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "glu_forward", counting_unit)
    products = _counted(monkeypatch)
    call = layers.function(lora_mlp, used, save="input", **options)
    found = _run(lambda z, *rest: checkpoint(lambda x, *r: call(x * 1.0, *r), z, *rest, use_reentrant=False), leaves)
    assert _same(found, wanted)
    assert products == [2 * INNER, HIDDEN, 2 * INNER]
    assert len(units) == 1


def test_a_checkpoint_stops_in_front_of_a_linear_that_saves_its_input(
    device: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [layers.make(HIDDEN, HIDDEN, 4)]
    leaves = _leaves(device, layers, used)
    del leaves[1]
    products = _counted(monkeypatch)
    call = layers.function(lora_linear, used, save="input", backend="triton")
    _run(lambda z, *rest: checkpoint(lambda x, *r: call(x * 1.0, *r), z, *rest, use_reentrant=False), leaves)
    assert products == [HIDDEN]


def test_saved_tensors_are_the_minimum(device: str, layers: Any) -> None:
    """Per row: linear keeps its input, QKV the residual stream, the MLP that and gate and up; nothing as wide beside
    them.
    """
    rows, hidden, inner = 65, 64, 96
    sizes = {}
    for name, operation, _, used, options in layers.three():
        if "rope" in options:
            options["rope"] = tuple(torch.randn(1, rows, 16, device=device) for _ in range(2))
        saved: dict[int, int] = {}
        leaves = [
            t.requires_grad_()
            for t in (
                torch.randn(1, rows, hidden, device=device),
                torch.ones(hidden, device=device),
                *layers.flat(*used),
            )
        ]

        def keep(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if t.dim() and t.shape[-1] >= hidden and t.numel() == rows * t.shape[-1]:
                saved[t.untyped_storage().data_ptr()] = t.shape[-1]
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            layers.function(operation, used, backend="triton", **options)(*leaves)
        sizes[name] = sum(saved.values())
    assert sizes == {"linear": hidden, "qkv": hidden, "mlp": hidden + 2 * inner}


def test_a_checkpoint_does_not_run_downs_product_again(
    device: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = _counted(monkeypatch)
    _, _, _, used, options = layers.three()[2]
    leaves = [
        t.requires_grad_()
        for t in (torch.randn(2, 5, 64, device=device), torch.ones(64, device=device), *layers.flat(*used))
    ]
    call = layers.function(lora_mlp, used, backend="triton", **options)
    direct = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    assert products == [192, 64]
    products.clear()
    kept = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False).square().sum(), leaves)
    assert products == [192, 64, 192]
    assert all(torch.equal(a, b) for a, b in zip(direct, kept, strict=True))


def test_liger_272_1251_a_saved_tensor_changed_in_place_is_noticed(device: str) -> None:
    """What backward needs is saved through autograd, which checks versions; a raw buffer would give wrong gradients."""
    z = torch.randn(3, 8, device=device, requires_grad=True)
    stream = z * 1.0
    layer = Projection(torch.randn(8, 8, device=device), None, torch.ones(2, 8, device=device, requires_grad=True), torch.ones(8, 2, device=device))  # fmt: skip  # noqa: E501
    y = lora_linear(stream, layer, norm=Norm(torch.ones(8, device=device), 1e-5), backend="triton")
    stream.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_early_saved_input_changed_in_place_is_noticed(device: str, layers: Any) -> None:
    used = _mlp(layers)
    z, norm, *adapters = _leaves(device, layers, used)
    stream = z * 1.0
    y = layers.function(lora_mlp, used, save="input", norm=True, backend="triton")(stream, norm, *adapters)
    stream.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_unknown_save_mode_is_refused(device: str, layers: Any) -> None:
    one = [layers.make(HIDDEN, HIDDEN, 4)]
    with pytest.raises(ValueError, match="save mode 'inputs'"):
        layers.function(lora_linear, one, save="inputs", backend="triton")(
            torch.randn(1, 3, HIDDEN, device=device), *layers.flat(*one)
        )
    used = _mlp(layers)
    with pytest.raises(ValueError, match="save mode 'nothing'"):
        layers.function(lora_mlp, used, save="nothing", backend="triton")(
            torch.randn(1, 3, HIDDEN, device=device), *layers.flat(*used)
        )
