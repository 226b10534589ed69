"""The data that `kernels/bench/memory.py` writes for the recipes' commands is as long as the recipes allow."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.data.template import Renderer
from ftcli.model.tokenizer import load_tokenizer
from ftcli.rows.prompts import prompts_of
from tests.rows import read_rows

BENCH = Path(__file__).resolve().parents[3] / "kernels" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    worker = importlib.import_module("memory_worker")
    cases = importlib.import_module("memory_cases").recipe_cases()
    return {"worker": worker, **{case.name: case for case in cases}}


def test_texts_fill_the_rows_and_batches(bench: dict[str, Any], tmp_path: Path) -> None:
    path = bench["worker"].write_texts(bench["gemma2-2b"].loaded(), tmp_path / "rows.jsonl", 4)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert len(texts) == 4 * 4  # of the larger of both batches
    assert {len(text) for text in texts} == {2046}  # and a first and a last token
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["mistral-7b-grpo", "smoke-grpo"])
def test_prompts_reach_the_longest_length_and_are_padded(name: str, bench: dict[str, Any], tmp_path: Path) -> None:
    loaded = bench[name].loaded()
    path = bench["worker"].write_prompts(loaded, tmp_path / "rows.jsonl", 8)
    tokenizer = load_tokenizer(loaded.recipe.model, offline=True)
    renderer = Renderer(tokenizer, loaded.recipe.data.chat_template)
    prompts = prompts_of(read_rows(DatasetConfig(path=str(path))), loaded.recipe.data.format)
    lengths = [len(tokenizer(renderer.prompt(p), add_special_tokens=False)["input_ids"]) for p in prompts]
    assert len(lengths) == 8
    assert max(lengths) == loaded.recipe.grpo.max_prompt_length
    assert min(lengths) < max(lengths)
