"""Norms over heads and rotation behind a QKV projection, in one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from ftkernels import lora_qkv as module
from ftkernels.device import Tile
from ftkernels.lora_qkv import lora_qkv, lora_qkv_reference
from ftkernels.projection import Norm, Projection
from ftkernels.qkv_norm_rope import qkv_norm_rope_backward, qkv_norm_rope_forward
from ftkernels.qkv_parts import HeadNorms, Rotary
from ftkernels.rms_norm import rms_norm_reference
from ftkernels.rope import apply_rope_reference
from torch import Tensor

BF16 = torch.bfloat16
Q_HEADS, K_HEADS = 4, 2


def called(function: Any, head: int, form: Any, rope: Any, layers: Any, **kwargs: Any) -> Any:
    """``function`` of z, the norms' weights, then what is trained: the weights, or adapters of ``layers``."""

    def call(z: Tensor, norm: Tensor, norm_q: Tensor, norm_k: Tensor, *trained: Tensor) -> Any:
        if layers is None:
            built = [Projection(w) for w in trained]
        else:
            pairs = zip(trained[::2], trained[1::2], strict=True)
            built = [layer.build(a, b, z) for layer, (a, b) in zip(layers, pairs, strict=True)]
        return function(
            z,
            *built,
            head_dim=head,
            norm=Norm(norm, 1e-6, form),
            head_norms=(Norm(norm_q, 1e-5, form), Norm(norm_k, 1e-5, form)),
            rope=tuple(t.to(z.dtype) for t in rope),
            **kwargs,
        )

    return call


def weights_of_norms(device: str, head: int) -> list[Tensor]:
    return [torch.randn(size, device=device) for size in (40, head, head)]


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("head", [16, 24])
def test_with_trained_weights_it_matches_float64(device: str, tools: Any, layers: Any, head: int, form: str) -> None:
    rows = [Q_HEADS * head, K_HEADS * head, K_HEADS * head]
    inputs = [torch.randn(2, 5, 40, device=device), *weights_of_norms(device, head)]
    inputs += [torch.randn(n, 40, device=device) / 40**0.5 for n in rows]
    arguments = (head, form, layers.angles(head), None)
    op, reference = called(lora_qkv, *arguments, backend="triton"), called(lora_qkv_reference, *arguments)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


@pytest.mark.parametrize("rank", [4, 80])
@pytest.mark.parametrize("rotated", [16, 8])
def test_with_adapters_it_matches_float64(device: str, tools: Any, layers: Any, rank: int, rotated: int) -> None:
    """Also what the one kernel does not take: ranks above 64, and heads that are rotated in part."""
    made = [layers.make(n * 16, 40, rank, bias=True) for n in (Q_HEADS, K_HEADS, K_HEADS)]
    inputs = [torch.randn(2, 5, 40, device=device), *weights_of_norms(device, 16), *layers.flat(*made)]
    arguments = (16, "llama", layers.angles(rotated), made)
    op, reference = called(lora_qkv, *arguments, backend="triton"), called(lora_qkv_reference, *arguments)
    tools.assert_float32(op, reference, inputs)
    tools.assert_bfloat16(op, reference, inputs, BF16)


