"""Projections that a model has joined already (Phi-3, GLM-4): one weight, one adapter, several outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.device import Tile
from ftkernels.fp8 import quantize_weight
from ftkernels.glu import GluLowRank, glu_backward, glu_forward
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.lowrank_plan import adapter_tensors
from ftkernels.nf4 import quantize_nf4
from ftkernels.projection import AdapterPacks, Norm, Projection, WeightCopies
from ftkernels.qkv_norm_rope import qkv_norm_rope_backward, qkv_norm_rope_forward, qkv_rope_backward, qkv_rope_forward
from ftkernels.qkv_parts import HeadNorms, Rotary
from torch import Tensor

from tests.pairs import all_pairs
from tests.tiers import further

BF16, F32 = torch.bfloat16, torch.float32
Q_HEADS, KV_HEADS, HEAD = 4, 2, 16
#: 7 rows, so that no tile is full; 40 inputs.
SHAPE = (1, 7, 40)
SAVES = ["gate_up", "gate_up_once", "input"]


def rows(heads: tuple[int, int] = (Q_HEADS, KV_HEADS), head: int = HEAD) -> int:
    return (heads[0] + 2 * heads[1]) * head


def angles(device: str, features: int, tokens: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(1, tokens, features, device=device), torch.randn(1, tokens, features, device=device)


def mlp_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of z, the joined gate and up, and down."""
    return lambda z, gate_up, down, **kwargs: function(z, gate_up, None, down, **kwargs)


def inputs_of(device: str, layers: Any, used: Sequence[Any], shape: Sequence[int] = SHAPE) -> list[Tensor]:
    return [torch.randn(*shape, device=device), torch.randn(shape[-1], device=device), *layers.flat(*used)]


# Against float64


@pytest.mark.parametrize("rank", [0, 4, 80], ids="rank{}".format)
@pytest.mark.parametrize("rope", [None, 16, 8], ids="rope{}".format)
def test_qkv_matches_float64(device: str, tools: Any, layers: Any, rope: int | None, rank: int) -> None:
    used = [layers.make(rows(), 40, rank, bias=rank == 4)]
    kwargs = {"norm": True, "head_dim": HEAD, "kv_heads": KV_HEADS, "rope": rope and angles(device, rope)}
    op = layers.function(lora_qkv, used, backend="triton", **kwargs)
    reference = layers.function(lora_qkv_reference, used, **kwargs)
    tools.assert_float32(op, reference, inputs_of(device, layers, used))


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("rotated", [16, 8], ids="rope{}".format)
@pytest.mark.parametrize("rank", [0, 4], ids="rank{}".format)
def test_qkv_with_norms_by_head_matches_float64(
    device: str, tools: Any, layers: Any, rank: int, rotated: int, form: str
) -> None:
    layer = layers.make(rows(), 40, rank, bias=True)
    rope = angles(device, rotated)

    def called(function: Any, **kwargs: Any) -> Any:
        def call(z: Tensor, norm: Tensor, *rest: Tensor) -> Any:
            a, b, *weights = rest if rank else (None, None, *rest)
            head_norms = tuple(Norm(weight, 1e-5, form) for weight in weights)
            given = {"head_dim": HEAD, "kv_heads": KV_HEADS, "head_norms": head_norms, **kwargs}
            turns = tuple(t.to(z.dtype) for t in rope)
            return function(z, layer.build(a, b, z), norm=Norm(norm, 1e-6, form), rope=turns, **given)

        return call

    inputs = [*inputs_of(device, layers, [layer]), *(torch.randn(HEAD, device=device) for _ in range(2))]
    op, reference = called(lora_qkv, backend="triton"), called(lora_qkv_reference)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


#: As other families have them: (features that are rotated, layout, over what norms are, after the rotation).
OPTIONS = [
    pytest.param(8, "pairs", None, False, id="GLM-4"),
    pytest.param(12, "halves", None, False, id="Phi-4-mini"),
    pytest.param(16, "halves", "width", False, id="OLMo-2"),
    pytest.param(16, "halves", "head", True, id="HunYuan"),
]


