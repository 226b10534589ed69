"""Rows of a matrix that lies in pinned host memory, read by the device itself: the lookup of an embedding.

    out[n] = table[ids[n]]

A GPU addresses pinned memory as its own (unified virtual addressing), so nothing waits: not the host for the ids, and
not the device for a copy that the host begins. What is moved is the rows that are asked for, over the bus: 8 KiB each
for 4,096 columns of 16 bits. A kernel that is captured in a CUDA graph reads what lies there in each replay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import BackendName, choose_backend, on_device_of

_BLOCK = 2048


@triton.jit
def _rows_kernel(table_ptr, ids_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    """One program a row: (rows, columns) at ``table_ptr`` -> a row of ``out``. NaN for an id that is no row."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + n).to(tl.int64)
    is_row = (row >= 0) & (row < rows)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        found = tl.load(table_ptr + row * columns + at, mask=inside & is_row, other=float("nan"))
        tl.store(out_ptr + n * columns + at, found, mask=inside)


def host_rows(table: Tensor, ids: Tensor, *, backend: BackendName = "auto") -> Tensor:
    """``table[ids]`` on the device of ``ids``; autograd does not see it.

    Args:
        table: (V, H) floating, contiguous, on the host: pinned where ``ids`` are on a GPU.
        ids: (...) int64 or int32, each in [0, V). The row of another one is NaN: no kernel may read what is not there,
            and nothing wrong may pass for a row.

    Returns:
        (..., H) in ``table``'s dtype.

    Raises:
        ValueError: a table that a GPU cannot read, or tensors of other shapes or dtypes.
    """
    if table.dim() != 2 or not table.is_floating_point() or not table.is_contiguous():
        raise ValueError(f"expected a contiguous floating (V, H) table, got {table.dtype} of {tuple(table.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be int64 or int32, got {ids.dtype}")
    if table.is_cuda or (ids.is_cuda and not table.is_pinned()):
        raise ValueError("the table must lie on the host, in pinned memory where a GPU reads it")
    triton_ = choose_backend(ids.device, backend).is_triton
    if not triton_:
        return torch.nn.functional.embedding(ids, table.detach())
    out = torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device=ids.device)
    if out.numel():
        with on_device_of(out):
            _rows_kernel[(ids.numel(),)](table.detach(), ids.contiguous(), out, *table.shape, BLOCK=_BLOCK, num_warps=4)
    return out
