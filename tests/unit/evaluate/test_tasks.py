"""Judges of generated text: the built-in ones and the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.config import TaskConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.evaluate.tasks import Answered, JudgedRow, judge
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row


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
    assert judge(TaskConfig(**task), Answered([asked], ["q"], [completion])).score == float(right)


def answered(*completions: str) -> Answered:
    """Rows with a column ``level`` whose answers are 1, 2, 3, ..."""
    prompts = [
        Prompt(Row("tasks.jsonl", i, {"prompt": f"q{i}", "level": i}), None, f"q{i}", str(i))
        for i in range(1, len(completions) + 1)
    ]
    return Answered(prompts, [f"<q{i}>" for i in range(1, len(completions) + 1)], completions)


def test_the_score_is_the_mean_and_samples_are_kept() -> None:
    result = judge(TaskConfig(), answered("1", "two", "3", "4"))
    assert (result.name, result.use, result.score, result.rows) == ("exact_match", "exact_match", 0.75, 4)
    assert result.samples[1] == JudgedRow("<q2>", "2", "two", 0.0)
    assert len(judge(TaskConfig(), answered(*"123456789")).samples) == 8


def users(function: Callable[..., Any], *completions: str, **settings: Any) -> Any:
    return judge(TaskConfig(file="mine.py:close", **settings), answered(*completions), function)


def test_a_users_function_is_called_as_rewards_are() -> None:
    seen: dict[str, Any] = {}

    def close(completions: list[str], prompts: list[str], **columns: Any) -> list[float | None]:
        seen.update(columns, completions=completions, prompts=prompts)
        return [1, 0.5, None]

    result = users(close, "a", "b", "c", args={"strict": True})
    assert seen == {
        "completions": ["a", "b", "c"], "prompts": ["<q1>", "<q2>", "<q3>"], "answer": ["1", "2", "3"],
        "level": [1, 2, 3], "strict": True,
    }  # fmt: skip
    assert (result.name, result.use, result.score, result.rows) == ("close", "function", 0.75, 2)
    assert result.samples[2].score is None


@pytest.mark.parametrize(("function", "words"), [
    (lambda **_: 1 / 0, "raised ZeroDivisionError"),
    (lambda **_: [1.0], "1 values, a list of 2 numbers was expected"),
    (lambda **_: 1.0, "returned float, a list of 2"),
    (lambda **_: [1.0, float("nan")], "nan for completion 2"),
    (lambda **_: ["yes", 1], "'yes' for completion 1"),
])  # fmt: skip
def test_what_a_users_function_does_wrong_is_said(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(FtcliError, match="FT765") as raised:
        users(function, "a", "b")
    assert raised.value.exit_code == ExitCode.DATA
    assert words in str(raised.value)
    assert "mine.py:close" in str(raised.value)
