"""One step of AdamW whose moments are kept in 8 bits, in blocks of 256 elements with a float32 scale each.

    m, v            from codes and scales, then as in ``ftkernels.adamw``, which the new parameter is computed with
    step            of the parameter, without weight decay: at most as large as AdamW's can be (:func:`largest_step`)
    scale           the largest magnitude of a block
    code            of the nearest value of the moment's table times the scale; of a v above 0 never that of 0

A v that is rounded to 0, or too far down, would divide an m that was not: with beta2 = 0.999 a gradient of a hundredth
of its block's largest would move its parameter by 32 learning rates in every step, and without limit once it is gone.

The tables are those of Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization" (dynamic tree
quantization): 0, 1, and in each of seven decades below 1 the centres of equal cells of [0.1, 1] of it, twice as many in
each as in the decade below. Of m both signs, 1 cell in the lowest decade and 64 in the highest; of v, which has no
sign, 2 and 128.

The kernel computes the cell of a value from its decade, and looks at the boundaries to the neighbours, which are not
those of the cell where decades meet: the nearest value without a search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.adamw import AdamWSettings, stepped
from ftkernels.device import BackendName

BLOCK = 256
_DECADES = 7
#: Blocks of one program.
_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Moment8:
    """A moment: codes (uint8, the parameter's shape, contiguous) and the scale of each block, (blocks,) float32."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, like: Tensor, *, signed: bool) -> Moment8:
        """A moment of zeros for the parameter ``like``."""
        codes = torch.full(like.shape, 127 if signed else 0, dtype=torch.uint8, device=like.device)
        return cls(codes, torch.zeros(-(-like.numel() // BLOCK), dtype=torch.float32, device=like.device))


@dataclass(frozen=True, slots=True)
class _Table:
    """``values`` (256,) in order; ``bounds``: of the values from 0 up the lower bound of each, -inf first, and inf."""

    values: Tensor
    bounds: Tensor


def values_of(*, signed: bool) -> Tensor:
    """The 256 values of a table in order, float32."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        cells = 2 ** (decade if signed else decade + 1)
        for cell in range(cells):
            value = (0.1 + 0.9 * (cell + 0.5) / cells) * 10.0 ** (decade - _DECADES + 1)
            found += [value, -value] if signed else [value]
    return torch.tensor(sorted(found), dtype=torch.float64).float()


@cache
def _table(device: torch.device, signed: bool) -> _Table:
    values = values_of(signed=signed)
    positive = values[values >= 0].double()
    inf = torch.tensor([torch.inf], dtype=torch.float64)
    bounds = torch.cat([-inf, (positive[1:] + positive[:-1]) / 2, inf]).float()
    return _Table(values.to(device), bounds.to(device))


def largest_step(settings: AdamWSettings) -> float:
    """The largest lr * |m / (1 - beta1^t)| / sqrt(v / (1 - beta2^t)) of any gradients, inf where there is none.

    By Cauchy and Schwarz, m^2 <= v (1 - beta1)^2 / (1 - beta2) * sum over k < t of (beta1^2 / beta2)^k.
    """
    if not settings.beta2:
        return math.inf
    ratio, step = settings.beta1**2 / settings.beta2, settings.step
    if step * math.log(max(ratio, 1.0)) > 500.0:
        return math.inf
    total = step if ratio == 1.0 else (1.0 - ratio**step) / (1.0 - ratio)
    return settings.size * (1.0 - settings.beta1) * math.sqrt(total / (1.0 - settings.beta2)) / settings.root


@triton.jit
def _rank(x, bounds_ptr, CELLS: tl.constexpr):
    """The index of the nearest table value, from 0 up, for magnitudes up to 1. CELLS: those of the lowest decade."""
    factor = tl.full(x.shape, 1e6, tl.float32)
    cells = tl.full(x.shape, CELLS, tl.float32)
    bound = 1e-6
    for _ in tl.static_range(6):
        above = x >= bound
        factor = tl.where(above, factor * 0.1, factor)
        cells = tl.where(above, cells * 2.0, cells)
        bound = bound * 10.0
    # Before a decade with n cells there are n - CELLS cells, and 0.
    cell = tl.minimum(tl.maximum((x * factor - 0.1) * (cells / 0.9), 0.0), cells - 1.0)
    rank = 1 + cells.to(tl.int32) - CELLS + cell.to(tl.int32)
    rank = rank - (x < tl.load(bounds_ptr + rank)).to(tl.int32)
    return rank + (x >= tl.load(bounds_ptr + rank + 1)).to(tl.int32)


@triton.jit
def _step_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    m_scale_ptr,
    m_values_ptr,
    m_bounds_ptr,
    v_ptr,
    v_scale_ptr,
    v_values_ptr,
    v_bounds_ptr,
    copy_ptr,
    clip_ptr,
    count,
    blocks,
    keep,
    beta1_rest,
    beta2,
    beta2_rest,
    size,
    root,
    eps,
    largest,
    CLIP: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    block = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < count
    p = tl.load(p_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    m_code = tl.load(m_ptr + at, mask=mask, other=127).to(tl.int32)
    v_code = tl.load(v_ptr + at, mask=mask, other=0).to(tl.int32)
    m_scale = tl.load(m_scale_ptr + block, mask=block < blocks, other=0.0)[:, None]
    v_scale = tl.load(v_scale_ptr + block, mask=block < blocks, other=0.0)[:, None]
    if CLIP:
        g = g * tl.load(clip_ptr).to(tl.float32)
    m = tl.load(m_values_ptr + m_code) * m_scale
    v = tl.load(v_values_ptr + v_code) * v_scale
    m = m + tl.cast(beta1_rest, tl.float32) * (g - m)
    v = tl.cast(beta2, tl.float32) * v + tl.cast(beta2_rest, tl.float32) * (g * g)
    step = tl.cast(size, tl.float32) * m / (tl.sqrt(v) * tl.cast(root, tl.float32) + tl.cast(eps, tl.float32))
    bound = tl.cast(largest, tl.float32)
    step = tl.where(step > bound, bound, tl.where(step < -bound, -bound, step))  # NaN stays
    p = tl.cast(keep, tl.float32) * p - step
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=mask)
    size_m = tl.abs(m)
    m_scale = tl.max(size_m, axis=1)
    v_scale = tl.max(v, axis=1)
    tl.store(m_scale_ptr + block, m_scale, mask=block < blocks)
    tl.store(v_scale_ptr + block, v_scale, mask=block < blocks)
    m_rank = _rank(size_m / tl.where(m_scale > 0.0, m_scale, 1.0)[:, None], m_bounds_ptr, 1)
    v_rank = _rank(v / tl.where(v_scale > 0.0, v_scale, 1.0)[:, None], v_bounds_ptr, 2)
    v_rank = tl.maximum(v_rank, (v > 0.0).to(tl.int32))
    # -1 is not in the table.
    m_code = tl.where(m < 0.0, 127 - tl.minimum(m_rank, 127), 127 + m_rank)
    tl.store(m_ptr + at, m_code.to(tl.uint8), mask=mask)
    tl.store(v_ptr + at, v_rank.to(tl.uint8), mask=mask)


def adamw_step_8bit(
    parameter: Tensor,
    gradient: Tensor,
    m: Moment8,
    v: Moment8,
    settings: AdamWSettings,
    *,
    clip: Tensor | None = None,
    copy: Tensor | None = None,
    backend: BackendName = "auto",
) -> None:
    """One step of the module docstring, in place on ``parameter``, ``m`` and ``v``; autograd does not see it.

    Args:
        parameter, gradient: of one shape, float32 or narrower. ``parameter`` is contiguous.
        clip: a scalar on the device that the gradient is multiplied by. None: 1.
        copy: of that shape, contiguous: takes the new parameter, rounded to its dtype.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit, or stochastic rounding, which there is not.
    """
    _check(parameter, gradient, (m, v), settings, copy)
    given = gradient, m, v, settings, clip
    stepped(parameter, copy, backend, lambda p, kept: _launch(p, *given, kept), lambda: _in_torch(parameter, *given))


def _launch(
    p: Tensor, g: Tensor, m: Moment8, v: Moment8, settings: AdamWSettings, clip: Tensor | None, copy: Tensor | None
) -> None:
    blocks, first, second = m.scales.numel(), _table(p.device, True), _table(p.device, False)
    _step_kernel[(triton.cdiv(blocks, _TOGETHER),)](
        p,
        g.contiguous(),
        m.codes,
        m.scales,
        first.values,
        first.bounds,
        v.codes,
        v.scales,
        second.values,
        second.bounds,
        p if copy is None else copy,
        p if clip is None else clip,
        p.numel(),
        blocks,
        *settings.factors,
        largest_step(settings),
        CLIP=clip is not None,
        COPY=copy is not None,
        BLOCK=BLOCK,
        TOGETHER=_TOGETHER,
        num_warps=4,
    )


def _in_torch(p: Tensor, g: Tensor, m: Moment8, v: Moment8, settings: AdamWSettings, clip: Tensor | None) -> None:
    g = g.float() if clip is None else g.float() * clip.float()
    first, second = dequantized(m, signed=True), dequantized(v, signed=False)
    first.add_(g - first, alpha=1.0 - settings.beta1)
    second.mul_(settings.beta2).add_(g * g, alpha=1.0 - settings.beta2)
    kept = p.float() * (1.0 - settings.lr * settings.weight_decay)
    step, bound = settings.size * first / (second.sqrt() * settings.root + settings.eps), largest_step(settings)
    p.copy_(kept - step.clamp(-bound, bound))
    _quantize(first, m, signed=True)
    _quantize(second, v, signed=False)


def dequantized(moment: Moment8, *, signed: bool) -> Tensor:
    """The moment in float32, in the parameter's shape."""
    values = _table(moment.codes.device, signed).values[moment.codes.long().flatten()]
    return (values * moment.scales.repeat_interleave(BLOCK)[: values.numel()]).view(moment.codes.shape)


def _quantize(x: Tensor, into: Moment8, *, signed: bool) -> None:
    """Writes ``x`` in 8 bits over ``into``."""
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    into.scales.copy_(padded.abs().amax(1))
    part = (padded.abs() / torch.where(into.scales > 0, into.scales, 1.0)[:, None]).flatten()[: flat.numel()]
    rank = torch.bucketize(part, _table(x.device, signed).bounds[1:-1], right=True)
    if signed:
        rank = torch.where(flat < 0, 127 - rank.clamp(max=127), 127 + rank)
    else:
        rank = torch.maximum(rank, (flat > 0).long())
    into.codes.copy_(rank.view(x.shape))


def _check(
    p: Tensor, g: Tensor, moments: tuple[Moment8, Moment8], settings: AdamWSettings, copy: Tensor | None
) -> None:
    blocks = -(-p.numel() // BLOCK)
    for moment in moments:
        if moment.codes.shape != p.shape or moment.scales.shape != (blocks,) or not moment.codes.is_contiguous():
            shapes = f"{tuple(moment.codes.shape)} with {tuple(moment.scales.shape)} scales"
            raise ValueError(f"a moment of shape {shapes} does not fit a parameter of {tuple(p.shape)}")
        if moment.codes.dtype != torch.uint8 or moment.scales.dtype != torch.float32:
            raise ValueError(f"codes are uint8 and scales float32, got {moment.codes.dtype}, {moment.scales.dtype}")
    if p.shape != g.shape or not p.is_contiguous() or p.dtype == torch.float64:
        raise ValueError(f"a gradient of {tuple(g.shape)} for a {p.dtype} parameter of {tuple(p.shape)}")
    if settings.rounding != "nearest":
        raise ValueError("with moments in 8 bits parameters are rounded to nearest")
    if copy is not None and (copy.shape != p.shape or not copy.is_contiguous()):
        raise ValueError(f"a copy of shape {tuple(copy.shape)} cannot be made of {tuple(p.shape)}")