@pytest.mark.parametrize("rank", [4, 80], ids="rank{}".format)
@pytest.mark.parametrize(("rotated", "layout", "span", "after"), OPTIONS)
def test_qkv_with_every_epilogue_matches_float64(
    device: str, tools: Any, layers: Any, rotated: int, layout: str, span: Any, after: bool, rank: int
) -> None:
    used = [layers.make(rows(), 40, rank, bias=True)]
    kwargs: dict[str, Any] = {"norm": True, "head_dim": HEAD, "kv_heads": KV_HEADS, "rope": angles(device, rotated)}
    kwargs["rope_layout"] = layout
    if span is not None:
        sizes = [HEAD] * 2 if span == "head" else [Q_HEADS * HEAD, KV_HEADS * HEAD]
        kwargs["head_norms"] = tuple(Norm(torch.randn(size, device=device), 1e-5) for size in sizes)
        kwargs.update(norm_span=span, norm_after_rope=after)
    tools.assert_float32(
        layers.function(lora_qkv, used, backend="triton", **kwargs),
        layers.function(lora_qkv_reference, used, **kwargs),
        inputs_of(device, layers, used),
    )


@pytest.mark.parametrize("heads", [(5, 1), (1, 1), (3, 3)], ids=str)
def test_qkv_without_a_norm_and_with_odd_heads(device: str, tools: Any, layers: Any, heads: tuple[int, int]) -> None:
    used = [layers.make(rows(heads, 6), 12, 2)]
    kwargs: dict[str, Any] = {"head_dim": 6, "kv_heads": heads[1], "rope": angles(device, 6, 3)}
    tools.assert_float32(
        layers.function(lora_qkv, used, backend="triton", **kwargs),
        layers.function(lora_qkv_reference, used, **kwargs),
        [torch.randn(1, 3, 12, device=device), *layers.flat(*used)],
    )


MLPS = all_pairs(((4, 4), (4, 0), (0, 4), (80, 3), (3, 80)), ("none", "add", "return"), SAVES, ("silu", "gelu_tanh"))


@pytest.mark.parametrize(("ranks", "residual", "save", "activation"), MLPS, ids=str)
def test_mlp_matches_float64(
    device: str, tools: Any, layers: Any, ranks: tuple[int, int], residual: str, save: str, activation: str
) -> None:
    used = [layers.make(2 * 67, 40, ranks[0], bias=True), layers.make(40, 67, ranks[1], bias=True)]
    kwargs = {"norm": True, "activation": activation, "residual": residual}
    op = layers.function(mlp_of(lora_mlp), used, backend="triton", save=save, **kwargs)
    reference = layers.function(mlp_of(lora_mlp_reference), used, **kwargs)
    tools.assert_float32(op, reference, inputs_of(device, layers, used))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("adapters", [BF16, F32], ids=["adapters_bf16", "adapters_f32"])
