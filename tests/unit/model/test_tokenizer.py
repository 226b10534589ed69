"""Stop tokens of generation_config.json count, survive, and are none where a family writes them inside of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ftcli.config.model import ModelConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.facts.model import read_facts
from ftcli.model.tokenizer import align_special_tokens, load_tokenizer, stop_token_ids
from tests.unit.data.official import Official


def stops(template: str, folder: Path, config: Any, generation: Any) -> tuple[set[str], Any]:
    """The stop tokens of a model whose files name these, by their texts; and what an aligned model names."""
    tokenizer = Official(template).tokenizer
    source = Path(__file__).parents[3] / "ftcli/assets/models/tiny-gemma2/config.json"
    ids = {"eos_token_id": [tokenizer.convert_tokens_to_ids(token) for token in config]}
    tokenizer.eos_token = config[0]
    (folder / "config.json").write_text(json.dumps({**json.loads(source.read_text()), **ids}))
    brought = [tokenizer.convert_tokens_to_ids(token) for token in generation]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": brought}))
    tokenizer.save_pretrained(folder)
    facts = read_facts(ModelConfig(name_or_path=str(folder)), offline=True, origins=Origins(MapNode(None, {})))
    found = stop_token_ids(facts, tokenizer)
    model: Any = SimpleNamespace(config=LlamaConfig(), generation_config=SimpleNamespace(eos_token_id=brought))
    align_special_tokens(model, tokenizer, found)
    named = set(tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id))
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    return set(tokenizer.convert_ids_to_tokens(list(found))), named


@pytest.mark.parametrize(
    ("template", "config", "generation"),
    [
        ("gptoss", ["<|return|>"], ["<|return|>", "<|endoftext|>", "<|call|>"]),
        ("qwen3", ["<|im_end|>"], ["<|im_end|>", "<|endoftext|>"]),
        ("llama3", ["<|eot_id|>"], ["<|end_of_text|>", "<|eot_id|>"]),
        ("phi3", ["<|endoftext|>"], ["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    ],
)
def test_those_of_generation_config_count_and_are_kept(
    tmp_path: Path, template: str, config: list[str], generation: list[str]
) -> None:
    found, named = stops(template, tmp_path, config, generation)
    assert found >= set(generation)
    assert named >= set(generation)


def test_what_ends_gpt_oss_reasoning_does_not_end_its_turn(tmp_path: Path) -> None:
    found, named = stops("gptoss", tmp_path, ["<|return|>"], ["<|return|>", "<|endoftext|>", "<|call|>"])
    assert "<|end|>" not in found | named
    found, _ = stops("phi3", tmp_path, ["<|endoftext|>"], ["<|endoftext|>"])
    assert "<|end|>" in found


def test_what_a_model_came_with_stays_though_no_file_said_so() -> None:
    tokenizer = Official("qwen3").tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    brought = [ids[1], 10**6, False]  # False is 0, and token 0 may be special
    model: Any = SimpleNamespace(config=LlamaConfig(), generation_config=SimpleNamespace(eos_token_id=brought))
    tokenizer.add_special_tokens({"additional_special_tokens": [tokenizer.convert_ids_to_tokens(0)]})
    align_special_tokens(model, tokenizer, (ids[0],))
    assert model.generation_config.eos_token_id == ids


def test_new_tokens_are_added_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call looks through the whole vocabulary: one a token took minutes for some thousands."""
    calls: list[int] = []
    add = PreTrainedTokenizerFast.add_tokens

    def counted(self: Any, tokens: Any, *how: Any, **more: Any) -> int:
        calls.append(len(tokens))
        return add(self, tokens, *how, **more)

    monkeypatch.setattr(PreTrainedTokenizerFast, "add_tokens", counted)
    names = [f"<t{number}>" for number in range(50)]
    model = ModelConfig(name_or_path="bundled:tiny-gemma2", add_tokens=tuple(names))
    tokenizer = load_tokenizer(model, offline=True)
    assert calls.count(50) == 1
    assert len(calls) < 10
    first = tokenizer.convert_tokens_to_ids(names[0])
    assert tokenizer.convert_tokens_to_ids(names) == list(range(first, first + 50))
