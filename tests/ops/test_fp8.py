"""fp8: quantized rows to the bit, and products within stated bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.fp8 import (
    E4M3,
    Fp8Rows,
    Fp8Weight,
    dequantize_fp8_triton,
    e4m3_store,
    fp8_on_tensor_cores,
    join_fp8,
    joined_fp8,
    multiply_rows,
    part_fp8,
    quantize_fp8,
    quantize_fp8_torch,
    quantize_fp8_triton,
    quantize_weight,
)
from ftkernels.rms_norm import norm_forward
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
#: Relative Frobenius error of one product of random matrices against the unquantized one (measured: 3.8e-2).
ONE_PRODUCT = 4e-2
#: Of a tensor core's product against float64 of the same quantized operands (measured: at most 4.9e-3).
FAST_ACCUMULATION = 6e-3


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device)


# Rows


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "widest"), [((5, 130), 32768), ((1, 1), 32768), ((3, 130), 64), ((2, 4096), 32768)])
def test_the_kernel_gives_the_references_bits(
    device: str, shape: tuple[int, int], widest: int, dtype: torch.dtype
) -> None:
    x = (_random(device, *shape) * torch.logspace(-3, 3, shape[0], device=device)[:, None]).to(dtype)
    q, scale = quantize_fp8_triton(x, widest=widest)
    wanted, wanted_scale = quantize_fp8_torch(x)
    assert q.dtype == wanted.dtype == E4M3
    assert _same(q, wanted)
    assert torch.equal(scale, wanted_scale)


def test_rows_may_be_a_slice(device: str) -> None:
    wide = _random(device, 6, 96)
    for x in (wide[::2, 32:64], wide.t()):
        got, wanted = quantize_fp8_triton(x), quantize_fp8_torch(x.contiguous())
        assert _same(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("widest", [32768, 16])
def test_rows_of_zeros_and_of_numbers_that_are_not_finite(device: str, widest: int) -> None:
    """Peers divide by the largest value: a row of zeros became NaN. And a cast makes 448 of infinity."""
    x = _random(device, 6, 40)
    x[0] = 0
    x[1, 3], x[2, 4], x[3, 5] = float("nan"), float("inf"), float("-inf")
    x[4] = torch.finfo(F32).max
    x[5] = 1e-30
    for q, scale in (quantize_fp8_triton(x, widest=widest), quantize_fp8_torch(x)):
        assert scale[0] == 1
        assert not q[0].float().any()
        nan = q.float().isnan()
        assert nan.nonzero().tolist() == [[1, 3], [2, 4], [3, 5]]
        finite = Fp8Rows(q, scale).dequantize(F64)[~nan]
        assert torch.isfinite(finite).all()
        assert ((finite - x[~nan].double()).abs() <= x[~nan].double().abs() / 16).all()
        # The rest of a row with such a number in it is quantized as without it.
        assert float(scale[1]) == float(scale[2]) == float(scale[3]) == 2**-7


def test_a_scale_is_the_smallest_power_of_two_that_fits(device: str) -> None:
    largest = torch.tensor([448.0, 449.0, 224.0, 225.0, 1.75, 1.7500001, 3e38, 2.0**-118], device=device)
    for _, scale in (quantize_fp8_triton(largest[:, None]), quantize_fp8_torch(largest[:, None])):
        exponent = torch.frexp(scale)
        assert (exponent.mantissa == 0.5).all()
        assert (largest / scale <= 448).all()
        assert (largest / (scale / 2) > 448).all()


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_every_value_is_torchs_own(device: str, dtype: torch.dtype) -> None:
    """Also of a slice, of a transposed matrix and of one without rows."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).view(16, 16)
    for data in (values, values.t(), values[::2, 3:9], values[:0]):
        scale = 2.0 ** torch.arange(-3, data.shape[0] - 3, device=device)
        wanted = (data.to(torch.float64) * scale[:, None].double()).to(dtype)
        torch.testing.assert_close(Fp8Rows(data, scale).dequantize(dtype), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (5, 2050), (3, 48)], ids=str)
