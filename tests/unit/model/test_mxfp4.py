"""Experts in MXFP4 are read as transformers reads them, a stack at a time, into every form that experts are held in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.nf4 import quantize_nf4
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.model.experts import QuantizedStack
from ftcli.model.released import BLOCKS, SCALES, Mxfp4, grouped, read_group
from tests.mxfp4_files import SIZES, drawn, released, theirs
from tests.quantized import NF4, load

CPU = torch.device("cpu")
IDS = torch.randint(5, 250, (2, 24), generator=torch.Generator().manual_seed(3))
NONE = QuantizationConfig(method="none")


def parts(blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {BLOCKS: blocks, SCALES: scales}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_byte_and_scale_is_transformers_number(dtype: torch.dtype) -> None:
    """All 256 bytes under all 255 scales; the largest overflow alike."""
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    found, wanted = Mxfp4({}).dequantized("x", parts(blocks, scales), dtype, CPU), theirs(blocks, scales, dtype)
    assert found.shape == (1, 512, 255)
    assert found.is_contiguous()
    assert torch.equal(found, wanted)
    assert found.isfinite().sum() > (0.9 if dtype != torch.float16 else 0.05) * found.numel()


def test_bfloat16_holds_every_number_that_is_no_overflow() -> None:
    scales = torch.arange(250, dtype=torch.uint8).view(1, 250, 1).repeat(1, 1, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 250, 1, 1)
    wide = Mxfp4({}).dequantized("x", parts(blocks, scales), torch.float32, CPU)
    assert torch.equal(Mxfp4({}).dequantized("x", parts(blocks, scales), torch.bfloat16, CPU).float(), wide)


def test_all_else_passes_and_both_parts_are_one_stack() -> None:
    blocks, scales = drawn(3, 6, 64)
    other = torch.ones(2)
    stored = {"a.w_scales": scales, "b": other, "a.w_blocks": blocks, "c.bias": other}
    groups = grouped(stored, Mxfp4({}))
    assert list(groups) == ["a.w", "b", "c.bias"]
    found = {name: in_full(stored, name, group) for name, group in groups.items()}
    assert torch.equal(found["a.w"], theirs(blocks, scales, torch.float32))
    assert found["b"] is other
    shapes = {end: tuple(tensor.shape) for end, tensor in parts(blocks, scales).items()}
    assert Mxfp4({}).shape("a.w", shapes) == found["a.w"].shape


def in_full(stored: dict[str, Tensor], name: str, group: dict[str, str]) -> Tensor:
    return read_group(Mxfp4({}), name, group, stored.__getitem__, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({SCALES: None}, "w_scales is not stored"),
        ({BLOCKS: None}, "w_blocks is not stored"),
        ({SCALES: torch.zeros(3, 6, 1, dtype=torch.uint8)}, "do not fit together"),
        ({SCALES: torch.zeros(3, 6, 2, dtype=torch.int8)}, "do not fit together"),
        ({BLOCKS: torch.zeros(3, 6, 2, 8, dtype=torch.uint8)}, "do not fit together"),
        ({BLOCKS: torch.zeros(3, 6, 32, dtype=torch.uint8)}, "do not fit together"),
    ],
)
def test_parts_that_make_no_stack_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    given = {end: tensor for end, tensor in (parts(*drawn(3, 6, 64)) | change).items() if tensor is not None}
    stored = {f"a.w{end}": tensor for end, tensor in given.items()}
    with pytest.raises(FtcliError, match=r"a\.w") as caught:
        in_full(stored, "a.w", grouped(stored, Mxfp4({}))["a.w"])
    [finding] = caught.value.findings
    assert finding.code == "FT323"
    assert said in finding.message


@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_a_released_model_is_loaded_into_full_precision(shards: str, tmp_path: Path) -> None:
    full = released(tmp_path / "base", shards=shards)
    model = load(tmp_path / "base", NONE)
    parameters = dict(model.named_parameters())
    assert len(full) == 4
    for name, stack in full.items():
        assert torch.equal(parameters[name], stack), name
    assert all(parameter.requires_grad for parameter in parameters.values())  # adapters freeze them
    assert getattr(model.config, "quantization_config", None) is None
    stored = {k: v for path in (tmp_path / "base").glob("*.safetensors") for k, v in load_file(path).items()}
    for name, parameter in parameters.items():
        if name not in full:
            assert torch.equal(parameter, stored[name].float()), name


def test_its_experts_are_packed_in_nf4_as_those_in_full_precision(tmp_path: Path) -> None:
    full = released(tmp_path / "base")
    model = load(tmp_path / "base", NF4)
    for name, stack in full.items():
        held = model.get_parameter(name)
        assert isinstance(held, QuantizedStack)
        numbers = quantize_nf4(stack.reshape(-1, stack.shape[-1])).dequantize(torch.float32).view(stack.shape)
        assert torch.equal(held.packed.dequantize(torch.float32).view(held.shape), numbers)
        assert (numbers - stack).norm() > 1e-3 * stack.norm()
    with torch.no_grad():
        assert bool(model(input_ids=IDS, use_cache=False).logits.isfinite().all())


def test_fp8_holds_the_experts_numbers(tmp_path: Path) -> None:
    """Two significant bits are exact in e4m3, by a power of two a row."""
    full = released(tmp_path / "base")
    model = load(tmp_path / "base", QuantizationConfig(method="fp8"))
    for name, stack in full.items():
        held = model.get_parameter(name)
        assert isinstance(held, QuantizedStack)
        assert torch.equal(held + 0, stack), name
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Fp8Linear"


def test_a_stack_of_another_shape_is_refused(tmp_path: Path) -> None:
    released(tmp_path / "base")
    (path,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors |= {f"{name}{end}": tensor for end, tensor in parts(*drawn(4, SIZES["hidden_size"] - 2, 64)).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(FtcliError, match="gate_up_proj is stored with shape") as caught:
        load(tmp_path / "base", NONE)
    assert caught.value.findings[0].code == "FT323"
