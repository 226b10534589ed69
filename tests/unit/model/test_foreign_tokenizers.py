"""Tokenizers beside models of a family that transformers loads tokenizers of by a class of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.tokenizer import load_tokenizer, require_known_ids
from tests.small_models import config_of

TOKENS = 264


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Qwen2 with the bundled tokenizer's files beside it, as somebody's own; they name no unknown token."""
    config_of("qwen2", vocab_size=TOKENS).save_pretrained(tmp_path / "model")
    shutil.copytree(asset("tokenizers", "bytes"), tmp_path / "model", dirs_exist_ok=True)
    shutil.copytree(asset("tokenizers", "bytes"), tmp_path / "own")
    return tmp_path / "model"


@pytest.mark.parametrize("named", ["bytes", "own"])
def test_a_tokenizer_of_another_family_keeps_its_size_in_an_export(model: Path, named: str) -> None:
    name = str(model.parent / "own") if named == "own" else named
    used = load_tokenizer(ModelConfig(name_or_path=str(model), tokenizer=name), offline=True)
    used.save_pretrained(model)
    again: Any = AutoTokenizer.from_pretrained(model)
    assert len(again) == len(used) == TOKENS
    text = "a<|endoftext|>é<unused0>\n 7"
    assert again(text)["input_ids"] == used(text)["input_ids"]


def test_a_token_that_loading_adds_beyond_the_vocabulary_is_refused(model: Path) -> None:
    facts: Any = SimpleNamespace(vocab_size=TOKENS, name="mine")
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(model)), offline=True)
    with pytest.raises(
        FtcliError, match=r"gives '<\|endoftext\|>' the id 264, and the vocabulary of mine has 264"
    ) as caught:
        require_known_ids(tokenizer, facts)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT315", ExitCode.PREFLIGHT)
    require_known_ids(tokenizer, SimpleNamespace(vocab_size=TOKENS + 1, name="mine"))  # type: ignore[arg-type]
    require_known_ids(tokenizer, SimpleNamespace(vocab_size=None, name="mine"))  # type: ignore[arg-type]
