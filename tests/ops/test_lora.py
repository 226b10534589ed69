"""Fused LoRA operations: linear, QKV with norm and rotary embedding, gated MLP."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from ftkernels.lora_linear import lora_linear, lora_linear_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.lowrank import base_forward
from ftkernels.projection import Norm, Projection, join_weights, joined
from torch.utils.checkpoint import checkpoint

BF16, F32 = torch.bfloat16, torch.float32


def _z(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 5, 40)), device=device)


def _angles(device: str, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 5, features, device=device), torch.randn(1, 5, features, device=device).expand(2, 5, features)


# Linear


@pytest.mark.parametrize("rank", [0, 3, 16, 80], ids="rank{}".format)
@pytest.mark.parametrize("form", [None, "llama", "gemma"])
def test_linear_matches_float64(device: str, tools: Any, layers: Any, form: Any, rank: int) -> None:
    layer = layers.make(70, 40, rank, bias=rank == 3)
    inputs = [_z(device), *([torch.randn(40, device=device)] if form else []), *layers.flat(layer)]
    kwargs = {"norm": form is not None, "form": form or "llama"}
    tools.assert_float32(
        layers.function(lora_linear, [layer], backend="triton", **kwargs),
        layers.function(lora_linear_reference, [layer], **kwargs),
        inputs,
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_linear_adds_the_residual(device: str, tools: Any, layers: Any, backend: Any) -> None:
    layer = layers.make(33, 40, 4)

    def call(function: Any, **kwargs: Any) -> Any:
        return lambda z, r, a, b: function(z, layer.build(a, b, z), residual=r, **kwargs)

    inputs = (_z(device), _z(device, 2, 5, 33), *layers.flat(layer))
    tools.assert_float32(call(lora_linear, backend=backend), call(lora_linear_reference), inputs)
    tools.assert_bfloat16(call(lora_linear, backend=backend), call(lora_linear_reference), inputs, BF16)


# QKV


@pytest.mark.parametrize("ranks", [(4, 4, 4), (16, 0, 3), (0, 0, 0), (80, 80, 80)], ids=str)
@pytest.mark.parametrize("rope", [None, 16, 8], ids="rope{}".format)
def test_qkv_matches_float64(
    device: str, tools: Any, layers: Any, rope: int | None, ranks: tuple[int, int, int]
) -> None:
    qkv = [layers.make(n * 16, 40, r, bias=True) for n, r in zip((4, 2, 2), ranks, strict=True)]
    kwargs: dict[str, Any] = {"norm": True, "head_dim": 16, "rope": None if rope is None else _angles(device, rope)}
    tools.assert_float32(
        layers.function(lora_qkv, qkv, backend="triton", **kwargs),
        layers.function(lora_qkv_reference, qkv, **kwargs),
        [_z(device), torch.randn(40, device=device), *layers.flat(*qkv)],
    )


def test_qkv_without_a_norm_and_with_odd_heads(device: str, tools: Any, layers: Any) -> None:
    """Head size 6 is no power of two, 5 and 1 heads are no multiples of anything."""
    qkv = [layers.make(n * 6, 12, 2) for n in (5, 1, 1)]
    cos, sin = torch.randn(1, 3, 6, device=device), torch.randn(1, 3, 6, device=device)
    kwargs: dict[str, Any] = {"head_dim": 6, "rope": (cos, sin)}
    tools.assert_float32(
        layers.function(lora_qkv, qkv, backend="triton", **kwargs),
        layers.function(lora_qkv_reference, qkv, **kwargs),
        [_z(device, 1, 3, 12), *layers.flat(*qkv)],
    )


def test_qkv_views_have_attentions_layout(device: str, layers: Any) -> None:
    """Of one buffer, where the low-rank terms and the rotation ride in the kernel: on a GPU in half precision."""
    qkv = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)]
    z = _z(device).to(BF16 if device == "cuda" else F32)
    out = layers.function(lora_qkv, qkv, head_dim=16, rope=_angles(device, 16), backend="triton")(z, *layers.flat(*qkv))
    assert [tuple(t.shape) for t in out[:3]] == [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]
    assert all(t.stride(-1) == 1 for t in out[:3])
    assert len({t.untyped_storage().data_ptr() for t in out[:3]}) == 1


def test_qkv_takes_expanded_and_missing_gradients(device: str, tools: Any, layers: Any) -> None:
    """Attention may hand back broadcast gradients, or none for an output that was not used."""
    qkv = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)]
    kwargs: dict[str, Any] = {"head_dim": 16, "rope": _angles(device, 16), "norm": True}

    def call(function: Any, **extra: Any) -> Any:
        op = layers.function(function, qkv, **kwargs, **extra)
        return lambda *inputs: (op(*inputs).q.mean(), op(*inputs).k.transpose(-1, -2).sum(-1), op(*inputs).residual * 2)

    inputs = [_z(device), torch.randn(40, device=device), *layers.flat(*qkv[:2])]
    frozen_v = layers.flat(qkv[2])  # its adapter has no gradient when v is not used

    def without_v(function: Any) -> Any:
        return lambda *given: function(*given, *(t.to(given[0].dtype) for t in frozen_v))

    tools.assert_float32(without_v(call(lora_qkv, backend="triton")), without_v(call(lora_qkv_reference)), inputs)


# MLP


@pytest.mark.parametrize("ranks", [(4, 4, 4), (0, 16, 0), (0, 0, 5), (3, 3, 80), (80, 2, 2)], ids=str)
@pytest.mark.parametrize("residual", ["none", "add", "return"])
def test_mlp_matches_float64(device: str, tools: Any, layers: Any, residual: str, ranks: tuple[int, ...]) -> None:
    mlp = [
        layers.make(90, 40, ranks[0], bias=True),
        layers.make(90, 40, ranks[1]),
        layers.make(40, 90, ranks[2], bias=True),
    ]
    kwargs: dict[str, Any] = {"norm": True, "activation": "silu", "residual": residual}
    tools.assert_float32(
        layers.function(lora_mlp, mlp, backend="triton", **kwargs),
        layers.function(lora_mlp_reference, mlp, **kwargs),
        [_z(device), torch.randn(40, device=device), *layers.flat(*mlp)],
    )


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu2"])
def test_mlp_activations(device: str, tools: Any, layers: Any, activation: str) -> None:
    mlp = [layers.make(129, 24, 2), layers.make(129, 24, 2), layers.make(17, 129, 2)]
    tools.assert_float32(
        layers.function(lora_mlp, mlp, backend="triton", activation=activation),
        layers.function(lora_mlp_reference, mlp, activation=activation),
        [_z(device, 7, 24), *layers.flat(*mlp)],
    )


def _three(device: str, layers: Any) -> list[tuple[str, Any, Any, list[Any], dict[str, Any]]]:
    """The three operations with a norm: (name, operation, reference, layers, options)."""
    qkv = [layers.make(n * 16, 64, 4) for n in (4, 2, 2)]
    mlp = [layers.make(96, 64, 4), layers.make(96, 64, 4), layers.make(64, 96, 4)]
    heads = {"head_dim": 16, "rope": _angles(device, 16), "norm": True}
    return [
        ("linear", lora_linear, lora_linear_reference, [layers.make(64, 64, 4)], {"norm": True}),
        ("qkv", lora_qkv, lora_qkv_reference, qkv, heads),
        ("mlp", lora_mlp, lora_mlp_reference, mlp, {"norm": True, "residual": "add"}),
    ]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("adapters", [BF16, F32], ids=["adapters_bf16", "adapters_f32"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_bfloat16_is_as_good_as_torch(
    device: str, tools: Any, layers: Any, which: int, adapters: Any, backend: Any
) -> None:
    _, operation, reference, used, options = _three(device, layers)[which]
    flat = layers.flat(*used)
    inputs = [_z(device, 2, 5, 64), torch.rand(64, device=device) + 0.5, *flat]
    tools.assert_bfloat16(
        layers.function(operation, used, backend=backend, **options),
        layers.function(reference, used, **options),
        inputs,
        [BF16, BF16, *[adapters] * len(flat)],
    )


@pytest.mark.parametrize("z_dtype", [BF16, F32], ids=["z_bf16", "z_f32"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_autocast_computes_in_its_dtype_and_returns_everyones_own(
    device: str, tools: Any, layers: Any, which: int, z_dtype: Any
) -> None:
    """fp32 adapters under autocast, the base weights in float32: the products are bfloat16, gradients are the leaves'
    own.
    """
    _, operation, reference, used, options = _three(device, layers)[which]
    flat = layers.flat(*used)
    dtypes = [z_dtype, F32, *[F32] * len(flat)]

    def under_autocast(function: Any) -> Any:
        def call(*inputs: torch.Tensor) -> Any:
            if inputs[0].dtype == torch.float64:
                return function(*inputs)
            with torch.autocast(device, BF16):
                return function(*inputs)

        return call

    inputs = [_z(device, 2, 5, 64), torch.rand(64, device=device) + 0.5, *flat]
    tools.assert_bfloat16(
        under_autocast(layers.function(operation, used, backend="triton", **options)),
        under_autocast(layers.function(reference, used, **options)),
        inputs,
        dtypes,
    )
    leaves = [t.to(d).requires_grad_() for t, d in zip(inputs, dtypes, strict=True)]
    out = under_autocast(layers.function(operation, used, backend="triton", **options))(*leaves)
    first = out[0] if isinstance(out, tuple) else out
    assert first.dtype == (F32 if which == 2 and z_dtype == F32 else BF16)  # "add" promotes with the residual
    grads = torch.autograd.grad(first.float().sum(), leaves)[:3] if which != 1 else ()
    assert [g.dtype for g in grads] == dtypes[: len(grads)]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_twice_the_same_bits(device: str, layers: Any, which: int) -> None:
    _, operation, _, used, options = _three(device, layers)[which]
    leaves = [t.requires_grad_() for t in (_z(device, 2, 70, 64), torch.ones(64, device=device), *layers.flat(*used))]
    if "rope" in options:
        options["rope"] = tuple(torch.randn(1, 70, 16, device=device) for _ in range(2))
    call = layers.function(operation, used, backend="triton", **options)
    runs = []
    for _ in range(2):
        out = call(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        runs.append([*outputs, *torch.autograd.grad([o.square().sum() for o in outputs], leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_no_rows(device: str, layers: Any, which: int) -> None:
    _, operation, _, used, options = _three(device, layers)[which]
    if "rope" in options:
        options["rope"] = tuple(torch.randn(1, 0, 16, device=device) for _ in range(2))
    leaves = [t.requires_grad_() for t in (_z(device, 2, 0, 64), torch.ones(64, device=device), *layers.flat(*used))]
    out = layers.function(operation, used, backend="triton", **options)(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad([o.sum() for o in outputs], leaves)
    assert all(float(g.abs().sum()) == 0.0 for g in grads)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_gradcheck(device: str, layers: Any, which: int) -> None:
    used = [
        [layers.make(3, 4, 1)],
        [layers.make(n * 2, 4, 1) for n in (2, 1, 1)],
        [layers.make(3, 4, 1), layers.make(3, 4, 1), layers.make(4, 3, 1)],
    ][which]
    _, operation, _, _, options = _three(device, layers)[which]
    if which == 1:
        options.update(head_dim=2, rope=tuple(torch.randn(1, 2, 2, device=device) for _ in range(2)))
    inputs = [torch.randn(1, 2, 4, device=device), torch.rand(4, device=device) + 0.5, *layers.flat(*used)]
    doubles = [t.double().requires_grad_() for t in inputs]
    call = layers.function(operation, used, backend="triton", **options)
    assert torch.autograd.gradcheck(call, doubles, fast_mode=True)


# Dropout: with A and B the identity and W zero, the layer shows its mask.


def _mask_layer(device: str, features: int, dropout: float) -> Projection:
    eye = torch.eye(features, device=device)
    return Projection(
        torch.zeros_like(eye), None, eye.clone().requires_grad_(), eye.clone().requires_grad_(), 1.0, dropout
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_dropout_drops_scales_and_repeats_its_mask_in_backward(device: str, backend: Any) -> None:
    z = torch.rand(64, 16, device=device).add(0.5).requires_grad_()
    layer = _mask_layer(device, 16, 0.25)
    y = lora_linear(z, layer, backend=backend)
    mask = (y != 0).float() / 0.75
    assert torch.allclose(y, z * mask, atol=1e-6)
    assert 0.15 < float((mask == 0).float().mean()) < 0.35
    dy = torch.randn(64, 16, device=device)
    dz, da = torch.autograd.grad(y, (z, layer.a), dy)
    assert torch.allclose(dz, dy * mask, atol=1e-6)
    assert torch.allclose(da, dy.t() @ (z * mask), atol=1e-4)


def test_dropout_follows_the_seed_and_differs_between_adapters(device: str) -> None:
    z = torch.rand(1, 32, 16, device=device) + 0.5
    q, k, v = (_mask_layer(device, 16, 0.5) for _ in range(3))

    def masks(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [t != 0 for t in lora_qkv(z, q, k, v, head_dim=16, backend="triton")[:3]]

    first, again, other = masks(1), masks(1), masks(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_dropout_gradients_behind_a_norm_are_consistent(device: str, layers: Any, which: int) -> None:
    """Numerical differentiation with the seed fixed: forward and backward use one mask, in every group."""
    _, operation, _, used, options = _three(device, layers)[which]
    inputs = [torch.randn(1, 5, 64, device=device), torch.rand(64, device=device) + 0.5, *layers.flat(*used)]
    if "rope" in options:
        options["rope"] = tuple(torch.randn(1, 5, 16, device=device) for _ in range(2))

    def dropping(z: torch.Tensor, *projections: Projection, **kwargs: Any) -> Any:
        torch.manual_seed(3)
        dropped = [Projection(p.weight, p.bias, p.a, p.b, p.scaling, 0.3) for p in projections]
        return operation(z, *dropped, **kwargs)

    call = layers.function(dropping, used, backend="triton", **options)
    assert torch.autograd.gradcheck(call, [t.double().requires_grad_() for t in inputs], fast_mode=True)


# Weights


def test_joined_weights_give_the_same_bits_and_keep_their_parameters(device: str, tools: Any, layers: Any) -> None:
    qkv = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)]
    parameters = [torch.nn.Parameter(layer.weight.clone(), requires_grad=False) for layer in qkv]
    buffer = join_weights(parameters)
    assert all(torch.equal(p, layer.weight) for p, layer in zip(parameters, qkv, strict=True))
    view = joined(parameters, F32)
    assert view is not None
    assert view.data_ptr() == buffer.data_ptr()
    assert torch.equal(view, torch.cat([layer.weight for layer in qkv]))
    z = _z(device)
    outs = []
    for weights in ([layer.weight for layer in qkv], parameters):
        built = [Projection(w, None, lay.a, lay.b, 2.0) for w, lay in zip(weights, qkv, strict=True)]
        outs.append(lora_qkv(z, *built, head_dim=16, backend="triton"))
    assert all(tools.relative(a, b.double()) < 1e-6 for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_match_float64(device: str, tools: Any, layers: Any, bias: bool) -> None:
    mlp = [layers.make(48, 40, 4, bias=bias), layers.make(48, 40, 4, bias=bias), layers.make(40, 48, 4)]

    def joining(z: torch.Tensor, gate: Projection, up: Projection, down: Projection, **kwargs: Any) -> Any:
        weights = [p.weight.clone() for p in (gate, up)]
        join_weights(weights)
        gate, up = (Projection(w, p.bias, p.a, p.b, p.scaling) for w, p in zip(weights, (gate, up), strict=True))
        return lora_mlp(z, gate, up, down, backend="triton", **kwargs)

    tools.assert_float32(
        layers.function(joining, mlp), layers.function(lora_mlp_reference, mlp), [_z(device), *layers.flat(*mlp)]
    )


def test_neighbours_in_different_storages_are_not_joined() -> None:
    storage = torch.randn(8, 4)
    assert joined([storage[:3], storage[3:]], F32) is not None
    assert joined([storage[:3], storage[4:]], F32) is None
    assert joined([storage[:3], storage[3:].clone()], F32) is None
    assert joined([storage[:3], storage[3:]], BF16) is None


class _Quantised:
    """A stand-in for a quantised weight: int8 and one scale."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().max() / 127
        self.data = (weight / self.scale).round().to(torch.int8)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype) * self.scale.to(dtype)


