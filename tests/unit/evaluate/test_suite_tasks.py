"""Judges of generated text: the built-in ones and the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from ftcli.config.evaluation import TaskConfig
from ftcli.data.reasoning import Answer
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.suite import AnsweredTask, JudgedRow, TaskResult, judge
from ftcli.judges import CompletionBatch, open_judge
from ftcli.judges.verdicts import JudgeScores
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row


def scored(task: TaskConfig, answered: AnsweredTask) -> TaskResult:
    """The task's result, with the judge that it names."""
    return judge(task, answered, open_judge(task))


@pytest.mark.parametrize(("task", "completion", "reference", "right"), [
    ({}, " 42\n", "42", True),
    ({}, "42.", "42", False),
    ({"use": "exact_match"}, "", None, True),
    ({"use": "contains"}, "it is 42, I think", "42", True),
    ({"use": "contains"}, "it is 41", " 42 ", False),
    ({"use": "regex", "pattern": r"^\d+$"}, "42", None, True),
    ({"use": "regex", "pattern": r"^\d+$"}, "forty", "42", False),
    ({"use": "regex", "pattern": "a.b"}, "a\nb", None, True),
    ({"use": "regex", "pattern": "z"}, "a" * 20_000 + "z", None, False),
    ({"use": "json_valid"}, ' {"a": [1, null, "x"]}\n', None, True),
    ({"use": "json_valid"}, "3", None, True),
    ({"use": "json_valid"}, "{'a': 1}", None, False),
    ({"use": "json_valid"}, '{"a": 1} and more', None, False),
    ({"use": "json_valid"}, '{"a": NaN}', None, False),
    ({"use": "json_valid"}, "", None, False),
    ({"use": "json_valid"}, "[" * 100_000, None, False),
])  # fmt: skip
def test_built_in_judges(task: dict[str, Any], completion: str, reference: str | None, right: bool) -> None:
    asked = Prompt(Row("tasks.jsonl", 1, {}), None, "q", reference)
    assert scored(TaskConfig(**task), AnsweredTask([asked], ["q"], [Answer(completion)])).score == float(right)


def answered(*completions: str) -> AnsweredTask:
    """Rows with a column ``level`` whose answers are 1, 2, 3, ..."""
    prompts = [
        Prompt(Row("tasks.jsonl", i, {"prompt": f"q{i}", "level": i}), None, f"q{i}", str(i))
        for i in range(1, len(completions) + 1)
    ]
    return AnsweredTask(prompts, [f"<q{i}>" for i in range(1, len(completions) + 1)], [*map(Answer, completions)])


def test_the_score_is_the_mean_and_samples_are_kept() -> None:
    result = scored(TaskConfig(), answered("1", "two", "3", "4"))
    assert (result.name, result.use, result.score, result.rows) == ("exact_match", "exact_match", 0.75, 4)
    assert result.samples[1] == JudgedRow("<q2>", "2", "two", 0.0)
    assert len(scored(TaskConfig(), answered(*"123456789")).samples) == 8


class AsReadFromRows:
    """A judge that notes what it is asked."""

    def scores(self, batch: CompletionBatch) -> JudgeScores:
        self.batch = batch
        return JudgeScores([1.0] * len(batch.completions))


def test_judges_get_the_prompts_as_the_rows_have_them() -> None:
    """A reward model renders them by its own template, not by that of the model that answered."""
    task, asked = AsReadFromRows(), answered("a", "b")
    judge(TaskConfig(), asked, cast("Any", task))
    assert task.batch.asked == asked.prompts


def users(folder: Path, body: str, *completions: str, **settings: Any) -> TaskResult:
    """The result of a task with a function of this body."""
    (folder / "mine.py").write_text(f"def close(completions, prompts, **columns):\n    {body}\n")
    return scored(TaskConfig(file=f"{folder}/mine.py:close", **settings), answered(*completions))


def test_a_users_function_is_called_as_rewards_are(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    body = f"import json; json.dump([completions, prompts, columns], open({str(seen)!r}, 'w')); return [1, 0.5, None]"
    result = users(tmp_path, body, "a", "b", "c", args={"strict": True})
    assert json.loads(seen.read_text()) == [
        ["a", "b", "c"],
        ["<q1>", "<q2>", "<q3>"],
        {"answer": ["1", "2", "3"], "completion_reasoning": [None] * 3, "level": [1, 2, 3], "strict": True},
    ]
    assert (result.name, result.use, result.score, result.rows) == ("close", "function", 0.75, 2)
    assert result.samples[2].score is None


@pytest.mark.parametrize(("body", "words"), [
    ("1 / 0", "raised ZeroDivisionError"),
    ("return [1.0]", "a list of 1 value, a list of 2 numbers was expected"),
    ("return 1.0", "returned float, a list of 2"),
    ("return [1.0, float('nan')]", "for completion 2 to tasks.jsonl:2: 'b'"),
    ("return ['yes', 1]", "returned 'yes'"),
])  # fmt: skip
def test_what_a_users_function_does_wrong_is_said(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(FtcliError, match="FT765") as raised:
        users(tmp_path, body, "a", "b")
    assert raised.value.exit_code == ExitCode.DATA
    assert words in str(raised.value)
    assert "mine.py:close" in str(raised.value)


@pytest.mark.parametrize(("on_error", "score", "rows"), [("skip", 1.0, 1), (0.0, 0.5, 2)])
def test_a_task_counts_what_its_judge_fails_on(tmp_path: Path, on_error: str | float, score: float, rows: int) -> None:
    body = "return [1.0 if text == 'a' else {}[text] for text in completions]"
    result = users(tmp_path, body, "a", "b", on_error=on_error)
    assert (result.score, result.rows, result.failed) == (score, rows, 1)
    assert f"raised KeyError: 'b' ({tmp_path}/mine.py:2) for completion 2 to tasks.jsonl:2" in str(result.failure)
    assert result.as_dict()["failed"] == 1
