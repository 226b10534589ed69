"""Environments that a model acts in, by TRL's contract: a class with ``reset``, public methods that are its tools, and
``get_reward`` where it has a reward of its own.

Each instance lives in a process of its own (:mod:`ftcli.judges.worker`), which is killed when a call is late. One that
has ended is made anew: it is reset with the same row and called as it was before, so that a rollout goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.judges.judge import file_of
from ftcli.judges.process import LOAD_SECONDS, CallTimedOut, FunctionSource, Worker, WorkerGone
from ftcli.judges.verdicts import FailedJudgement, Verdict
from ftcli.plain import JsonMap, JsonObject, as_unicode

#: Calls that wait at a time.
_MOST_THREADS = 512
#: Processes that end before what they were to do is given up: a machine short of memory kills some, and a tool that
#: ends its own always will.
_PROCESSES = 4
_T = TypeVar("_T")
#: A name, and arguments by name.
Call = tuple[str, JsonObject]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer, and whether it failed."""

    name: str
    content: str
    failed: bool


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """An environment's description: its class' name, its tools as JSON Schemas, and whether it has a reward."""

    name: str
    schemas: tuple[JsonObject, ...]
    rewards: bool


class Broken(Exception):
    """The environment cannot be brought to where it was; the message says why, as a sentence about it would."""


@dataclass(slots=True)
class EnvironmentInstance:
    """One instance, for one rollout at a time.

    Attributes:
        seconds: What each call may take.
        tool_seconds: What tools have taken since the last reset.
    """

    worker: Worker
    seconds: float
    tool_seconds: float = 0.0
    _row: JsonMap | None = None
    _called: list[list[Call]] = field(default_factory=list)
    _made_in: int | None = None

    def facts(self) -> EnvironmentFacts:
        """Raises Broken, CallTimedOut, WorkerGone."""

        def described() -> tuple[JsonObject, JsonObject]:
            made = self._make()
            if "reset" not in made["parts"]:
                raise Broken("has no method reset")
            return made, self._asked("describe", seconds=LOAD_SECONDS)  # imports transformers

        made, found = _outliving(described)
        return EnvironmentFacts(made["environment"], tuple(found["schemas"]), "get_reward" in made["parts"])

    def reset(self, row: JsonMap) -> str | None:
        """Begins a rollout; what it says is the end of the last user turn. Raises Broken, CallTimedOut, WorkerGone."""
        self._row, self._called, self.tool_seconds = row, [], 0.0
        return _outliving(self._restore)

    def call(self, calls: Sequence[Call], most: int | None) -> list[ToolResult]:
        """Calls tools, none of which ends the rollout: a failure is told to the model.

        Args:
            most: Characters of a result that are kept; None: all.
        """
        began = time.monotonic()
        asked = list(calls)
        try:
            said = [ToolResult(name, as_unicode(text), failed) for (name, _), (text, failed) in zip(
                asked, self._there_asked("call", asked)["results"], strict=True
            )]  # fmt: skip
            self._called.append(asked)
        except CallTimedOut:
            said = self._failed(asked, f"no answer within {self.seconds:g} seconds")
        except (Broken, WorkerGone) as error:
            said = self._failed(asked, str(error))
        self.tool_seconds += time.monotonic() - began
        return [one if most is None else _cut(one, most) for one in said]

    def reward(self) -> Verdict:
        """The environment's own."""
        try:
            answer = self._there_asked("reward")
            if "shape" in answer:
                return FailedJudgement("returned a list, where a number up to 1e12 in size or None was expected,")
            if answer.get("bad"):
                return FailedJudgement(f"{answer['bad']['0']}, where a number up to 1e12 in size or None was expected,")
            score: float | None = answer["scores"][0]
            return score
        except CallTimedOut:
            return FailedJudgement(f"gave no reward within {self.seconds:g} seconds")
        except (Broken, WorkerGone) as error:
            return FailedJudgement(str(error))

    def state(self) -> JsonObject:
        """Its public attributes that are JSON values; none where it cannot be brought to where it was."""
        try:
            found: JsonObject = self._there_asked("state")["state"]
        except (CallTimedOut, Broken, WorkerGone):
            return {}
        return found

    def _make(self) -> JsonObject:
        made = self._asked("make", seconds=LOAD_SECONDS)
        self._made_in = self.worker.kept
        return made

    def _restore(self) -> str | None:
        """An instance that is where this one was; what its reset says."""
        self._make()
        said: str | None = self._asked("reset", dict(self._row or {}))["said"]
        for calls in self._called:
            self._asked("call", calls)
        return None if said is None else as_unicode(said)

    def _there_asked(self, what: str, *given: Any) -> JsonObject:
        """Asks the instance as it was left, in another process where its own has ended meanwhile."""

        def asked() -> JsonObject:
            if self._made_in != self.worker.kept:
                self._restore()
            return self._asked(what, *given)

        return _outliving(asked)

    def _asked(self, what: str, *given: Any, seconds: float | None = None) -> JsonObject:
        answer = self.worker.do(what, *given, seconds=seconds or self.seconds)
        if "raised" in answer:
            raise Broken(answer["raised"])
        if not ({"environment", "schemas", "said", "results", "scores", "shape", "state"} & answer.keys()):
            raise Broken("gave an answer that is not its own")
        return answer

    def _failed(self, calls: Sequence[Call], why: str) -> list[ToolResult]:
        return [ToolResult(name, as_unicode(str({"error": why})), failed=True) for name, _ in calls]


