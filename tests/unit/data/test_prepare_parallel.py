"""Several processes give what one gives, in the same order; one that goes away is an error and not a hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ftcli.config.data import DataConfig
from ftcli.data.encode import EncodedRows, Encoder
from ftcli.data.prepare import CHUNK_ROWS, PreparedData, encode_all
from ftcli.errors import FtcliError
from ftcli.rows.row import Row

if TYPE_CHECKING:  # the processes that these tests start import this module
    from transformers import PreTrainedTokenizerBase


class Dying:
    """Ends its process, or fails, at row 300."""

    def __init__(self, how: str) -> None:
        self._how = how

    def batch(self, rows: Sequence[Row]) -> EncodedRows:
        """Does not return for the second chunk."""
        if rows[0].number > CHUNK_ROWS:
            if self._how == "killed":
                os._exit(9)
            raise ZeroDivisionError("a bug")
        raise FtcliError.single("FT421", "no template", exit_code=4)  # type: ignore[arg-type]


def rows(count: int) -> list[Row]:
    return [Row("d.jsonl", n + 1, {"text": f"row {n} " * (n % 7)} if n % 7 else {"text": 3}) for n in range(count)]


def test_the_number_of_processes_changes_nothing(
    prepared: Callable[..., PreparedData], bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    texts = [{"text": "x" * (1 + n % 150)} if n % 10 else {"text": 0} for n in range(3 * CHUNK_ROWS + 5)]
    one = prepared(texts, num_proc=1, max_bad_rows=0.2)
    two = prepared(texts, num_proc=2, max_bad_rows=0.2)
    assert list(one.sequences) == list(two.sequences)
    assert one.ledgers == two.ledgers
    assert one.ledgers[0].bad_rows == 78


def test_errors_of_a_process_arrive_as_themselves() -> None:
    with pytest.raises(FtcliError, match="FT421: no template"):
        list(encode_all(Dying("failed"), rows(10), 2))


def test_a_killed_process_is_an_error_with_its_exit_code() -> None:
    late = rows(2 * CHUNK_ROWS)[CHUNK_ROWS:]
    with pytest.raises(FtcliError, match=r"FT436.*exit code 9"):
        list(encode_all(Dying("killed"), late, 2))


def test_a_bug_in_a_process_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        list(encode_all(Dying("failed"), rows(2 * CHUNK_ROWS)[CHUNK_ROWS:], 2))


def test_no_more_processes_wait_than_there_are_chunks(bytes_tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = Encoder(bytes_tokenizer, (int(bytes_tokenizer.eos_token_id),), DataConfig(), "text")
    batches = list(encode_all(encoder, rows(3), 2))
    assert [len(batch.lengths) for batch in batches] == [2]