@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_bfloat16_is_as_good_as_torch(
    device: str, tools: Any, layers: Any, which: int, adapters: torch.dtype, backend: Any
) -> None:
    """By more elements than above: what bfloat16 rounds away of few is chance."""
    operation, reference = [(lora_qkv, lora_qkv_reference), (mlp_of(lora_mlp), mlp_of(lora_mlp_reference))][which]
    used = [[layers.make(128, 64, 4)], [layers.make(192, 64, 4), layers.make(64, 96, 4)]][which]
    options = {"norm": True, **both(layers, device)[which][2]}
    if which == 0:
        options["rope"] = angles(device, HEAD, 40)
    inputs = [torch.randn(1, 40, 64, device=device), torch.rand(64, device=device) + 0.5, *layers.flat(*used)]
    tools.assert_bfloat16(
        layers.function(operation, used, backend=backend, **options),
        layers.function(reference, used, **options),
        inputs,
        [BF16, BF16, *[adapters] * (len(inputs) - 2)],
    )


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
@pytest.mark.parametrize("which", ["qkv", "mlp", "mlp, input"])
def test_trained_weights_match_float64(device: str, tools: Any, which: str, bias: bool) -> None:
    shapes = [(rows(), 40)] if which == "qkv" else [(2 * 67, 40), (40, 67)]
    rope = angles(device, HEAD)

    def called(function: Any, **kwargs: Any) -> Any:
        def call(z: Tensor, norm: Tensor, *trained: Tensor) -> Any:
            biases: Sequence[Tensor | None] = trained[len(shapes) :] if bias else [None] * len(shapes)
            built = [Projection(w, b) for w, b in zip(trained[: len(shapes)], biases, strict=True)]
            if which == "qkv":
                kwargs.update(head_dim=HEAD, kv_heads=KV_HEADS, rope=tuple(t.to(z.dtype) for t in rope))
            return function(z, *built, norm=Norm(norm, 1e-6), **kwargs)

        return call

    inputs = [torch.randn(*SHAPE, device=device), torch.randn(40, device=device)]
    inputs += [torch.randn(shape, device=device) / shape[1] ** 0.5 for shape in shapes]
    inputs += [torch.randn(shape[0], device=device) for shape in shapes] if bias else []
    if which == "qkv":
        op, reference = called(lora_qkv, backend="triton"), called(lora_qkv_reference)
    else:
        save = "input" if which.endswith("input") else "gate_up"
        op = called(mlp_of(lora_mlp), backend="triton", save=save, residual="add")
        reference = called(mlp_of(lora_mlp_reference), residual="add")
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


# Against separate projections


def apart(layer: Any, sizes: Sequence[int], z: Tensor) -> tuple[list[Projection], list[Tensor]]:
    """The layer's parts as projections that each have the whole A; and their leaves."""
    parts, leaves = [], []
    for weight, bias, b in zip(*(t.split(sizes) for t in (layer.weight, layer.bias, layer.b)), strict=True):
        a = layer.a.clone().requires_grad_()
        b = b.clone().requires_grad_()
        parts.append(Projection(weight.to(z.dtype), bias.to(z.dtype), a, b, layer.scaling))
        leaves += [a, b]
    return parts, leaves


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("which", ["qkv", "mlp"])
def test_it_is_what_separate_projections_with_one_a_give(
    device: str, tools: Any, layers: Any, which: str, backend: Any
) -> None:
    sizes = [Q_HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD] if which == "qkv" else [67, 67]
    layer, down = layers.make(sum(sizes), 40, 4, bias=True), layers.make(40, 67, 0)
    z = torch.randn(*SHAPE, device=device).requires_grad_()
    norm = Norm(torch.rand(40, device=device).add_(0.5).requires_grad_(), 1e-5)
    rope = angles(device, HEAD)

    def run(projections: Sequence[Projection], leaves: Sequence[Tensor]) -> list[Tensor]:
        if which == "qkv":
            kv_heads = KV_HEADS if len(projections) == 1 else None
            heads = {"head_dim": HEAD, "kv_heads": kv_heads, "rope": rope}
            outputs: tuple[Tensor, ...] = lora_qkv(z, *projections, norm=norm, backend=backend, **heads)
        else:
            gate, up = (*projections, None)[:2]
            made = lora_mlp(z, gate, up, down.build(None, None, z), norm=norm, residual="return", backend=backend)
            outputs = tuple(made)
        generator = torch.Generator().manual_seed(3)
        incoming = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, [z, norm.weight, *leaves], incoming)]

    a, b = (t.clone().requires_grad_() for t in (layer.a, layer.b))
    *found, da, db = run([layer.build(a, b, z)], [a, b])
    wanted = run(*apart(layer, sizes, z))
    count = len(found)
    gradients = wanted[count:]
    wanted = [*wanted[:count], torch.stack(gradients[::2]).sum(0), torch.cat(gradients[1::2])]
    for index, (value, exact) in enumerate(zip([*found, da, db], wanted, strict=True)):
        assert tools.relative(value, exact) <= 1e-5, index


