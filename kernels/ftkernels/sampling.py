"""Draws a token from each row of logits, with random numbers that depend on nothing but the row's seed and position.

    p_j = exp(z_j / T) / sum_l exp(z_l / T)  over what the filters leave;  token = min {j : sum_{l <= j} p_l > u}

u = uniform(seed, position) in [0, 1) is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) with the position as its counter: state = seed + (position + 1) * 0x9E3779B97F4A7C15, then its
finaliser, of which the upper 24 bits are kept. So neither the other rows of a batch nor the order in which rows are
computed has a say.

Filters, in this order, each on what the one before has left: ``top_k`` likeliest tokens; the fewest likeliest tokens
whose probabilities reach ``top_p``; tokens at least ``min_p`` times as likely as the likeliest. Equally likely tokens
stay or go together. Temperature 0 takes the likeliest token, the first of several.

Without filters two kernels choose: one pass over the logits, and one look at a block. The first leaves of each block of
a row its largest score m, where that is, and s = sum exp(score - m). The second adds the blocks up (log-sum-exp), and
takes the likeliest token, or the block that the random number falls into and the token within it. Scores are logits /
T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import BackendName, choose_backend, on_device_of

_GOLDEN = 0x9E3779B97F4A7C15
_FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))
_MASK = 2**64 - 1
#: Tokens whose probabilities are added up at a time.
_BLOCK = 256
#: What a row gets whose logits are not finite.
NOT_FINITE = -1

#: Of two tokens whose logits differ by 0.001 the likelier one is sampled always at this temperature.
COLDEST = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken: below :data:`COLDEST`, logits / T leave float32."""
        return self.temperature < COLDEST


#: The likeliest token.
GREEDY = Sampling()


def row_seed(*numbers: int) -> int:
    """A signed 64-bit seed of some numbers, such as a run's seed, a step and a row: other numbers, another seed."""
    state = 0
    for number in numbers:
        state = _mixed((state + number * _GOLDEN + 1) & _MASK)
    return state - 2**64 if state >= 2**63 else state


def _mixed(state: int) -> int:
    for shift, factor in _FINALISER:
        state ^= state >> shift
        state = state if factor is None else state * factor & _MASK
    return state


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """(B,) float32 in [0, 1): one number for each int64 seed and position, (B,) each."""
    state = seeds + (positions.long() + 1) * _signed(_GOLDEN)  # int64 arithmetic wraps as it should
    for shift, factor in _FINALISER:
        state = state ^ _shifted(state, shift)
        state = state if factor is None else state * _signed(factor)
    return _shifted(state, 40).to(torch.float32) * 2.0**-24


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shifted to the right without its sign."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def choose(
    logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor, *, backend: BackendName = "auto"
) -> tuple[Tensor, Tensor]:
    """The next token of each row, (B,) int64, and its log-probability, (B,) float32.

    The log-probability is that of the softmax of logits / T (of the logits where T is 0), before any filter: what a
    policy's gradient needs. A row whose largest logit or sum is not finite has the token ``NOT_FINITE``.

    Args:
        logits: (B, V), floating.
        seeds, positions: (B,), int64 and integers: what the random number depends on.
        backend: see ``ftkernels.device.choose_backend``. Filters are torch's on every device.
    """
    greedy = sampling.greedy
    if not _filters(sampling) or greedy:
        uniform = None if greedy else uniforms(seeds, positions)
        if choose_backend(logits.device, backend).is_triton:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            return choose_triton(logits, 0.0 if greedy else sampling.temperature, uniform)
    scores = logits.float()
    if not greedy and sampling.temperature != 1.0:
        scores = scores * (1.0 / sampling.temperature)
    total = torch.logsumexp(scores, dim=-1)
    if greedy:
        token = scores.argmax(dim=-1)
    else:
        left = scores
        if _filters(sampling):
            left = scores.masked_fill(scores < _threshold(scores, sampling)[:, None], -math.inf)
        token = _inverse(left, uniforms(seeds, positions))
    logprob = scores.gather(1, token[:, None])[:, 0] - total
    return torch.where(torch.isfinite(total), token, NOT_FINITE), logprob


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _threshold(scores: Tensor, sampling: Sampling) -> Tensor:
    """(B,), the lowest score that the filters leave."""
    lowest = scores.new_full(scores.shape[:1], -math.inf)
    if 0 < sampling.top_k < scores.shape[1]:
        lowest = scores.topk(sampling.top_k, dim=-1).values[:, -1]
    if sampling.top_p < 1.0:
        ordered = scores.sort(dim=-1, descending=True).values
        ordered = ordered.masked_fill(ordered < lowest[:, None], -math.inf)
        reached = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
        last = (reached < sampling.top_p).sum(dim=-1).clamp(max=scores.shape[1] - 1)
        lowest = torch.maximum(lowest, ordered.gather(1, last[:, None])[:, 0])
    if sampling.min_p > 0.0:
        lowest = torch.maximum(lowest, scores.amax(dim=-1) + math.log(sampling.min_p))
    return lowest


def _inverse(scores: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the cumulative probability exceeds u; never one of probability zero.

    The sums are taken by blocks of tokens, then within the one that u falls into: a scan of whole rows would be slow.
    """
    padded = F.pad(scores, (0, -scores.shape[1] % _BLOCK), value=-math.inf) if scores.shape[1] % _BLOCK else scores
    weights = torch.exp(padded - padded.amax(dim=-1, keepdim=True)).unflatten(1, (-1, _BLOCK))
    before = weights.sum(dim=-1).cumsum(dim=-1)
    sought = uniform * before[:, -1]
    block = _first_above(before, sought)
    start = torch.where(block > 0, before.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    chosen = weights.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
    return block * _BLOCK + _first_above(chosen.cumsum(dim=-1), sought - start)


def _first_above(reached: Tensor, sought: Tensor) -> Tensor:
    """(B,) int64: where in each row of cumulative sums (B, N) the first one above ``sought`` is. Where rounding leaves
    none above, the last one that added something.
    """
    last = (reached < reached[:, -1:]).sum(dim=-1)
    return torch.minimum((reached <= sought[:, None]).sum(dim=-1), last)


_COLUMNS = 4096


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
    blocks = triton.cdiv(vocabulary, _COLUMNS)
    largest, sums = (torch.empty((rows, blocks), dtype=torch.float32, device=logits.device) for _ in range(2))
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprob = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rate = 1.0 / temperature if temperature else 1.0
    with on_device_of(logits):
        _blocks_kernel[(rows, blocks)](
            logits, logits.stride(0), largest, where, sums, vocabulary, blocks, RATE=rate, BLOCK=_COLUMNS, num_warps=8
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
            BLOCK=_COLUMNS,
            BLOCKS=triton.next_power_of_2(blocks),
            num_warps=8,
        )
    return token, logprob