def _outliving(work: Callable[[], _T]) -> _T:
    """The result of ``work``, which is repeated where its process ends. Raises WorkerGone where that goes on."""
    for _ in range(_PROCESSES - 1):
        with suppress(WorkerGone):
            return work()
    return work()


def _cut(result: ToolResult, most: int) -> ToolResult:
    if len(result.content) <= most:
        return result
    return ToolResult(
        result.name, f"{result.content[:most]}\n({len(result.content) - most:,} characters more)", result.failed
    )


class EnvironmentPool:
    """The instances of a run, which begin one rollout after the other.

    Raises FtcliError FT472 (exit 4) where the environment cannot be made.
    """

    def __init__(self, spec: str, seconds: float) -> None:
        self._spec, self._seconds = spec, seconds
        self._instances: list[EnvironmentInstance] = []
        # Of the pool's own lifetime: a process is told to end when the thread that started it does.
        self._threads = ThreadPoolExecutor(_MOST_THREADS)
        try:
            self.facts = self._grown(1)[0].facts()
        except CallTimedOut as error:
            raise self.failure(f"was not made within {LOAD_SECONDS:g} seconds") from error
        except (Broken, WorkerGone) as error:
            raise self.failure(str(error)) from error

    def begin(
        self, rows: Sequence[JsonMap], rollouts: Sequence[str]
    ) -> tuple[list[EnvironmentInstance], list[str | None]]:
        """An instance for each row, reset with it, and what each says.

        Args:
            rollouts: What messages call each of them.

        Raises FtcliError FT472 (exit 4) where one fails.
        """
        instances = self._grown(len(rows))
        began = [self._threads.submit(one.reset, row) for one, row in zip(instances, rows, strict=True)]
        said: list[str | None] = []
        help = "call its reset yourself with the columns of that row, which it gets by name (`def reset(self, **row)`)"
        for which, one in zip(rollouts, began, strict=True):
            try:
                said.append(one.result())
            except CallTimedOut as error:
                raise self.failure(f"was not reset within {self._seconds:g} seconds for {which}", help) from error
            except (Broken, WorkerGone) as error:
                raise self.failure(f"{error} in reset, for {which}", help) from error
        return instances, said

    def submit(self, work: Any, *given: Any) -> Future[Any]:
        """Work that waits for an instance, beside everything else."""
        return self._threads.submit(work, *given)

    def close(self) -> None:
        """Ends all instances, whatever they do: the program's own end waits for the threads that wait for them."""
        for one in self._instances:
            one.worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def failure(self, why: str, help: str = "make an instance in Python yourself, and fix what it says") -> FtcliError:
        """An error that ends the run."""
        message = f"the environment {self._spec} {why}"
        return FtcliError.single("FT472", message, exit_code=ExitCode.DATA, origin=Origin(self._spec), help=help)

    def _grown(self, count: int) -> list[EnvironmentInstance]:
        path, name = file_of(self._spec)
        more = count - len(self._instances)
        if more > 0:
            self._instances += [
                EnvironmentInstance(Worker(FunctionSource(path, name)), self._seconds) for _ in range(more)
            ]
        return self._instances[:count]
