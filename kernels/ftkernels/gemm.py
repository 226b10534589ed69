"""Matrix products with the precision spelled out: what is accumulated, what is written, and checked in-place forms."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def mm_accurate(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``a @ b``, written in float32 for half-precision operands (nothing is rounded to half on the way), else in
    their own dtype; into ``out`` where one is given.

    Shapes: a (M, K), b (K, N) -> (M, N). Both operands have one dtype.

    Raises:
        ValueError: the operands' dtypes differ, or ``out`` has another dtype than the product.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"mm_accurate needs operands of one dtype, got {a.dtype} and {b.dtype}")
    if out is not None:
        return _mm_accurate_into(out, a, b)
    if a.dtype not in _HALF:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _mm_accurate_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if out.dtype != (torch.float32 if a.dtype in _HALF else a.dtype):
        raise ValueError(f"mm_accurate cannot write a product of {a.dtype} into {out.dtype}")
    if a.dtype not in _HALF:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_mm_accurate_(out: Tensor, a: Tensor, b: Tensor, *, rows: int) -> Tensor:
    """``out += a @ b`` in place, where ``out`` is as wide as what ``mm_accurate`` gives: one GEMM, except for half
    precision off the GPU, which has a temporary of at most ``rows`` rows of ``out``.

    Shapes: out (M, N), a (M, K), b (K, N).

    Raises:
        ValueError: the operands' dtypes differ, or ``out`` has another dtype than the product.
    """
    if a.dtype != b.dtype or out.dtype != (torch.float32 if a.dtype in _HALF else a.dtype):
        raise ValueError(f"add_mm_accurate_ cannot add a product of {a.dtype} and {b.dtype} to {out.dtype}")
    if a.dtype not in _HALF:
        return out.addmm_(a, b)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    for part, left in zip(out.split(rows), a.split(rows), strict=True):
        part += mm_accurate(left, b)
    return out


def add_mm_(out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0) -> Tensor:
    """``out += alpha * a @ b`` in place, in one GEMM.

    Shapes: out (M, N), a (M, K), b (K, N).

    Raises:
        ValueError: dtypes differ, shapes disagree, or ``out`` shares memory with an operand.
    """
    if not (out.dtype == a.dtype == b.dtype):
        raise ValueError(f"add_mm_ needs one dtype, got out {out.dtype}, a {a.dtype}, b {b.dtype}")
    if out.shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
        raise ValueError(f"add_mm_ shapes disagree: {tuple(out.shape)} += {tuple(a.shape)} @ {tuple(b.shape)}")
    if out.numel() and out.untyped_storage().data_ptr() in (
        a.untyped_storage().data_ptr(),
        b.untyped_storage().data_ptr(),
    ):
        raise ValueError("add_mm_ cannot write into the storage of one of its operands")
    return out.addmm_(a, b, alpha=alpha)


def compute_dtype(device_type: str, *tensors: Tensor | None) -> torch.dtype:
    """The dtype in which a product of these tensors is taken: autocast's when it is on, else what they promote to.

    Autocast leaves float64 alone, and so does this.

    Raises:
        ValueError: no tensor was given.
    """
    present = [t.dtype for t in tensors if t is not None]
    if not present:
        raise ValueError("compute_dtype needs a tensor")
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype
