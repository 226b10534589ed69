"""A QLoRA run is a run like any other: it saves, resumes, evaluates and is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.nf4 import quantize_nf4
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import QuantizedLinear
from tests.e2e.conftest import User
from tests.quantized import quantize_linears

NF4: dict[str, Any] = {"quantization": {"method": "nf4"}, "checkpoint": {"every_steps": 3}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def user(stored: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return stored


def dequantized_model(source: Path, folder: Path) -> Path:
    """The model with every linear weight replaced by what its NF4 form stands for."""
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantize_linears(packed, QuantizationConfig(method="nf4"))
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.frozen_weight().dequantize(torch.float32))
    path = folder / "dequantized"
    plain.save_pretrained(path)
    for file in Path(source).iterdir():
        if not (path / file.name).exists() and file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def test_a_qlora_run_saves_resumes_evaluates_and_is_exported(user: User, narrow_files: Path) -> None:
    done = user.done("train", user.recipe("whole", **NF4))
    assert done["steps"] == 6
    run = user.folder / "whole"

    table = json.loads((run / "manifest.json").read_text())["quantization"]
    assert {entry["method"] for entry in table} == {"nf4"}
    assert len(table) == 2 * 7
    first = next(entry for entry in table if entry["layer"] == "model.layers.0.mlp.gate_proj")
    assert first["shape"] == [96, 64]
    assert first["bytes"] < 0.6 * 96 * 64 + 4 * (16 + 257)

    # The adapter is PEFT's, and none of the packed base is saved with it.
    saved = weights(run)
    assert all(".lora_A." in name or ".lora_B." in name for name in saved)

    # The same bits from a run that was cut off after its first checkpoint.
    user.goes_on_alike("whole", str(user.folder / "whole.yaml"))

    evaluated = user.done("eval", str(user.folder / "whole.yaml"), "--run", str(run))
    held_out = json.loads((run / "eval.json").read_text())
    assert evaluated["run"]["loss"] == pytest.approx(held_out["run"]["loss"])
    assert evaluated["run"]["loss"] < evaluated["base"]["loss"]

    exports = user.done("export", str(run))["exports"]
    assert {export["format"] for export in exports} == {"adapter", "safetensors"}
    merged = load_file(Path(next(e["path"] for e in exports if e["format"] == "safetensors")) / "model.safetensors")
    whole = ("--set", "export.formats=[safetensors]", "--set", "export.base=original", "--force")
    (original,) = user.done("export", str(run), *whole)["exports"]
    base = load_file(narrow_files / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (saved[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    stored, change = base[f"{name}.weight"], 32 / 4 * b @ a
    compute = getattr(torch, json.loads((run / "manifest.json").read_text())["dtype_plan"]["compute"])
    numbers = quantize_nf4(stored).dequantize(compute)
    assert torch.equal(merged[f"{name}.weight"], (numbers.float() + change).to(stored.dtype))
    into_stored = load_file(Path(original["path"]) / "model.safetensors")
    assert torch.equal(into_stored[f"{name}.weight"], (stored.float() + change).to(stored.dtype))


def test_quantized_training_is_training_of_the_dequantized_model(user: User, narrow_files: Path) -> None:
    """Losses of every step and the trained adapter: off the kernels the two take the same products."""
    user.done("train", user.recipe("packed", quantization={"method": "nf4"}))
    dense = str(dequantized_model(narrow_files, user.folder))
    user.done("train", user.recipe("dense", model={"name_or_path": dense}))
    assert user.losses("packed") == pytest.approx(user.losses("dense"), rel=1e-5)
    packed, reference = weights(user.folder / "packed"), weights(user.folder / "dense")
    for name, tensor in reference.items():
        assert float((packed[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)) < 1e-3, name
    user.done("train", user.recipe("kept", quantization={"method": "nf4", "keep_dequantized": True}))
    assert user.losses("kept") == user.losses("dense")
    user.done("train", user.recipe("plain"))
    assert user.losses("plain") != pytest.approx(user.losses("packed"), rel=1e-4)


def test_random_weights_are_quantized_as_they_are_drawn(user: User) -> None:
    recipe = user.recipe("r", model={"init": "random"}, quantization={"method": "nf4", "double_quant": False})
    first = user.done("train", recipe, "--max-steps", "2")
    again = user.done("train", recipe, "--max-steps", "2", "--set", f"run.output_dir={user.folder / 'again'}")
    assert first["train_loss"] == again["train_loss"]
    table = json.loads((user.folder / "r" / "manifest.json").read_text())["quantization"]
    assert len(table) == 2 * 7
