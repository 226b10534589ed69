"""BitNet's linear layer: the same integers from the kernels and from plain torch, gradients in closed form, packing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from ftkernels.bitlinear import (
    Int8Rows,
    bit_linear,
    bit_linear_reference,
    integer_product,
    mixed_linear,
    norm_quantize,
    norm_quantize_triton,
    quantize_int8,
    quantize_int8_triton,
    round_weight,
)
from ftkernels.device import interpreting
from ftkernels.int8_product import FEW, FEWEST, MANY, MANY_DESCRIBED, ProductTile, describable, int8_product
from ftkernels.ternary import (
    Ternary,
    dequantize_int8_triton,
    pack_ternary,
    quantize_int8_torch,
    remaster,
    ternarise,
    unpack_ternary,
)

# (rows, inputs, outputs): whole tiles, odd ones, one row, and rows that are read twice.
SHAPES = ((64, 128, 128), (5, 70, 33), (1, 512, 60), (70, 257, 31))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(rows: int, inner: int, outer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + inner)
    x, w, b = torch.randn(rows, inner) * 3, torch.randn(outer, inner) * 0.02, torch.randn(outer)
    x[0] = 0.0  # a row whose largest value is below the smallest scale
    return x.to(DEVICE, dtype), w.to(DEVICE), b.to(DEVICE)


def test_ternary_values_are_those_of_the_formula_in_float64() -> None:
    _, w, _ = made(1, 300, 200)
    found, exact = ternarise(w), w.double()
    scale = exact.abs().mean()
    assert float(found.scale) == float(scale.float())
    distance = (exact / scale).abs().sub(0.5).abs()  # what lies on a boundary to the last bit may go either way
    wanted = (exact / scale).round().clamp(-1, 1).to(torch.int8)
    assert bool((found.data == wanted)[distance > 1e-6].all())
    assert float(ternarise(torch.zeros(4, 4)).scale) == pytest.approx(1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_have_the_integers_of_plain_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, w, b = made(*shape, dtype)
    strided = torch.full((x.shape[0], 2 * x.shape[1]), torch.nan, device=DEVICE, dtype=dtype)[:, : x.shape[1]]
    strided.copy_(x)
    q, step = quantize_int8_torch(x)
    for given, widest in ((x, 32768), (strided, 32768), (x[:5], 32)):
        found, found_step = quantize_int8_triton(given, widest=widest)
        assert torch.equal(found, q[: len(found)])
        assert torch.equal(found_step, step[: len(found)])
    t = ternarise(w)
    for bias in (None, b):
        found = int8_product(q, step, t.data, t.scale, bias, torch.float32)
        plain = integer_product(q, t.data) * step[:, None] * t.scale
        assert torch.equal(found, plain if bias is None else plain + bias)
        exact = (q.double() * step[:, None].double()) @ (t.data.double() * t.scale.double()).t()
        exact = exact if bias is None else exact + bias.double()
        assert (found.double() - exact).norm() <= 1e-6 * exact.norm()
        half = int8_product(q, step, t.data, t.scale, bias, torch.bfloat16)
        assert torch.equal(half, found.to(torch.bfloat16))


def on_this_machine(tile: ProductTile) -> ProductTile:
    """In the interpreter a smaller one of its kind: every program costs a millisecond, and each size the same code."""
    return replace(tile, rows=32, columns=64, depth=64) if interpreting() else tile


@pytest.mark.parametrize("tile", [FEWEST, FEW, MANY, MANY_DESCRIBED])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(64, 128, 128), (90, 208, 136), (1, 512, 64)])
def test_every_tile_has_the_bits_of_plain_torch(tile: ProductTile, rows: int, inner: int, outer: int) -> None:
    if tile.described and not interpreting() and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no descriptors")
    x, w, b = made(rows, inner, outer)
    (q, step), t = quantize_int8_torch(x), ternarise(w)
    plain = integer_product(q, t.data) * step[:, None] * t.scale
    for bias in (None, b):
        for dtype in (torch.float32, torch.bfloat16):
            found = int8_product(q, step, t.data, t.scale, bias, dtype, tile=on_this_machine(tile))
            assert torch.equal(found, (plain if bias is None else plain + bias).to(dtype))


def test_rows_that_begin_in_the_middle_of_16_bytes_are_not_described() -> None:
    whole = torch.zeros(4, 32, dtype=torch.int8)
    assert describable(whole, torch.zeros(4, 8, dtype=torch.bfloat16))
    assert not describable(whole, torch.zeros(4, 4, dtype=torch.bfloat16))
    assert not describable(torch.zeros(4, 24, dtype=torch.int8))
    assert not describable(whole.view(-1)[8:104].view(3, 32))


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (70, 513)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_round_weights_as_plain_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[0])
    for w in (torch.randn(shape) * 0.02, torch.randn(shape).round() / 2, torch.zeros(shape)):
        w = w.to(DEVICE, dtype)
        plain, found = ternarise(w), round_weight(w, backend="triton")
        assert float(found.scale) == float(plain.scale)
        assert torch.equal(found.data, plain.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, in the interpreter
        w[0, 0] = torch.nan
        assert bool(torch.isnan(round_weight(w, backend="triton").scale))


def test_values_times_their_scale_are_rounded_once() -> None:
    x, w, _ = made(33, 70, 40)
    (q, step), t = quantize_int8_torch(x), ternarise(w)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_int8_triton(q, step, dtype), (q * step[:, None]).to(dtype))
        assert torch.equal(dequantize_int8_triton(t.data, t.scale, dtype), t.dequantize(dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """A maximum that passes NaN over would give a diverged model finite losses."""
    x, w, _ = made(5, 70, 33)
    x[2, 3] = value
    weight, t = torch.ones(70, device=DEVICE), ternarise(w)
    for rows in (quantize_int8(x, backend="torch"), quantize_int8(x, backend="triton"), norm_quantize(x, weight, 1e-5)):
        assert not bool(bit_linear(rows, None, t)[2].isfinite().any())
        assert bool(bit_linear(rows, None, t)[3].isfinite().all())
    _, step = quantize_int8_triton(x, widest=32)
    assert step.isfinite().tolist() == [True, True, False, True, True]


def test_halves_round_to_even_as_torch_rounds() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    q, _ = quantize_int8_triton(x)
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_a_norm_that_quantizes_is_norm_and_quantizing(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    if x_dtype == torch.bfloat16 and interpreting():
        pytest.skip("the interpreter keeps in float32 what the norm rounds to bfloat16")
    x, _, _ = made(33, 70, 4, x_dtype)
    weight = (1 + 0.1 * torch.randn(70, device=DEVICE)).to(w_dtype)
    plain, fused = (norm_quantize(x, weight, 1e-5, backend=name) for name in ("torch", "triton"))
    assert int((plain.q.int() - fused.q.int()).abs().max()) <= 1  # sums over a row may differ in their last bit
    assert float((plain.q != fused.q).float().mean()) < 1e-2
    assert torch.allclose(plain.step, fused.step, rtol=1e-5, atol=1e-9)
    again = norm_quantize_triton(x, weight, 1e-5)
    assert torch.equal(again[0], fused.q)


def grads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, backend: Any) -> list[torch.Tensor]:
    x, w, b = (each.detach().clone().requires_grad_() for each in (x, w, b))
    y = bit_linear(quantize_int8(x, backend=backend), w, ternarise(w), b, backend=backend)
    torch.manual_seed(1)
    dy = torch.randn_like(y)
    y.backward(dy)
    found = [y.detach(), dy, x.grad, w.grad, b.grad]
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_go_straight_through(backend: Any) -> None:
    x, w, b = made(5, 70, 33)
    y, dy, dx, dw, db = grads(x, w, b, backend)
    t, (q, step) = ternarise(w), quantize_int8_torch(x)
    w_q, x_q = t.data.double() * t.scale.double(), q.double() * step[:, None].double()
    for found, exact in ((dx, dy.double() @ w_q), (dw, dy.double().t() @ x_q), (db, dy.double().sum(0))):
        assert (found.double() - exact).norm() <= 1e-5 * exact.norm()
    reference = [each.detach().clone().requires_grad_() for each in (x, w, b)]
    out = bit_linear_reference(*reference, t)
    out.backward(dy)
    for found, each in zip((y, dx, dw, db), (out, *(leaf.grad for leaf in reference)), strict=True):
        assert torch.allclose(found, each, rtol=1e-4, atol=1e-5)


def test_layers_that_share_quantized_rows_add_up_their_gradients() -> None:
    x, w, _ = made(7, 32, 16)
    x = x.view(1, 7, 32).requires_grad_()
    weight = torch.ones(32, device=DEVICE, requires_grad=True)
    rows = norm_quantize(x, weight, 1e-5, backend="triton")
    assert isinstance(rows, Int8Rows)
    assert rows.shape == (1, 7, 32)
    t = ternarise(w)
    (bit_linear(rows, w, t).sum() + 2 * bit_linear(rows, w, t).sum()).backward()
    alone = x.detach().clone().requires_grad_()
    n = weight.detach().clone().requires_grad_()
    normed = n * (alone * torch.rsqrt(alone.pow(2).mean(-1, keepdim=True) + 1e-5))
    (3 * (normed @ t.dequantize(torch.float32).t())).sum().backward()
    assert torch.allclose(x.grad, alone.grad, rtol=1e-4, atol=1e-4)
    assert torch.allclose(weight.grad, n.grad, rtol=1e-4, atol=1e-4)


def test_under_autocast_the_output_has_its_dtype_and_masters_get_float32_gradients() -> None:
    x, w, _ = made(4, 32, 8)
    w = w.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = bit_linear(quantize_int8(x), w, ternarise(w))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_a_share_of_0_is_the_plain_layer_and_of_1_the_quantized_one() -> None:
    x, w, b = made(5, 32, 16)
    t = ternarise(w)
    assert torch.equal(mixed_linear(x, w, t, b, 0.0), torch.nn.functional.linear(x, w, b))
    whole = bit_linear(quantize_int8(x), w, t, b)
    assert torch.allclose(mixed_linear(x, w, t, b, 1.0), whole, rtol=1e-4, atol=1e-5)
    leaf = w.clone().requires_grad_()
    mixed_linear(x, leaf, t, b, 0.25).sum().backward()
    q, step = quantize_int8_torch(x)
    mixed = x + 0.25 * (q * step[:, None] - x)
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, mixed.sum(0).expand_as(w), rtol=1e-4, atol=1e-4)


def test_masters_of_ternary_values_are_rounded_to_them_again_bit_for_bit() -> None:
    torch.manual_seed(0)
    for scale in (torch.rand(200) * 10 ** torch.randint(-3, 2, (200,)) + 2e-5).tolist():
        values = ternarise(torch.randn(24, 70)).data
        again = ternarise(remaster(values, scale))
        assert torch.equal(again.data, values)
        assert float(again.scale) == float(torch.tensor(scale))
    assert int(torch.count_nonzero(ternarise(remaster(torch.zeros(8, 8, dtype=torch.int8), 0.5)).data)) == 0


def test_packing_goes_back() -> None:
    values = ternarise(torch.randn(24, 70)).data
    packed = pack_ternary(values)
    assert packed.shape == (6, 70)
    assert (int(packed[2, 5]) >> 2) & 3 == int(values[1 * 6 + 2, 5]) + 1
    assert torch.equal(unpack_ternary(packed), values)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pack_ternary(torch.zeros(6, 4, dtype=torch.int8)), "6 rows cannot be packed"),
        (lambda: unpack_ternary(torch.full((2, 4), 0b11, dtype=torch.uint8)), "stands for no ternary value"),
        (lambda: unpack_ternary(torch.zeros(2, 4)), "uint8"),
        (lambda: remaster(torch.ones(4, 4, dtype=torch.int8), 1e-6), "smallest that masters can have"),
        (lambda: Ternary(torch.zeros(2, 4), torch.ones(())), "int8"),
        (lambda: Ternary(torch.zeros(2, 4, dtype=torch.int8), torch.ones(1)), "one float32 scale"),
        (lambda: bit_linear(quantize_int8(torch.zeros(3, 5)), None, ternarise(torch.ones(2, 4))), "do not fit"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
