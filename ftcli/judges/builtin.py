"""Judges that need no code of the user's. Completions are untrusted text: they are compared, and not run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from ftcli.config.evaluation import JudgeConfig, RewardConfig
from ftcli.errors import Finding
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, Scorer, Verdict
from ftcli.tables import code_of, judges
from ftcli.time_limit import TookTooLong, limited_time

#: An expression sees only this much of a completion, so that a slow one cannot hold up training.
MAX_MATCHED_CHARS = 20_000
#: And is given up after so long.
SECONDS = 1.0


class Pattern:
    """A regular expression that a reward or a task names. Raises re.error where it is none."""

    def __init__(self, expression: str) -> None:
        self._compiled = re.compile(expression, re.DOTALL)

    def search(self, text: str) -> re.Match[str] | None:
        """The first match anywhere in the first 20,000 characters; ``.`` matches line breaks too.

        Raises TookTooLong after a second, where this is the main thread: only there a signal can end a search.
        """
        with limited_time(SECONDS):
            return self._compiled.search(text[:MAX_MATCHED_CHARS])


def built_in(config: JudgeConfig, name: str) -> Callable[[CompletionBatch], list[Verdict]]:
    """The judge ``name`` with the options that a reward or a task gives it."""
    row = judges.row(name)
    options = {key: getattr(config, key, None) for key in row.options}
    made = code_of(row.code)(**{key: value for key, value in options.items() if value is not None})
    if row.model:
        of_batch: Callable[[CompletionBatch], list[Verdict]] = made
        return of_batch
    scorer: Scorer = made
    return lambda batch: scorer(batch.completions, batch.answers)


def missing_answer(reward: RewardConfig, columns: Collection[str]) -> Finding | None:
    """FT453 for a built-in reward that compares with a column of the data, where the data does not have it."""
    if reward.use is None or not judges.row(reward.use).compares or reward.answer in columns:
        return None
    return Finding(
        "FT453",
        f"the reward {reward.use} compares with column {reward.answer!r}, which the data does not have",
        help=f"set the reward's `answer` to one of: {', '.join(sorted(columns)) or 'none'}",
    )


def exact_match(extract: str | None = None) -> Scorer:
    """Passes where a completion is the answer, surrounding space aside.

    With ``extract``, a regular expression, only its first group is compared (all that matches, where it has no group).
    """
    expression = Pattern(extract) if extract is not None else None

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [_matches(text, answer, expression) for text, answer in zip(completions, answers, strict=True)]

    return score


def contains() -> Scorer:
    """Passes where the answer, without surrounding space, is somewhere in the completion."""

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [float(answer.strip() in text) for text, answer in zip(completions, answers, strict=True)]

    return score


def regex(pattern: str) -> Scorer:
    """Passes where ``pattern`` is found (:meth:`ftcli.judges.builtin.Pattern.search`)."""
    expression = Pattern(pattern)

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [_found(text, expression) for text in completions]

    return score


def length(max_chars: int, min_chars: int = 0) -> Scorer:
    """Passes for at least ``min_chars`` and at most ``max_chars`` characters, surrounding space aside."""

    def score(completions: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        return [float(min_chars <= len(text.strip()) <= max_chars) for text in completions]

    return score


_GIVEN_UP = FailedJudgement(f"has an expression that was given up after {SECONDS:g} s")


def _found(text: str, expression: Pattern) -> Verdict:
    try:
        return float(expression.search(text) is not None)
    except TookTooLong:
        return _GIVEN_UP


def _matches(text: str, answer: str, expression: Pattern | None) -> Verdict:
    if expression is not None:
        try:
            text = _extracted(expression, text)
        except TookTooLong:
            return _GIVEN_UP
    return float(text.strip() == answer.strip())


def _extracted(expression: Pattern, text: str) -> str:
    found = expression.search(text)
    if found is None:
        return ""
    return (found.group(1) if found.groups() else found.group(0)) or ""  # a group may take no part in the match
