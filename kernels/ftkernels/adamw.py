"""One step of AdamW in float32, for parameters and gradients of any dtype, rounded to nearest or stochastically.

    g = clip * g
    p = (1 - lr * weight_decay) * p
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

m and v are float32 (float64 for float64 parameters), and so is all arithmetic; p is rounded once, when it is stored. In
bfloat16 an update below 2^-9 of its parameter is lost to rounding to nearest, every time. Stochastic rounding goes up
with the probability of the part that is cut off, so that many small updates arrive on average:

    bits of p in float32, plus a random number below 2^16, cut off at 16 bits

The random numbers are a hash (PCG's output function) of the element's index and ``seed``: the same in every run.
Source of the method: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision".

Or with moments in 8 bits, in blocks of 256 elements with a float32 scale each:

    m, v            from codes and scales, then as above, which the new parameter is computed with
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import BackendName, accumulate_dtype, choose_backend, interpreting, on_device_of, triton_dtype

Rounding = Literal["nearest", "stochastic"]

_BLOCK = 1024
_MULTIPLIER, _WORD_MULTIPLIER, _MASK = 747796405, 277803737, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """The numbers of one step; ``step`` counts from 1. ``seed`` is that of stochastic rounding, below 2^31."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    rounding: Rounding = "nearest"
    seed: int = 0

    @property
    def size(self) -> float:
        """lr / (1 - beta1^t)."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """1 / sqrt(1 - beta2^t)."""
        return float((1.0 - self.beta2**self.step) ** -0.5)

    @property
    def factors(self) -> tuple[float, ...]:
        """As kernels take them: keep, beta1_rest, beta2, beta2_rest, size, root, eps."""
        beta2, keep = self.beta2, 1.0 - self.lr * self.weight_decay
        return keep, 1.0 - self.beta1, beta2, 1.0 - beta2, self.size, self.root, self.eps


@triton.jit
def _random_bits(index, seed):
    """A hash of ``index`` (uint32) in 32 bits."""
    state = index * 747796405 + seed
    word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737
    return (word >> 22) ^ word


@triton.jit(do_not_specialize=["seed"])
def _step_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    copy_ptr,
    clip_ptr,
    count,
    keep,
    beta1_rest,
    beta2,
    beta2_rest,
    size,
    root,
    eps,
    seed,
    CLIP: tl.constexpr,
    COPY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    p = tl.load(p_ptr + at, mask=mask, other=0.0).to(ACC)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(ACC)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + at, mask=mask, other=0.0)
    if CLIP:
        g = g * tl.load(clip_ptr).to(ACC)
    m = m + tl.cast(beta1_rest, ACC) * (g - m)
    v = tl.cast(beta2, ACC) * v + tl.cast(beta2_rest, ACC) * (g * g)
    p = tl.cast(keep, ACC) * p - tl.cast(size, ACC) * m / (tl.sqrt(v) * tl.cast(root, ACC) + tl.cast(eps, ACC))
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=mask)
    if STOCHASTIC:
        bits = p.to(tl.uint32, bitcast=True)
        noise = _random_bits(at.to(tl.uint32), tl.cast(seed, tl.uint32)) & 0xFFFF
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, bits + noise, bits) & 0xFFFF0000
        p = tl.where(finite, bits.to(tl.float32, bitcast=True), p)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    settings: AdamWSettings,
    *,
    clip: Tensor | None = None,
    copy: Tensor | None = None,
    backend: BackendName = "auto",
) -> None:
    """One step of the module docstring, in place on ``parameter``, ``m`` and ``v``; autograd does not see it.

    Args:
        parameter, gradient: of one shape, any float dtype. ``parameter`` is contiguous.
        m, v: of that shape, contiguous, in ``parameter``'s accumulation dtype.
        clip: a scalar on the device that the gradient is multiplied by. None: 1.
        copy: of that shape, contiguous: takes the new parameter, rounded to its dtype. Not with stochastic rounding.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit, or stochastic rounding of other than bfloat16.
    """
    _check(parameter, gradient, m, v, settings, copy)
    given = gradient, m, v, settings, clip
    stepped(parameter, copy, backend, lambda p, kept: _launch(p, *given, kept), lambda: _in_torch(parameter, *given))


def stepped(
    parameter: Tensor,
    copy: Tensor | None,
    backend: BackendName,
    launch: Callable[[Tensor, Tensor | None], None],
    in_torch: Callable[[], None],
) -> None:
    """A step by ``launch``, which gets the parameter and the copy that the kernel is to write, or ``in_torch``."""
    with torch.no_grad():
        kept = None
        if not choose_backend(parameter.device, backend).is_triton:
            in_torch()
        elif parameter.numel():
            # The interpreter truncates casts to bfloat16: there the kernel writes float32, and torch rounds.
            short = interpreting() and parameter.dtype in (torch.bfloat16, torch.float16)
            stored, kept = parameter.float() if short else parameter, None if interpreting() else copy
            with on_device_of(parameter):
                launch(stored, kept)
            if short:
                parameter.copy_(stored)
        if kept is None and copy is not None:
            copy.copy_(parameter)


def stochastic_round(x: Tensor, seed: int) -> Tensor:
    """``x`` (float32) in bfloat16, rounded stochastically in plain torch: the bits of the kernel."""
    bits = x.contiguous().view(torch.int32)
    noise = _random_bits_torch(torch.arange(x.numel(), device=x.device), seed).view(x.shape) & 0xFFFF
    finite = torch.isfinite(x)
    moved = ((bits.to(torch.int64) & _MASK) + noise) & 0xFFFF0000
    moved = torch.where(moved >= 2**31, moved - 2**32, moved).to(torch.int32)
    return torch.where(finite, moved.view(torch.float32), x).to(torch.bfloat16)


def _random_bits_torch(index: Tensor, seed: int) -> Tensor:
    """``_random_bits`` in int64, which holds the products of 32 bits."""
    state = ((index & _MASK) * _MULTIPLIER + seed) & _MASK
    word = (((state >> ((state >> 28) + 4)) ^ state) * _WORD_MULTIPLIER) & _MASK
    return (word >> 22) ^ word


def _launch(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: AdamWSettings, clip: Tensor | None, copy: Tensor | None
) -> None:
    count = p.numel()
    _step_kernel[(triton.cdiv(count, _BLOCK),)](
        p,
        g.contiguous(),
        m,
        v,
        m if copy is None else copy,
        m if clip is None else clip,
        count,
        *settings.factors,
        settings.seed,
        CLIP=clip is not None,
        COPY=copy is not None,
        STOCHASTIC=settings.rounding == "stochastic",
        ACC=triton_dtype(m.dtype),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def _in_torch(p: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: AdamWSettings, clip: Tensor | None) -> None:
    g = g.to(m.dtype)
    if clip is not None:
        g = g * clip.to(m.dtype)
    m.add_(g - m, alpha=1.0 - settings.beta1)
    v.mul_(settings.beta2).add_(g * g, alpha=1.0 - settings.beta2)
    kept = p.to(m.dtype) * (1.0 - settings.lr * settings.weight_decay)
    updated = kept - settings.size * m / (v.sqrt() * settings.root + settings.eps)
    p.copy_(stochastic_round(updated, settings.seed) if settings.rounding == "stochastic" else updated)


def _check(p: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: AdamWSettings, copy: Tensor | None) -> None:
    if not p.shape == g.shape == m.shape == v.shape:
        raise ValueError(f"shapes differ: {tuple(p.shape)}, {tuple(g.shape)}, {tuple(m.shape)}, {tuple(v.shape)}")
    wanted = accumulate_dtype(p.dtype)
    if m.dtype != wanted or v.dtype != wanted:
        raise ValueError(f"the moments of a {p.dtype} parameter are {wanted}, got {m.dtype} and {v.dtype}")
    if not (p.is_contiguous() and m.is_contiguous() and v.is_contiguous()):
        raise ValueError("parameter and moments must be contiguous: they are updated in place")
    if settings.rounding == "stochastic" and p.dtype != torch.bfloat16:
        raise ValueError(f"stochastic rounding is of bfloat16 parameters, not {p.dtype}")
    if copy is not None and (copy.shape != p.shape or not copy.is_contiguous() or settings.rounding == "stochastic"):
        raise ValueError(f"a copy of shape {tuple(copy.shape)} cannot be made of {tuple(p.shape)}")


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
def _step_kernel_8bit(
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
    _check_8bit(parameter, gradient, (m, v), settings, copy)
    given = gradient, m, v, settings, clip
    stepped(
        parameter,
        copy,
        backend,
        lambda p, kept: _launch_8bit(p, *given, kept),
        lambda: _in_torch_8bit(parameter, *given),
    )


def _launch_8bit(
    p: Tensor, g: Tensor, m: Moment8, v: Moment8, settings: AdamWSettings, clip: Tensor | None, copy: Tensor | None
) -> None:
    blocks, first, second = m.scales.numel(), _table(p.device, True), _table(p.device, False)
    _step_kernel_8bit[(triton.cdiv(blocks, _TOGETHER),)](
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


def _in_torch_8bit(p: Tensor, g: Tensor, m: Moment8, v: Moment8, settings: AdamWSettings, clip: Tensor | None) -> None:
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


def _check_8bit(
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
