"""A weight that is quantized on a GPU stands for the numbers that it stands for when it is quantized on the CPU.

An export merges an adapter into those, on whatever machine it is made.
"""

from __future__ import annotations

import pytest
import torch
from ftkernels.fp8 import quantize_weight
from ftkernels.nf4 import quantize_nf4

pytestmark = pytest.mark.gpu

SHAPES = [(4096, 4096), (14336, 4096), (1000, 320)]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    return torch.device("cuda", 0)


def drawn(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4(cuda: torch.device, shape: tuple[int, int], dtype: torch.dtype, double_quant: bool) -> None:
    weight = drawn(shape, dtype)
    there, here = (quantize_nf4(each, double_quant=double_quant) for each in (weight.to(cuda), weight))
    assert torch.equal(there.data.cpu(), here.data)
    assert torch.equal(there.absmax.cpu(), here.absmax)
    for compute in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(there.dequantize(compute).cpu(), here.dequantize(compute))


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8(cuda: torch.device, shape: tuple[int, int]) -> None:
    weight = drawn(shape, torch.bfloat16)
    there, here = quantize_weight(weight.to(cuda)), quantize_weight(weight)
    for compute in (torch.bfloat16, torch.float32):
        assert torch.equal(there.dequantize(compute).cpu(), here.dequantize(compute))
