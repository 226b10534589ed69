"""An fp8 run is a run like any other, and trains what the dequantized model trains, within the rounding of fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import QuantizedLinear
from tests.e2e.conftest import User
from tests.quantized import quantize_linears

FP8: dict[str, Any] = {"quantization": {"method": "fp8"}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def user(stored: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return stored


def dequantized_model(source: Path, folder: Path) -> str:
    """The model with every linear weight replaced by what its fp8 form stands for."""
    plain, stored = (AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) for _ in range(2))
    quantize_linears(stored, QuantizationConfig(method="fp8"))
    with torch.no_grad():
        for name, module in stored.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.frozen_weight().dequantize(torch.float32))
    path = folder / "dequantized"
    plain.save_pretrained(path)
    for file in Path(source).iterdir():
        if file.is_file() and not (path / file.name).exists():
            (path / file.name).write_bytes(file.read_bytes())
    return str(path)


def test_an_fp8_run_saves_resumes_evaluates_and_is_exported(user: User, narrow_files: Path) -> None:
    change = {**FP8, "train": {"max_steps": 4}, "checkpoint": {"every_steps": 2}}
    assert user.done("train", user.recipe("whole", **change))["steps"] == 4
    run = user.folder / "whole"
    table = json.loads((run / "manifest.json").read_text())["quantization"]
    assert {entry["method"] for entry in table} == {"fp8"}
    assert len(table) == 2 * 7
    gate = next(entry for entry in table if entry["layer"] == "model.layers.0.mlp.gate_proj")
    assert gate["shape"] == [96, 64]
    assert gate["bytes"] == 2 * 96 * 64 + 4 * (96 + 64)
    saved = weights(run)
    assert all(".lora_A." in name or ".lora_B." in name for name in saved)

    # The same bits from a run that was cut off after its first checkpoint.
    user.goes_on_alike("whole", str(user.folder / "whole.yaml"))

    evaluated = user.done("eval", str(user.folder / "whole.yaml"), "--run", str(run))
    assert evaluated["run"]["loss"] < evaluated["base"]["loss"]

    name = "model.layers.0.self_attn.q_proj"
    low_rank = [saved[f"base_model.model.{name}.lora_{side}.weight"] for side in "BA"]
    source = load_file(narrow_files / "model.safetensors")[f"{name}.weight"]
    trained = load_file(Path(dequantized_model(narrow_files, user.folder)) / "model.safetensors")[f"{name}.weight"]
    for base, options in ((trained, ()), (source, ("--set", "export.base=original", "--force"))):
        exports = user.done("export", str(run), *options)["exports"]
        folder = Path(next(e["path"] for e in exports if e["format"] == "safetensors"))
        merged = load_file(folder / "model.safetensors")[f"{name}.weight"]
        wanted = (base.float() + 32 / 4 * low_rank[0] @ low_rank[1]).to(source.dtype)
        assert torch.equal(merged, wanted)
    assert not torch.equal(source.float(), trained)


def test_fp8_training_is_training_of_the_dequantized_model(user: User, narrow_files: Path) -> None:
    """Losses of every step within 3% (measured: 1.7%), on transformers' layers and on ours; adapters point one way."""
    user.done("train", user.recipe("dense", model={"name_or_path": dequantized_model(narrow_files, user.folder)}))
    reference, losses = weights(user.folder / "dense"), user.losses("dense")
    for kernels in ("off", "reference"):
        user.done("train", user.recipe(kernels, **FP8, model={"kernels": kernels}))
        assert user.losses(kernels) == pytest.approx(losses, rel=3e-2)
        assert user.losses(kernels) != pytest.approx(losses, rel=1e-5)  # activations were quantized
        trained = weights(user.folder / kernels)
        for name, tensor in reference.items():
            if ".lora_B." in name:  # starts at zero: all of it was learnt
                alike = torch.nn.functional.cosine_similarity(trained[name].flatten(), tensor.flatten(), dim=0)
                assert alike > 0.9, (name, float(alike))
