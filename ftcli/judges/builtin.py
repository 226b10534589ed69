"""Judges that need no code of the user's. Completions are untrusted text: they are compared, and not run here."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ftcli.config import RewardConfig
from ftcli.config.judging import JudgeConfig
from ftcli.errors import Finding
from ftcli.judges.patterns import Pattern
from ftcli.patience import TookTooLong
from ftcli.tables import code_of, judges


class BuiltIn(Protocol):
    """Scores each completion: 1.0 where it passes, else 0.0; None where an expression was given up.

    ``answers`` has one known answer for each completion.
    """

    def __call__(self, completions: Sequence[str], answers: Sequence[str], **options: Any) -> list[float | None]: ...


class Bound(Protocol):
    """A built-in judge whose options are those of a recipe."""

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[float | None]: ...


def built_in(config: JudgeConfig, name: str) -> Bound:
    """The judge ``name`` with the options that a reward or a task gives it."""
    row = judges.row(name)
    function: BuiltIn = code_of(row.code)
    options = {key: getattr(config, key, None) for key in row.options}
    given = {key: value for key, value in options.items() if value is not None}
    return lambda completions, answers: function(completions, answers, **given)


def missing_answer(reward: RewardConfig, columns: Collection[str]) -> Finding | None:
    """FT453 for a built-in reward that compares with a column of the data, where the data does not have it."""
    if reward.use is None or not judges.row(reward.use).compares or reward.answer in columns:
        return None
    return Finding(
        "FT453",
        f"the reward {reward.use} compares with column {reward.answer!r}, which the data does not have",
        help=f"set the reward's `answer` to one of: {', '.join(sorted(columns)) or 'none'}",
    )


def exact_match(completions: Sequence[str], answers: Sequence[str], extract: str | None = None) -> list[float | None]:
    """Passes where a completion is the answer, surrounding space aside.

    With ``extract``, a regular expression, only its first group is compared (all that matches, where it has no group).
    """
    expression = Pattern(extract) if extract is not None else None
    return [_matches(text, answer, expression) for text, answer in zip(completions, answers, strict=True)]


def contains(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """Passes where the answer, without surrounding space, is somewhere in the completion."""
    return [float(answer.strip() in text) for text, answer in zip(completions, answers, strict=True)]


def regex(completions: Sequence[str], answers: Sequence[str], pattern: str) -> list[float | None]:
    """Passes where ``pattern`` is found (:meth:`ftcli.judges.patterns.Pattern.search`)."""
    expression = Pattern(pattern)
    return [_found(text, expression) for text in completions]


def length(
    completions: Sequence[str], answers: Sequence[str], max_chars: int, min_chars: int = 0
) -> list[float | None]:
    """Passes for at least ``min_chars`` and at most ``max_chars`` characters, surrounding space aside."""
    return [float(min_chars <= len(text.strip()) <= max_chars) for text in completions]


def json_valid(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """Passes for one JSON value and nothing else; NaN and Infinity are not JSON."""
    return [float(_is_json(text)) for text in completions]


def _found(text: str, expression: Pattern) -> float | None:
    try:
        return float(expression.search(text) is not None)
    except TookTooLong:
        return None


def _matches(text: str, answer: str, expression: Pattern | None) -> float | None:
    if expression is not None:
        try:
            text = _extracted(expression, text)
        except TookTooLong:
            return None
    return float(text.strip() == answer.strip())


def _extracted(expression: Pattern, text: str) -> str:
    found = expression.search(text)
    if found is None:
        return ""
    return (found.group(1) if found.groups() else found.group(0)) or ""  # a group may take no part in the match


def _is_json(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
