"""Attention with sinks, a learned score a query head that has no value: against float64 and gpt-oss's own attention."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftkernels.attention import KeptOutput, attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles
from ftkernels.attention_mask import AttentionMask
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

CAUSAL = AttentionMask.causal_mask()
OBLONG = AttentionTiles(
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
)


def inputs(
    device: str, *, batch: int = 1, heads: int = 4, kv_heads: int = 2, q_len: int = 35, k_len: int = 0, size: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as projections leave them, (B, S, H, D), and sinks that hardly count up to one that counts most."""
    lengths = q_len, k_len or q_len, k_len or q_len
    counts = heads, kv_heads, kv_heads
    q, k, v = (torch.randn(batch, s, h, size, device=device) for s, h in zip(lengths, counts, strict=True))
    return q, k, v, torch.linspace(-2.0, 5.0, heads, device=device)


def call(function: Callable[..., Tensor], mask: AttentionMask, **options: Any) -> Callable[..., Tensor]:
    """``function`` of (B, S, H, D) tensors and sinks."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        given = {"scale": 0.25, **options}
        return function(*heads_first, mask, sinks=sinks, **given).transpose(1, 2)

    return run


def check(tools: Any, tensors: tuple[Tensor, ...], mask: AttentionMask, tiles: AttentionTiles | None = None, **options: Any) -> None:  # fmt: skip  # noqa: E501
    kernels = call(attention, mask, backend="triton", tiles=tiles, **options)
    tools.assert_float32(kernels, call(attention_reference, mask, **options), tensors)


def padded(device: str, side: str, window: int | None) -> AttentionMask:
    padding = torch.arange(35, device=device) < torch.tensor([[35], [1], [20]], device=device)
    return AttentionMask.from_padding(padding.flip(1) if side == "left" else padding, window=window)


def branching(device: str, window: int | None) -> AttentionMask:
    """A prompt of 9 tokens with two answers, of 14 and of 12."""
    of = torch.tensor([[0] * 35, [0] * 9 + [9] * 14 + [23] * 12], dtype=torch.int32, device=device)
    return AttentionMask(window=window, document_starts=of[:1], length=35, branch_starts=of[1:])


def packed(device: str, window: int | None) -> AttentionMask:
    return AttentionMask.from_cu_seqlens(torch.tensor([0, 11, 12, 35], device=device), 35, window=window)


@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (0.0, 8), (5.0, 8)])
@pytest.mark.parametrize("make", [branching, packed], ids=["branches", "documents"])
def test_packed_documents_and_shared_prompts(
    device: str, tools: Any, make: Callable[..., AttentionMask], softcap: float, window: int | None
) -> None:
    check(tools, inputs(device), make(device, window), OBLONG, softcap=softcap)


@pytest.mark.parametrize(("side", "window"), [("left", None), ("left", 8), ("right", None), ("right", 8)])
def test_queries_that_see_nothing(device: str, tools: Any, side: str, window: int | None) -> None:
    """Padding: the sink alone would be all of the softmax, and has no value."""
    mask = padded(device, side, window)
    tensors = inputs(device, batch=3, heads=2, kv_heads=1)
    check(tools, tensors, mask)
    blind = ~mask.dense(35, 35, device).any(-1)[:, 0]
    assert blind.any()
    assert not call(attention, mask, backend="triton")(*tensors)[blind].any()


@pytest.mark.parametrize(("softcap", "tiles"), [(0.0, None), (5.0, None), (50.0, OBLONG)])
def test_tiles_with_and_without_masked_elements(
    device: str, tools: Any, softcap: float, tiles: AttentionTiles | None
) -> None:
    check(tools, inputs(device, heads=2, kv_heads=1, q_len=97), CAUSAL, tiles, softcap=softcap)


def test_every_query_sees_every_key(device: str, tools: Any) -> None:
    check(tools, inputs(device, batch=2, q_len=41), AttentionMask.full())


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 1, 64), (3, 3, 48), (1, 1, 256)])
def test_heads(device: str, tools: Any, heads: int, kv_heads: int, size: int) -> None:
    tensors = inputs(device, heads=heads, kv_heads=kv_heads, q_len=19, size=size)
    check(tools, tensors, AttentionMask.causal_mask(8), scale=size**-0.5)


@pytest.mark.parametrize("q_len", [1, 7])
def test_queries_after_a_cached_prefix(device: str, tools: Any, q_len: int) -> None:
    check(tools, inputs(device, q_len=q_len, k_len=50), AttentionMask.causal_mask(12))


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """transformers' attention of gpt-oss through a window of 8."""
    module: Any = SimpleNamespace(sinks=sinks, num_key_value_groups=q.shape[2] // k.shape[2], training=True)
    seen = AttentionMask.causal_mask(8).dense(q.shape[1], k.shape[1], q.device)
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
    out, _ = eager_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), mask, scaling=0.25)
    return out