# The kernels


#: (features that are rotated, in pairs, over what norms are, after the rotation)
EPILOGUES = [
    pytest.param(16, False, None, False, id="rope"),
    pytest.param(8, True, None, False, id="pairs in part"),
    pytest.param(16, False, "head", False, id="norm rope"),
    pytest.param(12, False, "head", True, id="rope in part norm"),
    pytest.param(16, False, "width", False, id="width rope"),
    pytest.param(0, False, "width", False, id="width"),
]


@pytest.mark.parametrize("tile", [Tile(16, 2, 4), *further(Tile(16, 1, 4), Tile(32, 8, 4))], ids=str)
@pytest.mark.parametrize(("rotated", "pairs", "span", "after"), EPILOGUES)
def test_every_tile_of_the_rotation_reads_one_xa_and_sums_its_gradient(
    device: str, tools: Any, rotated: int, pairs: bool, span: Any, after: bool, tile: Tile
) -> None:
    """As separate parts whose xa are the same; their gradients' sum. Programs have 1, 2 or all of the 5 heads of q."""
    tokens, heads, k_heads, rank = 37, 5, 2, 16
    width = rows((heads, k_heads))
    y, xa = torch.randn(tokens, width, device=device), torch.randn(tokens, rank, device=device)
    b = torch.randn(width, rank, device=device)
    cos, sin = angles(device, rotated, tokens) if rotated else (None, None)
    apart = Rotary(cos, sin, heads, k_heads, HEAD, pairs)
    one = replace(apart, joined=True)
    sizes = [HEAD] * 2 if span != "width" else [heads * HEAD, k_heads * HEAD]
    weights = [torch.randn(size, device=device) for size in sizes]
    norms = None if span is None else HeadNorms(*weights, 1e-6, "llama", span, after)

    def forward(xa: Tensor, rotary: Rotary) -> Tensor:
        if norms is not None:
            return torch.cat(qkv_norm_rope_forward(y.clone(), xa, b, rotary, norms, tile=tile), dim=1)
        return qkv_rope_forward(y.clone(), xa, b, rotary, tile=tile)

    assert torch.equal(forward(xa, one), forward(xa.repeat(1, 3), apart))
    # Each token's heads lie side by side, as attention leaves them.
    dq, dk, dv = (
        torch.randn(tokens, n, HEAD, device=device).unsqueeze(0).transpose(1, 2) for n in (heads, k_heads, k_heads)
    )

    def backward(rotary: Rotary) -> tuple[Tensor, Tensor]:
        if norms is not None:
            made = qkv_norm_rope_backward((dq, dk, dv), y, b, rotary, norms, F32, want_dw=False, tile=tile)
            d, dxa = made.d, made.dxa
        else:
            d, dxa = qkv_rope_backward(dq, dk, dv, b, rotary, F32, tile=tile)
        assert dxa is not None
        return d, dxa.sum(0)

    (d, dxa), (d_apart, dxa_apart) = backward(one), backward(apart)
    assert torch.equal(d, d_apart)
    assert dxa.shape == (tokens, rank)
    assert tools.relative(dxa, d @ b) <= 1e-6
    assert tools.relative(dxa, dxa_apart.view(tokens, 3, rank).sum(1)) <= 1e-6


