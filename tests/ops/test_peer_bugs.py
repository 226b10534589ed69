"""Bugs of other kernels that belong to no single operation: compilers, and scalars that widen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ftkernels import glu
from ftkernels.attention import attention_reference
from ftkernels.attention_config import AttentionSettings, AttentionTile, choose_tiles
from ftkernels.attention_kernels import attention_forward, key_backward, query_backward
from ftkernels.attention_mask import AttentionMask
from ftkernels.device import Tile, gpu_of
from ftkernels.glu import glu_reference
from ftkernels.linear_cross_entropy import linear_cross_entropy
from ftkernels.rms_norm import rms_norm
from torch import Tensor

BF16 = torch.bfloat16


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "softcap"), [(256, 50.0), (128, 0.0)])
def test_fla_984_988_1262_attention_is_right_at_every_tile_and_number_of_warps(size: int, softcap: float) -> None:
    """Triton has compiled wrong code for Hopper at some tiles only: transposed products, more warps than one group."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 320, h, size, device="cuda", dtype=BF16).transpose(1, 2) for h in (4, 2, 2, 4))
    mask, scale = AttentionMask.causal_mask(100), size**-0.5
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention_reference(*leaves, mask, scale=scale, softcap=softcap)
    wanted = torch.autograd.grad(exact, leaves, d_out.double())
    ranges, settings = mask.ranges(320, 320, "cuda"), AttentionSettings(scale, softcap, size, 2, BF16)
    tiles = choose_tiles(gpu_of(torch.device("cuda")), BF16, size)
    out, lse = attention_forward(q, k, v, ranges, settings, tiles.forward)
    saved = (q, k, v, out, lse)
    _, delta = query_backward(saved, d_out, ranges, settings, tiles.d_query)
    for warps in (4, 8):
        for queries, keys in ((32, 64), (64, 32), (64, 64)):
            for tma in (False, True):
                tile = AttentionTile(queries, keys, warps, 2, tma=tma)
                found = attention_forward(q, k, v, ranges, settings, tile)[0]
                dq = query_backward(saved, d_out, ranges, settings, tile)[0]
                dk, _ = key_backward(saved, d_out, delta, ranges, settings, tile, want_dk=True, want_dv=False)
                _, dv = key_backward(saved, d_out, delta, ranges, settings, tile, want_dk=False, want_dv=True)
                assert dk is not None
                assert dv is not None
                errors = [_apart(a, b) for a, b in zip((found, dq, dk, dv), (exact.detach(), *wanted), strict=True)]
                assert max(errors) < 1e-2, (tile, errors)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (64, 64), (64, 128)])
def test_fla_826_products_in_elementwise_kernels_are_right_at_every_tile(rows: int, columns: int, warps: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    torch.manual_seed(0)
    gate, up = torch.randn(200, 2 * 360, device="cuda", dtype=BF16).chunk(2, 1)
    low = glu.GluLowRank(*(torch.randn(s, device="cuda", dtype=BF16) for s in ((200, 32), (720, 16), (16, 360))))
    found, ha = glu.glu_forward(gate, up, "silu", low, tile=Tile(rows, columns, warps, 2, 4))
    xa, b, a_down = (t.double() for t in (low.xa, low.b, low.a_down))
    full = [gate.double() + xa[:, :16] @ b[:360].T, up.double() + xa[:, 16:] @ b[360:].T]
    wanted = glu_reference(*full, "silu")
    assert ha is not None
    assert _apart(found, wanted) < 1e-2
    assert _apart(ha, wanted @ a_down.T) < 1e-2


def test_liger_1350_float64_scalars_widen_nothing(device: str) -> None:
    """A configuration read with numpy, or a count in float64, is a scalar like any other."""
    x, weight = torch.randn(5, 48, device=device), torch.randn(48, device=device)
    head, labels = torch.randn(70, 48, device=device), torch.randint(0, 70, (5,), device=device)

    def both(scalar: Any) -> list[Tensor]:
        return [
            rms_norm(x, weight, scalar(1e-6), backend="triton"),
            linear_cross_entropy(x, head, labels, softcap=scalar(30.0), label_smoothing=scalar(0.1), backend="triton"),
        ]

    for plain, wide in zip(both(float), both(np.float64), strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(plain, wide)
    count = torch.tensor(5.0, dtype=torch.float64, device=device)
    loss = linear_cross_entropy(x, head, labels, num_items=count, backend="triton")
    assert loss.dtype == torch.float32
