"""Checkpoints in the layout in which bitsandbytes saves NF4."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.errors import FtcliError
from ftcli.model.nf4 import NF4Linear, nf4_from_bitsandbytes
from tests.quantized import NF4, SINGLE, TINY, load, packed_state, same_state


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """``stored(double_quant, change)``: a folder in bitsandbytes' layout; ``change`` edits its tensors."""

    def _stored(double_quant: bool = True, change: Callable[[dict[str, Any]], Any] = lambda tensors: None) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(TINY / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if layer.endswith("_proj"):
                tensors |= {layer + key: part for key, part in packed_state(tensor.float(), double_quant).items()}
            else:
                tensors[name] = tensor
        change(tensors)
        for file in TINY.iterdir():
            if file.suffix == ".json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((TINY / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double_quant,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return _stored


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_checkpoint_in_bitsandbytes_layout_is_read_without_bitsandbytes(
    double_quant: bool, stored: Callable[..., Path]
) -> None:
    loaded, own = load(stored(double_quant)), load(settings=NF4 if double_quant else SINGLE)
    ids = torch.randint(0, 256, (1, 9))
    assert torch.equal(loaded(ids).logits, own(ids).logits)
    for name, module in own.named_modules():
        if isinstance(module, NF4Linear):
            assert same_state(loaded.get_submodule(name), module)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("double_quant", [True, False])
def test_what_bitsandbytes_itself_saves_is_read(double_quant: bool) -> None:
    from bitsandbytes import functional

    weight = torch.randn(48, 64) * 0.02
    data, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
    parts = {"weight": data, **state.as_dict(packed=True)}
    read = nf4_from_bitsandbytes(parts, weight.shape)
    assert torch.equal(read.dequantize(torch.float32), functional.dequantize_4bit(data, state))


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.__setitem__(f"model.layers.0.mlp.up_proj.{key}", value)


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{key}")


def _fp4(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__"
    tensors[name + "fp4"] = tensors.pop(name + "nf4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("weight.absmax"), "without its absmax"),
        (_drop("weight.quant_state.bitsandbytes__nf4"), "without its quant_state"),
        (_drop("weight.nested_absmax"), "what turns them back is missing"),
        (_drop("weight"), "without its weight"),
        (_fp4, "stored as fp4"),
        (_set("weight.quant_map", torch.zeros(16)), "quant_map is not NF4's"),
        (_set("weight.absmax", torch.zeros(3, dtype=torch.uint8)), "absmax must be 2048"),
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight not stored"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}), "no place for .* model.extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), r"shape \(2,\) and must be \(256,\)"),
    ],
    ids=["scales", "state", "nested scales", "data", "fp4", "table", "size", "missing", "unexpected", "shape"],
)
def test_a_file_that_does_not_fit_is_refused_with_the_layer(
    change: Callable[[dict[str, Any]], Any], message: str, stored: Callable[..., Path]
) -> None:
    with pytest.raises(FtcliError, match=message) as caught:
        load(stored(change=change))
    assert caught.value.findings[0].code == "FT323"
    if "model." not in message and "shape" not in message:
        assert "model.layers.0.mlp.up_proj" in caught.value.findings[0].message


def test_a_layer_that_the_files_keep_in_full_precision_stays_so(stored: Callable[..., Path]) -> None:
    """Issue 11, B5: `llm_int8_skip_modules` of a checkpoint was quantized all the same."""
    kept = "model.layers.0.mlp.down_proj"
    original = load_file(TINY / "model.safetensors")[f"{kept}.weight"]

    def keep(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(f"{kept}.")]:
            del tensors[name]
        tensors[f"{kept}.weight"] = original

    model = load(stored(change=keep), NF4)
    layer = model.get_submodule(kept)
    assert type(layer) is torch.nn.Linear
    assert torch.equal(layer.weight.float(), original.float())
    assert isinstance(model.get_submodule("model.layers.1.mlp.down_proj"), NF4Linear)
