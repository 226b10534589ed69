"""Stop strings in text that comes token by token."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.generation.requests import StopCheck, StopConditions


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte: a character may be four."""
    return AutoTokenizer.from_pretrained(asset("tokenizers", "bytes"), local_files_only=True)


@pytest.mark.parametrize("stop", ["END", "fin é", "终止", "🙂", "👩‍👩‍👧 done"])
def test_a_stop_string_of_any_script_ends_with_its_last_token(tokenizer: Any, stop: str) -> None:
    tokens = tokenizer("well, 好的 🙃 then " + stop, add_special_tokens=False)["input_ids"]
    check = StopCheck(StopConditions(strings=(stop,)), tokenizer)
    assert [at for at in range(1, len(tokens) + 1) if check.stopped(tokens[:at])] == [len(tokens)]


def test_the_longest_of_several_stop_strings_is_seen_as_a_whole(tokenizer: Any) -> None:
    check = StopCheck(StopConditions(strings=("x", "终止终止")), tokenizer)
    tokens = tokenizer("终终止终止", add_special_tokens=False)["input_ids"]
    assert [check.stopped(tokens[:at]) for at in (len(tokens) - 1, len(tokens))] == [False, True]
