"""Held-out rows that stand in the training data are told, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.data.prepare import prepare
from ftcli.data.tokens import TokenTable
from ftcli.train.data import also_trained

TRAINED = ["one", "two", "three", "six"]


def table(folder: Path, texts: list[str]) -> TokenTable:
    path = folder / f"{len(texts)}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    data = DataConfig.model_validate({"train": [str(path)], "max_seq_len": 64})
    tokenizer: Any = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    return prepare(data.train, data, tokenizer, (tokenizer.eos_token_id,)).sequences


@pytest.mark.parametrize(("held_out", "said"), [(["two", "ten", "six", "six", "four"], "3 of 5"), (["ten", "a"], None)])
def test_rows_on_both_sides_are_told(tmp_path: Path, held_out: list[str], said: str | None) -> None:
    found = list(also_trained(table(tmp_path, TRAINED), table(tmp_path, held_out)))
    assert [finding.code for finding in found] == ([] if said is None else ["FT468"])
    if said is not None:
        assert found[0].message.startswith(f"{said} held-out texts")
        assert str(found[0].origin).endswith("4.jsonl:2")  # the first of them that is trained on
