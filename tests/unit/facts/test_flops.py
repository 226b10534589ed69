"""Operations of a training step, counted by hand for a shape small enough to do so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.model import LoraConfig
from ftcli.facts.flops import step_flops
from ftcli.facts.model import ModelFacts, read_facts

H, F, V, LAYERS = 64, 160, 96, 3
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ATTENTION, MLP = 2 * (H * H + 2 * H * H // 2 + H * H), 2 * 3 * H * F


@pytest.fixture
def facts(load: Callable[..., Any], folder: Callable[..., Path]) -> ModelFacts:
    loaded = load(f"model: {{name_or_path: {folder('m', CONFIG)}, tokenizer: bytes}}\n")
    return read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)


def test_a_step_with_adapters(facts: ModelFacts) -> None:
    found = step_flops(facts, LoraConfig(r=4, target_modules=("gate_proj",)), seq_len=9)
    assert found is not None
    assert found.linear == LAYERS * 2 * (ATTENTION + MLP)
    assert found.adapters == LAYERS * 3 * 2 * 4 * (H + F)
    assert found.attention == LAYERS * 7 * 2 * H * 5  # a query sees five keys on average
    assert found.head == 2 * 2 * V * H
    assert found.recompute == 0


def test_full_fine_tuning_has_gradients_of_weights(facts: ModelFacts) -> None:
    found = step_flops(facts, None, seq_len=9)
    assert found is not None
    assert found.linear == LAYERS * 3 * (ATTENTION + MLP)
    assert found.adapters == 0


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("selective", 2 * 2 * H * F + 2 * 4 * (H + F)),
        (True, ATTENTION + MLP + 2 * 4 * (H + F) + 2 * 2 * H * 5),
        ("offload", ATTENTION + MLP + 2 * 4 * (H + F) + 2 * 2 * H * 5),
    ],
)
def test_what_is_run_again(policy: Any, again: int, facts: ModelFacts) -> None:
    lora = LoraConfig(r=4, target_modules=("gate_proj",))
    found = step_flops(facts, lora, seq_len=9, gradient_checkpointing=policy)
    assert found is not None
    assert found.recompute == LAYERS * again
