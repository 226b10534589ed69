"""Failures of attention that happened elsewhere, each by its name, and the properties that rule them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles, choose_tiles
from ftkernels.attention_mask import AttentionMask
from ftkernels.device import gpu_of
from torch import Tensor

CAUSAL = AttentionMask.causal_mask()
SMALL = AttentionTiles(*[AttentionTile(16, 16, 4, 1)] * 5)


def inputs(device: str, batch: int = 1, length: int = 40, size: int = 16) -> list[Tensor]:
    """q with 2 heads, k and v with 1: (B, H, S, D)."""
    return [torch.randn(batch, length, heads, size, device=device).transpose(1, 2) for heads in (2, 1, 1)]


def run(tensors: list[Tensor], mask: AttentionMask, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output and gradients of the kernels."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, mask, scale=0.25, backend="triton", **options)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) + out.detach())
    return out.detach(), grads


def test_transformers_39408_a_window_of_w_has_w_keys(device: str) -> None:
    """Uniform scores and values that count: the output is the mean of the keys seen, so W + 1 keys would show."""
    window, length = 8, 40
    q, k, v = inputs(device, length=length)
    v = torch.arange(length, device=device, dtype=torch.float32)[None, None, :, None].expand(1, 1, length, 16)
    out, _ = run([torch.zeros_like(q), k, v], AttentionMask.causal_mask(window), tiles=SMALL)
    expected = torch.tensor([(max(0, i - window + 1) + i) / 2 for i in range(length)], device=device)
    assert torch.allclose(out[0, 0, :, 0], expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 8])
def test_transformers_31670_documents_do_not_see_each_other(device: str, window: int | None) -> None:
    """Another document's tokens change nothing, not one bit, in output or gradient; with a window too."""
    ids = torch.tensor([[0] * 13 + [1] * 20 + [2] * 7], device=device)
    mask = AttentionMask.from_document_ids(ids, window=window)
    tensors = inputs(device)
    out, grads = run(tensors, mask, softcap=5.0)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, :, 13:33] = torch.randn_like(x[:, :, 13:33]) * 10
    other_out, other_grads = run(changed, mask, softcap=5.0)
    for one, other in zip((out, *grads), (other_out, *other_grads), strict=True):
        assert torch.equal(one[:, :, :13], other[:, :, :13])
        assert torch.equal(one[:, :, 33:], other[:, :, 33:])
        assert not torch.equal(one[:, :, 13:33], other[:, :, 13:33])


def test_liger_1456_lanes_beyond_the_last_key_are_masked_after_the_cap(device: str) -> None:
    """Capping a masked score makes it -softcap, a probability of exp(-softcap): with scores that low, it would count.

    17 keys leave 15 lanes of a tile empty; all true scores are -softcap too, so each wrong lane weighs as much as a
    key, and the output would shrink towards 0.
    """
    q, k, v = (torch.ones(1, 1, 17, 16, device=device) for _ in range(3))
    out, _ = run([-100 * q, 100 * k, v], AttentionMask.full(), softcap=2.0)
    assert torch.allclose(out, torch.ones_like(out), atol=1e-6)


@pytest.mark.parametrize(("dtype", "softcap"), [
    (torch.float32, 0.0), (torch.float32, 50.0), (torch.bfloat16, 50.0), (torch.float16, 50.0), (torch.float16, 0.0),
])  # fmt: skip
def test_vllm_56578_huge_scores_are_no_nan(device: str, softcap: float, dtype: torch.dtype) -> None:
    """tanh as a ratio of exponentials is inf / inf for scores of 1e4."""
    q, k, v = (x.to(dtype) for x in inputs(device))
    scores = (q.float() @ k.float().transpose(-1, -2) * 0.25).abs().max()
    factor = float((2e4 / scores) ** 0.5)
    tensors = [q * factor, k * factor, v]
    out, grads = run(tensors, CAUSAL, softcap=softcap)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    exact = attention_reference(*(x.double() for x in tensors), CAUSAL, scale=0.25, softcap=softcap)
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (out.double() - exact).norm() <= tolerance * exact.norm()


def test_scores_all_at_the_bottom_of_the_cap_do_not_vanish(device: str) -> None:
    """The running maximum is left out where scores are capped: exp(-50) of every key must still add up."""
    q, k, v = inputs(device)
    tensors = [torch.full_like(q, 30.0), torch.full_like(k, -30.0), v]
    out, grads = run(tensors, CAUSAL, softcap=50.0)
    expected = v.cumsum(2) / torch.arange(1, 41, device=device)[:, None]
    assert torch.allclose(out, expected.expand_as(out), atol=1e-5)
    assert all(torch.isfinite(x).all() for x in grads)


@pytest.mark.parametrize(("side", "softcap"), [("left", 5.0), ("right", 0.0)])
def test_padding_gets_zeros_whatever_it_holds(device: str, side: str, softcap: float) -> None:
    """Output and gradients at padding are exactly 0, and what padding holds reaches nobody, not by one bit.

    The conftest fills new memory with NaN: an element that no kernel writes would show.
    """
    token = torch.arange(40, device=device) < torch.tensor([[40], [17], [0]], device=device)
    token = token.flip(1) if side == "left" else token
    mask = AttentionMask.from_padding(token)
    tensors = inputs(device, batch=3)
    out, grads = run(tensors, mask, softcap=softcap)
    for x in (out, *grads):
        padding = ~token[:, None].expand(-1, x.shape[1], -1)
        assert torch.isfinite(x).all()
        assert (x[padding] == 0).all()
    assert (out[token[:, None].expand(-1, 2, -1)] != 0).any(-1).all()
    changed = [torch.where(token[:, None, :, None], x, 1e4) for x in tensors]
    again, again_grads = run(changed, mask, softcap=softcap)
    for one, other in zip((out, *grads), (again, *again_grads), strict=True):
        assert torch.equal(one, other)


