"""A look with a budget: it stops, says where, refuses what it has seen, and keeps what is whole for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.config.data import DataConfig
from ftcli.config.evaluation import GenerateConfig
from ftcli.data.asked import room_of_task
from ftcli.data.prepare import prepare
from ftcli.data.survey import RowSurvey
from ftcli.errors import FtcliError
from ftcli.reporting import SilentReporter
from ftcli.time_limit import TimeBudget

STOPS = (1,)


class Counted(TimeBudget):
    """Is spent after a number of questions instead of seconds."""

    def __init__(self, questions: int) -> None:
        super().__init__(1e6)
        self._left = questions

    def spent(self) -> bool:
        self._left -= 1
        self.stopped = self.stopped or self._left < 0
        return self.stopped


def data_of(folder: Path, *rows: Any, **options: Any) -> DataConfig:
    path = folder / "d.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return DataConfig.model_validate({"train": [str(path)], "max_seq_len": 100, **options})


def look(data: DataConfig, tokenizer: PreTrainedTokenizerBase, budget: TimeBudget, cache: Path) -> RowSurvey:
    looking = RowSurvey(data, tokenizer, budget, cache_dir=cache, reporter=SilentReporter())
    looking.rows("data.train", data.train, STOPS)
    return looking


def test_what_is_tokenized_whole_is_kept_for_the_run(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = data_of(tmp_path, *({"text": f"row {n}"} for n in range(300)))
    looking = look(data, bytes_tokenizer, TimeBudget(1e6), tmp_path / "cache")
    assert [(one.rows, one.whole) for one in looking.found] == [(300, True)]
    found = prepare(data.train, data, bytes_tokenizer, STOPS, cache_dir=tmp_path / "cache")
    assert found.from_cache == (True,)


def test_a_spent_budget_leaves_no_part_behind(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = data_of(tmp_path, *({"text": f"row {n}"} for n in range(1000)), {"text": 5})
    looking = look(data, bytes_tokenizer, Counted(2), tmp_path / "cache")
    (one,) = looking.found
    assert (one.whole, looking.failures) == (False, [])
    assert 16 <= one.rows < 1000
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_what_was_seen_to_be_wrong_is_refused_though_the_budget_is_spent(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"text": 5}, *({"text": f"row {n}"} for n in range(999))]
    for allowed, refused in ((0, True), (1, False), (0.0001, False)):
        data = data_of(tmp_path, *rows, max_bad_rows=allowed)
        looking = look(data, bytes_tokenizer, Counted(2), tmp_path / "cache")
        assert bool(looking.failures) == refused, "of the beginning of a source a share says nothing"
    assert look(data, bytes_tokenizer, TimeBudget(1e6), tmp_path / "cache").failures, "it does of the whole"


def test_prompts_stop_as_well(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    data = data_of(tmp_path, *[{"prompt": "q", "answer": "a"}] * 50, {"prompt": 3, "answer": "a"})
    for questions, rows in ((1, 0), (20, 19)):
        looking = RowSurvey(data, bytes_tokenizer, Counted(questions), cache_dir=None, reporter=SilentReporter())
        looking.prompts("eval.tasks", data.train, room_of_task(data, GenerateConfig(max_new_tokens=10)))
        looking.raise_failures()
        assert [(one.rows, one.whole) for one in looking.found] == [(rows, False)]
    looking = RowSurvey(data, bytes_tokenizer, TimeBudget(1e6), cache_dir=None, reporter=SilentReporter())
    looking.prompts("eval.tasks", data.train, room_of_task(data, GenerateConfig(max_new_tokens=10)))
    with pytest.raises(FtcliError, match="FT412"):
        looking.raise_failures()
