"""Partial sums of the adapters' gradients, added up and rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.primitives import column_sums, row_sums


@pytest.mark.parametrize("shape", [(1, 3, 16), (4, 37, 48), (7, 130, 32), (3, 0, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("triton_kernel", [True, False])
def test_sums_are_rounded_once(
    device: str, tools: Any, shape: tuple[int, ...], dtype: torch.dtype, normed: bool, triton_kernel: bool
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    partial = torch.randn(shape, device=device, dtype=wide)
    rstd = torch.rand(shape[1], device=device, dtype=wide) if normed else None
    found = row_sums(partial, rstd, dtype, triton_kernel=triton_kernel)
    exact = partial.double().sum(0)
    wanted = [exact] if rstd is None else [exact, exact * rstd.double()[:, None]]
    assert (found.scaled is None) == (rstd is None)
    for value, truth in zip(found, wanted, strict=False):
        assert value is not None
        assert (value.dtype, value.shape) == (dtype, truth.shape)
        bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        assert tools.relative(value, truth) <= bound


@pytest.mark.parametrize("shape", [(0, 5), (1, 40), (528, 33), (300, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_columns_are_added_up(device: str, tools: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    partial = torch.randn(shape, device=device, dtype=dtype)
    found = column_sums(partial)
    assert (found.dtype, found.shape) == (dtype, shape[1:])
    assert tools.relative(found, partial.double().sum(0)) <= (1e-12 if dtype == torch.float64 else 1e-6)
    assert torch.equal(found, column_sums(partial))
