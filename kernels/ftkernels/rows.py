"""Addressing of tensors as rows of a contiguous last dimension, without copying where strides allow it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StridedRows:
    """``tensor`` as (count, width): row i starts at ``(i // inner) * outer_stride + (i % inner) * inner_stride``."""

    tensor: Tensor
    count: int
    inner: int
    outer_stride: int
    inner_stride: int


def as_rows(x: Tensor) -> StridedRows:
    """Collapse the leading dimensions of ``x`` (..., width) into at most two strides; copies only when that cannot be.

    A slice of heads out of a fused projection, (B, S, heads, D), needs two strides and no copy.
    """
    groups = _stride_groups(x) if x.dim() and (x.stride(-1) == 1 or x.shape[-1] <= 1) else None
    if groups is None or len(groups) > 2:
        x = x.contiguous()
        groups = _stride_groups(x)
    count = prod(x.shape[:-1])
    if not groups:
        return StridedRows(x, count, 1, 0, 0)
    if len(groups) == 1:
        return StridedRows(x, count, 1, groups[0][1], 0)
    return StridedRows(x, count, groups[1][0], groups[0][1], groups[1][1])


def _stride_groups(x: Tensor) -> list[tuple[int, int]]:
    """Leading dimensions merged where one stride covers them: [(size, stride)], outermost first."""
    groups: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    return groups
