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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
