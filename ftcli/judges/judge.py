"""One interface to every judge, of a reward or of a task: opened once and asked any number of times.

The user's are ``path.py:function``, loaded from the file that the recipe names, each in a process of its own. What a
file defines is ``function(completions, prompts, **columns)``, which gives a number, or None, for each completion; it
may be ``async``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ftcli.assets import bundled
from ftcli.config.evaluation import JudgeConfig, OnError, RewardConfig, TaskConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError, Origin, first_line
from ftcli.judges.builtin import built_in
from ftcli.judges.endpoint import JudgeAccess
from ftcli.judges.process import LOAD_SECONDS, NOT_ITS_OWN, CallTimedOut, FunctionSource, Worker, WorkerGone
from ftcli.judges.reward_model import classifier_files
from ftcli.judges.verdicts import CompletionBatch, FailedJudgement, JudgeScores, Verdict
from ftcli.paths import expanded, is_file
from ftcli.plain import JsonMap, JsonObject
from ftcli.rows.prompts import Prompt
from ftcli.tables import layouts

#: Arguments that functions get beside columns, and get only where they take them.
CALLED_WITH = ("prompts", "completions", "completion_reasoning")
OFFERED = ("completion_reasoning", "environments")
#: Arguments that judges get beside columns; no column may have such a name.
RESERVED = frozenset(
    (
        *("prompt", "completion", "completion_ids", *CALLED_WITH),
        *("trainer_state", "log_extra", "log_metric", "environments"),
    )
)

#: Nothing from outside.
NO_ACCESS = JudgeAccess()

#: Seconds of one call, unless the recipe says otherwise.
DEFAULT_TIMEOUT = 60.0
#: So many times a call's time a batch takes at most: all together, two times one by one, and what is left together.
_ALONE_TIMES = 2.0


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's in a process of its own, with what the recipe says of it.

    ``code`` is that of the error for what is the function's fault whatever it judges, and ``what`` names it there.
    """

    spec: str
    worker: Worker
    arguments: JsonMap
    timeout: float
    what: str
    code: str

    def verdicts(self, batch: CompletionBatch) -> list[Verdict]:
        """A number for each completion, None for those that the function does not judge, and failures.

        Where it fails on all of them together, each is tried alone, and those that do not fail are judged again
        together: a function may compare completions with each other.

        Raises FtcliError: ``code`` (exit 4) when it returns anything else than a list of so many values.
        """
        count = len(batch.completions)
        together = self._call(batch, self.timeout)
        if not isinstance(together, FailedJudgement) or count == 1:
            return [together] * count if isinstance(together, FailedJudgement) else together
        alone = self._alone(batch)
        left = [place for place in range(count) if alone[place] is None]
        if len(left) == count:
            return [FailedJudgement(f"{together.reason}, though for none of {count} completions alone,")] * count
        again = self._call(batch.only(left), self.timeout) if left else []
        if isinstance(again, FailedJudgement):
            again = [again] * len(left)
        judged = dict(zip(left, again, strict=True))
        return [judged[place] if place in judged else alone[place] for place in range(count)]

    def _alone(self, batch: CompletionBatch) -> list[FailedJudgement | None]:
        """The failure of each completion that fails when it is judged alone; None for the others."""
        found: list[FailedJudgement | None] = []
        end = time.monotonic() + _ALONE_TIMES * self.timeout
        for place in range(len(batch.completions)):
            seconds = min(self.timeout, end - time.monotonic())
            one = self._call(batch.only([place]), seconds) if seconds > 0 else FailedJudgement("did not arrive in time")
            found.append(one if isinstance(one, FailedJudgement) else None)
        return found

    def _call(self, batch: CompletionBatch, seconds: float) -> list[Verdict] | FailedJudgement:
        count = len(batch.completions)
        given: JsonObject = {"completions": list(batch.completions), "prompts": list(batch.prompts)}
        given["completion_reasoning"] = list(batch.reasoning) or [None] * count
        try:
            self.worker.loaded()  # a file that is run again has its own time
            began = time.monotonic()
            self.worker.ask({**given, **batch.columns, **self.arguments}, count, offered=OFFERED, seconds=seconds)
            answer = self.worker.answer(seconds - (time.monotonic() - began))
        except CallTimedOut:
            return FailedJudgement(f"gave no answer within {seconds:g} seconds")
        except WorkerGone as error:
            return FailedJudgement(str(error))
        if "raised" in answer:
            return FailedJudgement(answer["raised"])
        if "shape" in answer:
            message = f"{self.what} {self.spec} returned {answer['shape']}, a list of {count} numbers was expected"
            raise FtcliError.single(self.code, message, exit_code=ExitCode.DATA, origin=Origin(self.spec))
        bad, scores = answer.get("bad", {}), answer.get("scores", ())
        if len(scores) != count:
            return FailedJudgement(NOT_ITS_OWN)
        return [
            FailedJudgement(f"{bad[str(place)]}, where a number up to 1e12 in size or None was expected,")
            if str(place) in bad
            else score
            for place, score in enumerate(scores)
        ]


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The columns that judges get: those that every row has, except the conversation itself, and ``answer`` from the
    row's known answer if there is no such column and every row has one.
    """
    names = set.intersection(*(set(prompt.row.fields) for prompt in prompts)) if prompts else set()
    columns = {name: [p.row.fields[name] for p in prompts] for name in sorted(names - layouts.conversation_columns())}
    if "answer" not in columns and all(prompt.reference is not None for prompt in prompts):
        columns["answer"] = [prompt.reference for prompt in prompts]
    return columns


def reserved_column(columns: Collection[str]) -> Finding | None:
    """FT454 for a column that a reward could not be handed, since GRPO uses its name itself."""
    clash = sorted(RESERVED & (set(columns) - layouts.conversation_columns()))
    if not clash:
        return None
    message = f"the data has a column named {clash[0]!r}, which GRPO uses itself"
    return Finding("FT454", message, help="rename it in the file")


#: What helps where a file fails while it is loaded.
_GUARD = "run `python {0}` and fix what it says; what only a script does belongs under `if __name__ == '__main__':`"


def file_of(spec: str) -> tuple[Path, str]:
    """File and name of ``path.py:function``; the path is relative to the current directory, or that of a bundled
    environment.
    """
    name, _, function = spec.rpartition(":")
    return bundled(name, "environments") or expanded(name), function


def open_function(spec: str, arguments: JsonMap, timeout: float | None, what: str, code: str) -> UserFunction:
    """The function named by ``path.py:function``, loaded and ready.

    The file is trusted like any script the user runs. Raises FtcliError (exit 2): FT451 no such file or function,
    FT452 the file fails when it is run.
    """
    path, function = file_of(spec)
    if not is_file(path):
        raise _unusable("FT451", f"no file at {path.absolute()}", spec, "the path is relative to the current directory")
    try:
        worker = Worker(FunctionSource(path, function))
    except OSError as error:
        message = f"{path.absolute()} cannot be read: {error.strerror or first_line(error)}"
        raise _unusable("FT451", message, spec, "make it readable, or name another file") from error
    try:
        found = worker.loaded()
    except CallTimedOut:
        found = {"raised": f"has not finished within {LOAD_SECONDS:g} seconds"}
    except WorkerGone as error:
        found = {"raised": str(error)}
    if "raised" in found:
        raise _unusable("FT452", f"{path} {found['raised']} when it was run", spec, _GUARD.format(path))
    if "has" in found:
        message = f"{path} has no function {function}; it has: {', '.join(found['has']) or 'none'}"
        raise _unusable("FT451", message, spec, "name one of them, or define it at the top level of the file")
    return UserFunction(spec, worker, arguments, timeout or DEFAULT_TIMEOUT, what, code)


def _unusable(code: str, message: str, spec: str, help: str) -> FtcliError:
    return FtcliError.single(code, message, exit_code=ExitCode.RECIPE, origin=Origin(spec), help=help)


#: What is judged, how messages name it, and the code of its failures.
_KINDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"reward": ("the reward", "FT455"), "task": ("the judge", "FT765")}
)


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward's or a task's judge. ``name`` is that of the built-in, or ``path.py:function``; ``measured`` gives
    numbers to log beside the scores since its last call.
    """

    name: str
    kind: Literal["reward", "task"]
    on_error: OnError
    ask: Callable[[CompletionBatch], list[Verdict]]
    measured: Callable[[], Mapping[str, float]] = dict

    def scores(self, batch: CompletionBatch) -> JudgeScores:
        """One number for each completion. Raises FtcliError FT455 for rewards, FT765 for tasks (exit 4), where
        completions cannot be judged and ``on_error`` is ``stop``, or a function returns no list of as many numbers.
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


def open_judge(config: RewardConfig | TaskConfig, access: JudgeAccess = NO_ACCESS) -> Judge:
    """The judge that a reward or a task names.

    Raises FtcliError (exit 2): FT451, FT452 for a function that cannot be loaded, FT280 for a JSON Schema that is none,
    FT470 where a key is not set.
    """
    kind: Literal["reward", "task"] = "reward" if isinstance(config, RewardConfig) else "task"
    name = judge_name(config)
    if config.file is None:
        on_error: OnError = "skip" if config.on_error is None else config.on_error
        ask = built_in(config, name, access)
        return Judge(name, kind, on_error, ask, getattr(ask, "measured", dict))
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
    specs = [one.file for one in judges if one.file is not None]
    if recipe.grpo is not None and recipe.grpo.environment is not None:
        specs.append(recipe.grpo.environment.file)
    functions = {spec.rpartition(":")[0]: file_of(spec)[0] for spec in specs}
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
