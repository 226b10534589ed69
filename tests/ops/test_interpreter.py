"""What tests/interpreter.py knows once is what Triton's interpreter works out each time, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from ftkernels.device import interpreting
from torch import Tensor
from triton.runtime.errors import InterpreterError

from tests.interpreter import quicken

FLOATS = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64, torch.uint8, torch.int16, torch.bool]


@pytest.fixture
def both_ways(quick_interpreter: pytest.MonkeyPatch | None) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Runs with Triton as it came and twice as the tests take it, and gives what all of them gave, in bytes."""
    if not interpreting() or quick_interpreter is None:
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")

    def run(launch: Callable[[], Tensor]) -> Tensor:
        quick_interpreter.undo()
        try:
            plain = launch()
        finally:
            quicken(quick_interpreter)
        for _ in range(2):
            assert torch.equal(launch().view(torch.uint8), plain.view(torch.uint8))
        return plain

    return run


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, count, SIZE: tl.constexpr, DIVIDES: tl.constexpr):
    """Sums, comparisons and the like of (SIZE, 2) values, under all pairs of shapes and with numbers, in float32."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, 2)
    at = rows[:, None] * 2 + columns
    x = tl.load(x_ptr + at, at < count, other=1)
    row = tl.load(y_ptr + columns)
    column = tl.load(y_ptr + rows.to(tl.int64))[:, None]
    one = tl.load(y_ptr)
    out = tl.where(x < row, 1.5, -2) + tl.where((x == one) | (rows[:, None] % 3 == 0), 0.25, 0)
    out += (x + row).to(tl.float32) + (column + x).to(tl.float32) * 2 - (x - one).to(tl.float32)
    out += (x * 3).to(tl.float32) + (1 + x).to(tl.float32) - (x * row * column).to(tl.float32)
    out += tl.sum((x + 0).to(tl.float32), 1)[:, None] + tl.max((x * 1).to(tl.float32), 0)
    out += (row + one).to(tl.float32) * count - (one + 2).to(tl.float32)
    out += tl.where((x <= row) & (column >= one), 8.0, 0) + tl.where((x > 1) | (row == column), 16.0, 0)
    out += tl.where((rows[:, None] & 1) != (columns[None, :] | 2), 32.0, 64.0)
    out += tl.load(x_ptr + columns, columns < 1, other=2)[None, :].to(tl.float32)
    out += tl.load(y_ptr + rows, rows < 3)[:, None].to(tl.float32) * (rows < 3)[:, None]
    if DIVIDES:
        out += (x / 3).to(tl.float32) + (x / (row + 17)).to(tl.float32) + (2.5 / (x + 11)).to(tl.float32)
    tl.store(out_ptr + at, out, at < count)


def _values(dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(16, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 9, (16,), generator=generator).to(dtype)


@pytest.mark.parametrize("second", [*FLOATS[:2], *INTEGERS], ids=str)
@pytest.mark.parametrize("first", [*FLOATS[:3], *INTEGERS], ids=str)
def test_operands_of_every_two_types_and_shapes(
    first: torch.dtype, second: torch.dtype, both_ways: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    x, y = _values(first, 1), _values(second, 2)
    divides = first.is_floating_point and second.is_floating_point

    def launch() -> Tensor:
        out = torch.zeros(16)
        _arithmetic[(1,)](x, y, out, 13, SIZE=8, DIVIDES=divides)
        return out

    assert both_ways(launch)[:13].isfinite().all()


@triton.jit
def _cast(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("tiny", [False, True], ids=["normal", "subnormal"])
def test_casts_of_every_kind_of_number(
    source: torch.dtype, target: torch.dtype, tiny: bool, both_ways: Callable[[Callable[[], Tensor]], Tensor]
) -> None:
    values = [0.0, -0.0, 1.0, -1.00390625, 3.14159, 65504.0, -1e30, 1e-30, float("inf"), float("-inf"), float("nan")]
    x = torch.tensor([*values, *([1e-40, -3e-39] if tiny else [2.0, -5.0]), *[7.0] * 3]).to(source)

    def launch() -> Tensor:
        out = torch.zeros(16, dtype=target)
        _cast[(1,)](x, out, SIZE=16)
        return out

    both_ways(launch)


@triton.jit
def _shaped(out_ptr, SIZE: tl.constexpr, OTHER: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.zeros((SIZE,), tl.float32) + tl.zeros((OTHER,), tl.float32)))


@pytest.mark.parametrize(("size", "other", "why"), [
    (8.0, 8, "Shape element 0 must have type"),
    (6, 8, "Shape element 0 must be a power of 2"),
    (4, 8, "incompatible dimensions"),
])  # fmt: skip
def test_what_triton_refuses_is_refused(size: float, other: int, why: str, quick_interpreter: object) -> None:
    """Also where the same shape, but for its type, was built before."""
    if not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    out = torch.zeros(1)
    for _ in range(2):
        _shaped[(1,)](out, SIZE=8, OTHER=8)
        with pytest.raises(InterpreterError, match=why):
            _shaped[(1,)](out, SIZE=size, OTHER=other)
