"""Modules that are trained whole, from training to export, in each dtype."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import User
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import tokenizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["bfloat16", *further("float32", "float16")])
def test_trained_measured_and_merged_with_the_same_numbers(dtype: str, user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build("llama").to(getattr(torch, dtype)).save_pretrained(base)
    tokenizer().save_pretrained(base)
    path = user.recipe(
        model={"name_or_path": str(base), "dtype": dtype},
        lora={"modules_to_save": ["norm", "lm_head"]},
        train={"max_steps": 2, "learning_rate": 1e-3},
        export={"formats": ["safetensors"]},
    )
    trained = user.done("train", path)
    adapter = load_file(user.folder / "r" / "adapter" / "adapter_model.safetensors")
    before = load_file(base / "model.safetensors")
    assert adapter["base_model.model.lm_head.weight"].dtype == torch.float32
    # A step of 1e-3 is smaller than half of bfloat16's at 1, which is where norms begin.
    moved = adapter["base_model.model.model.norm.weight"] - before["model.norm.weight"].float()
    assert float(moved.abs().min()) > 1e-4
    assert float(moved.abs().max()) < 3e-3
    assert user.done("eval", path, "--run", str(user.folder / "r"))["run"]["loss"] == trained["eval"]["loss"]
    assert user.run("export", str(user.folder / "r"))[0] == 0
    status = json.loads((user.folder / "r" / "status.json").read_text())
    assert status["state"] == "completed"


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_from_their_float32_numbers(user: User, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build("llama").to(torch.bfloat16).save_pretrained(base)
    tokenizer().save_pretrained(base)
    path = user.recipe(
        model={"name_or_path": str(base), "dtype": "bfloat16"},
        lora={"modules_to_save": ["norm", "lm_head"]},
        train={"max_steps": 4, "learning_rate": 1e-3},
        checkpoint={"every_steps": 3},
    )
    user.done("train", path)
    adapter = user.folder / "r" / "adapter" / "adapter_model.safetensors"
    whole = load_file(adapter)
    user.cut_off("r")
    user.done("train", path)
    again = load_file(adapter)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
