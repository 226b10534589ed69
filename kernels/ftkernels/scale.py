"""Scales a large tensor by a factor that is usually one; then nothing is read or written.

A loss that is divided by its tokens in the forward pass has the gradient 1 in backward. Whether it is, only the device
knows, and the host must not wait for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import BackendName, choose_backend, on_device_of, triton_dtype

_BLOCK = 8192


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask, other=0.0) * factor, mask=mask)


def scale_(x: Tensor, factor: Tensor, *, backend: BackendName = "auto") -> Tensor:
    """``x *= factor`` in place, without a pass over ``x`` where ``factor`` is one; autograd does not see it.

    Args:
        x: float32 or float64, contiguous.
        factor: a scalar on the device of ``x``.
        backend: see ``ftkernels.device.choose_backend``.

    Raises:
        ValueError: another dtype, or memory with gaps.
    """
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous() or factor.numel() != 1:
        raise ValueError(f"cannot scale {x.dtype} of {tuple(x.shape)} by {tuple(factor.shape)} in place")
    with torch.no_grad():
        if not choose_backend(x.device, backend).is_triton:
            return x.mul_(factor)
        if x.numel():
            with on_device_of(x):
                grid = (triton.cdiv(x.numel(), _BLOCK),)
                _scale_kernel[grid](x, factor, x.numel(), ACC=triton_dtype(x.dtype), BLOCK=_BLOCK, num_warps=8)
    return x
