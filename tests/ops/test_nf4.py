"""NF4: layout, values, the kernel and what uses it, bit for bit."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from ftkernels.limits import NF4_NESTED_BLOCK_SIZE
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lora_qkv import lora_qkv
from ftkernels.nf4 import (
    NF4_TABLE,
    NestedScales,
    NF4Weight,
    block_scales,
    nf4_into_reference,
    nf4_into_triton,
    quantize_nf4,
)
from ftkernels.projection import Norm, Projection, joint_matrix

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
#: Whole blocks, a short last block, an odd number of elements, one element, more blocks than one nested block.
SHAPES = [(64, 128), (37, 54), (37, 53), (1, 1), (290, 256)]

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def _weight(shape: tuple[int, int], device: str = "cpu", dtype: torch.dtype = F32) -> torch.Tensor:
    return (torch.randn(shape) * 0.02).to(device, dtype)


def _slowly(weight: NF4Weight) -> torch.Tensor:
    """The definition, element by element."""
    table, scales = weight.table.tolist(), block_scales(weight).tolist()
    values = []
    for index in range(weight.shape[0] * weight.shape[1]):
        byte = int(weight.data[index // 2])
        nibble = byte >> 4 if index % 2 == 0 else byte & 15
        values.append(torch.tensor(table[nibble]) * torch.tensor(scales[index // weight.block_size]))
    return torch.stack(values).view(weight.shape)


# Values


@pytest.mark.parametrize("double_quant", [False, True])
def test_the_reference_is_the_definition(double_quant: bool) -> None:
    weight = quantize_nf4(_weight((11, 13)), double_quant=double_quant, block_size=32)
    assert torch.equal(weight.dequantize(F32), _slowly(weight))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_the_reference_bits(device: str, shape: tuple[int, int], double_quant: bool) -> None:
    weight = quantize_nf4(_weight(shape, device), double_quant=double_quant)
    for dtype in (F32, BF16, F16, F64):
        wanted, got = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        nf4_into_reference(weight, wanted)
        nf4_into_triton(weight, got)
        assert torch.equal(got, wanted), dtype
        assert torch.equal(weight.dequantize(dtype), wanted)


@pytest.mark.parametrize("shape", [(67, 131), (66, 132)], ids=["odd", "whole words"])
@pytest.mark.parametrize("block_size", [32, 128, 4096])
def test_the_kernel_takes_every_block_size(device: str, block_size: int, shape: tuple[int, int]) -> None:
    weight = quantize_nf4(_weight(shape, device), block_size=block_size)
    wanted, got = (torch.empty(shape, device=device) for _ in range(2))
    nf4_into_reference(weight, wanted)
    nf4_into_triton(weight, got)
    assert torch.equal(got, wanted)


def test_the_kernel_takes_memory_that_is_not_aligned_to_words(device: str) -> None:
    """A slice of a file's storage may begin at any byte."""
    weight = quantize_nf4(_weight((64, 128), device))
    shifted = torch.cat([weight.data.new_zeros(1), weight.data])[1:]
    assert shifted.data_ptr() % 4
    got = torch.empty((64, 128), device=device)
    nf4_into_triton(dataclasses.replace(weight, data=shifted), got)
    assert torch.equal(got, weight.dequantize(F32))


def test_the_offset_comes_after_the_nested_scale() -> None:
    """absmax = table[q] * nested + offset; with the offset inside the product the weights of a layer are far off."""
    weight = quantize_nf4(_weight((64, 1024)))
    assert weight.nested is not None
    exact = quantize_nf4(_weight((64, 1024)), double_quant=False)  # the seed is set for each test: other numbers
    assert float(block_scales(weight).mean()) == pytest.approx(float(weight.nested.offset), rel=1e-2)
    assert float(block_scales(weight).mean()) == pytest.approx(float(exact.absmax.mean()), rel=1e-2)


