"""Fused LoRA operations: linear, QKV with norm and rotary embedding, gated MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ftkernels.lora_linear import lora_linear, lora_linear_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.projection import Norm, Projection

BF16, F32 = torch.bfloat16, torch.float32


def _z(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 5, 40)), device=device)


# Linear


@pytest.mark.parametrize("rank", [0, 3, 16, 80], ids="rank{}".format)
@pytest.mark.parametrize("form", [None, "llama", "gemma", "plain"])
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


@pytest.mark.parametrize("save", ["products", "input"])
@pytest.mark.parametrize("rank", [0, 4, 80])
def test_what_is_added_to_a_residual_may_be_scaled(device: str, tools: Any, layers: Any, rank: int, save: Any) -> None:
    """As Granite does: the linear and the MLP, adapters fused, not fused, and none."""
    layer, mlp = layers.make(40, 40, rank, bias=True), [layers.make(*n, rank) for n in ((96, 40), (96, 40), (40, 96))]

    def call(function: Any, **kwargs: Any) -> Any:
        def linear(z: Any, r: Any, *ab: Any) -> Any:
            return function(z, layer.build(*(ab or (None, None)), z), residual=r, scale=0.22, **kwargs)

        return linear

    inputs = (_z(device), _z(device), *layers.flat(layer))
    op, reference = call(lora_linear, backend="triton", save=save), call(lora_linear_reference)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)
    options = {"norm": True, "residual": "add", "scale": 0.22}
    kept = "input" if save == "input" else "gate_up_once"
    op = layers.function(lora_mlp, mlp, backend="triton", save=kept, **options)
    reference = layers.function(lora_mlp_reference, mlp, **options)
    inputs = (_z(device), torch.randn(40, device=device), *layers.flat(*mlp))
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


def test_scaled_layers_may_be_trained_themselves(device: str, tools: Any) -> None:
    shapes = ((96, 40), (96, 40), (40, 96))
    weights = [torch.randn(*shape, device=device) / shape[1] ** 0.5 for shape in shapes]

    def call(linear: Any, mlp: Any, **kwargs: Any) -> Any:
        def both(z: Any, w: Any, *rest: Any) -> Any:
            added = linear(z, Projection(w), residual=z, scale=0.22, **kwargs)
            return mlp(added, *(Projection(each) for each in rest), residual="add", scale=0.5, **kwargs)

        return both

    inputs = (_z(device), torch.randn(40, 40, device=device) / 40**0.5, *weights)
    op, reference = call(lora_linear, lora_mlp, backend="triton"), call(lora_linear_reference, lora_mlp_reference)
    tools.assert_float32(op, reference, inputs)


def test_a_scale_without_a_residual_is_refused() -> None:
    layer, z = Projection(torch.randn(8, 8)), torch.randn(1, 8)
    with pytest.raises(ValueError, match=r"scale 0\.5 is of what is added to a residual, and there is none"):
        lora_linear(z, layer, scale=0.5)
    with pytest.raises(ValueError, match=r"scale 0\.5 is of what is added to a residual, and none is added"):
        lora_mlp(z, layer, layer, layer, scale=0.5, residual="return")


# QKV


@pytest.mark.parametrize("ranks", [(4, 4, 4), (16, 0, 3), (0, 0, 0), (80, 80, 80)], ids=str)
@pytest.mark.parametrize("rope", [None, 16, 8], ids="rope{}".format)
def test_qkv_matches_float64(
    device: str, tools: Any, layers: Any, rope: int | None, ranks: tuple[int, int, int]
) -> None:
    qkv = [layers.make(n * 16, 40, r, bias=True) for n, r in zip((4, 2, 2), ranks, strict=True)]
    kwargs: dict[str, Any] = {"norm": True, "head_dim": 16, "rope": None if rope is None else layers.angles(rope)}
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
    out = layers.function(lora_qkv, qkv, head_dim=16, rope=layers.angles(16), backend="triton")(z, *layers.flat(*qkv))
    assert [tuple(t.shape) for t in out[:3]] == [(2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)]
    assert all(t.stride(-1) == 1 for t in out[:3])
    assert len({t.untyped_storage().data_ptr() for t in out[:3]}) == 1


def test_qkv_takes_expanded_and_missing_gradients(device: str, tools: Any, layers: Any) -> None:
    """Attention may hand back broadcast gradients, or none for an output that was not used."""
    qkv = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)]
    kwargs: dict[str, Any] = {"head_dim": 16, "rope": layers.angles(16), "norm": True}

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


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("adapters", [BF16, F32], ids=["adapters_bf16", "adapters_f32"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_bfloat16_is_as_good_as_torch(
    device: str, tools: Any, layers: Any, which: int, adapters: Any, backend: Any
) -> None:
    _, operation, reference, used, options = layers.three()[which]
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
    _, operation, reference, used, options = layers.three()[which]
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
    _, operation, _, used, options = layers.three()[which]
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
    _, operation, _, used, options = layers.three()[which]
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
    _, operation, _, _, options = layers.three()[which]
    if which == 1:
        options.update(head_dim=2, rope=tuple(torch.randn(1, 2, 2, device=device) for _ in range(2)))
    inputs = [torch.randn(1, 2, 4, device=device), torch.rand(4, device=device) + 0.5, *layers.flat(*used)]
    doubles = [t.double().requires_grad_() for t in inputs]
    call = layers.function(operation, used, backend="triton", **options)
    assert torch.autograd.gradcheck(call, doubles, fast_mode=True)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_incoming_gradients_and_inputs_are_never_written(device: str, layers: Any, which: int) -> None:
    _, operation, _, used, options = layers.three()[which]
    leaves = [t.requires_grad_() for t in (_z(device, 2, 5, 64), torch.ones(64, device=device), *layers.flat(*used))]
    kept = [t.detach().clone() for t in leaves]
    out = layers.function(operation, used, backend="triton", **options)(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    incoming = [torch.randn_like(o) for o in outputs]
    incoming_kept = [g.clone() for g in incoming]
    torch.autograd.grad(outputs, leaves, incoming)
    assert all(torch.equal(a, b) for a, b in zip(incoming, incoming_kept, strict=True))
    assert all(torch.equal(a.detach(), b) for a, b in zip(leaves, kept, strict=True))


def test_unsloth_4533_a_trainable_norm_in_front_gets_its_gradient(device: str, layers: Any) -> None:
    for _, operation, _, used, options in layers.three():
        weight = torch.ones(64, device=device, requires_grad=True)
        out = layers.function(operation, used, backend="triton", **options)(
            _z(device, 2, 5, 64), weight, *layers.flat(*used)
        )
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        assert weight.grad is not None
        assert float(weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("save", ["products", "input"])
def test_a_norm_in_front_may_have_no_weight(device: str, tools: Any, layers: Any, save: Any) -> None:
    linear, mlp = layers.make(64, 40, 4), [layers.make(n, m, 4) for n, m in ((96, 40), (96, 40), (40, 96))]
    qkv, bare = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)], Norm(None, 1e-5)
    heads = {"head_dim": 16, "rope": layers.angles(16)}
    for operation, reference, used, options, saves in (
        (lora_linear, lora_linear_reference, [linear], {}, {"save": save}),
        (lora_mlp, lora_mlp_reference, mlp, {}, {"save": save if save == "input" else "gate_up_once"}),
        (lora_qkv, lora_qkv_reference, qkv, heads, {}),
    ):
        op = layers.function(partial(operation, norm=bare, backend="triton", **saves), used, **options)
        plain = layers.function(partial(reference, norm=bare), used, **options)
        tools.assert_float32(op, plain, [_z(device), *layers.flat(*used)])


def test_no_grad_gives_the_same_values(device: str, layers: Any) -> None:
    for _, operation, _, used, options in layers.three():
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
