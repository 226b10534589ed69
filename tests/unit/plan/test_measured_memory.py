"""The estimate of families without a description against what a training step on a CPU allocates.

torch's profiler counts every allocation of the CPU's allocator: the peak over a step, and weights and optimizer state
that were there before it, are what the estimate calls allocated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ftcli.config.load import LoadedRecipe
from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.model.backbone import head_of, hidden_states
from ftcli.model.load import config_of, load_model
from ftcli.model.lora import apply_lora
from ftcli.model.lora_targets import freeze_other_parts
from ftcli.model.loss import next_token_loss
from ftcli.model.pretrained import hollow
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.run import RunPlan
from tests.estimates import plan_of
from tests.small_models import config_of as small_config

pytestmark = pytest.mark.filterwarnings("ignore")
Load = Callable[..., LoadedRecipe]

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
ROWS, TOKENS = 2, 256


def plan_for(model_type: str, load: Load, folder: Path, *overrides: str, **change: Any) -> RunPlan:
    values = small_config(model_type, **change).to_dict()
    values.pop("architectures", None)
    (folder / "config.json").write_text(json.dumps(values, default=str))
    loaded = load(
        f"model: {{name_or_path: {folder}, init: random, dtype: float32, tokenizer: bytes}}\n"
        f"data: {{train: [a.jsonl], max_seq_len: {TOKENS}}}\n",
        f"train.per_device_train_batch_size={ROWS}",
        *overrides,
    )
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    return plan_of(loaded.recipe, replace(facts, shape=None), named_device("cpu"))


def allocated(plan: RunPlan) -> int:
    """Bytes at the peak of a training step."""
    recipe = plan.recipe
    cpu = torch.device("cpu")
    model: Any = load_model(recipe.model, plan.facts, plan.dtypes, device=cpu, seed=0, offline=True)
    freeze_other_parts(model)
    if recipe.lora is not None:
        model, _ = apply_lora(model, recipe.lora, plan.dtypes, seed=0)
    model.train()
    if plan.policy.by_transformers:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.lora is not None:
            model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    ids = torch.randint(5, 250, (ROWS, TOKENS))

    def step() -> None:
        states = hidden_states(model, {"input_ids": ids})
        next_token_loss(states, head_of(model), ids, num_items=ids.numel()).loss.backward()
        del states
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    held = sum(4 * p.numel() for p in model.parameters()) + sum(8 * p.numel() for p in trained)
    return held + most


@pytest.mark.parametrize(
    ("policy", "lora"),
    [
        pytest.param("false", "lora={r: 8}", id="false-adapters", marks=pytest.mark.long),
        pytest.param("true", "lora=null", id="true-full"),
        pytest.param("true", "lora={r: 8}", id="true-adapters"),
        pytest.param("false", "lora=null", id="false-full", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("mixtral", WIDE),
        pytest.param("qwen3_moe", WIDE, marks=pytest.mark.long),
        pytest.param("gpt_oss", WIDE, marks=pytest.mark.long),
        pytest.param("olmoe", WIDE, marks=pytest.mark.long),
        pytest.param("phimoe", WIDE, marks=pytest.mark.long),
        pytest.param("glm4_moe_lite", WIDE, marks=pytest.mark.long),
        pytest.param("falcon_h1", {}, marks=pytest.mark.long),
        pytest.param("nemotron_h", {}, marks=pytest.mark.long),
        pytest.param("nemotron", WIDE, marks=pytest.mark.long),
        ("mamba2", {}),
        pytest.param("gptj", {}, marks=pytest.mark.long),
    ],
)
def test_the_estimate_is_what_a_step_allocates(
    model_type: str, change: dict[str, Any], policy: str, lora: str, load: Load, tmp_path: Path
) -> None:
    plan = plan_for(model_type, load, tmp_path, lora, f"train.gradient_checkpointing={policy}", **change)
    found = estimate_memory(plan)
    assert found is not None
    assert found.allocated_bytes == pytest.approx(allocated(plan), rel=0.1)


@pytest.mark.parametrize("lora", ["lora={r: 8}", "lora={r: 8, experts: false}"])
def test_sizes_are_those_of_the_model(lora: str, load: Load, tmp_path: Path) -> None:
    plan = plan_for("qwen3_moe", load, tmp_path, lora)
    measured, model = plan.measured, hollow(config_of(dict(plan.facts.raw)))
    assert measured.parameters == sum(p.numel() for p in model.parameters())
    settings = plan.recipe.lora
    assert settings is not None
    adapted, _ = apply_lora(model, settings, plan.dtypes, seed=0)
    assert measured.trained.elements == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    listed = sum(matrix.elements * matrix.count for matrix in measured.trained.matrices)
    assert listed == measured.trained.elements
    found = Counter(p.shape for p in adapted.parameters() if p.requires_grad)
    assert {torch.Size((m.rows, m.columns)): m.count for m in measured.trained.matrices} == found


@pytest.mark.parametrize(("model_type", "layers"), [("mixtral", 5000), ("rwkv", 0), ("rwkv", -1)])
def test_a_number_of_layers_that_cannot_be_is_refused(model_type: str, layers: int, load: Load, tmp_path: Path) -> None:
    from ftcli.errors import FtcliError

    plan = plan_for(model_type, load, tmp_path, num_hidden_layers=layers)
    with pytest.raises(FtcliError, match="FT305"):
        estimate_memory(plan)


def test_layers_that_differ_by_a_factor_are_measured_once(load: Load, tmp_path: Path) -> None:
    """DiffLlama's have one each: a model of 32 layers was measured layer by layer, and one of 1,000 without end."""
    plan = plan_for("diffllama", load, tmp_path, num_hidden_layers=6)
    activations = plan.measured.activations
    assert activations is not None
    assert [kind.count for kind in activations.kinds] == [6]