@pytest.mark.parametrize("tile", [Tile(16, 1, 4), Tile(16, 8, 4), Tile(32, 3, 4)], ids=str)
def test_every_tile_writes_every_element(device: str, tools: Any, tile: Tile) -> None:
    """37 rows and 5 + 2 heads fill no tile; gradients come in any strides."""
    batch, seq_len, heads, k_heads, head = 1, 37, 5, 2, 16
    width = (heads + 2 * k_heads) * head
    y = torch.randn(seq_len, width, device=device)
    angle = torch.randn(1, seq_len, head, device=device)
    rotary = Rotary(angle.cos(), angle.sin(), heads, k_heads, head)
    norms = HeadNorms(torch.randn(head, device=device), torch.randn(head, device=device), 1e-6, "llama")

    def reference(y: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        split = y.view(batch, seq_len, -1, head).transpose(1, 2).split([heads, k_heads, k_heads], 1)
        normed = [rms_norm_reference(x, w, 1e-6) for x, w in zip(split, (q, k), strict=False)]
        return *apply_rope_reference(*normed, rotary.cos.double(), rotary.sin.double()), split[2]

    leaves = [t.double().requires_grad_() for t in (y, norms.q, norms.k)]
    exact = reference(*leaves)
    truth = torch.cat(exact[:2], 1).detach()
    incoming = [torch.randn(seq_len, batch, n, head, device=device).permute(1, 2, 0, 3) for n in (heads, k_heads, 2)]
    wanted = torch.autograd.grad(exact, leaves, [g.double() for g in incoming])
    turned, left = qkv_norm_rope_forward(y, None, None, rotary, norms, tile=tile)
    both = turned.view(batch, seq_len, -1, head).transpose(1, 2)
    assert tools.relative(both, truth) <= 1e-6
    assert torch.equal(left, y)
    dq, dk, dv = incoming
    made = qkv_norm_rope_backward((dq, dk, dv), y, None, rotary, norms, torch.float32, want_dw=True, tile=tile)
    for found, true in zip((made.d, made.dw_q, made.dw_k), wanted, strict=True):
        assert found is not None
        assert tools.relative(found, true) <= 1e-6


def test_llama_heads_are_rounded_before_the_weight_bit_for_bit(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``test_rms_norm`` has it of whole rows, in float16 for the interpreter; no angle turns anything here."""
    if device == "cpu":
        for name in ("qkv_norm_rope", "qkv_backward"):
            monkeypatch.setattr(f"ftkernels.{name}.triton_store_dtype", lambda _: tl.float16)
    y = torch.tensor([5.0, -5.0, 4.0, 1.0, -1.0, 2.0, 0.0, 0.0]).repeat(3, 2 * 4).to(device, torch.float16)
    wq, wk = (torch.randn(16, device=device, dtype=torch.float16) for _ in range(2))
    still = Rotary(torch.ones(1, 3, 16, device=device), torch.zeros(1, 3, 16, device=device), 2, 1, 16)
    norms = HeadNorms(wq, wk, 1e-6, "llama")
    turned, left = qkv_norm_rope_forward(y, None, None, still, norms)
    n = (y[:, :48].float() / 3.0).to(torch.float16)
    assert torch.equal(turned, n * torch.cat([wq, wq, wk]))
    ones = tuple(torch.ones(1, heads, 3, 16, device=device, dtype=torch.float16) for heads in (2, 1, 1))
    made = qkv_norm_rope_backward(ones, left, None, still, norms, torch.float16, want_dw=True)
    assert made.dw_q is not None
    assert made.dw_k is not None
    assert torch.equal(made.dw_q.float(), 6.0 * n[0, :16].float())
    assert torch.equal(made.dw_k.float(), 3.0 * n[0, :16].float())


def test_frozen_norms_get_no_gradient_and_cost_no_sums(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*args: Any, want_dw: bool, **kwargs: Any) -> Any:
        asked.append(want_dw)
        return qkv_norm_rope_backward(*args, want_dw=want_dw, **kwargs)

    monkeypatch.setattr(module, "qkv_norm_rope_backward", noted)
    dtype = BF16 if device == "cuda" else torch.float32  # on a GPU float32 takes other ways
    z = torch.randn(1, 3, 32, device=device, dtype=dtype, requires_grad=True)
    weights = [torch.randn(n * 16, 32, device=device, dtype=dtype) for n in (2, 1, 1)]
    norm, angle = Norm(torch.ones(16, device=device), 1e-6), torch.randn(1, 3, 16, device=device)
    made = lora_qkv(
        z,
        *(Projection(w) for w in weights),
        head_dim=16,
        head_norms=(norm, norm),
        rope=(angle.cos(), angle.sin()),
        backend="triton",
    )
    made.v.sum().backward()  # q and k take no part: their gradients are zeros
    assert asked == [False]
    assert z.grad is not None
    wanted = torch.ones(1, 3, 16, device=device) @ weights[2].float()
    torch.testing.assert_close(z.grad.float(), wanted, rtol=1e-2 if device == "cuda" else 1e-5, atol=1e-2)


def test_norms_of_another_head_size_are_refused() -> None:
    norm = Norm(torch.ones(8), 1e-6)
    weights = [Projection(torch.randn(n * 16, 32)) for n in (2, 1, 1)]
    with pytest.raises(ValueError, match=r"norms of heads of 16 with weights of \(8,\), \(8,\)"):
        lora_qkv(torch.randn(1, 3, 32), *weights, head_dim=16, head_norms=(norm, norm))