def test_the_reference_and_the_kernels_are_gpt_osss_attention(device: str, tools: Any) -> None:
    tensors = inputs(device, batch=2)
    mask = AttentionMask.causal_mask(8)
    exact = tools.run(gpt_oss, tensors, [torch.float64] * 4)
    reference = tools.run(call(attention_reference, mask), tensors, [torch.float64] * 4)
    for one, other in zip(reference, exact, strict=True):
        assert tools.relative(one, other) < 1e-12
    tools.assert_float32(call(attention, mask, backend="triton"), gpt_oss, tensors)
    tools.assert_float32(call(attention, mask, backend="torch"), gpt_oss, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_better_than_gpt_osss_own(device: str, tools: Any, dtype: torch.dtype) -> None:
    """Each of output and gradients, with sinks in half precision; bounds as those without sinks."""
    tensors = [x.to(dtype) for x in inputs(device, size=32)]
    ours = call(attention, AttentionMask.causal_mask(8), backend="triton")
    exact, got, theirs = (
        tools.run(function, tensors, [of] * 4)
        for function, of in ((gpt_oss, torch.float64), (ours, dtype), (gpt_oss, dtype))
    )
    for value, plain, truth in zip(got, theirs, exact, strict=True):
        assert value.dtype == dtype
        assert tools.relative(value, truth) <= 1.5 * tools.relative(plain, truth)
        assert tools.relative(value, truth) <= (5e-3 if dtype == torch.bfloat16 else 2e-3)


def test_autocast_leaves_the_sinks_in_float32(device: str) -> None:
    q, k, v, sinks = inputs(device)
    sinks.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out = call(attention, CAUSAL, backend="triton")(q, k, v, sinks)
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out.float().sum(), sinks)
    assert grad.dtype == torch.float32
    expected = call(attention_reference, CAUSAL)(*(x.bfloat16().float() for x in (q, k, v)), sinks)
    assert torch.allclose(out.float(), expected, atol=2e-2)
    assert torch.allclose(grad, torch.autograd.grad(expected.sum(), sinks)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sink_of_minus_infinity_is_none(device: str, side: str) -> None:
    mask = padded(device, side, None)
    leaves = [x.requires_grad_() for x in inputs(device, batch=3, heads=2, kv_heads=1)]
    with torch.no_grad():
        leaves[3].fill_(float("-inf"))
    for function, options in ((attention, {"backend": "triton"}), (attention_reference, {})):
        out = call(function, mask, **options)(*leaves)
        *grads, d_sinks = torch.autograd.grad(out.square().sum(), leaves)
        assert not d_sinks.any()
        plain = function(*(x.transpose(1, 2) for x in leaves[:3]), mask, scale=0.25, **options).transpose(1, 2)
        assert torch.allclose(out, plain, atol=1e-6)
        for one, other in zip(grads, torch.autograd.grad(plain.square().sum(), leaves[:3]), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_sinks_are_no_nan(device: str, dtype: torch.dtype) -> None:
    """One that takes all of the softmax, one that takes none of it, and both against huge scores."""
    q, k, v, _ = (x.to(dtype) for x in inputs(device, heads=2, kv_heads=1))
    sinks = torch.tensor([3e4, -3e4], device=device, dtype=dtype)
    for factor in (1.0, 60.0):
        leaves = [x.detach().requires_grad_() for x in (q * factor, k * factor, v, sinks)]
        out = call(attention, CAUSAL, backend="triton")(*leaves)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        assert all(torch.isfinite(x).all() for x in (out, *grads))
        assert not out[:, :, 0].any()
        assert out[:, :, 1].any()


@pytest.mark.parametrize("wanted", [(3,), (0,), (2, 3), (1, 3), (0, 1, 2)])
def test_only_the_gradients_that_are_wanted(device: str, wanted: tuple[int, ...]) -> None:
    tensors = list(inputs(device, q_len=20))
    leaves = [tensors[i].requires_grad_() for i in wanted]
    results = []
    for function, options in ((attention, {"backend": "triton"}), (attention_reference, {})):
        out = call(function, CAUSAL, **options)(*tensors)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_views_are_read_in_place_and_two_runs_give_the_same_bits(device: str, tools: Any) -> None:
    """q, k, v of one projection, and sinks that lie apart in memory."""

    def split(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, sinks: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in x.split((32, 16, 16), dim=-1))
            return function(q, k, v, CAUSAL, scale=0.25, sinks=sinks[::2], **options)

        return run

    tensors = torch.randn(2, 21, 4 * 16, device=device), torch.randn(4, device=device)
    tools.assert_float32(split(attention, backend="triton"), split(attention_reference), tensors)
    first, again = (tools.run(split(attention, backend="triton"), tensors, [torch.bfloat16] * 2) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_a_checkpoint_that_kept_the_output_gives_the_same_bits(device: str) -> None:
    leaves = [x.requires_grad_() for x in inputs(device)]
    wanted = torch.autograd.grad(call(attention, CAUSAL, backend="triton")(*leaves).square().sum(), leaves)
    kept = KeptOutput(lambda tensor: lambda: tensor)
    out = checkpoint(call(attention, CAUSAL, backend="triton", kept=kept), *leaves, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32), torch.zeros(4, device="meta")])  # fmt: skip  # noqa: E501
def test_what_does_not_fit_is_refused(sinks: Tensor) -> None:
    q, k, v, _ = inputs("cpu")
    with pytest.raises(ValueError, match="a sink for each of 4 query heads"):
        call(attention, CAUSAL)(q, k, v, sinks)
