"""RMS normalisation, in the forms that model families use, with or without a residual connection.

Legend: M rows, H width. For one row x:

    rstd = 1 / sqrt(mean(x^2) + eps)         float32
    n = x * rstd
    llama:  y = round(n) * w                 n is rounded to x's dtype before the product; y in the dtype of x * w
    gemma:  y = round(n * (1 + w))           all float32, one rounding, y in x's dtype
    plain:  y = round(n * w)                 likewise (OLMo-2, OLMo-3, gpt-oss, Gemma-4, Nemotron-H)

Without a weight y = round(n) in every form. Backward, with g = dy * w (llama, plain), dy * (1 + w) (gemma) or dy:

    dx = rstd * (g - n * mean(g * n))
    dw = sum over rows of dy * n             float32 partial sums a program, added in a fixed order

With a residual:

    add_rms_norm:  r' = x + r,  y = norm(r')      pre-norm blocks; gives (y, r'). Backward adds dr' in its kernel
    rms_norm_add:  y = r + norm(x)                post-norm blocks (Gemma-2, Gemma-3)

dx never overwrites dy: in Gemma-2 both the norm and the residual read dy (Liger 370, 376).
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendChoice, BackendName, accumulate_dtype, choose_backend
from ftkernels.limits import WIDEST_ROW, NormForm
from ftkernels.norm_parts import norm_backward, norm_forward


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, form: NormForm = "llama", backend: BackendName = "auto"
) -> Tensor:
    """Normalise the last dimension of ``x``; the module docstring has the formulas.

    Args:
        x: (..., H), any strides.
        weight: (H,), or None: no weight.
        form: "llama", "gemma" or "plain"; they differ in the 1 that Gemma adds to the weight and in where they round.

    Raises:
        ValueError: shapes that do not fit, or an unknown form.
    """
    _check(x, weight, form, None)
    if not norm_backend(x, backend).is_triton:
        return rms_norm_reference(x, weight, eps, form=form)
    return _Norm.apply(x, None, weight, eps, form, "none")[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    form: NormForm = "llama",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``. Shapes and errors as ``rms_norm``; ``residual`` has ``x``'s shape."""
    _check(x, weight, form, residual)
    if not norm_backend(x, backend).is_triton:
        total = x + residual
        return rms_norm_reference(total, weight, eps, form=form), total
    y, total = _Norm.apply(x, residual, weight, eps, form, "before")
    return y, total


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    form: NormForm = "gemma",
    backend: BackendName = "auto",
) -> Tensor:
    """``residual + norm(x)``. Shapes and errors as ``rms_norm``; ``residual`` has ``x``'s shape."""
    _check(x, weight, form, residual)
    if not norm_backend(x, backend).is_triton:
        return residual + rms_norm_reference(x, weight, eps, form=form)
    return _Norm.apply(x, residual, weight, eps, form, "after")[0]


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, form: NormForm = "llama") -> Tensor:
    """The same in plain torch, differentiable. float64 inputs are computed in float64."""
    wide = x.to(accumulate_dtype(x.dtype))
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return n.to(x.dtype)
    if form == "llama":
        return weight * n.to(x.dtype)
    return (n * (weight.to(n.dtype) + (1.0 if form == "gemma" else 0.0))).to(x.dtype)


def norm_backend(x: Tensor, backend: BackendName = "auto") -> BackendChoice:
    """Chooses the implementation of the norms for ``x``, and says why."""
    if x.shape[-1] > WIDEST_ROW:
        return BackendChoice("torch", f"rows of {x.shape[-1]} are wider than the kernel's {WIDEST_ROW}")
    return choose_backend(x.device, backend)


class _Norm(torch.autograd.Function):
    """(y, x + residual or None). Saves x (or the sum) and rstd; n is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, form: NormForm, where: Any
    ) -> tuple[Tensor, Tensor | None]:
        y, total, rstd = norm_forward(x, weight, eps, form, residual=residual, where=where)
        ctx.save_for_backward(x if total is None else total, weight, rstd)
        ctx.form, ctx.where, ctx.x_dtype = form, where, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wants_x, wants_residual, wants_w = ctx.needs_input_grad[:3]
        if dy is None:  # only the sum was used
            dy = torch.zeros_like(x)
        dx, dw = norm_backward(
            dy, x, weight, rstd, ctx.form, d_sum=d_total if ctx.where == "before" else None, want_dw=wants_w
        )
        d_residual = None
        if wants_residual:
            d_residual = (dx if ctx.where == "before" else dy).to(ctx.residual_dtype)
        return (
            dx.to(ctx.x_dtype) if wants_x else None,
            d_residual,
            None if dw is None else dw.to(weight.dtype),
            None,
            None,
            None,
        )


def _check(x: Tensor, weight: Tensor | None, form: str, residual: Tensor | None) -> None:
    if form not in get_args(NormForm):
        raise ValueError(f"form must be 'llama', 'gemma' or 'plain', got {form!r}")
    if x.dim() < 1:
        raise ValueError("a norm needs rows, not a scalar")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit the last dimension of x {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not have the shape of x {tuple(x.shape)}")
