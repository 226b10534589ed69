"""The gradients of adapters in one kernel, beside plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.device import Tile
from ftkernels.thin_products import MOST_COLUMNS, OfA, OfB, takes, thin_products, thin_products_reference

#: Rows, output features of each projection, rank, input features.
SHAPES = [
    (70, (40,), 16, 48),
    (130, (64, 33, 20), 16, 70),
    (5, (90, 90), 32, 40),
    (200, (64, 64, 64), 16, 64),
    (33, (7,), 64, 5),
    (0, (20, 20), 16, 30),
]
#: The one in use, and one of small blocks: several of columns, several programs to the rows.
TILES = [None, Tile(16, 32, 4, 2, 50)]


def _operands(device: str, shape: tuple[Any, ...], dtype: torch.dtype) -> tuple[OfB, OfA]:
    rows, outs, rank, features = shape
    thin = len(outs) * rank
    made = [torch.randn(rows, n, device=device).to(dtype) for n in (sum(outs) + 3, thin, features, thin)]
    weight = torch.rand(features, device=device)
    # dy is a part of a wider matrix.
    return OfB(made[0][:, 3:], made[1], outs), OfA(made[2], made[3], 0.5, weight, "gemma")


def _exact(of_b: OfB | None, of_a: OfA | None, rank: int) -> Any:
    wide_b = None if of_b is None else of_b._replace(dy=of_b.dy.double(), xa=of_b.xa.double())
    wide_a = None if of_a is None else of_a._replace(x=of_a.x.double(), dxa=of_a.dxa.double())
    return thin_products_reference(wide_b, wide_a, rank)


@pytest.mark.parametrize("tile", TILES, ids=["in use", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_products_match_float64(
    device: str, tools: Any, shape: tuple[Any, ...], dtype: torch.dtype, tile: Tile | None
) -> None:
    """What the operands are rounded to is exact in float32, and so are their products: bfloat16 has its bound too."""
    if device == "cuda" and dtype != torch.bfloat16:
        pytest.skip("float32 operands take GEMMs there")
    of_b, of_a = _operands(device, shape, dtype)
    found, exact = thin_products(of_b, of_a, shape[2], tile=tile), _exact(of_b, of_a, shape[2])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for value, truth in zip(found, exact, strict=True):
        assert value is not None
        assert (value.dtype, value.shape) == (wide, truth.shape)
        assert value.is_contiguous()
        assert tools.relative(value, truth) <= 1e-5


@pytest.mark.parametrize("norm", ["none", "llama", "gemma"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_each_product_alone_and_twice_the_same_bits(device: str, tools: Any, shape: tuple[Any, ...], norm: str) -> None:
    of_b, of_a = _operands(device, shape, torch.bfloat16)
    of_a = of_a._replace(norm_form=norm) if norm != "none" else OfA(of_a.x, of_a.dxa)
    for asked in ((of_b, of_a), (of_b, None), (None, of_a)):
        found, again = (thin_products(*asked, shape[2], tile=TILES[1]) for _ in range(2))
        for value, same, exact in zip(found, again, _exact(*asked, shape[2]), strict=True):
            assert (value is None) == (exact is None)
            if value is not None:
                assert torch.equal(value, same)
                assert tools.relative(value, exact) <= 1e-5


def test_operands_of_any_strides(device: str, tools: Any) -> None:
    of_b, of_a = _operands(device, SHAPES[1], torch.bfloat16)
    turned = of_b._replace(dy=of_b.dy.t().contiguous().t()), of_a._replace(x=of_a.x.t().contiguous().t())
    for value, expected in zip(thin_products(*turned, 16), thin_products(of_b, of_a, 16), strict=True):
        assert torch.equal(value, expected)


def test_rows_beyond_the_last_are_not_read(device: str) -> None:
    """What lies behind the operands in memory is NaN, and 0 * NaN would show."""
    of_b, of_a = _operands(device, SHAPES[0], torch.bfloat16)

    def padded(x: torch.Tensor) -> torch.Tensor:
        wider = torch.full((x.shape[0] + 70, x.shape[1] + 9), float("nan"), device=device, dtype=x.dtype)
        wider[: x.shape[0], : x.shape[1]] = x
        return wider[: x.shape[0], : x.shape[1]]

    found = thin_products(
        of_b._replace(dy=padded(of_b.dy), xa=padded(of_b.xa)), of_a._replace(x=padded(of_a.x), dxa=padded(of_a.dxa)), 16
    )
    for value, expected in zip(found, thin_products(of_b, of_a, 16), strict=True):
        assert torch.equal(value, expected)


def test_what_the_kernel_takes() -> None:
    x = torch.zeros(4, 16)
    wide = torch.zeros(4, MOST_COLUMNS + 16)
    large = torch.empty(1 << 20, 16, device="meta")
    assert takes(OfB(x, x, (4, 4, 8)), OfA(x, wide[:, :MOST_COLUMNS]))
    assert takes(None, OfA(x, wide[:, :MOST_COLUMNS]))
    assert takes(OfB(x, x, (8, 8)), None)
    assert takes(OfB(large, x, (16,)), None)
    assert not takes(OfB(large[1:], x, (16,)), None)
    assert not takes(OfB(x, x, (4, 4, 4, 4)), OfA(x, x))
    assert not takes(OfB(x, x, (16,)), OfA(x, wide))
    assert not takes(None, None)
