"""Shared parts of a QKV projection's epilogues, forward and backward. Their formulas are in ``ftkernels.qkv_rope`` and
``ftkernels.qkv_norm_rope``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import triton_dtype, triton_store_dtype
from ftkernels.limits import NormForm
from ftkernels.tiles import Tile

#: Up to so many rows a program of the forward takes one head.
FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin, (B or 1, S, D), last stride 1, and the head counts they turn."""

    cos: Tensor
    sin: Tensor
    q_heads: int
    k_heads: int

    @property
    def head_dim(self) -> int:
        """D; the whole head is rotated."""
        return int(self.cos.shape[-1])


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights (D,) of the norms of queries and of keys, whose eps and form are one."""

    q: Tensor
    k: Tensor
    eps: float
    form: NormForm


def qkv_constants(rotary: Rotary, b: Tensor | None, joined: bool, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """The constexpr arguments and the launch options that all these kernels take.

    ``b``: (N, K), of adapters. ``joined``: q, k and v have one adapter, and one x @ A.T, between them.
    """
    half = rotary.head_dim // 2
    return {
        "DELTA": b is not None,
        "JOINED": joined,
        "HALF": half,
        "BLOCK": max(16, triton.next_power_of_2(half)),
        "K": 16 if b is None else b.shape[1],
        "ACC": triton_dtype(dtype),
        "DOT": triton_store_dtype(dtype),
        "BM": tile.rows,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def head_weights(w_ptr, d, d_ok, HALF: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr):
    """The halves of a norm's factor: the weight, with Gemma's 1."""
    w1 = tl.load(w_ptr + d, mask=d_ok, other=0.0).to(ACC)
    w2 = tl.load(w_ptr + HALF + d, mask=d_ok, other=0.0).to(ACC)
    if FORM == "gemma":
        w1 = 1.0 + w1
        w2 = 1.0 + w2
    return w1, w2


@triton.jit
def head_rstd(x1, x2, eps, HALF: tl.constexpr, ACC: tl.constexpr):
    """(rows, 1): of heads whose lanes past HALF are 0."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    return (1.0 / tl.sqrt(squares / (2 * HALF) + tl.cast(eps, ACC)))[:, None]
