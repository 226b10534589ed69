"""Scores of sampled answers, by the recipe's rewards or the judges of its tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftcli.config.evaluation import RewardConfig, TaskConfig
from ftcli.config.recipe import Recipe
from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.judges import CALLED_WITH, columns_of, files_of, judge_name, judging_tasks, open_judge
from ftcli.methods.grpo.rewards import Reward, RewardFailures, build_rewards
from ftcli.plain import JsonObject, plain_fields
from ftcli.reporting import Reporter
from ftcli.run.inputs import fingerprint
from ftcli.tables import judges

#: Answers that judges get at once, about: whole groups, since a function may compare answers of one prompt.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one answer: the weighted sum, None if no judge had an opinion, and each judge's verdict."""

    value: float | None
    parts: tuple[float | None, ...]


class Scorer(Protocol):
    """Scores answers. Whatever else can do so, as a reward model, stands behind this."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the parts of a score."""

    @property
    def full(self) -> float | None:
        """The score of an answer that passes everything; None where scores have no such bound."""

    def settings(self) -> JsonObject:
        """All that scores depend on, beside prompts and answers."""

    def load(self) -> None:
        """Loads what takes memory, before whoever takes what is left."""

    def scores(self, places: Sequence[int], groups: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        """A score for each answer to the prompts at ``places``."""


class JudgeScorer:
    """Scores by the recipe's rewards, summed by weight; without any by the judges of its tasks, as their mean.

    Raises:
        FtcliError: As :func:`ftcli.methods.grpo.rewards.build_rewards`; FT453 (exit 4) also for a task that compares
            with known answers where a row has none.
    """

    def __init__(self, recipe: Recipe, asked: Sequence[RenderedPrompt], reporter: Reporter) -> None:
        self._recipe = recipe
        self._asked = asked
        self._reporter = reporter
        self._told: set[str] = set()
        prompts = [one.prompt for one in asked]
        self._columns = columns_of(prompts)
        self._configs: tuple[RewardConfig | TaskConfig, ...] = recipe.rewards or judging_tasks(recipe)
        most = 1.0 if recipe.grpo is None or not recipe.rewards else recipe.grpo.reward_failures.max_fraction
        self._failures = RewardFailures(most, reporter)
        if recipe.rewards:
            self._judges = build_rewards(recipe.rewards, self._columns)
            return
        tasks = judging_tasks(recipe)
        _require_answers(tasks, asked)
        lent = {name: values for name, values in self._columns.items() if name not in CALLED_WITH}
        self._columns = {"answer": [prompt.reference for prompt in prompts], **lent}
        self._judges = [
            Reward(task.label, 1 / len(tasks), open_judge(task), "answer" if _compares(task) else None)
            for task in tasks
        ]

    @property
    def names(self) -> Sequence[str]:
        """The same as :class:`Scorer`."""
        return [judge.name for judge in self._judges]

    @property
    def full(self) -> float | None:
        """The same as :class:`Scorer`: built-in judges pass or fail, but for models."""
        if any(one.file is not None or judges.row(judge_name(one)).model for one in self._configs):
            return None
        return math.fsum(max(judge.weight, 0.0) for judge in self._judges)

    def settings(self) -> JsonObject:
        """The same as :class:`Scorer`: the judges' settings, and their files by content."""
        configs = [config.model_dump(mode="json", exclude={"data", "max_rows"}) for config in self._configs]
        files = [plain_fields(fingerprint(name, path)) for name, path in files_of(self._recipe).items()]
        return {"judges": configs, "files": [[one["name"], one["sha256"]] for one in files]}

    def load(self) -> None:
        """The same as :class:`Scorer`: reward models, which are loaded when they are first asked."""
        first = self._asked[0]
        for judge, config in zip(self._judges, self._configs, strict=True):
            if config.file is None and judges.row(judge_name(config)).model:
                lent = {name: values[:1] for name, values in self._columns.items()}
                judge.scores([first.text], [""], lent, [first.prompt.row.origin], [None], [first.prompt])

    def scores(self, places: Sequence[int], groups: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        """The same as :class:`Scorer`.

        Raises:
            FtcliError: FT455, FT765 (exit 4) where a judge fails and its `on_error` is `stop`, FT456 where a reward
                fails on more answers than the recipe lets pass.
        """
        each = max(1, _AT_ONCE // max(len(groups[0]), 1))
        found: list[list[Score]] = []
        for start in range(0, len(places), each):
            found += self._batch(places[start : start + each], groups[start : start + each])
        return found

    def _batch(self, places: Sequence[int], groups: Sequence[Sequence[Answer]]) -> list[list[Score]]:
        rows = [place for place, group in zip(places, groups, strict=True) for _ in group]
        said = [one for group in groups for one in group]
        lent = {name: [values[row] for row in rows] for name, values in self._columns.items()}
        origins = [self._asked[row].prompt.row.origin for row in rows]
        texts, reasoning = [one.text for one in said], [one.reasoning for one in said]
        prompts, asked = [self._asked[row].text for row in rows], [self._asked[row].prompt for row in rows]
        by_judge: list[Sequence[float | None]] = []
        for judge in self._judges:
            scored = judge.scores(prompts, texts, lent, origins, reasoning, asked)
            self._note(judge, len(texts), len(scored.failed), scored.example)
            by_judge.append(scored.values)
        flat = iter([self._score(parts) for parts in zip(*by_judge, strict=True)])
        return [[next(flat) for _ in group] for group in groups]

    def _score(self, parts: tuple[float | None, ...]) -> Score:
        known = [judge.weight * part for judge, part in zip(self._judges, parts, strict=True) if part is not None]
        return Score(math.fsum(known) if known else None, parts)

    def _note(self, judge: Reward, judged: int, failed: int, example: str | None) -> None:
        if example is not None and judge.name not in self._told:
            self._told.add(judge.name)
            help = f"the answer {judge.becomes}; this is said once, and the result counts what was not judged"
            self._reporter.finding(Finding("FT768", example, help=help, severity="warning"))
        self._failures.add(judge.name, judged, failed)


def _compares(task: TaskConfig) -> bool:
    return task.file is None and judges.row(task.kind).compares


def _require_answers(tasks: Sequence[TaskConfig], asked: Sequence[RenderedPrompt]) -> None:
    comparing = next((task for task in tasks if _compares(task)), None)
    without = next((one.prompt.row for one in asked if one.prompt.reference is None), None)
    if comparing is not None and without is not None:
        raise FtcliError.single(
            "FT453",
            f"the task {comparing.label} compares with known answers, and this row has none",
            exit_code=ExitCode.DATA,
            origin=without.origin,
            help="add the column `answer`, or judge without one: a task with `file`, `use: regex` or `use: length`",
        )