@pytest.mark.parametrize("tile", [Tile(16, 16, 4), Tile(16, 32, 4, programs=2), Tile(32, 64, 4)], ids=str)
def test_every_tile_of_the_gated_unit_reads_one_xa_and_sums_its_gradient(device: str, tools: Any, tile: Tile) -> None:
    tokens, inner, rank = 37, 67, 16
    gate, up = torch.randn(tokens, 2 * inner, device=device).chunk(2, dim=1)
    xa, b = torch.randn(tokens, rank, device=device), torch.randn(2 * inner, rank, device=device)
    dh = torch.randn(tokens, inner, device=device)
    one, two = (GluLowRank(each, b, None) for each in (xa, xa.repeat(1, 2)))
    assert (one.joined, two.joined) == (True, False)
    assert torch.equal(*(glu_forward(gate, up, "silu", low, tile=tile)[0] for low in (one, two)))
    made = [glu_backward(dh.clone(), gate, up, "silu", lowrank=low, tile=tile) for low in (one, two)]
    (d, _, dxa), (d_apart, _, dxa_apart) = made
    assert dxa is not None
    assert dxa_apart is not None
    assert torch.equal(d, d_apart)
    assert dxa.shape[1:] == (tokens, rank)
    assert tools.relative(dxa.sum(0), d @ b) <= 1e-6
    assert tools.relative(dxa.sum(0), dxa_apart.sum(0).view(tokens, 2, rank).sum(1)) <= 1e-6


# How it is called


def both(layers: Any, device: str) -> list[tuple[Any, list[Any], dict[str, Any]]]:
    """(operation, layers, options) of joined QKV and MLP behind a norm."""
    heads = {"head_dim": HEAD, "kv_heads": KV_HEADS, "rope": angles(device, HEAD)}
    qkv, mlp = [layers.make(rows(), 40, 4)], [layers.make(2 * 67, 40, 4), layers.make(40, 67, 4)]
    return [(lora_qkv, qkv, {"norm": True, **heads}), (mlp_of(lora_mlp), mlp, {"norm": True, "residual": "add"})]