def test_the_kernel_dequantizes_every_value(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All bytes that there are, NaN and the smallest among them; rows wider than a block."""
    data = torch.arange(shape[0] * shape[1], device=device).to(torch.uint8).view(E4M3).view(shape)
    scale = 2.0 ** torch.arange(-6, shape[0] - 6, device=device)
    wanted = (data.to(F64) * scale[:, None].double()).to(dtype)
    torch.testing.assert_close(dequantize_fp8_triton(data, scale, dtype), wanted, rtol=0, atol=0, equal_nan=True)


def test_values_are_within_a_sixteenth(device: str) -> None:
    """3 bits of significand. Together they are 2.7% off, whatever the scale: a power of two loses nothing."""
    x = _random(device, 64, 512)
    for factor in (1.0, 1.3, 1.9):
        rows = quantize_fp8(x * factor)
        back = rows.dequantize(F64)
        large = back.abs() > 2**-6 * rows.scale[:, None].double()
        assert ((back - (x * factor).double()).abs() <= (x * factor).double().abs() / 16)[large].all()
        assert _relative(back, x * factor) < 2.8e-2
        assert torch.equal(rows.dequantize(BF16).double(), back)  # bfloat16 holds all of it


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("shape", [(7, 96), (33, 4096)], ids=str)
def test_the_norm_quantizes_what_it_stores(device: str, form: Any, shape: tuple[int, int]) -> None:
    """To the bit what a pass of its own makes of it; and the norm is what it is without, up to the order of its sum."""
    dtype = BF16 if device == "cuda" else F32  # the interpreter rounds to bfloat16 after the kernel
    x, weight = _random(device, *shape).to(dtype), _random(device, shape[1]).to(dtype)
    x[2] = 0
    plain, _, plain_rstd = norm_forward(x, weight, 1e-5, form)
    q = torch.empty(shape, dtype=e4m3_store(), device=device)
    scale = torch.empty(shape[0], device=device)
    y, _, rstd = norm_forward(x, weight, 1e-5, form, quantized=(q, scale))
    if device == "cuda":  # the two forms are compiled apart, and need not add up a row in the same order
        torch.testing.assert_close(rstd, plain_rstd, rtol=1e-6, atol=0.0)
        assert float((y != plain).float().mean()) < 1e-3
        torch.testing.assert_close(y, plain, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(y, plain)
        assert torch.equal(rstd, plain_rstd)
    wanted = quantize_fp8_torch(y)
    assert _same(q.to(E4M3), wanted[0])
    assert torch.equal(scale, wanted[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA machine")
def test_rows_beyond_32_bits() -> None:
    """2^31 elements and some: the last row is addressed in 64 bits."""
    rows = 2**31 // 32768 + 2
    x = torch.zeros((rows, 32768), dtype=BF16, device="cuda")
    x[-1] = torch.linspace(-3, 3, 32768)
    got, wanted = quantize_fp8_triton(x), quantize_fp8_torch(x[-1:])
    assert _same(got[0][-1:], wanted[0])
    assert not got[0][:-1].view(torch.uint8).any()


# Products


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_products_both_ways(device: str, dtype: torch.dtype) -> None:
    """Against float64 of the quantized operands, and against the unquantized ones."""
    weight = _random(device, 96, 160) / 160**0.5
    w = quantize_weight(weight)
    x, dy = _random(device, 48, 160).to(dtype), _random(device, 48, 96).to(dtype)
    dense = w.dequantize(F64)
    for got, given, matrix, plain in (
        (w.product(x), x, dense.t(), weight.t()),
        (w.product_back(dy), dy, dense, weight),
    ):
        assert got.dtype == dtype
        exact = quantize_fp8(given).dequantize(F64) @ matrix
        bound = 1e-6 if dtype == F32 else FAST_ACCUMULATION if device == "cuda" else 4e-3
        assert _relative(got, exact) <= bound
        assert 1e-2 < _relative(got, given.double() @ plain.double()) <= ONE_PRODUCT


def test_the_tensor_cores_take_what_they_can(device: str) -> None:
    """Aligned products in bfloat16 on a GPU; the rest falls back, and an empty batch is no product."""
    on_gpu = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    for rows, inner, out, dtype, fits in (
        (8, 32, 48, BF16, True),
        (5, 32, 48, BF16, True),
        (8, 40, 48, BF16, False),
        (8, 32, 40, BF16, False),
        (8, 32, 48, F32, False),
        (0, 32, 48, BF16, False),
    ):
        a, b = quantize_fp8(_random(device, rows, inner)), quantize_fp8(_random(device, out, inner))
        assert fp8_on_tensor_cores(a.data, b.data, dtype) == (fits and on_gpu)
        exact = a.dequantize(F64) @ b.dequantize(F64).t()
        got = multiply_rows(a, b, dtype)
        assert (got.shape, got.dtype) == ((rows, out), dtype)
        assert rows == 0 or _relative(got, exact) <= FAST_ACCUMULATION


def test_both_copies_of_a_weight_are_one_matrix(device: str) -> None:
    weight = _random(device, 64, 96) * torch.logspace(-2, 2, 64, device=device)[:, None]
    w = quantize_weight(weight)
    back = Fp8Rows(w.transposed, w.transposed_scale).dequantize(F64).t()
    assert ((w.dequantize(F64) - back).abs() <= 2.0**-10 * w.transposed_scale.double()).all()
    plain = quantize_weight(_random(device, 64, 96).clamp(0.01))  # nothing small enough to lose a bit
    assert torch.equal(plain.dequantize(F64), Fp8Rows(plain.transposed, plain.transposed_scale).dequantize(F64).t())


def test_neighbours_are_one_product(device: str) -> None:
    alone = [quantize_weight(_random(device, rows, 64)) for rows in (48, 16, 32)]
    assert joined_fp8(alone) is None
    assert joined_fp8(alone[:1]) is alone[0]
    parts = join_fp8(alone)
    joint = joined_fp8(parts)
    assert joint is not None
    assert joint.shape == (96, 64)
    assert joint.data.data_ptr() == parts[0].data.data_ptr()
    assert joined_fp8([parts[1], parts[0], parts[2]]) is None
    assert joined_fp8([*parts[:2], alone[2]]) is None
    assert joined_fp8(parts[:2]) is None  # their transposed copies have a gap behind each row
    for dtype in (F32, BF16):
        x, dy = _random(device, 8, 64).to(dtype), _random(device, 8, 96).to(dtype)
        pieces = torch.cat([w.product(x) for w in alone], dim=1)
        assert _relative(joint.product(x), pieces) < 1e-3
        separately = sum(w.product_back(d).double() for w, d in zip(parts, dy.split([48, 16, 32], dim=1), strict=True))
        assert _relative(joint.product_back(dy), separately) < (1e-3 if dtype == F32 else 1e-2)
    for before, after in zip(alone, (part_fp8(w) for w in parts), strict=True):
        assert all(
            _same(getattr(before, name), getattr(after, name))
            for name in ("data", "scale", "transposed", "transposed_scale")
        )


def test_parts_that_are_no_weight_are_refused() -> None:
    w = quantize_weight(torch.randn(32, 48))
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((w.data.view(torch.uint8), w.scale, w.transposed, w.transposed_scale), "e4m3 with float32 scales"),
        ((w.data, w.scale.half(), w.transposed, w.transposed_scale), "e4m3 with float32 scales"),
        ((w.data, w.scale, w.data, w.transposed_scale), "a matrix and its transpose"),
        ((w.data, w.transposed_scale, w.transposed, w.scale), "one scale a row"),
        ((w.data, w.scale, w.transposed.to("meta"), w.transposed_scale), "on one device"),
    ]
    for parts, said in wrong:
        with pytest.raises(ValueError, match=said):
            Fp8Weight(*parts)
    for value in (float("nan"), float("inf")):
        bad = torch.randn(32, 48)
        bad[3, 4] = value
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(bad)
    with pytest.raises(ValueError, match="floating matrix"):
        quantize_fp8(torch.zeros((3, 4), dtype=torch.uint8))
