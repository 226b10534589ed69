"""Reward models of every kind: quantized bases, other adapters, dtypes, policies, families; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ftcli.config.load import load_recipe
from ftcli.facts.model import read_facts
from ftcli.plan.trained import trained_parameters
from tests.e2e.conftest import User, merged
from tests.e2e.test_families import folder_of
from tests.e2e.test_reward import PAIRS, require_told, scored
from tests.tiers import further, telling

SHORT = merged(PAIRS, {"train": {"max_steps": 3}, "eval": {"every_steps": None}, "checkpoint": {"every_steps": 2}})

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's remarks on some families


@pytest.fixture
def user(stored: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return stored


def trained(user: User, **change: Any) -> Path:
    """The run directory of a recipe that trains, resumes to the same bytes, and exports."""
    recipe = user.recipe("r", **merged(SHORT, change))
    user.done("train", recipe)
    user.goes_on_alike("r", recipe)
    return user.folder / "r"


KINDS: dict[str, tuple[dict[str, Any], float, float]] = {
    "DoRA": ({"lora": {"use_dora": True}}, 1e-3, 0.05),
    "dropout": ({"lora": {"dropout": 0.3}}, 1e-3, 0.05),
    "PiSSA": ({"lora": {"init_lora_weights": "pissa"}}, 1e-2, 0.05),
    "OLoRA": ({"lora": {"init_lora_weights": "olora"}}, 1e-2, 0.05),
    "rsLoRA": ({"lora": {"use_rslora": True}}, 1e-3, 0.05),
    "two layers": ({"lora": {"target_modules": ["q_proj", "down_proj"]}}, 1e-3, 0.05),
    "reference kernels": ({"model": {"kernels": "reference"}}, 1e-3, 0.05),
    "bfloat16": ({"model": {"dtype": "bfloat16"}}, 0.2, 0.2),
    "checkpointed": ({"train": {"gradient_checkpointing": True}}, 1e-3, 0.05),
    "centred": ({"reward": {"center_rewards_coefficient": 0.01}}, 1e-3, 0.05),
}


@pytest.mark.parametrize(("change", "near", "merged_near"), telling(KINDS, "DoRA", "reference kernels"))
def test_what_plain_libraries_load_scores_as_eval_says(
    change: dict[str, Any], near: float, merged_near: float, user: User
) -> None:
    run = trained(user, **change)
    told = user.done("eval", str(user.folder / "r.yaml"), "--run", str(run))
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    more = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "dtype": torch.float32}
    require_told(
        told, scored(AutoPeftModelForSequenceClassification.from_pretrained(run / "adapter", **more), tokenizer), near
    )
    user.done("export", str(run), "--format", "safetensors")
    folder = run / "export" / "safetensors"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    require_told(told, scored(model, AutoTokenizer.from_pretrained(folder)), merged_near)


@pytest.mark.parametrize("method", ["nf4", *further("fp8")])
def test_on_a_quantized_base(method: str, user: User) -> None:
    run = trained(user, quantization={"method": method})
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    assert not [entry for entry in manifest["quantization"] if entry["layer"].endswith("score")]
    done = user.done("export", str(run), "--format", "safetensors")
    assert done["exports"][0]["verification"]["compared"].startswith("every weight, scores")


def require_counted(run: Path, elements: int) -> None:
    """The plan's count of trained parameters is that of what is saved: score and no head."""
    loaded = load_recipe(run / "recipe.yaml")
    recipe = loaded.recipe
    shape = read_facts(recipe.model, offline=True, origins=loaded.origins).shape
    assert shape is not None
    assert trained_parameters(recipe, shape).elements == elements


@pytest.mark.parametrize(
    ("name", "part"),
    [("score", "score is always trained"), ("classifier", "always trained"), ("lm_head", "does not use lm_head")],
)
def test_modules_that_are_trained_anyway_or_not_used_are_refused(name: str, part: str, user: User) -> None:
    status, document = user.run("check", user.recipe("r", **merged(PAIRS, {"lora": {"modules_to_save": [name]}})))
    (found,) = [one for one in document["findings"] if one["severity"] == "error"]
    assert (status, found["code"]) == (3, "FT313")
    assert part in found["message"]


@pytest.mark.parametrize("lora", [{"r": 8}, None], ids=["LoRA", "all weights"])
def test_a_plan_has_no_head(lora: Any, user: User) -> None:
    """Of a head that is frozen and unused there is neither workspace, nor gradient, nor state of the optimizer."""
    change = {"model": {"name_or_path": "meta-llama/Llama-3.1-8B"}, "lora": lora, "data": {"max_seq_len": 1024}}
    recipes = {
        method: user.recipe(method, **merged(PAIRS, merged(change, {"train": {"method": method}})))
        for method in ("reward", "dpo")
    }
    found = {method: user.run("check", path, "--as", "b200")[1]["result"] for method, path in recipes.items()}
    parts = {method: {one["part"] for one in each["kernel_table"]} for method, each in found.items()}
    assert parts["dpo"] - parts["reward"] == {"head and loss"}
    assert parts["reward"] - parts["dpo"] == {"score and loss"}
    terms = found["reward"]["memory"]["parts"]
    assert not terms.get("head gradient")
    assert not terms.get("loss workspace")
    if lora is None:
        assert terms["optimizer"] == 8 * (8_030_261_248 - 128_256 * 4096 + 4096)


FAMILIES = ["phi3", *further("qwen3", "llama", "mistral", "gemma2", "gemma3_text")]


@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "LoRA"))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(model_type: str, lora: Any, user: User, tmp_path: Path) -> None:
    base = folder_of(model_type, tmp_path / "base")
    run = trained(user, model={"name_or_path": str(base), "dtype": "float32"}, lora=lora)
    stored = load_file(run / ("adapter/adapter_model.safetensors" if lora else "model/model.safetensors"))
    require_counted(run, sum(tensor.numel() for tensor in stored.values()))
    told = user.done("eval", str(user.folder / "r.yaml"), "--run", str(run))
    user.done("export", str(run), "--format", "safetensors")
    folder = run / "export" / "safetensors"
    weights = load_file(folder / "model.safetensors")
    assert "score.weight" in weights
    assert not [name for name in weights if name.startswith("lm_head")]
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    require_told(told, scored(model, AutoTokenizer.from_pretrained(folder)), 0.05)
