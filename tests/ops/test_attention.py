"""Attention against float64: output and gradients of q, k and v; in float32 a relative Frobenius error of 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles
from ftkernels.attention_mask import AttentionMask
from torch import Tensor

CAUSAL = AttentionMask.causal_mask()
# Longer one way than the other, and smaller or larger than the windows below; dk and dv in one launch.
OBLONG = AttentionTiles(
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(16, 32, 4, 1),
    AttentionTile(32, 16, 4, 1),
    AttentionTile(16, 32, 4, 1),
)


def inputs(
    device: str, *, batch: int = 1, heads: int = 2, kv_heads: int = 1, q_len: int = 20, k_len: int = 0, size: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as projections leave them: (B, S, H, D)."""
    k_len = k_len or q_len
    return (
        torch.randn(batch, q_len, heads, size, device=device),
        torch.randn(batch, k_len, kv_heads, size, device=device),
        torch.randn(batch, k_len, kv_heads, size, device=device),
    )


def call(function: Callable[..., Tensor], mask: AttentionMask, **options: Any) -> Callable[..., Tensor]:
    """``function`` of (B, S, H, D) tensors."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = options.get("scale", q.shape[-1] ** -0.5)
        rest = {key: value for key, value in options.items() if key != "scale"}
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return function(*heads_first, mask, scale=scale, **rest).transpose(1, 2)

    return run


def check(tools: Any, tensors: tuple[Tensor, ...], mask: AttentionMask, tiles: AttentionTiles | None = None, **options: Any) -> None:  # fmt: skip  # noqa: E501
    kernels = call(attention, mask, backend="triton", tiles=tiles, **options)
    tools.assert_float32(kernels, call(attention_reference, mask, **options), tensors)


@pytest.mark.parametrize(("length", "softcap"), [(3, 50.0), (17, 0.0), (63, 50.0), (65, 0.0)])
def test_causal_at_odd_lengths(device: str, tools: Any, length: int, softcap: float) -> None:
    check(tools, inputs(device, q_len=length), CAUSAL, softcap=softcap)


@pytest.mark.parametrize(("window", "length"), [
    (8, 7), (8, 8), (8, 9), (8, 19), (8, 65), (40, 39), (40, 40), (40, 41), (40, 83),
])  # fmt: skip
def test_windows_smaller_and_larger_than_a_tile(device: str, tools: Any, window: int, length: int) -> None:
    check(tools, inputs(device, heads=1, q_len=length), AttentionMask.causal_mask(window), OBLONG, softcap=5.0)


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (40, 5.0)])
def test_tiles_without_any_masked_element(device: str, tools: Any, window: int | None, softcap: float) -> None:
    """Long enough that the unmasked loops run, in all kernels, with dk and dv apart and together."""
    check(tools, inputs(device, q_len=97), AttentionMask.causal_mask(window), softcap=softcap)
    check(tools, inputs(device, heads=1, q_len=97), AttentionMask.causal_mask(window), OBLONG, softcap=softcap)


def test_every_query_sees_every_key(device: str, tools: Any) -> None:
    check(tools, inputs(device, batch=2, heads=1, q_len=41), AttentionMask.full(), softcap=5.0)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (4, 1), (3, 3)])
def test_query_heads_share_key_heads(device: str, tools: Any, heads: int, kv_heads: int) -> None:
    tensors = inputs(device, batch=2, heads=heads, kv_heads=kv_heads, q_len=19)
    check(tools, tensors, AttentionMask.causal_mask(8), softcap=5.0)


@pytest.mark.parametrize("size", [32, 48, 64, 96, 256, 272, 512])
def test_head_sizes(device: str, tools: Any, size: int) -> None:
    tensors = inputs(device, heads=1, q_len=33, size=size)
    check(tools, tensors, CAUSAL, softcap=50.0 if size == 256 else 0.0)


@pytest.mark.parametrize(("side", "window", "softcap"), [
    ("left", None, 5.0), ("left", 8, 0.0), ("right", None, 0.0), ("right", 8, 5.0),
])  # fmt: skip
def test_ragged_padding(device: str, tools: Any, side: str, window: int | None, softcap: float) -> None:
    lengths = torch.tensor([[35], [1], [20]], device=device)
    padding = torch.arange(35, device=device) < lengths
    mask = AttentionMask.from_padding(padding.flip(1) if side == "left" else padding, window=window)
    check(tools, inputs(device, batch=3, heads=1, q_len=35), mask, softcap=softcap)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 8), (False, None)])
def test_packed_documents(device: str, tools: Any, causal: bool, window: int | None) -> None:
    lengths = torch.tensor([0, 30, 31, 50, 70], device=device)
    mask = AttentionMask.from_cu_seqlens(lengths, 70, causal=causal, window=window)
    check(tools, inputs(device, heads=1, q_len=70), mask, OBLONG)


def test_rows_packed_differently(device: str, tools: Any) -> None:
    ids = torch.tensor([[0] * 10 + [1] * 30, [0] * 40, [0] * 33 + [1] * 7], device=device)
    padding = torch.ones(3, 40, device=device)
    padding[0, 38:] = 0
    mask = AttentionMask.from_document_ids(ids, window=12).padded(padding)
    check(tools, inputs(device, batch=3, heads=1, q_len=40), mask)


@pytest.mark.parametrize(("q_len", "window"), [(1, None), (7, 8), (33, None)])
def test_queries_after_a_cached_prefix(device: str, tools: Any, q_len: int, window: int | None) -> None:
    padding = torch.arange(50, device=device) >= torch.tensor([[0], [20]], device=device)
    mask = AttentionMask.from_padding(padding, window=window)
    check(tools, inputs(device, batch=2, heads=1, q_len=q_len, k_len=50), mask)


def test_one_token_is_its_own_value(device: str) -> None:
    """The softmax of one score: gradients of query and key are 0 but for rounding."""
    leaves = [x.transpose(1, 2).requires_grad_() for x in inputs(device, q_len=1)]
    out = attention(*leaves, CAUSAL, scale=0.25, softcap=5.0, backend="triton")
    incoming = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, leaves, incoming)
    assert torch.allclose(out, leaves[2].expand_as(out))
    assert torch.allclose(dv, incoming.sum(1, keepdim=True), atol=1e-6)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-6


def test_gemma2s_own_scale(device: str, tools: Any) -> None:
    """query_pre_attn_scalar is not the head size."""
    check(tools, inputs(device, q_len=33), CAUSAL, softcap=50.0, scale=224**-0.5)


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.bfloat16, 50.0), (torch.bfloat16, 0.0), (torch.float16, 50.0)])
def test_half_precision(device: str, tools: Any, dtype: torch.dtype, softcap: float) -> None:
    """Probabilities and their gradients are rounded to the inputs' dtype before their products, as every flash
    attention does: 2^-9 a rounding in bfloat16, of which a gradient sees three.
    """
    tensors = inputs(device, heads=4, kv_heads=2, q_len=40, size=32)
    run = call(attention, AttentionMask.causal_mask(30), backend="triton", softcap=softcap)
    reference = call(attention_reference, AttentionMask.causal_mask(30), softcap=softcap)
    compared = tools.compare(run, reference, tensors, dtype)
    assert compared.error <= (5e-3 if dtype == torch.bfloat16 else 2e-3), compared


def test_a_slice_of_a_fused_projection_is_read_in_place(device: str, tools: Any) -> None:
    """q, k, v as views of one (B, S, (Hq + 2 Hkv) * D) tensor, and as (B, H, S, D) memory."""
    fused = torch.randn(2, 21, 4 * 16, device=device)

    def split(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in x.split((32, 16, 16), dim=-1))
            return function(q, k, v, CAUSAL, scale=0.25, **options)

        return run

    tools.assert_float32(split(attention, backend="triton"), split(attention_reference), (fused,))
    memory = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(device, batch=2, q_len=21)]
    check(tools, tuple(memory), CAUSAL)


def test_the_output_folds_into_rows_without_a_copy(device: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in inputs(device, batch=2))
    for backend in ("triton", "torch"):
        out = attention(q, k, v, CAUSAL, scale=0.25, backend=backend)  # type: ignore[arg-type]
        assert out.transpose(1, 2).is_contiguous()
        assert out.transpose(1, 2).reshape(2, 20, 32).data_ptr() == out.data_ptr()


def test_gradients_without_contiguous_rows(device: str) -> None:
    """``out.sum().backward()`` brings an expanded gradient, all strides 0."""
    leaves = [x.transpose(1, 2).requires_grad_() for x in inputs(device)]
    for function, options in ((attention, {"backend": "triton"}), (attention_reference, {})):
        out = function(*leaves, CAUSAL, scale=0.25, **options)
        grads = torch.autograd.grad(out.sum(), leaves)
        if function is attention:
            got = grads
    for one, other in zip(got, grads, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_wanted(device: str, wanted: tuple[int, ...]) -> None:
    tensors = [x.transpose(1, 2) for x in inputs(device)]
    for i in wanted:
        tensors[i].requires_grad_()
    leaves = [tensors[i] for i in wanted]
    results = []
    for function, options in ((attention, {"backend": "triton"}), (attention_reference, {})):
        out = function(*tensors, CAUSAL, scale=0.25, softcap=5.0, **options)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_the_torch_form_is_the_same_function(device: str, tools: Any) -> None:
    mask = AttentionMask.causal_mask(8)
    run = call(attention, mask, backend="torch", softcap=5.0)
    tools.assert_float32(run, call(attention_reference, mask, softcap=5.0), inputs(device, batch=2))


def test_the_reference_is_torchs_own_attention() -> None:
    q, k, v = (x.double().transpose(1, 2) for x in inputs("cpu", batch=2, heads=4, kv_heads=2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(attention_reference(q, k, v, CAUSAL, scale=0.3), expected, atol=1e-12)


def test_autocast_decides_the_dtype(device: str) -> None:
    """A norm over heads may leave q and k in float32 beside a bfloat16 v."""
    q, k, v = (x.transpose(1, 2) for x in inputs(device))
    with pytest.raises(ValueError, match="one floating dtype"):
        attention(q, k, v.bfloat16(), CAUSAL, scale=0.25)
    with torch.autocast(device, torch.bfloat16):
        out = attention(q, k, v.bfloat16(), CAUSAL, scale=0.25, backend="triton")
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), attention(q, k, v, CAUSAL, scale=0.25), atol=2e-2)
