"""Log-probabilities and entropies of rows of logits, one slab of the vocabulary after the other, and their gradients.

Formulas: ``ftkernels.linear_log_prob``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.cross_entropy import falling
from ftkernels.device import on_device_of, rounded, store_dtype, triton_dtype


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """softcap (0: none), factor on the logits before the cap, temperature that divides them after it."""

    softcap: float = 0.0
    logit_scale: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Slab:
    """A product of some rows with a slab of the head: the vocabulary's entries from ``start`` on.

    ``products`` (C, S) float32 or float64, which the operations below overwrite; ``bias`` (S,) or None.
    """

    products: Tensor
    start: int
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RunningSums:
    """Running sums of C rows after some slabs, each (C,) float32 or float64.

    highest: the largest z. others: sum of exp(z - highest) over all entries but the label. weighted: sum of
    (z - highest) exp(z - highest) over them. label: the label's z. slope: the cap's derivative there.
    """

    highest: Tensor
    others: Tensor
    weighted: Tensor
    label: Tensor
    slope: Tensor

    @classmethod
    def before(cls, rows: int, like: Tensor) -> RunningSums:
        """Before the first slab; dtype and device of ``like``."""
        zeros = like.new_zeros(4, rows)
        return cls(like.new_full((rows,), float("-inf")), *zeros)

    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """After the last slab, each (C,): log-probability and entropy in nats, log-sum-exp, and the sum of
        exp(z - highest) over all entries.
        """
        above = self.label - self.highest
        mine = torch.exp(above)
        total = self.others + mine
        log_total = torch.log(total)
        entropy = log_total - (self.weighted + mine * above) / total
        return above - log_total, entropy, self.highest + log_total, total


@dataclass(frozen=True, slots=True)
class Upstream:
    """Inputs of backward for C rows, each (C,): log-sum-exp, entropy, and both incoming gradients."""

    log_sum_exp: Tensor
    entropy: Tensor
    d_log_prob: Tensor
    d_entropy: Tensor


def fold_reference(
    slab: Slab, labels: Tensor, running: RunningSums, options: LogitOptions, *, weights: torch.dtype | None
) -> tuple[Tensor | None, Tensor]:
    """Takes a slab into ``running``, in place, in plain torch.

    Args:
        labels: (C,) in [0, V).
        weights: dtype of the first result; None where it is not wanted.

    Returns:
        exp(z - highest) times the cap's derivative, 0 at the label, (C, S); and exp(highest before - highest), (C,),
        the factor on what was gathered with the weights of earlier slabs.
    """
    z, slope = _capped(slab, options)
    columns = torch.arange(slab.start, slab.start + z.shape[1], device=z.device)
    here = columns == labels[:, None]
    highest = torch.maximum(running.highest, z.amax(1))
    shift = torch.where(running.others > 0, running.highest - highest, 0.0)
    decay = torch.exp(running.highest - highest)
    above = z - highest[:, None]
    others = torch.exp(above).masked_fill(here, 0.0)
    running.weighted.copy_(
        decay * (running.weighted + running.others * shift) + torch.where(others > 0, others * above, 0.0).sum(1)
    )
    running.others.mul_(decay).add_(others.sum(1))
    running.highest.copy_(highest)
    inside = here.any(1)
    running.label.copy_(torch.where(inside, torch.where(here, z, 0.0).sum(1), running.label))
    steep = torch.ones_like(running.slope) if slope is None else torch.where(here, slope, 0.0).sum(1)
    running.slope.copy_(torch.where(inside, steep, running.slope))
    if weights is None:
        return None, decay
    return (others if slope is None else others * slope).to(weights), decay


def grad_reference(slab: Slab, labels: Tensor, upstream: Upstream, options: LogitOptions, dtype: torch.dtype) -> Tensor:
    """(C, S) in ``dtype``: the gradient of a slab's products, in plain torch; ``labels`` (C,) in [0, V)."""
    z, slope = _capped(slab, options)
    columns = torch.arange(slab.start, slab.start + z.shape[1], device=z.device)
    here = columns == labels[:, None]
    log_p = z - upstream.log_sum_exp[:, None]
    p = torch.exp(log_p)
    grad = upstream.d_log_prob[:, None] * (here.to(z.dtype) - p)
    grad -= upstream.d_entropy[:, None] * torch.where(p > 0, p * (log_p + upstream.entropy[:, None]), 0.0)
    if slope is not None:
        grad *= slope
    return (grad * (options.logit_scale / options.temperature)).to(dtype)


def _capped(slab: Slab, options: LogitOptions) -> tuple[Tensor, Tensor | None]:
    """z (C, S), and the cap's derivative where there is a cap."""
    x = slab.products if slab.bias is None else slab.products + slab.bias.to(slab.products.dtype)
    u = x * options.logit_scale
    if not options.softcap:
        return u / options.temperature, None
    t = torch.tanh(u / options.softcap)
    return options.softcap * t / options.temperature, 1.0 - t * t


