"""Families under ``launch.engine: fsdp`` whose layers are a unit of FSDP2 each: transformers' own, and Gemma-4's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills
from tests.small_models import build

SHARDED: dict[str, Any] = {
    "launch": {"engine": "fsdp"},
    "train": {"max_steps": 3, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 3, "per_device_eval_batch_size": 2, "samples": 1, "generate": {"max_new_tokens": 2}},
    "checkpoint": {"every_steps": 3},
}
TWICE: dict[str, Any] = {"train": {"gradient_accumulation_steps": 2}}
FULL: dict[str, Any] = {"lora": None, "train": {"learning_rate": 1e-4}}
#: Layers that see everything, with heads of their own, and values that are keys, among the first two, which are checked
#: alone; and behind them, as released models have them. Shared keys.
TYPES: dict[str, dict[str, Any]] = {
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
}
BEHIND = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
AGAIN: dict[str, Any] = {"train": {"gradient_checkpointing": True}}


def change_of(drills: Drills, model_type: str, change: dict[str, Any], **built: Any) -> dict[str, Any]:
    base = drills.folder / "base"
    build(model_type, num_hidden_layers=4, **(TYPES.get(model_type, {}) | built)).save_pretrained(base)
    model = {"name_or_path": str(base), "dtype": "float32", "tokenizer": "bytes", "init": "pretrained"}
    return merged(merged(SHARDED, {"model": model}), change)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        pytest.param("qwen3_moe", {}, id="experts, adapters"),
        pytest.param(
            "gemma4_unified_text", {"model": {"kernels": "reference"}}, id="heads of two sizes, on the kernels"
        ),
        pytest.param(
            "gemma4_unified_text",
            merged(merged(FULL, AGAIN), {"model": {"kernels": "reference"}}),
            id="heads of two sizes, full, layers again",
        ),
        pytest.param(
            "gemma4_text", {"model": {"kernels": "reference"}}, id="inputs of layers' own, shared keys, on the kernels"
        ),
        pytest.param(
            "gemma4_text",
            merged(merged(FULL, AGAIN), {"model": {"kernels": "reference"}}),
            id="inputs of layers' own, shared keys, full, layers again",
        ),
        pytest.param("mamba2", FULL, id="state space, full"),
        pytest.param(
            "falcon_h1",
            merged({"quantization": {"method": "nf4"}}, AGAIN),
            id="hybrid, nf4, layers again",
        ),
        pytest.param("gpt_oss", merged(FULL, AGAIN), id="sinks and biases, full, layers again"),
    ],
)
def test_two_ranks_are_one_process_that_accumulates_twice(
    model_type: str, change: dict[str, Any], drills: Drills
) -> None:
    recipe = change_of(drills, model_type, change)
    alone = drills.whole(**merged(recipe, TWICE))
    ranks = run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert "weights: sharded over 2 processes" in ranks.said
    for line, wanted in zip(drills.metrics("two"), drills.metrics(alone), strict=True):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert line.get(key, 0) == pytest.approx(wanted.get(key, 0), rel=1e-5), key
    require_close(drills.folder / "two", alone)


def require_close(folder: Path, other: Path) -> None:
    result = "adapter" if (other / "adapter").is_dir() else "model"
    (name,) = (path.name for path in (other / result).glob("*.safetensors"))
    found, wanted = (load_file(each / result / name) for each in (folder, other))
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert torch.allclose(found[key], wanted[key], rtol=1e-3, atol=2e-5), key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gemma4_unified_text", "gemma4_text"])
def test_the_first_layers_are_checked_as_they_are(model_type: str, drills: Drills) -> None:
    """Both have windows: the last layer of a model sees everything, the last of its first layers does not."""
    kernels: dict[str, Any] = {"model": {"kernels": "reference"}, "train": {"max_steps": 1}}
    recipe = change_of(drills, model_type, kernels, layer_types=BEHIND, num_kv_shared_layers=0)
    alone = drills.whole(**merged(recipe, TWICE))
    ranks = run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert "self-check" in ranks.said
    require_close(drills.folder / "two", alone)
