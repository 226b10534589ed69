"""Triton kernels that choose a token of each row without filters: one pass over the logits, and one look at a block.

The first kernel leaves of each block of a row its largest score m, where that is, and s = sum exp(score - m). The
second adds the blocks up (log-sum-exp), and takes the likeliest token, or the block that the random number falls into
and the token within it. Scores are logits / T. ``ftkernels.sampling.choose`` is the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of

_BLOCK = 4096


@triton.jit
def _blocks_kernel(
    logits_ptr, stride, largest_ptr, where_ptr, sum_ptr, V, blocks, RATE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * RATE
    largest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == largest, at, V), 0)
    shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    tl.store(largest_ptr + row * blocks + block, largest)
    tl.store(where_ptr + row * blocks + block, first)
    tl.store(sum_ptr + row * blocks + block, tl.sum(tl.exp(scores - shift), 0))


@triton.jit
def _choose_kernel(
    logits_ptr, stride, largest_ptr, where_ptr, sum_ptr, uniform_ptr, token_ptr, logprob_ptr, V, blocks,
    RATE: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    real = b < blocks
    largest = tl.load(largest_ptr + row * blocks + b, mask=real, other=float("-inf"))
    sums = tl.load(sum_ptr + row * blocks + b, mask=real, other=0.0)
    peak = tl.max(largest, 0)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    weights = sums * tl.exp(largest - shift)
    total = tl.sum(weights, 0)
    if GREEDY:
        first = tl.load(where_ptr + row * blocks + b, mask=real, other=V)
        token = tl.min(tl.where(largest == peak, first, V), 0)
    else:
        reached = tl.cumsum(weights, 0)
        sought = tl.load(uniform_ptr + row) * total
        # Where rounding leaves no block above, the last one that added something.
        last = tl.max(tl.where(weights > 0.0, b, 0), 0)
        block = tl.minimum(tl.sum((reached <= sought).to(tl.int32), 0), last)
        before = tl.sum(tl.where(b < block, weights, 0.0), 0)
        j = tl.arange(0, BLOCK)
        at = block * BLOCK + j
        scores = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * RATE
        within = tl.exp(scores - shift)
        above = tl.sum((tl.cumsum(within, 0) <= sought - before).to(tl.int32), 0)
        token = block * BLOCK + tl.minimum(above, tl.max(tl.where(within > 0.0, j, 0), 0))
    finite = (total > 0.0) & (total < float("inf")) & (peak < float("inf"))
    token = tl.minimum(token, V - 1)
    score = tl.load(logits_ptr + row * stride + token).to(tl.float32) * RATE
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(logprob_ptr + row, score - shift - tl.log(tl.where(finite, total, 1.0)))


def choose_triton(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """(token (B,) int64, log-probability (B,) float32) of rows of ``logits`` (B, V), whose last stride is 1.

    ``uniform``: (B,) float32 in [0, 1); None takes the likeliest token. -1 stands for a row that is not finite.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    largest, sums = (torch.empty((rows, blocks), dtype=torch.float32, device=logits.device) for _ in range(2))
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rate = 1.0 / temperature if temperature else 1.0
    with on_device_of(logits):
        _blocks_kernel[(rows, blocks)](
            logits, logits.stride(0), largest, where, sums, vocabulary, blocks, RATE=rate, BLOCK=_BLOCK, num_warps=8
        )
        _choose_kernel[(rows,)](
            logits,
            logits.stride(0),
            largest,
            where,
            sums,
            largest if uniform is None else uniform,
            token,
            logprob,
            vocabulary,
            blocks,
            RATE=rate,
            GREEDY=uniform is None,
            BLOCK=_BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=8,
        )
    return token, logprob
