"""Draws a token from each row of logits, with random numbers that depend on nothing but the row's seed and position.

    p_j = exp(z_j / T) / sum_l exp(z_l / T)  over what the filters leave;  token = min {j : sum_{l <= j} p_l > u}

u = uniform(seed, position) in [0, 1) is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) with the position as its counter: state = seed + (position + 1) * 0x9E3779B97F4A7C15, then its
finaliser, of which the upper 24 bits are kept. So neither the other rows of a batch nor the order in which rows are
computed has a say.

Filters, in this order, each on what the one before has left: ``top_k`` likeliest tokens; the fewest likeliest tokens
whose probabilities reach ``top_p``; tokens at least ``min_p`` times as likely as the likeliest. Equally likely tokens
stay or go together. Temperature 0 takes the likeliest token, the first of several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ftkernels.device import BackendName, choose_backend
from ftkernels.sampling_kernels import choose_triton

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
