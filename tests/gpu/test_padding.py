"""Attention over rows that are padded on the left: GRPO's batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.model.attention import padding_safe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA machine")]
PADDED = 40


@pytest.mark.parametrize("length", [230, 320, 768])
def test_gradients_are_finite_and_right(length: int) -> None:
    """cuDNN's are NaN at 320 tokens, and a run of GRPO ended with "the gradient norm is nan"."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril().repeat(2, 1, 1, 1)
    mask[..., :PADDED] = False
    upstream = torch.randn_like(q)
    upstream[:, :, :PADDED] = 0.0

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        with padding_safe():
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
            return torch.autograd.grad(out, leaves, upstream.to(dtype))

    for found, exact in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert bool(torch.isfinite(found).all())
        assert float((found.float() - exact).norm() / exact.norm()) < 1e-2