def run(call: Callable[..., Any], leaves: Sequence[Tensor], times: int = 1) -> list[Tensor]:
    """Outputs, and the gradients of the last of ``times`` backward passes through one graph."""
    out = call(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(3)
    incoming = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    for left in reversed(range(times)):
        gradients = torch.autograd.grad(outputs, leaves, incoming, retain_graph=left > 0)
    return [*(o.detach() for o in outputs), *gradients]


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_twice_the_same_bits_and_nothing_given_is_written(
    device: str, layers: Any, which: int, dtype: torch.dtype
) -> None:
    operation, used, options = both(layers, device)[which]
    leaves = [t.to(dtype).requires_grad_() for t in inputs_of(device, layers, used)]
    kept = [t.detach().clone() for t in leaves]
    call = layers.function(operation, used, backend="triton", **options)
    first = run(call, leaves)
    assert same(run(call, leaves), first)
    assert same([t.detach() for t in leaves], kept)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("ranks", [(4, 4), (80, 2)], ids=["in kernels", "in products"])
@pytest.mark.parametrize("residual", ["add", "return"])
def test_mlp_gives_the_same_bits_whatever_it_saves(
    device: str, layers: Any, residual: str, ranks: tuple[int, int], backend: str
) -> None:
    used = [layers.make(2 * 67, 40, ranks[0], bias=True), layers.make(40, 67, ranks[1])]
    leaves = [t.requires_grad_() for t in inputs_of(device, layers, used)]
    options = {"norm": True, "residual": residual, "backend": backend}
    wanted = run(layers.function(mlp_of(lora_mlp), used, **options), leaves)
    for save in SAVES[1:]:
        call = layers.function(mlp_of(lora_mlp), used, save=save, **options)
        assert same(run(call, leaves), wanted), save
        assert same(run(call, leaves, times=2), wanted), f"{save}, a second backward through a retained graph"


@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_strided_inputs_and_gradients(device: str, layers: Any, which: int) -> None:
    """Every other token of a longer sequence, and gradients whose tokens lie apart, as dense ones.

    To rounding: on a GPU cuBLAS may take another kernel for strided operands.
    """
    operation, used, options = both(layers, device)[which]
    long, weight, *adapters = inputs_of(device, layers, used, (1, 14, 40))
    call = layers.function(operation, used, backend="triton", **options)

    def gradients(z: Tensor, *, strided: bool) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (weight, *adapters)]
        z = z.detach().requires_grad_()
        out = call(z, *leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(3)
        incoming = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
        if strided:
            incoming = [torch.stack([g, g], dim=-2)[..., 0, :] for g in incoming]
        return [*outputs, *torch.autograd.grad(outputs, [z, *leaves], incoming)]

    assert not long[:, ::2].is_contiguous()
    found, wanted = gradients(long[:, ::2], strided=True), gradients(long[:, ::2].contiguous(), strided=False)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


def test_qkv_takes_expanded_and_missing_gradients(device: str, tools: Any, layers: Any) -> None:
    """Attention may hand back broadcast gradients, or none for an output that was not used."""
    operation, used, options = both(layers, device)[0]

    def call(function: Any, **extra: Any) -> Any:
        op = layers.function(function, used, **options, **extra)
        return lambda *inputs: (op(*inputs).q.mean(), op(*inputs).k.transpose(-1, -2).sum(-1), op(*inputs).residual * 2)

    arguments = call(operation, backend="triton"), call(lora_qkv_reference), inputs_of(device, layers, used)
    tools.assert_float32(*arguments)


@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_no_rows(device: str, layers: Any, which: int) -> None:
    operation, used, options = both(layers, device)[which]
    if which == 0:
        options["rope"] = angles(device, HEAD, 0)
    leaves = [t.requires_grad_() for t in inputs_of(device, layers, used, (1, 0, 40))]
    count = len(leaves)
    found = run(layers.function(operation, used, backend="triton", **options), leaves)
    assert all(float(g.abs().sum()) == 0.0 for g in found[-count:])


@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_dropout_has_one_mask_and_consistent_gradients(device: str, layers: Any, which: int) -> None:
    """Numerical differentiation with the seed fixed: forward and backward drop the same of the one adapter's input."""
    operation, used, options = both(layers, device)[which]

    def dropping(z: Tensor, *projections: Projection, **kwargs: Any) -> Any:
        torch.manual_seed(3)
        return operation(z, *[Projection(p.weight, p.bias, p.a, p.b, p.scaling, 0.3) for p in projections], **kwargs)

    call = layers.function(dropping, used, backend="triton", **options)
    inputs = [t.double().requires_grad_() for t in inputs_of(device, layers, used)]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_dropout_drops_the_same_for_queries_keys_and_values(device: str) -> None:
    """With A the identity, B three of them and W zero, each part shows the mask."""
    eye = torch.eye(16, device=device)
    layer = Projection(torch.zeros(48, 16, device=device), None, eye, eye.repeat(3, 1), 1.0, 0.5)
    z = torch.rand(1, 32, 16, device=device) + 0.5
    q, k, v, _ = lora_qkv(z, layer, head_dim=16, kv_heads=1, backend="triton")
    assert 0.3 < float((q == 0).float().mean()) < 0.7
    assert torch.equal(q, k)
    assert torch.equal(q, v)


# What a group is given


@pytest.mark.parametrize("quantize", [quantize_nf4, quantize_weight], ids=["nf4", "fp8"])
@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_a_quantized_weight_is_used_as_it_is(
    device: str, tools: Any, layers: Any, which: int, quantize: Callable[[Tensor], Any]
) -> None:
    """NF4 as its dequantized matrix, to the bit; fp8 within the rounding of activations and gradients to 3 bits."""
    shapes = [[(128, 64)], [(2 * 96, 64), (64, 96)]][which]
    operation, _, options = both(layers, device)[which]
    weights = [quantize(torch.randn(shape, device=device) / shape[1] ** 0.5) for shape in shapes]
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    adapters = [(made(4, i), made(o, 4)) for o, i in shapes]
    z, weight = made(1, 7, 64), made(64)
    leaves = [z, weight, *(t for pair in adapters for t in pair)]
    options = {**options, "norm": Norm(weight, 1e-5)}

    def called(weights: Sequence[Any]) -> list[Tensor]:
        built = [Projection(w, None, a, b, 0.5) for w, (a, b) in zip(weights, adapters, strict=True)]
        return run(lambda *_: operation(z, *built, backend="triton", **options), leaves)

    found, dense = called(weights), called([w.dequantize(F32) for w in weights])
    assert same(called(weights), found)
    if quantize is quantize_nf4:
        assert same(found, dense)
    else:
        errors = [tools.relative(value, exact) for value, exact in zip(found, dense, strict=True)]
        assert 1e-3 < max(errors) < 8e-2, errors


@pytest.mark.parametrize("which", [0, 1], ids=["qkv", "mlp"])
def test_packed_adapters_give_the_same_bits(device: str, layers: Any, which: int) -> None:
    operation, used, options = both(layers, device)[which]
    z, weight, *flat = (t.requires_grad_() for t in inputs_of(device, layers, used))
    built = [layer.build(a, b, z) for layer, a, b in zip(used, flat[::2], flat[1::2], strict=True)]
    packs = AdapterPacks([[p] for p in built], F32)
    packs.refresh()
    options = {**options, "norm": Norm(weight, 1e-5)}
    packed = [
        Projection(p.weight, p.bias, p.a, p.b, p.scaling, packed=pack)
        for p, pack in zip(built, packs.packs, strict=True)
    ]
    assert packs.packs[0] is not None
    assert packs.packs[0].b is not None
    assert packs.packs[0].b.shape == (built[0].out_features, 16)
    leaves = [z, weight, *(t for t in adapter_tensors(built) if t is not None)]
    found, wanted = (
        run(lambda *_, p=each: operation(z, *p, backend="triton", **options), leaves) for each in (packed, built)
    )
    assert same(found, wanted)


def test_copies_of_trained_weights_are_what_products_read(device: str) -> None:
    """bfloat16 products of float32 weights: a copy changes nothing, and gradients are float32."""
    gate_up, down = (torch.randn(s, device=device).div_(6).requires_grad_() for s in ((2 * 67, 40), (40, 67)))
    copies = WeightCopies([[Projection(gate_up)], [Projection(down)]], BF16)
    copies.refresh()
    z, norm = torch.randn(*SHAPE, device=device), torch.ones(40, device=device)

    def gradients(given: Sequence[Tensor | None]) -> list[Tensor]:
        layers = [Projection(w, copy=copy) for w, copy in zip((gate_up, down), given, strict=True)]
        with torch.autocast(torch.device(device).type, dtype=BF16):
            y = mlp_of(lora_mlp)(z, *layers, norm=Norm(norm, 1e-6), residual="add", backend="triton")
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [gate_up, down])]

    found, wanted = gradients([copy for group in copies.copies for copy in group]), gradients([None, None])
    assert found[1].dtype == F32
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("out", "given", "message"),
    [
        (128, {}, "do not make heads"),
        (128, {"kv_heads": 0}, "do not make heads"),
        (128, {"kv_heads": 4}, "do not make heads"),
        (120, {"kv_heads": 2}, "do not make heads"),
        (128, {"kv_heads": 2, "k": Projection(torch.zeros(32, 4))}, "do not make heads"),
        (
            64,
            {"kv_heads": 3, "k": Projection(torch.zeros(32, 4)), "v": Projection(torch.zeros(32, 4))},
            "not kv_heads 3",
        ),
    ],
    ids=["no kv_heads", "no keys", "no queries", "half a head", "two of three", "other kv_heads"],
)
def test_rows_that_make_no_heads_are_named(out: int, given: dict[str, Any], message: str) -> None:
    for function in (lora_qkv, lora_qkv_reference):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(1, 3, 4), Projection(torch.zeros(out, 4)), head_dim=16, **given)


def test_rows_that_are_no_gate_and_up_are_named() -> None:
    z, down = torch.zeros(3, 4), Projection(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="15 output features"):
        lora_mlp(z, Projection(torch.zeros(15, 4)), None, down)
    with pytest.raises(ValueError, match="down"):
        lora_mlp(z, Projection(torch.zeros(18, 4)), None, down)
