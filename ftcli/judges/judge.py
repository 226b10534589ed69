"""One interface to every judge, of a reward or of a task: opened once and asked any number of times."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ftcli.config.evaluation import JudgeConfig, OnError, RewardConfig, TaskConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.judges.builtin import built_in
from ftcli.judges.reward_model import classifier_files
from ftcli.judges.user import file_of, open_function
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, JudgeScores, Verdict
from ftcli.paths import expanded, is_file

#: What is judged, how messages name it, and the code of its failures.
_KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"reward": ("the reward", "FT455"), "task": ("the judge", "FT765")}
)


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward's or a task's judge. ``name`` is that of the built-in, or ``path.py:function``."""

    name: str
    kind: Literal["reward", "task"]
    on_error: OnError
    ask: Callable[[CompletionBatch], list[Verdict]]

    def scores(self, batch: CompletionBatch) -> JudgeScores:
        """One number for each completion.

        Raises:
            FtcliError: FT455 for rewards, FT765 for tasks (exit 4), where completions cannot be judged and
                ``on_error`` is ``stop``, or a function returns no list of as many numbers.
        """
        verdicts = self.ask(batch)
        failed = tuple(place for place, verdict in enumerate(verdicts) if isinstance(verdict, FailedJudgement))
        if not failed:
            return JudgeScores([v for v in verdicts if not isinstance(v, FailedJudgement)])
        first = verdicts[failed[0]]
        assert isinstance(first, FailedJudgement)
        what, code = _KINDS[self.kind]
        example = f"{what} {self.name} {first.reason} for {batch.named(failed[0])}"
        if self.on_error == "stop":
            help = "fix it, or set its `on_error` to `skip` or to a number, which then scores such completions"
            origin = Origin(self.name)
            raise FtcliError.single(code, example, exit_code=ExitCode.DATA, origin=origin, help=help)
        instead = None if self.on_error == "skip" else float(self.on_error)
        return JudgeScores([instead if isinstance(v, FailedJudgement) else v for v in verdicts], failed, example)


def open_judge(config: RewardConfig | TaskConfig) -> Judge:
    """The judge that a reward or a task names.

    Raises FtcliError (exit 2): FT451, FT452 for a function that cannot be loaded, FT280 for a JSON Schema that is none.
    """
    kind: Literal["reward", "task"] = "reward" if isinstance(config, RewardConfig) else "task"
    name = judge_name(config)
    if config.file is None:
        on_error: OnError = "skip" if config.on_error is None else config.on_error
        return Judge(name, kind, on_error, built_in(config, name))
    what, code = _KINDS[kind]
    function = open_function(config.file, config.args, config.timeout, what, code)
    return Judge(config.file, kind, "stop" if config.on_error is None else config.on_error, function.verdicts)


def judge_name(config: JudgeConfig) -> str:
    """The built-in judge of a reward or a task, or "function"."""
    return config.kind if isinstance(config, TaskConfig) else config.use or "function"


def files_of(recipe: Recipe) -> dict[str, Path]:
    """The files that judge, of functions, JSON Schemas and reward models, in rewards and in tasks, by their names in
    the recipe.

    One that is not there is left out: opening its judge says so.
    """
    judges: list[JudgeConfig] = [*recipe.rewards, *recipe.eval.tasks]
    functions = {one.file.rpartition(":")[0]: file_of(one.file)[0] for one in judges if one.file is not None}
    models = [one.model for one in judges if one.model is not None and one.file is None]
    of_models = {str(path): path for model in models for path in classifier_files(model)}
    schemas = {one.json_schema: expanded(one.json_schema) for one in judges if isinstance(one.json_schema, str)}
    return {
        name: path
        for name, path in {**functions, **schemas, **of_models}.items()
        if is_file(path) and os.access(path, os.R_OK)
    }


def judging_tasks(recipe: Recipe) -> tuple[TaskConfig, ...]:
    """The tasks by which what is sampled is judged: those without rows of their own; all, where each has some."""
    return tuple(task for task in recipe.eval.tasks if not task.data) or recipe.eval.tasks


def judges_of(recipe: Recipe) -> dict[str, Judge]:
    """The judges of the recipe's tasks by the tasks' names, opened before anything that takes long.

    Raises FtcliError as :func:`open_judge`.
    """
    return {task.label: open_judge(task) for task in recipe.eval.tasks}