@triton.jit
def _load_z(
    products_ptr,
    row_stride,
    bias_ptr,
    S,
    softcap,
    factor,
    over,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of a slab: (lanes, inside, z, the cap's derivative)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < S
    x = tl.load(products_ptr + row * row_stride + lanes, mask=inside, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(bias_ptr + lanes, mask=inside, other=0.0).to(ACC)
    u = x * tl.cast(factor, ACC)
    if HAS_CAP:
        cap = tl.cast(softcap, ACC)
        r = falling(u, cap)
        z = (cap - 2.0 * cap * r) * tl.cast(over, ACC)
        slope = 4.0 * r * (1.0 - r)
    else:
        z = u * tl.cast(over, ACC)
        slope = tl.full((BLOCK,), 1.0, ACC)
    return lanes, inside, z, slope


@triton.jit
def _fold_kernel(
    products_ptr,
    row_stride,
    bias_ptr,
    labels_ptr,
    highest_ptr,
    others_ptr,
    weighted_ptr,
    label_ptr,
    slope_ptr,
    decay_ptr,
    out_ptr,
    out_stride,
    start,
    S,
    softcap,
    factor,
    over,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. What it stores over the products depends on their maximum, so on every load before it."""
    row = tl.program_id(0).to(tl.int64)
    lanes, inside, z, slope = _load_z(
        products_ptr, row_stride, bias_ptr, S, softcap, factor, over, HAS_BIAS, HAS_CAP, ACC, BLOCK
    )
    column = tl.load(labels_ptr + row) - start
    here = lanes == column
    before = tl.load(highest_ptr + row)
    sum_before = tl.load(others_ptr + row)
    highest = tl.maximum(before, tl.max(tl.where(inside, z, float("-inf")), axis=0))
    above = z - highest
    others = tl.where(inside & (lanes != column), tl.exp(above), 0.0)
    decay = tl.exp(before - highest)
    shift = tl.where(sum_before > 0.0, before - highest, 0.0)
    weighted = tl.load(weighted_ptr + row) + sum_before * shift
    # A logit of -inf has weight 0, and 0 * -inf would be NaN.
    weighted = weighted * decay + tl.sum(others * tl.where(others > 0.0, above, 0.0), axis=0)
    tl.store(highest_ptr + row, highest)
    tl.store(others_ptr + row, sum_before * decay + tl.sum(others, axis=0))
    tl.store(weighted_ptr + row, weighted)
    tl.store(decay_ptr + row, decay)
    if (column >= 0) & (column < S):
        tl.store(label_ptr + row, tl.sum(tl.where(here, z, 0.0), axis=0))
        tl.store(slope_ptr + row, tl.sum(tl.where(here, slope, 0.0), axis=0))
    if WANT_WEIGHTS:
        tl.store(out_ptr + row * out_stride + lanes, (others * slope).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _grad_kernel(
    products_ptr,
    row_stride,
    bias_ptr,
    labels_ptr,
    lse_ptr,
    entropy_ptr,
    d_log_prob_ptr,
    d_entropy_ptr,
    out_ptr,
    out_stride,
    start,
    S,
    softcap,
    factor,
    over,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. The barrier stands between the loads of a row and the stores that may lie over them."""
    row = tl.program_id(0).to(tl.int64)
    lanes, inside, z, slope = _load_z(
        products_ptr, row_stride, bias_ptr, S, softcap, factor, over, HAS_BIAS, HAS_CAP, ACC, BLOCK
    )
    tl.debug_barrier()
    column = tl.load(labels_ptr + row) - start
    log_p = z - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    grad = tl.load(d_log_prob_ptr + row) * (tl.where(lanes == column, 1.0, 0.0) - p)
    surprise = p * (tl.where(p > 0.0, log_p, 0.0) + tl.load(entropy_ptr + row))
    grad = (grad - tl.load(d_entropy_ptr + row) * surprise) * slope
    grad *= tl.cast(factor, ACC) * tl.cast(over, ACC)
    tl.store(out_ptr + row * out_stride + lanes, grad.to(out_ptr.dtype.element_ty), mask=inside)


def fold(
    slab: Slab, labels: Tensor, running: RunningSums, options: LogitOptions, *, weights: torch.dtype | None
) -> tuple[Tensor | None, Tensor]:
    """``fold_reference`` in one Triton launch; the weights lie over the products where they are no wider."""
    count, columns = slab.products.shape
    decay = torch.empty_like(running.highest)
    out = _over(slab.products, weights or slab.products.dtype)
    if count:
        with on_device_of(slab.products):
            _fold_kernel[(count,)](
                slab.products,
                slab.products.stride(0),
                slab.products if slab.bias is None else slab.bias,
                labels,
                running.highest,
                running.others,
                running.weighted,
                running.label,
                running.slope,
                decay,
                out,
                out.stride(0),
                slab.start,
                columns,
                options.softcap,
                options.logit_scale,
                1.0 / options.temperature,
                HAS_BIAS=slab.bias is not None,
                HAS_CAP=options.softcap != 0.0,
                WANT_WEIGHTS=weights is not None,
                ACC=triton_dtype(slab.products.dtype),
                **_block(columns),
            )
    return (None if weights is None else rounded(out, weights)), decay


def grad(slab: Slab, labels: Tensor, upstream: Upstream, options: LogitOptions, dtype: torch.dtype) -> Tensor:
    """``grad_reference`` in one Triton launch; the gradient lies over the products where it is no wider."""
    count, columns = slab.products.shape
    out = _over(slab.products, dtype)
    if count:
        with on_device_of(slab.products):
            _grad_kernel[(count,)](
                slab.products,
                slab.products.stride(0),
                slab.products if slab.bias is None else slab.bias,
                labels,
                upstream.log_sum_exp,
                upstream.entropy,
                upstream.d_log_prob,
                upstream.d_entropy,
                out,
                out.stride(0),
                slab.start,
                columns,
                options.softcap,
                options.logit_scale,
                1.0 / options.temperature,
                HAS_BIAS=slab.bias is not None,
                HAS_CAP=options.softcap != 0.0,
                ACC=triton_dtype(slab.products.dtype),
                **_block(columns),
            )
    return rounded(out, dtype)


def _over(products: Tensor, dtype: torch.dtype) -> Tensor:
    """(C, S) of ``dtype`` in the memory of ``products``, which are contiguous: row by row in the same place."""
    stored = store_dtype(dtype)
    return products if stored == products.dtype else products.view(stored)[:, : products.shape[1]]


def _block(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 4), 16)}
