"""Mixtures of experts on our layers over several ranks: each has its experts whole, or a shard of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_fsdp_families import FULL, SHARDED, TWICE, require_close
from tests.mxfp4_files import released
from tests.small_models import build
from tests.tiers import further, telling

pytestmark = pytest.mark.filterwarnings("ignore")

#: All weights, with the loss that spreads tokens over experts.
WHOLE: dict[str, Any] = merged(FULL, {"train": {"router_aux_loss_coef": 0.3}})
NF4: dict[str, Any] = {"quantization": {"method": "nf4"}}
FP8: dict[str, Any] = {"quantization": {"method": "fp8"}}
SHARED_ROWS: dict[str, Any] = {**SHARDED, "launch": {"context_parallel_size": 2}}
DDP: dict[str, Any] = {**SHARDED, "launch": {"engine": "ddp"}}


def change_of(drills: Drills, *changes: dict[str, Any], model_type: str = "qwen3_moe") -> dict[str, Any]:
    base = drills.folder / "base"
    if model_type == "gpt_oss":
        released(base, num_hidden_layers=4)
    else:
        build(model_type, num_hidden_layers=4).save_pretrained(base)
    model = {"name_or_path": str(base), "dtype": "float32", "tokenizer": "bytes", "init": "pretrained"}
    found: dict[str, Any] = {"model": {**model, "kernels": "reference"}}
    for change in changes:
        found = merged(found, change)
    return found


def require_alike(drills: Drills, alone: Path) -> None:
    for line, wanted in zip(drills.metrics("two"), drills.metrics(alone), strict=True):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert line.get(key, 0) == pytest.approx(wanted.get(key, 0), rel=1e-5), key
    require_close(drills.folder / "two", alone)


@pytest.mark.parametrize("change", telling({"16 bits": {}, "nf4": NF4, "full": WHOLE}, "nf4"))
def test_two_ranks_are_one_process_that_accumulates_twice(change: dict[str, Any], drills: Drills) -> None:
    recipe = change_of(drills, DDP, change)
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert drills.metrics("two") == drills.metrics(alone)
    result = "model" if change is WHOLE else "adapter"
    require_same_weights(drills.folder / "two" / result, alone / result)
    (file,) = (alone / result).glob("*.safetensors")
    assert any(".experts." in name for name in load_file(file))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gpt_oss", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", NF4),
        ("gpt_oss", NF4),
        ("qwen3_moe", FP8),
        ("qwen3_moe", WHOLE),
        ("ernie4_5_moe", WHOLE),
    ],
)
def test_ranks_that_share_the_weights_are_one_process(model_type: str, change: dict[str, Any], drills: Drills) -> None:
    recipe = change_of(drills, SHARDED, change, model_type=model_type)
    alone = drills.whole(**merged(recipe, TWICE))
    ranks = run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert "weights: sharded over 2 processes" in ranks.said
    assert "kernels: 5 of 5 layers on" in ranks.said
    quantized = json.loads((drills.folder / "two" / "manifest.json").read_text())["quantization"]
    assert sum(".experts." in entry["layer"] for entry in quantized) == (8 if "quantization" in change else 0)
    require_alike(drills, alone)


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["qwen3_moe", *further("gpt_oss")])
def test_ranks_that_share_rows_are_one_process(model_type: str, drills: Drills) -> None:
    """Each sends its own tokens of a row to the experts, which it has all."""
    recipe = change_of(drills, SHARED_ROWS, model_type=model_type)
    alone = drills.whole(**merged(recipe, {"launch": {"context_parallel_size": 1}}))
    ranks = run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert "each row on 2 processes" in ranks.said
    require_alike(drills, alone)
