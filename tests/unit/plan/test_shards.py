"""The memory estimate of sharded full fine-tuning against what GPUs allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.load import load_recipe
from ftcli.facts.model import read_facts
from ftcli.plan.checkpointing import choose_engine
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.preflight.checks.machine import check_sharded
from ftcli.preflight.checks.memory_and_disk import gathering_findings
from tests.estimates import estimate_of, plan_of

GIB = 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
ONE = {**LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64}
THREE = {**LLAMA, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}


@pytest.mark.parametrize(
    ("model", "batch", "seq_len", "policy", "measured"),
    [
        ("Qwen/Qwen3-4B", 2, 4096, "false", 47.81),
        ("google/gemma-2-2b", 1, 8192, "false", 32.82),
        (ONE, 4, 2048, "selective", 11.43),
        (THREE, 1, 8192, "true", 26.09),
        ("meta-llama/Llama-3.1-8B", 2, 4096, "false", 73.5),
    ],
    ids=["qwen3-4b", "gemma2-2b", "llama3.2-1b", "llama3.2-3b", "llama3.1-8b"],
)
def test_the_peak_on_each_of_two_gpus_is_as_measured(
    model: str | dict[str, Any], batch: int, seq_len: int, policy: str, measured: float, tmp_path: Path
) -> None:
    """Two H200, torch 2.11, 2026-11-22: `kernels/bench/spread_memory.py`; the last one `spread.py`."""
    if isinstance(model, dict):
        (tmp_path / "config.json").write_text(json.dumps(model))
        model = str(tmp_path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"version: 1\nmodel: {{name_or_path: {model}, dtype: bfloat16, init: random, tokenizer: bytes}}\n"
        f"data: {{train: [a.jsonl], max_seq_len: {seq_len}}}\n"
        f"train: {{per_device_train_batch_size: {batch}, gradient_checkpointing: {policy}, cuda_graphs: false}}\n"
        "launch: {engine: fsdp, num_processes: 2}\n"
    )
    loaded = load_recipe(recipe)
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    found = estimate_of(loaded.recipe, facts, "h200").allocated_bytes / GIB
    assert found == pytest.approx(measured, rel=0.06)


QWEN_32B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
#: 64 completions of 512 + 512 tokens on two GPUs.
ROLLOUTS = (
    "train: {per_device_train_batch_size: 8, gradient_accumulation_steps: 4, gradient_checkpointing: true}\n"
    "grpo: {num_generations: 8, max_prompt_length: 512, max_completion_length: 512, rewards: [{use: exact_match}]}\n"
)


@pytest.mark.parametrize(
    ("model", "adapters", "device", "whole"),
    [
        (QWEN_32B, "lora: {r: 16}\n", "h200", 32.8e9 * 2),
        (QWEN_32B, "lora: {r: 16}\n", "h100", None),  # 33 of 80 GB are its own
        ("meta-llama/Llama-3.1-70B", "lora: {r: 16}\nquantization: {method: nf4}\n", "h200", 39.5e9),
        ("meta-llama/Llama-3.1-70B", "lora: {r: 16}\n", "h200", None),
        ("meta-llama/Llama-3.1-8B", "", "h200", 16.1e9),  # trained in float32, gathered in bfloat16
    ],
    ids=["32b", "32b on less", "70b nf4", "70b", "8b full"],
)
def test_weights_are_gathered_for_a_steps_completions_where_they_fit(
    model: str | dict[str, Any],
    adapters: str,
    device: str,
    whole: float | None,
    context: Callable[..., Any],
    tmp_path: Path,
) -> None:
    if isinstance(model, dict):
        (tmp_path / "config.json").write_text(json.dumps(model))
        model = str(tmp_path)
    named = f"model: {{name_or_path: {model}, dtype: bfloat16, init: random, tokenizer: bytes}}\n"
    launch = "launch: {engine: fsdp, num_processes: 2}\n"
    asked = context(
        named + "data: {train: [a.jsonl], max_seq_len: 1024}\n" + adapters + ROLLOUTS + launch, command="grpo"
    )
    facts = read_facts(asked.recipe.model, offline=True, origins=asked.origins)
    plan = plan_of(asked.recipe, facts, device, "grpo")
    found = estimate_memory(plan)
    assert found is not None
    said = list(gathering_findings(asked, plan, found))
    cache = found.parts["key-value cache"]
    assert cache == pytest.approx(32 * 1024 * plan.shape.num_layers * 8 * 128 * 2 * 2 / 0.9, rel=0.01)
    if whole is None:
        assert found.generator == "each step"
        assert "whole weights" not in found.parts
        assert [one.code for one in said] == ["FT366"]
        return
    layer = (plan.shape.parameters - plan.shape.embedding_parameters) / plan.shape.num_layers
    share = found.parts["whole weights"] / (1 + layer / plan.shape.parameters)
    assert share == pytest.approx(whole, rel=0.03)
    assert "whole weights" in found.phases["generation"]
    assert "whole weights" not in found.phases["forward"]
    assert not said


def test_a_reference_that_follows_is_not_sharded(context: Callable[..., Any]) -> None:
    """It would be written by one process; of adapters every rank has a copy."""
    follows = ROLLOUTS.replace("{num_generations", "{beta: 0.1, sync_ref_model: true, num_generations")
    named = "model: {name_or_path: meta-llama/Llama-3.1-8B, dtype: bfloat16}\ndata: {train: [a.jsonl]}\n"

    def said(more: str, launch: str = "engine: fsdp, num_processes: 2") -> list[str]:
        asked = context(named + more + f"launch: {{{launch}}}\n", command="grpo")
        facts = read_facts(asked.recipe.model, offline=True, origins=asked.origins)
        plan = choose_engine(plan_of(asked.recipe, facts, "h200", "grpo"))
        asked = replace(asked, recipe=plan.recipe)
        return [f"{one.code} {plan.recipe.launch.engine}" for one in check_sharded(asked, plan)]

    assert said(follows) == ["FT518 fsdp"]
    assert said("lora: {r: 16}\n" + follows) == said(ROLLOUTS) == said(follows, "num_processes: 2") == []
