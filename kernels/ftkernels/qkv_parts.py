"""Shared parts of a QKV projection's epilogues, forward and backward. Their formulas are in ``ftkernels.qkv_rope`` and
``ftkernels.qkv_norm_rope``, the lanes of a head in ``ftkernels.rope_parts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import triton_dtype, triton_store_dtype
from ftkernels.limits import NormForm, NormSpan
from ftkernels.norm_parts import kernel_form
from ftkernels.rope_parts import rotation_arguments
from ftkernels.tiles import Tile

#: Up to so many rows a program of the forward takes one head.
FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rotary:
    """The heads of q and of k and v, and what turns them: cos and sin, (B or 1, S, R), last stride 1, or None.

    ``pairs``: the layout of the rotation (``ftkernels.rope``). D and R are even. ``joined``: q, k and v are one
    projection with one adapter, whose xa (M, K) all parts read; else xa is (M, 3 * K). dxa has the shape of xa.
    """

    cos: Tensor | None
    sin: Tensor | None
    q_heads: int
    k_heads: int
    head_dim: int
    pairs: bool = False
    joined: bool = False

    @property
    def seq_len(self) -> int:
        """S; 1 where nothing is rotated."""
        return 1 if self.cos is None else int(self.cos.shape[1])

    @property
    def adapters(self) -> int:
        """x @ A.T that there are: one for each part, or one for all."""
        return 1 if self.joined else 3

    @property
    def rotated(self) -> int:
        """R."""
        return 0 if self.cos is None else int(self.cos.shape[-1])

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """Kernel arguments for cos and sin."""
        return rotation_arguments(self.cos, self.sin)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and of keys, whose eps and form are one. Both have weights or neither, (D,) each; (Hq * D,)
    and (Hk * D,) over the width. ``after``: behind the rotation.
    """

    q: Tensor | None
    k: Tensor | None
    eps: float
    form: NormForm
    span: NormSpan = "head"
    after: bool = False

    @property
    def kernel_form(self) -> str:
        """The constexpr ``FORM``."""
        return kernel_form(self.q, self.form)


def qkv_constants(rotary: Rotary, b: Tensor | None, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """The constexpr arguments and the launch options that all these kernels take. ``b``: (N, K), of adapters."""
    half = rotary.head_dim // 2
    return {
        "DELTA": b is not None,
        "JOINED": rotary.joined,
        "HALF": half,
        "ROT": rotary.rotated // 2,
        "PAIRS": rotary.pairs,
        "BLOCK": max(16, triton.next_power_of_2(half)),
        "K": 16 if b is None else b.shape[1],
        "ACC": triton_dtype(dtype),
        "DOT": triton_store_dtype(dtype),
        "BM": tile.rows,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def head_weights(w_ptr, first, gap, ok, FORM: tl.constexpr, ACC: tl.constexpr):
    """A norm's factor of both features of each lane: the weight, with Gemma's 1; 1 without a weight."""
    if FORM == "bare":
        w1 = tl.full((1, 1), 1.0, ACC)
        w2 = w1
    else:
        w1 = tl.load(w_ptr + first, mask=ok, other=0.0).to(ACC)
        w2 = tl.load(w_ptr + gap + first, mask=ok, other=0.0).to(ACC)
    if FORM == "gemma":
        w1 = 1.0 + w1
        w2 = 1.0 + w2
    return w1, w2


@triton.jit
def head_rstd(x1, x2, eps, HALF: tl.constexpr, ACC: tl.constexpr):
    """(rows, 1): of heads whose lanes past HALF are 0."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    return (1.0 / tl.sqrt(squares / (2 * HALF) + tl.cast(eps, ACC)))[:, None]
