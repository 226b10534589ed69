"""Tokenized once: a second run reads files and tokenizes nothing; whatever matters makes another entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.data.prepare import PreparedData
from ftcli.errors import FtcliError

Prepare = Callable[..., PreparedData]
TEXTS = [{"text": f"row {n}"} for n in range(5)]


def same(first: PreparedData, second: PreparedData) -> bool:
    return list(first.sequences) == list(second.sequences) and first.ledgers == second.ledgers


def test_a_second_run_does_not_call_the_tokenizer(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = prepared(TEXTS, cache_dir=cache)
    assert first.from_cache == (False,)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("rows were encoded again")

    monkeypatch.setattr("ftcli.data.prepare.encode_all", refuse)
    monkeypatch.setattr("ftcli.data.prepare.iterate", refuse)
    monkeypatch.setattr(type(bytes_tokenizer), "apply_chat_template", refuse)
    second = prepared(TEXTS, cache_dir=cache)
    assert second.from_cache == (True,)
    assert same(first, second)
    assert [str(tokens.row.origin) for tokens in second.sequences] == [f"{tmp_path}/d0.jsonl:{n}" for n in range(1, 6)]


@pytest.mark.parametrize(
    "change",
    [
        {"max_seq_len": 100},
        {"overlong": "drop"},
        {"loss_on": "all"},
        {"max_bad_rows": 1},
        {"chat_template": "chatml"},
        {"sources": [{"max_rows": 4}]},
        {"sources": [{"columns": {"text": "text"}}]},
        {"rows": [*TEXTS[:4], {"text": "other"}]},
    ],
)
def test_every_setting_that_matters_is_part_of_the_key(
    prepared: Prepare, tmp_path: Path, change: dict[str, Any]
) -> None:
    cache = tmp_path / "cache"
    prepared(TEXTS, cache_dir=cache)
    rows = change.pop("rows", TEXTS)
    assert prepared(rows, cache_dir=cache, **change).from_cache == (False,)
    assert prepared(TEXTS, cache_dir=cache, num_proc=1).from_cache == (True,)


def test_another_tokenizer_is_another_entry(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    prepared(TEXTS, cache_dir=cache)
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(bytes_tokenizer.name_or_path)
    other.add_tokens(["row"])
    found = prepared(TEXTS, cache_dir=cache, tokenizer=other)
    assert found.from_cache == (False,)
    assert len(found.sequences[0].input_ids) < len(prepared(TEXTS, cache_dir=cache).sequences[0].input_ids)


DAMAGES = {
    "cut": lambda entry: (entry / "ids.bin").write_bytes((entry / "ids.bin").read_bytes()[:-4]),
    "zeroed": lambda entry: (entry / "ids.bin").write_bytes(bytes((entry / "ids.bin").stat().st_size)),
    "one bit": lambda entry: flip(entry / "spans.bin"),
    "index": lambda entry: flip(entry / "index.bin"),
    "gone": lambda entry: (entry / "spans.bin").unlink(),
    "no json": lambda entry: (entry / "meta.json").write_text("{"),
    "no map": lambda entry: (entry / "meta.json").write_text("[1]"),
    "empty map": lambda entry: (entry / "meta.json").write_text("{}"),
    "deep": lambda entry: (entry / "meta.json").write_text("[" * 100_000),
    "no text": lambda entry: (entry / "meta.json").write_bytes(bytes(range(128, 256))),
    "counts": lambda entry: replace(entry / "meta.json", '"supervised_tokens": ', '"supervised_tokens": 1'),
    "sizes": lambda entry: replace(entry / "meta.json", '"sizes": {', '"sizes": {"more": 1, '),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew_and_said(prepared: Prepare, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    expected = list(prepared(TEXTS, cache_dir=cache).sequences)  # read now: cutting a mapped file changes it
    (entry,) = (cache / "tokens").iterdir()
    DAMAGES[damage](entry)
    told = Told()
    second = prepared(TEXTS, cache_dir=cache, reporter=told)
    assert second.from_cache == (False,)
    assert list(second.sequences) == expected
    assert "damaged" in told.warnings[0]
    assert prepared(TEXTS, cache_dir=cache).from_cache == (True,)


@pytest.mark.skipif(os.getuid() == 0, reason="root may delete anything")
def test_a_damaged_entry_that_cannot_be_deleted_is_not_used(prepared: Prepare, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = list(prepared(TEXTS, cache_dir=cache).sequences)
    (entry,) = (cache / "tokens").iterdir()
    flip(entry / "ids.bin")
    entry.chmod(0o500)
    found = prepared(TEXTS, cache_dir=cache, reporter=Told())
    entry.chmod(0o700)
    assert list(found.sequences) == expected


def test_a_damaged_entry_that_stays_is_not_used(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    expected = list(prepared(TEXTS, cache_dir=cache).sequences)
    (entry,) = (cache / "tokens").iterdir()
    flip(entry / "ids.bin")
    monkeypatch.setattr("ftcli.data.cache.shutil.rmtree", lambda *_, **__: None)
    assert list(prepared(TEXTS, cache_dir=cache, reporter=Told()).sequences) == expected


def test_a_cache_that_cannot_be_written_costs_a_warning_only(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = Told()
    found = prepared(TEXTS, cache_dir=tmp_path / "file", reporter=told)
    assert len(found.sequences) == 5
    assert "going on without" in told.warnings[0]


def test_nothing_is_kept_of_rows_that_are_refused(prepared: Prepare, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(FtcliError, match="FT412"):
        prepared([*TEXTS, {"text": 1}], cache_dir=cache)
    assert list((cache / "tokens").iterdir()) == []


def test_skipped_rows_are_told_again_by_a_second_run(prepared: Prepare, tmp_path: Path) -> None:
    rows = [*TEXTS, {"text": 1}]
    first = prepared(rows, cache_dir=tmp_path / "cache", max_bad_rows=1)
    second = prepared(rows, cache_dir=tmp_path / "cache", max_bad_rows=1)
    assert second.from_cache == (True,)
    assert first.findings == second.findings
    assert first.findings[0].code == "FT441"


class Told:
    """A reporter that remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def info(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Remembers."""
        self.warnings.append(text)

    def finding(self, finding: Any) -> None:
        """Nothing."""

    def progress(self, total: int | None, description: str) -> Any:
        """Counts nothing."""
        from ftcli.reporting import SilentReporter

        return SilentReporter().progress(total, description)