def test_quantizing_is_near_and_zeros_stay_zeros() -> None:
    dense = _weight((128, 256))
    dense[5] = 0.0
    weight = quantize_nf4(dense)
    back = weight.dequantize(F32)
    assert float((back - dense).norm() / dense.norm()) < 0.1
    assert not back[5].any()
    again = quantize_nf4(back, double_quant=False)
    assert torch.equal(again.data, quantize_nf4(dense, double_quant=False).data)


def test_the_middle_between_two_values_goes_to_the_lower_one() -> None:
    """The first element makes the block's scale 1; the fifteen others are the middles, then the floats above them."""
    table = torch.tensor(NF4_TABLE)
    middles = (table[:-1] + table[1:]) / 2
    above = torch.nextafter(middles, torch.tensor(1.0))
    dense = torch.cat([torch.ones(1), middles, torch.ones(1), above])[None]
    assert bytes(quantize_nf4(dense, double_quant=False).data.tolist()).hex() == "f0123456789abcdef123456789abcdef"


def test_a_weight_is_half_a_byte_and_its_scales() -> None:
    elements = 512 * 1024
    stored = quantize_nf4(_weight((512, 1024))).stored_bytes
    assert stored == elements // 2 + elements // 64 + 4 * (elements // 64 // NF4_NESTED_BLOCK_SIZE) + 4 * (16 + 256 + 1)


# bitsandbytes


def _theirs(data: torch.Tensor, state: Any) -> NF4Weight:
    nested = None
    if state.nested:
        inner = state.state2
        nested = NestedScales(inner.absmax, inner.code, state.offset.reshape(()), inner.blocksize)
    return NF4Weight(data.view(-1), state.absmax, state.code, state.shape, state.blocksize, nested)


@needs_bitsandbytes
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[4]])  # odd rows take their CPU code seconds to compile
def test_layout_and_values_are_those_of_bitsandbytes(
    device: str, shape: tuple[int, int], dtype: torch.dtype, double_quant: bool
) -> None:
    from bitsandbytes import functional

    dense = _weight(shape, device, dtype)
    data, state = functional.quantize_4bit(dense.clone(), quant_type="nf4", compress_statistics=double_quant)
    theirs, ours = _theirs(data, state), quantize_nf4(dense, double_quant=double_quant)
    assert torch.equal(theirs.dequantize(dtype), functional.dequantize_4bit(data, state))
    if device == "cuda":
        out = torch.empty(shape, dtype=dtype, device=device)
        nf4_into_triton(theirs, out)
        assert torch.equal(out, functional.dequantize_4bit(data, state))
    if device == "cuda":  # their kernel compares with rounded thresholds: ties may go the other way
        assert float((ours.data != theirs.data).float().mean()) < 1e-3
    else:
        assert torch.equal(ours.data, theirs.data)
    assert torch.equal(ours.table, theirs.table)
    assert ours.block_size == theirs.block_size
    if not double_quant:
        assert torch.equal(ours.absmax, theirs.absmax)
        return
    assert ours.nested is not None
    assert theirs.nested is not None
    assert torch.equal(ours.nested.table, theirs.nested.table)
    # Ours is the mean in float64, the same on every device; theirs is float32's, in the order of the device.
    rounding = 1e-6 if device == "cuda" else 0.0
    for name in ("absmax", "offset"):
        mine, known = getattr(ours.nested, name), getattr(theirs.nested, name)
        assert torch.allclose(mine, known, rtol=rounding, atol=0.0)
    # Their CPU routine searches the 8-bit table only approximately; ours is never the farther one.
    exact = quantize_nf4(dense, double_quant=False).absmax
    assert bool(((block_scales(ours) - exact).abs() <= (block_scales(theirs) - exact).abs() + 1e-8).all())
    assert float((ours.absmax != theirs.absmax).float().mean()) < 0.02


# Where weights go


def test_a_group_is_dequantized_into_one_buffer(device: str) -> None:
    weights = [quantize_nf4(_weight((rows, 96), device)) for rows in (64, 32, 33)]
    joint = joint_matrix(weights, BF16, torch.device(device))
    assert joint is not None
    assert torch.equal(joint, torch.cat([w.dequantize(BF16) for w in weights]))
    again = joint_matrix(weights, BF16, torch.device(device))
    assert again is not None
    assert again.untyped_storage().data_ptr() != joint.untyped_storage().data_ptr()  # nothing is shared between calls


