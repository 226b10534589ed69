"""The input of judges, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftcli.errors import Origin
from ftcli.rows.prompts import Prompt


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Completions that are judged together, with what is known of the row of each.

    Attributes:
        prompts: As the model saw them.
        answers: The known answers, for judges that compare with one.
        columns: What the rows lend to functions of the user's (:func:`ftcli.judges.judge.columns_of`).
        origins: Where the rows are, for messages; empty where that is not known.
        asked: The prompts as the rows have them; empty where nobody knows.
        reasoning: What the model wrote before each completion, None where nothing; empty where nobody knows.
    """

    completions: Sequence[str]
    prompts: Sequence[str] = ()
    answers: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    origins: Sequence[Origin] = ()
    reasoning: Sequence[str | None] = ()
    asked: Sequence[Prompt] = ()

    def only(self, places: Sequence[int]) -> CompletionBatch:
        """The completions at these places."""
        return CompletionBatch(
            [self.completions[at] for at in places],
            [self.prompts[at] for at in places],
            [self.answers[at] for at in places] if self.answers else (),
            {name: [values[at] for at in places] for name, values in self.columns.items()},
            [self.origins[at] for at in places] if self.origins else (),
            [self.reasoning[at] for at in places] if self.reasoning else (),
            [self.asked[at] for at in places] if self.asked else (),
        )

    def named(self, place: int) -> str:
        """One completion, for a message."""
        row = f" to {self.origins[place]}" if self.origins else ""
        return f"completion {place + 1}{row}: {self.completions[place][:200]!r}"


@dataclass(frozen=True, slots=True)
class FailedJudgement:
    """A completion that could not be judged; ``reason`` goes on from the judge's name, as in "raised ValueError"."""

    reason: str


#: Of one completion: a number; None, where the judge has no opinion; or why there is neither.
Verdict = float | None | FailedJudgement


#: A judge without code of the user's: 1.0 where a completion passes, else 0.0. It gets the completions, and one known
#: answer for each, "" for judges that read none.
Scorer = Callable[[Sequence[str], Sequence[str]], list[Verdict]]


@dataclass(frozen=True, slots=True)
class JudgeScores:
    """A number for each completion, None for those that do not count; ``failed`` are places that failed."""

    values: list[float | None]
    failed: tuple[int, ...] = ()
    #: Of the first failure, in words.
    example: str | None = None
