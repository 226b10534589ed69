"""A factor of one touches nothing; any other one is multiplied by."""

from __future__ import annotations

import pytest
import torch
from ftkernels.linear_cross_entropy import scale_


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0, float("nan")])
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 20_000), (torch.float64, 7), (torch.float32, 0)])
def test_it_is_the_product(device: str, dtype: torch.dtype, count: int, factor: float) -> None:
    x = torch.randn(count, device=device, dtype=dtype)
    by = torch.tensor(factor, device=device)
    wanted = x * by.to(dtype)
    found = scale_(x, by, backend="triton")
    assert found is x
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_what_it_cannot_scale_in_place_is_refused(device: str) -> None:
    one = torch.ones((), device=device)
    for x in (torch.zeros(4, 4, device=device).t(), torch.zeros(4, device=device, dtype=torch.bfloat16)):
        if x.dim() == 2:
            x = torch.zeros(4, 8, device=device)[:, ::2]
        with pytest.raises(ValueError, match="cannot scale"):
            scale_(x, one, backend="triton")
