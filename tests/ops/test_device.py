"""Which implementation runs, and why; products with their dtypes spelled out."""

from __future__ import annotations

import pytest
import torch
from ftkernels.device import choose_backend, interpreting
from ftkernels.gemm import add_mm_, compute_dtype, mm_accurate
from ftkernels.primitives import as_rows


def test_the_choice_states_its_reason() -> None:
    assert choose_backend("cuda").is_triton
    assert choose_backend("cuda", "torch").name == "torch"
    on_cpu = choose_backend("cpu")
    assert (on_cpu.name, "CUDA" in on_cpu.reason) == ("torch", True)
    with pytest.raises(ValueError, match="CUDA device"):
        choose_backend("meta", "triton")
    with pytest.raises(ValueError, match="backend"):
        choose_backend("cpu", "cuda")  # type: ignore[arg-type]


def test_the_interpreter_is_taken_only_when_asked_for() -> None:
    if interpreting():
        assert choose_backend("cpu", "triton").is_triton
    assert not choose_backend("cpu", "auto").is_triton


def test_in_place_products_check_dtype_shape_and_alias() -> None:
    out, a, b = torch.ones(2, 4), torch.ones(2, 3), torch.ones(3, 4)
    assert torch.equal(add_mm_(out, a, b), torch.full((2, 4), 4.0))
    with pytest.raises(ValueError, match="one dtype"):
        add_mm_(out, a.bfloat16(), b.bfloat16())
    with pytest.raises(ValueError, match="shapes"):
        add_mm_(out, b, a)
    square = torch.ones(3, 3)
    with pytest.raises(ValueError, match="storage"):
        add_mm_(square, square, torch.ones(3, 3))


def test_accurate_products_are_not_rounded_to_half() -> None:
    a = torch.ones(1, 300, dtype=torch.bfloat16)
    assert mm_accurate(a, a.t()).item() == 300.0
    assert mm_accurate(a, a.t() + 1 / 128).dtype == torch.float32
    with pytest.raises(ValueError, match="one dtype"):
        mm_accurate(a, torch.ones(300, 1))


def test_products_take_autocasts_dtype_or_promote() -> None:
    low, high = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    assert compute_dtype("cpu", low, None) == torch.bfloat16
    assert compute_dtype("cpu", low, high) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype("cpu", high) == torch.bfloat16
        assert compute_dtype("cpu", high.double()) == torch.float64


def test_rows_are_addressed_without_copying() -> None:
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).float()
    for view, copied in (
        (x, False),
        (x[:, :, 1:3], False),
        (x[:, 1:], False),
        (x.transpose(0, 2), True),
        (x[..., ::2], True),
    ):
        rows = as_rows(view)
        assert (rows.tensor.data_ptr() != view.data_ptr()) == copied
        base = rows.tensor.storage_offset()
        for i in range(rows.count):
            start = base + (i // rows.inner) * rows.outer_stride + (i % rows.inner) * rows.inner_stride
            row = torch.as_strided(rows.tensor, (view.shape[-1],), (1,), start)
            assert torch.equal(row, view.reshape(-1, view.shape[-1])[i])