def test_two_runs_give_the_same_bits(device: str) -> None:
    """No atomics: the order of every sum is fixed."""
    tensors = inputs(device, length=70)
    mask = AttentionMask.causal_mask(30)
    first, first_grads = run(tensors, mask, softcap=5.0)
    second, second_grads = run(tensors, mask, softcap=5.0)
    for one, other in zip((first, *first_grads), (second, *second_grads), strict=True):
        assert torch.equal(one, other)


def test_global_and_windowed_layers_differ_exactly_past_the_window(device: str) -> None:
    """A mask applied to the wrong layers cannot pass: they agree up to the window's length and nowhere after it."""
    tensors, window = inputs(device), 16
    everywhere, _ = run(tensors, CAUSAL)
    windowed, _ = run(tensors, CAUSAL.with_window(window))
    assert torch.allclose(everywhere[:, :, :window], windowed[:, :, :window], atol=1e-6)
    gap = (everywhere - windowed)[:, :, window:].abs().amax(-1)
    assert (gap > 1e-5).all()


def test_a_window_as_long_as_the_text_is_no_window(device: str) -> None:
    tensors = inputs(device)
    _, everywhere = run(tensors, CAUSAL)
    for window in (40, 4096):
        _, windowed = run(tensors, CAUSAL.with_window(window))
        assert all(torch.equal(one, other) for one, other in zip(everywhere, windowed, strict=True))


def test_a_row_does_not_depend_on_its_batch(device: str) -> None:
    """Ragged rows in one batch give what each gives alone."""
    token = torch.arange(40, device=device) >= torch.tensor([[0], [25]], device=device)
    tensors = inputs(device, batch=2)
    together, _ = run(tensors, AttentionMask.from_padding(token))
    alone, _ = run([x[1:, :, 25:] for x in tensors], CAUSAL)
    assert torch.allclose(together[1:, :, 25:], alone, atol=1e-6)


@pytest.mark.parametrize("rows_per_two_gib", [150, 30])
def test_offsets_past_two_to_the_31(device: str, rows_per_two_gib: int) -> None:
    """FA 2611: rows of one head lie further apart than int32 reaches, from tile to tile or inside a tile."""
    if device == "cpu":
        pytest.skip("takes 5 GB of memory")
    stride = 2**31 // rows_per_two_gib // 16 * 16
    length = rows_per_two_gib + 5
    flat = torch.zeros(stride * length + 16, device=device, dtype=torch.bfloat16)
    far = flat.as_strided((1, 1, length, 16), (flat.numel() // 16 * 16, flat.numel() // 16 * 16, stride, 1))
    q, k, v = (x.bfloat16()[:, :1] for x in inputs(device, length=length))
    far.copy_(v)
    near = attention(q, k, v, CAUSAL, scale=0.25, backend="triton")
    tiles = choose_tiles(gpu_of(torch.device(device)), torch.bfloat16, 16)
    for loads in (tiles, tiles.without_tma()):
        assert torch.equal(attention(q, k, far, CAUSAL, scale=0.25, backend="triton", tiles=loads), near)


def test_no_tokens_and_no_rows(device: str) -> None:
    for batch, length in ((0, 5), (2, 0)):
        out, grads = run(inputs(device, batch=batch, length=length), CAUSAL)
        assert out.shape == (batch, 2, length, 16)
        assert [g.shape for g in grads] == [(batch, h, length, 16) for h in (2, 1, 1)]


def test_gradients_are_those_of_small_differences(device: str) -> None:
    """The derivative with softcap, against the kernels' own forward: no reference shares its mistake."""
    tensors = inputs(device, length=6)
    _, grads = run(tensors, CAUSAL, softcap=1.0)
    weight = torch.ones_like(tensors[0]) + run(tensors, CAUSAL, softcap=1.0)[0]
    for i, (x, grad) in enumerate(zip(tensors, grads, strict=True)):
        step = torch.randn_like(x)
        values = []
        for sign in (1, -1):
            moved = [t + sign * 1e-2 * step if j == i else t for j, t in enumerate(tensors)]
            values.append(float((attention(*moved, CAUSAL, scale=0.25, softcap=1.0, backend="triton") * weight).sum()))
        numeric, exact = (values[0] - values[1]) / 2e-2, float((grad * step).sum())
        assert abs(numeric - exact) <= 1e-3 * max(1.0, abs(exact))


@pytest.mark.parametrize(("change", "message"), [
    ({"scale": 0.0}, "scale must be positive"),
    ({"softcap": -1.0}, "softcap"),
    ({"k": (2, 1, 40, 16)}, "batch and head size"),
    ({"k": (1, 1, 40, 32)}, "batch and head size"),
    ({"q": (1, 3, 40, 16), "k": (1, 2, 40, 16)}, "not a multiple"),
    ({"q": (2, 40, 16)}, "expected q"),
    ({"mask": AttentionMask.causal_mask().ranges(39, 40, "cpu")}, "the mask is for"),
    ({"mask": AttentionMask.from_padding(torch.tensor([[0, 1]] * 3))}, "made for 2 keys"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    q = torch.randn(change.get("q", (1, 2, 40, 16)))
    k = torch.randn(change.get("k", (1, 1, 40, 16)))
    options = {"scale": 0.25, **{key: change[key] for key in ("scale", "softcap") if key in change}}
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, change.get("mask", CAUSAL), **options)
