"""All faults of all rows in one go; a threshold decides between an error and a counted skip; the account adds up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ftcli.data.ledger import mostly_untrained
from ftcli.data.prepare import PreparedData
from ftcli.errors import FtcliError
from ftcli.rows.limits import Allowance

Prepare = Callable[..., PreparedData]
GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SYSTEM = {"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]}
EMPTY = {"messages": [{"role": "user", "content": "q"}]}
SURROGATE = '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]}'
LONG = {"messages": [{"role": "user", "content": "q" * 300}, {"role": "assistant", "content": "a"}]}
MIXED = [GOOD, "{", SYSTEM, EMPTY, GOOD, "[1]", SURROGATE]


def test_faults_of_every_stage_and_file_come_together(prepared: Prepare, tmp_path: Path) -> None:
    with pytest.raises(FtcliError) as caught:
        prepared(MIXED, [LONG, GOOD, {"other": 1}])
    told = [(f.origin.source[-8:], f.origin.line, f.code) for f in caught.value.findings if f.origin]
    assert told == [
        ("d0.jsonl", 2, "FT403"),
        ("d0.jsonl", 3, "FT425"),
        ("d0.jsonl", 4, "FT412"),
        ("d0.jsonl", 6, "FT403"),
        ("d0.jsonl", 7, "FT412"),
        ("d1.jsonl", 1, "FT431"),
        ("d1.jsonl", 3, "FT412"),
    ]
    assert "lone surrogate" in caught.value.findings[4].message


@pytest.mark.parametrize(("allowed", "skipped"), [(5, True), (0.72, True), (4, False), (0.7, False)])
def test_a_share_or_a_number_of_bad_rows_is_skipped_and_counted(
    prepared: Prepare, allowed: float, skipped: bool
) -> None:
    if not skipped:
        with pytest.raises(FtcliError) as caught:
            prepared(MIXED, max_bad_rows=allowed)
        assert len(caught.value.findings) == 5
        return
    found = prepared(MIXED, max_bad_rows=allowed)
    ledger = found.ledgers[0]
    assert (ledger.rows, ledger.kept_rows, ledger.bad_rows) == (7, 2, 5)
    assert ledger.bad_codes == {"FT403": 2, "FT425": 1, "FT412": 2}
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("FT441", "warning")
    assert "5 of 7 rows" in finding.message
    assert [tokens.row.number for tokens in found.sequences] == [1, 5]


def test_overlong_rows_are_no_bad_rows(prepared: Prepare) -> None:
    with pytest.raises(FtcliError, match="FT431"):
        prepared([GOOD, LONG], max_bad_rows=1.0)
    assert prepared([GOOD, LONG], overlong="drop").ledgers[0].dropped_rows == 1


def test_when_nothing_is_left_it_says_why(prepared: Prepare) -> None:
    with pytest.raises(FtcliError, match=r"FT404.*1 too long, 1 broken"):
        prepared([LONG, EMPTY], overlong="drop", max_bad_rows=1)
    with pytest.raises(FtcliError, match=r"FT404.*holds no rows"):
        prepared([])
    with pytest.raises(FtcliError, match="FT403"):
        prepared(["{"])


def test_training_little_of_the_tokens_is_said_with_the_reason(prepared: Prepare) -> None:
    assert mostly_untrained(prepared([GOOD]).ledgers, "auto") is None
    chat = [{"role": "user", "content": "q" * 150}, {"role": "assistant", "content": "a"}]
    masked = mostly_untrained(prepared([{"messages": chat}]).ledgers, "auto")
    assert masked is not None
    assert (masked.code, masked.severity) == ("FT442", "note")
    text: dict[str, Any] = {"text": "x" * 1000}
    assert mostly_untrained(prepared([text], overlong="truncate", max_seq_len=900).ledgers, "auto") is None
    cut = mostly_untrained(prepared([text], overlong="truncate").ledgers, "auto")
    assert cut is not None
    assert cut.severity == "warning"
    assert "20% of its 1,002 tokens" in cut.message
    assert "80% are cut" in cut.message


def test_a_row_that_calls_its_answer_bad_is_refused_however_late(prepared: Prepare, tmp_path: Path) -> None:
    rows = [{**GOOD, "label": n < 99, "id": n} for n in range(100)]
    with pytest.raises(FtcliError, match=r"FT408.*'label'") as caught:
        prepared(rows, cache_dir=tmp_path / "cache", max_bad_rows=50)
    (finding,) = caught.value.findings
    assert finding.origin is not None
    assert finding.origin.line == 100
    waived = prepared(rows, sources=[{"remove_columns": ["label"]}], cache_dir=tmp_path / "cache")
    assert (waived.ledgers[0].kept_rows, waived.ledgers[0].columns_unread) == (100, ["id"])
    with pytest.raises(FtcliError, match="FT408"):  # what was waived is not found in the cache by others
        prepared(rows, cache_dir=tmp_path / "cache")


def test_the_account_adds_up(prepared: Prepare) -> None:
    texts = [{"text": "x" * n} for n in (10, 50, 300, 500)]
    ledger = prepared(texts, overlong="truncate").ledgers[0]
    assert ledger.all_tokens == 860 + 2 * 4  # BOS and end of each
    assert ledger.tokens + ledger.cut_tokens + ledger.dropped_tokens == ledger.all_tokens
    assert ledger.length_quantiles == {"min": 12, "p50": 52, "p90": 502, "p99": 502, "max": 502}
    assert ledger.truncated_rows == 2


def test_a_tokenizer_that_cannot_place_its_tokens_is_refused(prepared: Prepare) -> None:
    class Slow:
        is_fast = False
        bos_token = bos_token_id = eos_token = chat_template = None
        special_tokens_map: ClassVar[dict[str, str]] = {}

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0] * len(text)}

        def get_vocab(self) -> dict[str, int]:
            return {}

    with pytest.raises(FtcliError, match="FT435: Slow cannot say"):
        prepared([{"text": "x"}], tokenizer=Slow())


def test_a_conversation_of_thousands_of_turns_is_too_long_at_once(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work on its turns, each of which the template would write once more, would be for nothing."""
    run, written = Allowance.run, []

    def counted(allowance: Allowance, characters: int, write: Callable[[], str]) -> str:
        written.append(characters)
        return run(allowance, characters, write)

    monkeypatch.setattr(Allowance, "run", counted)
    long = {"messages": GOOD["messages"] * 2500}
    with pytest.raises(FtcliError) as caught:
        prepared([long, GOOD, "{"], max_bad_rows=5)
    assert len(written) < 20
    assert [(f.origin.line, f.code) for f in caught.value.findings if f.origin] == [(1, "FT431")]


def test_a_conversation_of_many_turns_that_fits_is_trained_whole(prepared: Prepare) -> None:
    found = prepared([{"messages": GOOD["messages"] * 101}], max_seq_len=5000)
    assert [tokens.labels.count(4) for tokens in found.sequences] == [101]