def test_quantised_weights_are_dequantised_where_they_are_used(device: str, tools: Any, layers: Any) -> None:
    mlp = [layers.make(48, 40, 4), layers.make(48, 40, 4), layers.make(40, 48, 4)]
    quantised = [_Quantised(layer.weight) for layer in mlp]

    def call(function: Any, **kwargs: Any) -> Any:
        def run(z: torch.Tensor, *flat: torch.Tensor) -> Any:
            built = [Projection(q, None, flat[2 * i], flat[2 * i + 1], 2.0) for i, q in enumerate(quantised)]
            return function(z, *built, **kwargs)

        return run

    tools.assert_float32(call(lora_mlp, backend="triton"), call(lora_mlp_reference), [_z(device), *layers.flat(*mlp)])


# What may not happen


def test_saved_tensors_are_the_minimum(device: str, layers: Any) -> None:
    """Per row: linear keeps its input, QKV the residual stream, the MLP that and gate and up; nothing as wide beside
    them.
    """
    rows, hidden, inner = 65, 64, 96
    sizes = {}
    for name, operation, _, used, options in _three(device, layers):
        if "rope" in options:
            options["rope"] = tuple(torch.randn(1, rows, 16, device=device) for _ in range(2))
        saved: dict[int, int] = {}
        leaves = [
            t.requires_grad_()
            for t in (_z(device, 1, rows, hidden), torch.ones(hidden, device=device), *layers.flat(*used))
        ]

        def keep(t: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
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
    products: list[int] = []

    def counting(plan: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        products.append(plan.out_features)
        return base_forward(plan, x, *rest)

    for name in ("ftkernels.lora_mlp", "ftkernels.lowrank"):
        monkeypatch.setattr(import_module(name), "base_forward", counting)
    _, _, _, used, options = _three(device, layers)[2]
    leaves = [t.requires_grad_() for t in (_z(device, 2, 5, 64), torch.ones(64, device=device), *layers.flat(*used))]
    call = layers.function(lora_mlp, used, backend="triton", **options)
    direct = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    assert products == [192, 64]
    products.clear()
    kept = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False).square().sum(), leaves)
    assert products == [192, 64, 192]
    assert all(torch.equal(a, b) for a, b in zip(direct, kept, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_incoming_gradients_and_inputs_are_never_written(device: str, layers: Any, which: int) -> None:
    _, operation, _, used, options = _three(device, layers)[which]
    leaves = [t.requires_grad_() for t in (_z(device, 2, 5, 64), torch.ones(64, device=device), *layers.flat(*used))]
    kept = [t.detach().clone() for t in leaves]
    out = layers.function(operation, used, backend="triton", **options)(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    incoming = [torch.randn_like(o) for o in outputs]
    incoming_kept = [g.clone() for g in incoming]
    torch.autograd.grad(outputs, leaves, incoming)
    assert all(torch.equal(a, b) for a, b in zip(incoming, incoming_kept, strict=True))
    assert all(torch.equal(a.detach(), b) for a, b in zip(leaves, kept, strict=True))


def test_liger_272_1251_a_saved_tensor_changed_in_place_is_noticed(device: str) -> None:
    """What backward needs is saved through autograd, which checks versions; a raw buffer would give wrong gradients."""
    z = torch.randn(3, 8, device=device, requires_grad=True)
    stream = z * 1.0
    layer = Projection(torch.randn(8, 8, device=device), None, torch.ones(2, 8, device=device, requires_grad=True), torch.ones(8, 2, device=device))  # fmt: skip  # noqa: E501
    y = lora_linear(stream, layer, norm=Norm(torch.ones(8, device=device), 1e-5), backend="triton")
    stream.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_unsloth_4533_a_trainable_norm_in_front_gets_its_gradient(device: str, layers: Any) -> None:
    for _, operation, _, used, options in _three(device, layers):
        weight = torch.ones(64, device=device, requires_grad=True)
        out = layers.function(operation, used, backend="triton", **options)(
            _z(device, 2, 5, 64), weight, *layers.flat(*used)
        )
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        assert weight.grad is not None
        assert float(weight.grad.abs().sum()) > 0


def test_no_grad_gives_the_same_values(device: str, layers: Any) -> None:
    for _, operation, _, used, options in _three(device, layers):
        inputs = [
            _z(device, 2, 5, 64),
            torch.ones(64, device=device),
            *[t.requires_grad_() for t in layers.flat(*used)],
        ]
        call = layers.function(operation, used, backend="triton", **options)
        training = call(*inputs)
        with torch.no_grad():
            frozen = call(*inputs)
        first, second = (o[0] if isinstance(o, tuple) else o for o in (training, frozen))
        assert torch.equal(first, second)
        assert not second.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8, 4, dtype=torch.uint8)}, "uint8"),
        ({"weight": torch.zeros(8, 4, requires_grad=True)}, "frozen"),
        ({"weight": torch.zeros(8, 5)}, "does not take 4"),
        ({"bias": torch.zeros(4)}, "bias"),
        ({"a": None}, "both A and B"),
        ({"b": torch.zeros(8, 3)}, "do not fit"),
        ({"dropout": 1.0}, "dropout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_layers_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": torch.zeros(8, 4), "a": torch.zeros(2, 4), "b": torch.zeros(8, 2)}
    with pytest.raises(ValueError, match=message):
        lora_linear(torch.zeros(3, 4), Projection(**{**arguments, **change}))
