"""Rollouts of several turns: a model acts in environments, each of which is scored as soon as its rollout has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from ftcli.data.template import renderer_of
from ftcli.data.tool_talk import ToolTalk
from ftcli.errors import ExitCode, FtcliError
from ftcli.generation.requests import StopReason
from ftcli.job import Job
from ftcli.judges.environment import EnvironmentInstance, EnvironmentPool, ToolResult
from ftcli.judges.verdicts import FailedJudgement, Verdict
from ftcli.methods.grpo.settings import EnvironmentConfig, GrpoConfig
from ftcli.plain import JsonObject

#: No vocabulary has a token of more characters.
_MOST_CHARS = 512


@dataclass(slots=True)
class Episode:
    """One rollout.

    Attributes:
        turn: Tokens of the completion before its last turn.
        rounds, calls, failures: How often tools were asked, for how much, and how much of that failed.
        reward: The environment's own, on its way.
    """

    instance: EnvironmentInstance
    prompt: Sequence[int]
    turn: int = 0
    rounds: int = 0
    calls: int = 0
    failures: int = 0
    reward: Future[Verdict] | None = None


@dataclass(frozen=True, slots=True)
class Acting:
    """What rollouts of several turns need: instances, the template's way with tools, and the recipe's limits.

    Attributes:
        lockstep: Turns wait for each other, so that what is computed together does not depend on how fast tools are.
    """

    pool: EnvironmentPool
    talk: ToolTalk
    settings: EnvironmentConfig
    lockstep: bool


def open_acting(job: Job, grpo: GrpoConfig) -> Acting | None:
    """What rollouts of several turns need; None where the recipe names no environment.

    Raises:
        FtcliError: FT472 (exit 4) for an environment that cannot be made, FT263 (exit 2) where nothing would be
            rewarded, FT473 (exit 2) for a chat template without tools.
    """
    settings = grpo.environment
    if settings is None:
        return None
    pool = EnvironmentPool(settings.file, settings.timeout)
    if not pool.facts.rewards and not grpo.rewards:
        message = f"{settings.file} has no get_reward, and grpo.rewards is empty: nothing is rewarded"
        raise FtcliError.single("FT263", message, exit_code=ExitCode.RECIPE, help="add one of them")
    renderer = renderer_of(job.tokenizer, job.recipe.data)
    talk = ToolTalk(job.tokenizer, renderer, pool.facts.schemas, job.stops)
    return Acting(pool, talk, settings, settings.lockstep or job.device.type == "cpu")


@dataclass(slots=True)
class Episodes:
    """The turns of rollouts (:class:`ftcli.generation.requests.Turns`).

    Args:
        longest: Tokens of a completion, of all turns and what stands between them.
        places: Which rollout a completion is, by request and number.
    """

    acting: Acting
    rollouts: Sequence[Episode]
    longest: int
    places: Mapping[tuple[int, int], int]
    _said: SimpleQueue[tuple[int, int, int, Future[list[ToolResult]]]] = field(default_factory=SimpleQueue)
    _waiting: int = 0

    def ended(self, request: int, completion: int, tokens: Sequence[int], reason: StopReason) -> bool:
        """Asks tools where the turn calls some, and the rollout may still have another turn; else the reward."""
        one, settings = self.rollouts[self.places[request, completion]], self.acting.settings
        most = settings.max_tool_calling_iterations
        turn = self.acting.talk.turn(tokens[one.turn :], [*one.prompt, *tokens[: one.turn]])
        if not (turn.calls or turn.broken) or reason == "limit" or (most is not None and one.rounds >= most):
            self._finish(one)
            return False
        one.rounds += 1
        one.calls += len(turn.calls) + len(turn.broken)
        one.failures += len(turn.broken)
        asked = self.acting.pool.submit(_asked, one.instance, turn.calls, turn.broken, settings.max_response_chars)
        length = len(tokens)
        self._waiting += 1
        asked.add_done_callback(lambda done: self._said.put((request, completion, length, done)))
        return True

    def given(self, *, wait: bool) -> list[tuple[int, int, Sequence[int] | None]]:
        """What tools have said by now, as tokens."""
        count = self._waiting if wait and self.acting.lockstep else int(wait)
        if not self.acting.lockstep:
            count = max(count, self._said.qsize())
        told = [self._said.get() for _ in range(count)]
        self._waiting -= len(told)
        return [self._tokens(*one) for one in sorted(told, key=lambda one: one[:2])]

    def _tokens(
        self, request: int, completion: int, length: int, done: Future[list[ToolResult]]
    ) -> tuple[int, int, Sequence[int] | None]:
        one, results = self.rollouts[self.places[request, completion]], done.result()
        one.failures += sum(result.failed and result.name != "" for result in results)
        # What cannot fit is not tokenized: that takes seconds a megabyte.
        fits = sum(len(result.content) for result in results) <= _MOST_CHARS * (self.longest - length)
        tokens = self.acting.talk.answers([(result.name, result.content) for result in results]) if fits else []
        if not fits or length + len(tokens) >= self.longest:  # no room for another turn: it ends as it stands
            self._finish(one)
            return request, completion, None
        one.turn = length + len(tokens)
        return request, completion, tokens

    def _finish(self, one: Episode) -> None:
        if self.acting.pool.facts.rewards:
            one.reward = self.acting.pool.submit(one.instance.reward)


def _asked(
    instance: EnvironmentInstance, calls: Sequence[tuple[str, JsonObject]], broken: Sequence[str], most: int | None
) -> list[ToolResult]:
    said = instance.call(calls, most) if calls else []
    return said + [ToolResult("", str({"error": f"not a call: {text}"}), failed=True) for text in broken]


def verdict_as_json(verdict: Verdict) -> Any:
    """For other ranks."""
    return {"failed": verdict.reason} if isinstance(verdict, FailedJudgement) else verdict


def verdict_of_json(said: Any) -> Verdict:
    """What :func:`verdict_as_json` gave."""
    if isinstance(said, dict):
        return FailedJudgement(str(said["failed"]))
    found: float | None = said
    return found
