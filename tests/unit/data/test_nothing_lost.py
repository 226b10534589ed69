"""What a row says and ftcli does not carry out is refused, and no cache outlives the template it was made with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.data.order import mixture, rows_of
from ftcli.data.template import Renderer
from ftcli.rows.hub import _require_whole
from ftcli.rows.layouts import understand
from ftcli.rows.row import Misfit, Row

TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("layout", "fields", "word"),
    [
        ("sharegpt", {"conversations": TURNS, "images": ["a.png"]}, "1 images and 0 places"),
        ("messages", {"messages": CHAT, "images": ["a.png"]}, "1 images and 0 places"),
        ("messages", {"messages": [CHAT[0], {**CHAT[1], "thinking": "a", "reasoning": "b"}]}, "reasoning twice"),
        ("sharegpt", {"conversations": [TURNS[0], {**TURNS[1], "reasoning": ["a"]}]}, "not text"),
    ],
)
def test_turns_and_media_are_not_dropped_in_silence(layout: Any, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(Misfit, match=word):
        understand(Row("f", 1, fields), layout)


def test_reasoning_of_sharegpt_is_kept() -> None:
    row = Row("f", 1, {"conversations": [TURNS[0], {**TURNS[1], "reasoning_content": "hm"}]})
    messages = understand(row, "sharegpt").messages
    assert messages is not None
    assert messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_an_empty_column_of_media_is_no_media() -> None:
    assert understand(Row("f", 1, {"messages": CHAT, "images": []}), "messages").messages is not None


def renderer(template: Any) -> Renderer:
    tokenizer: Any = SimpleNamespace(
        chat_template=template, bos_token=None, bos_token_id=None, special_tokens_map={}, apply_chat_template=None
    )
    made = Renderer.__new__(Renderer)
    made._tokenizer, made._template = tokenizer, None
    return made


def test_a_cache_key_holds_every_template_of_a_tokenizer_and_the_date_where_it_is_shown() -> None:
    first = renderer({"default": "a", "tool_use": "b"})
    assert first.identity is not None
    assert first.identity != renderer({"default": "c", "tool_use": "b"}).identity
    assert renderer("plain").identity == "plain"
    assert renderer("{{ strftime_now('%d') }}").identity != "{{ strftime_now('%d') }}"
    assert renderer(None).identity is None


def test_equal_weights_are_interleaved_too() -> None:
    mix = mixture([100, 100], [1.0, 1.0])
    assert mix.weighted
    rows = rows_of(mix, torch.Generator().manual_seed(0))
    assert all(abs(sum(row < 100 for row in rows[:n]) - n / 2) <= 1 for n in range(1, 200))


def test_a_download_that_was_broken_off_is_not_taken_for_the_data(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00002.parquet").touch()
    with pytest.raises(OSError, match="1 of the 2 files"):
        _require_whole(tmp_path)
    (tmp_path / "train-00001-of-00002.parquet").touch()
    _require_whole(tmp_path)