def test_two_weights_that_are_held_at_once_do_not_share_memory(device: str) -> None:
    """bitsandbytes-based code dequantizes into one global buffer: the second weight overwrites the first."""
    first, second = (quantize_nf4(_weight((16, 64), device)) for _ in range(2))
    held = first.dequantize(F32)
    copy = held.clone()
    second.dequantize(F32)
    assert torch.equal(held, copy)


def test_a_group_is_one_product(device: str, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = (quantize_nf4(_weight((48, 64), device)) for _ in range(2))
    down = quantize_nf4(_weight((64, 48), device))
    shapes: list[tuple[int, ...]] = []
    plain = torch.mm

    def counting(a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        shapes.append((*a.shape, b.shape[1]))
        return plain(a, b, **kwargs)

    monkeypatch.setattr(torch, "mm", counting)
    z = torch.randn(1, 5, 64, device=device, requires_grad=True)
    lora_mlp(z, *(Projection(w) for w in (gate, up, down)), backend="triton").sum().backward()
    assert shapes.count((5, 64, 96)) == 1  # gate and up, forward
    assert shapes.count((5, 96, 64)) == 1  # and backward


@pytest.mark.parametrize("autocast", [False, True])
def test_operations_on_nf4_equal_those_on_the_dequantized_weight(device: str, layers: Any, autocast: bool) -> None:
    """Outputs and every gradient bit for bit: the same products of the same numbers."""
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "gate": (48, 64), "up": (48, 64), "down": (64, 48)}
    packed = {name: quantize_nf4(_weight(shape, device)) for name, shape in shapes.items()}
    adapters = {name: layers.make(*shape, 4) for name, shape in shapes.items()}
    dtype = BF16 if autocast else F32
    dense = {"down": packed["down"].dequantize(dtype)}
    for group in (("q", "k", "v"), ("gate", "up")):
        joint = joint_matrix([packed[name] for name in group], dtype, torch.device(device))
        assert joint is not None
        dense |= dict(zip(group, joint.split([shapes[name][0] for name in group]), strict=True))

    def run(quantized: bool) -> list[torch.Tensor]:
        leaves = {n: [layer.a.clone().requires_grad_(), layer.b.clone().requires_grad_()] for n, layer in adapters.items()}  # fmt: skip  # noqa: E501
        z = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()

        def layer(name: str) -> Projection:
            weight = packed[name] if quantized else dense[name]
            return Projection(weight, None, *leaves[name], 2.0)

        norm = Norm(torch.ones(64, device=device), 1e-5)
        with torch.autocast(device, dtype=BF16, enabled=autocast):
            q, k, v, residual = lora_qkv(
                z, layer("q"), layer("k"), layer("v"), head_dim=16, norm=norm, backend="triton"
            )
            y = lora_linear(q.transpose(1, 2).reshape(2, 5, 64), layer("q"), residual=residual, backend="triton")
            y = lora_mlp(y, layer("gate"), layer("up"), layer("down"), norm=norm, residual="add", backend="triton")
        loss = y.float().square().sum() + k.float().sum() + v.float().square().sum()
        inputs = [z, *(t for pair in leaves.values() for t in pair)]
        return [y.detach(), *torch.autograd.grad(loss, inputs)]

    for got, wanted in zip(run(True), run(False), strict=True):
        assert torch.equal(got, wanted)


# What may not happen


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_raw_packed_tensor_is_refused_by_every_operation(position: int) -> None:
    """Elsewhere: "mat1 and mat2 shapes cannot be multiplied (2158x4096 and 1x8388608)"."""
    packed = quantize_nf4(_weight((8, 8))).data
    raw = Projection(packed.view(1, -1))
    good = [Projection(torch.zeros(8, 8)) for _ in range(3)]
    good[position] = raw
    with pytest.raises(ValueError, match=r"uint8 tensor of shape \(1, 32\) is not a weight for 8 features"):
        lora_linear(torch.zeros(3, 8), raw)
    names = (("q", "k", "v"), ("gate", "up", "down"))
    with pytest.raises(ValueError, match=f"{names[0][position]}.*uint8"):
        lora_qkv(torch.zeros(1, 3, 8), *good, head_dim=4)
    with pytest.raises(ValueError, match=f"{names[1][position]}.*uint8"):
        lora_mlp(torch.zeros(1, 3, 8), *good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": torch.zeros(10, dtype=torch.uint8)}, "data must be 32 contiguous uint8"),
        ({"data": torch.zeros(32, dtype=torch.int8)}, "data must be"),
        ({"absmax": torch.zeros(2)}, "absmax must be 1 contiguous float32"),
        ({"absmax": torch.zeros(1, dtype=torch.uint8)}, "absmax must be"),
        ({"absmax": torch.zeros(1, dtype=BF16)}, "got .* bfloat16"),
        ({"table": torch.zeros(8)}, "table must be 16"),
        ({"shape": torch.Size((64,))}, "is a matrix"),
        ({"shape": torch.Size((4, 16, 1))}, "is a matrix"),
        ({"block_size": 48}, "block size 48"),
        ({"data": torch.zeros(32, dtype=torch.uint8, device="meta")}, "lie on cpu, meta"),
        ({"nested": NestedScales(torch.zeros(1), torch.zeros(256), torch.zeros(()))}, "1 contiguous uint8"),
        (
            {
                "absmax": torch.zeros(1, dtype=torch.uint8),
                "nested": NestedScales(torch.zeros(2), torch.zeros(256), torch.zeros(())),
            },
            "nested absmax",
        ),
        (
            {
                "absmax": torch.zeros(1, dtype=torch.uint8),
                "nested": NestedScales(torch.zeros(1), torch.zeros(255), torch.zeros(())),
            },
            "nested table",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    weight = quantize_nf4(torch.ones(8, 8), double_quant=False)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight, **change)


@pytest.mark.parametrize(
    "out",
    [torch.empty(8, 9), torch.empty(8, 8).t(), torch.empty(8, 8, dtype=torch.int32), torch.empty(8, 8, device="meta")],
    ids=["shape", "strides", "integer", "device"],
)
def test_memory_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    weight = quantize_nf4(torch.ones(8, 8))
    with pytest.raises(ValueError, match="cannot be written into"):
        weight.dequantize_into(out)


@pytest.mark.parametrize("bad", [torch.full((4, 4), float("nan")), torch.full((4, 4), float("inf"))])
def test_what_is_not_finite_is_not_quantized(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_nf4(bad)


def test_only_floating_matrices_are_quantized() -> None:
    with pytest.raises(ValueError, match="floating matrix"):
        quantize_nf4(torch.zeros(4))
    with pytest.raises(ValueError, match="floating matrix"):
        quantize_nf4(torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="block size"):
        quantize_nf4(torch.zeros(4, 4), block_size=48)


@pytest.mark.gpu
def test_bnb_1784_more_than_2_to_the_31_elements_are_addressed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA machine")
    shape = torch.Size((2**15 + 1, 2**16))
    elements = shape[0] * shape[1]
    data = torch.randint(0, 256, (elements // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(elements // 64, device="cuda")
    table = torch.tensor(NF4_TABLE, device="cuda")
    out = NF4Weight(data, absmax, table, shape).dequantize(BF16)
    tail = NF4Weight(data[-(2**15) :], absmax[-(2**10) :], table, torch.Size((1, 2**16)))
    assert torch.equal(out[-1:], tail.dequantize(BF16))
    middle = NF4Weight(data[2**29 : 2**29 + 2**15], absmax[2**24 :][: 2**10], table, torch.Size((1, 2**16)))
    assert torch.equal(out[2**14 : 2**14 + 1], middle.dequantize(BF16))
