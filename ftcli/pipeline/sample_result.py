"""What `ftcli sample` answers: what the answers are worth, and which rows were made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftcli.evaluate.draw import Drawing
from ftcli.evaluate.selection import ScoredAnswer, alike, reaches
from ftcli.plain import LEFT_OUT, SPREAD


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A file of rows.

    Attributes:
        left_out: Prompts that none of its rows is of, by the reason.
        otherwise: Answers that the chat template writes otherwise than they were generated.
    """

    path: str
    rows: int
    left_out: Mapping[str, int]
    otherwise: int = 0


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """What the answers are worth.

    Attributes:
        mean_score, mean_best_score: Over answers, and over prompts of the best one; None where nothing was judged.
        least_score: What passes.
        pass_at_1, pass_at_n: Share of answers that pass, and of prompts with one that does; None without a least score.
        without_spread: Share of prompts whose answers all have the same score.
        truncated, empty, not_judged: Answers that only their limit ended, without text, and without a score.
        tokens: That were generated.
    """

    prompts: int
    answers: int
    mean_score: float | None
    mean_best_score: float | None
    least_score: float | None
    pass_at_1: float | None
    pass_at_n: float | None
    without_spread: float
    truncated: int
    empty: int
    not_judged: int
    tokens: int
    sft: WrittenRows | None = field(default=None, metadata=LEFT_OUT)
    pairs: WrittenRows | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What `ftcli sample` answers. ``tokens_per_second``: None where every answer was there already."""

    recipe: str
    folder: str
    run: str | None
    checkpoint: str | None
    judges: tuple[str, ...]
    sampling: Drawing
    summary: SampleSummary = field(metadata=SPREAD)
    tokens_per_second: float | None = None


class Tally:
    """Adds answers up, prompt by prompt."""

    def __init__(self, least: float | None) -> None:
        self._least = least
        self._scores: list[float] = []
        self._best: list[float] = []
        self._prompts = self._answers = self._passed = self._solved = self._alike = 0
        self._truncated = self._empty = self._not_judged = self._tokens = 0

    def note(self, answers: Sequence[ScoredAnswer], tokens: int) -> None:
        """The answers to the next prompt."""
        known = [one.score for one in answers if one.score is not None]
        passed = sum(reaches(one, self._least) for one in answers if one.score is not None)
        self._scores.append(math.fsum(known))
        self._best += [max(known)] if known else []
        self._prompts += 1
        self._answers += len(answers)
        self._passed += passed
        self._solved += passed > 0
        self._alike += alike(known)
        self._truncated += sum(one.said.cut for one in answers)
        self._empty += sum(not one.said.text.strip() for one in answers)
        self._not_judged += len(answers) - len(known)
        self._tokens += tokens

    def summary(self, sft: WrittenRows | None, pairs: WrittenRows | None) -> SampleSummary:
        """All that was noted."""
        judged = self._answers - self._not_judged
        passes = self._least is not None
        return SampleSummary(
            prompts=self._prompts,
            answers=self._answers,
            mean_score=math.fsum(self._scores) / judged if judged else None,
            mean_best_score=math.fsum(self._best) / len(self._best) if self._best else None,
            least_score=self._least,
            pass_at_1=self._passed / max(judged, 1) if passes else None,
            pass_at_n=self._solved / max(self._prompts, 1) if passes else None,
            without_spread=self._alike / max(self._prompts, 1),
            truncated=self._truncated,
            empty=self._empty,
            not_judged=self._not_judged,
            tokens=self._tokens,
            sft=sft,
            pairs=pairs,
        )
