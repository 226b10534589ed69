"""The memory estimate of sharded full fine-tuning against what GPUs allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.load import load_recipe
from ftcli.facts.model import read_facts
from tests.estimates import estimate_of

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
