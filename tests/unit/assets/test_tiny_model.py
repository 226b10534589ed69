"""The bundled tiny Gemma-2: loads with plain transformers, has the family's features, and knows its tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.assets import asset

FOLDER = asset("models", "tiny-gemma2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def rows(name: str, count: int) -> list[dict[str, Any]]:
    with asset("data", f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file, strict=False)]


def answers(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Greedy completions with the settings of generation_config.json alone."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    )
    output = model.generate(**batch, max_new_tokens=20, do_sample=False)
    return list(tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def test_all_its_files_are_smaller_than_8_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000


def test_it_has_what_makes_gemma2_hard() -> None:
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Gemma2ForCausalLM"]
    assert config["attn_logit_softcapping"] == 50.0
    assert config["final_logit_softcapping"] == 30.0
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["sliding_window"] < 64
    assert 0 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True


def test_its_weights_are_bfloat16_and_between_2_and_3_5_million() -> None:
    stored = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", local_files_only=True)
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.bfloat16}
    assert 2_000_000 < sum(parameter.numel() for parameter in stored.parameters()) < 3_500_000
    assert stored.get_input_embeddings().weight is stored.get_output_embeddings().weight


def test_tokenizer_and_configs_agree(model: Any, tokenizer: Any) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id == model.generation_config.bos_token_id == tokenizer.bos_token_id
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<eos>") in model.generation_config.eos_token_id


def test_it_answers_what_it_was_pretrained_on(model: Any, tokenizer: Any) -> None:
    asked = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows("tiny-pretrain-eval", 200)]
    asked = [(prompt, answer) for prompt, answer in asked if not prompt.startswith("pick")]
    found = answers(model, tokenizer, [prompt for prompt, _ in asked])
    right = sum(one == answer for one, (_, answer) in zip(found, asked, strict=True))
    assert right / len(asked) > 0.85


def test_it_cannot_do_the_smoke_task_yet(model: Any, tokenizer: Any) -> None:
    asked = [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows("smoke-eval", 200)]
    found = answers(model, tokenizer, [prompt for prompt, _ in asked])
    assert sum(one == answer for one, (_, answer) in zip(found, asked, strict=True)) / len(asked) < 0.1


def test_it_picks_a_given_number_but_not_often_the_largest(model: Any, tokenizer: Any) -> None:
    asked = rows("smoke-grpo-eval", 200)
    found = answers(model, tokenizer, [row["prompt"] for row in asked])
    offered = sum(one in row["prompt"].removeprefix("pick: ").split() for one, row in zip(found, asked, strict=True))
    right = sum(one == row["answer"] for one, row in zip(found, asked, strict=True))
    assert offered / len(asked) > 0.95
    assert 0.1 < right / len(asked) < 0.5
