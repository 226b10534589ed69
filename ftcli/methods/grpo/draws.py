"""What a rollout draws: completions of prompts, and what rewards say of them. Each rank has all of them in the end.

Where a model acts in environments, a rollout has several turns, and is scored as soon as it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.data.template import renderer_of
from ftcli.data.tool_talk import ToolTalk
from ftcli.errors import ExitCode, FtcliError
from ftcli.generation.requests import Completion, PromptImages, StopReason, cut, shown_by
from ftcli.job import Job
from ftcli.judges import Judge
from ftcli.judges.environment import EnvironmentInstance, EnvironmentPool, ToolResult
from ftcli.judges.verdicts import FailedJudgement, Verdict
from ftcli.methods.grpo.advantages import overlong_penalties, without_spread
from ftcli.methods.grpo.rewards import Reward, RewardFailures
from ftcli.methods.grpo.rollouts import Rollouts, gather_completions, gather_rest, gather_rows
from ftcli.methods.grpo.settings import EnvironmentConfig, GrpoConfig
from ftcli.methods.grpo.spans import REWARDS, ROLLOUT, Spans
from ftcli.plain import JsonObject
from ftcli.run.process_group import gather_json
from ftcli.train.parallel import SEED_STRIDE

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup

#: The reward that `grpo.overlong_buffer` adds.
OVERLONG = "soft_overlong"
#: No vocabulary has a token of more characters.
_MOST_CHARS = 512


@dataclass(slots=True)
class Episode:
    """One rollout.

    Attributes:
        turn: Tokens of the completion before its last turn.
        rounds, calls, failures: How often tools were asked, for how much, and how much of that failed.
    """

    instance: EnvironmentInstance
    prompt: Sequence[int]
    turn: int = 0
    rounds: int = 0
    calls: int = 0
    failures: int = 0
    end: Future[tuple[Verdict, JsonObject]] | None = None


@dataclass(frozen=True, slots=True)
class Acting:
    """What rollouts of several turns need: instances, the template's way with tools, and the recipe's limits.

    Attributes:
        lockstep: Turns wait for each other, so that what is computed together does not depend on how fast tools are.
        lends: Functions that reward get the state of environments.
    """

    pool: EnvironmentPool
    talk: ToolTalk
    settings: EnvironmentConfig
    lockstep: bool
    lends: bool = False


def open_acting(job: Job, grpo: GrpoConfig) -> Acting | None:
    """What rollouts of several turns need; None where the recipe names no environment.

    Raises FtcliError FT472 (exit 4) for an environment that cannot be made, FT263 (exit 2) where nothing would be
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
    lends = any(one.file is not None for one in grpo.rewards)
    return Acting(pool, talk, settings, settings.lockstep or job.device.type == "cpu", lends)


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
        rewards, lends = self.acting.pool.facts.rewards, self.acting.lends
        if rewards or lends:
            one.end = self.acting.pool.submit(_ended, one.instance, rewards, lends)


def _ended(instance: EnvironmentInstance, rewards: bool, lends: bool) -> tuple[Verdict, JsonObject]:
    """The environment's own reward, and its state before."""
    state = instance.state() if lends else {}
    return instance.reward() if rewards else None, state


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


@dataclass(frozen=True, slots=True)
class DrawnCompletion:
    """One completion.

    Attributes:
        prompt, text: Its prompt as tokens and as text.
        tokens, known: Its tokens, and their log-probabilities where they are known.
        said: Its text as rewards and people see it.
        ended: It came to an end before its longest.
        given: Places of the tokens that the model did not write.
        shown: Its text with all turns, where it has several.
        state: Of its environment at its end.
    """

    row: int
    prompt: list[int]
    text: str
    tokens: list[int]
    known: list[float]
    said: Answer
    ended: bool
    given: Sequence[int] = ()
    verdict: Verdict = None
    shown: str | None = None
    state: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions, one after the other those of each prompt, and their rewards: (completions, rewards) float32, NaN
    where a reward had no opinion.
    """

    completions: list[DrawnCompletion]
    rewards: Tensor

    def replace(self, places: Sequence[int], others: Drawn) -> None:
        """Puts others in the places of some."""
        for place, one in zip(places, others.completions, strict=True):
            self.completions[place] = one
        self.rewards[torch.tensor(places)] = others.rewards


#: The column in which an environment's reward gets what the environments have said.
_VERDICT = "verdict"


def _of_environment(acting: Acting) -> Reward | None:
    """The environment's own reward, under its class' name; None where it has none."""
    if not acting.pool.facts.rewards:
        return None
    name, settings = acting.pool.facts.name, acting.settings
    judge = Judge(f"{name}.get_reward", "reward", settings.on_error, lambda batch: list(batch.columns[_VERDICT]))
    return Reward(name, settings.weight, judge)


def _rest(one: Completion, episode: Episode) -> JsonObject:
    """What is known of a rollout beside its tokens; its end is waited for."""
    verdict, state = (None, {}) if episode.end is None else episode.end.result()
    return {
        "given": one.given,
        "turn": episode.turn,
        "rounds": episode.rounds,
        "calls": episode.calls,
        "failures": episode.failures,
        "seconds": episode.instance.tool_seconds,
        "verdict": verdict_as_json(verdict),
        "state": state,
    }


def share_of(count: int, rank: int, ranks: int) -> slice:
    """Which of so many a rank is to see to."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def shown_in(job: Job, asked: Sequence[RenderedPrompt]) -> list[PromptImages | None]:
    """What each prompt shows; images are read when completions of it are made or scored."""
    texts = [one.text for one in asked if one.images]
    if not texts:
        return [None] * len(asked)
    pixels = job.pixel_reader()
    encoded = iter(job.tokenizer(text=texts, add_special_tokens=False)["input_ids"])
    return [shown_by(n, next(encoded), one.images, pixels) if one.images else None for n, one in enumerate(asked)]


class Draws:
    """Draws completions and has them judged. All ranks call it alike.

    Attributes:
        shown: The images of each prompt, by its number.
    """

    def __init__(
        self,
        job: Job,
        grpo: GrpoConfig,
        asked: Sequence[RenderedPrompt],
        columns: Mapping[str, Sequence[Any]],
        rewards: Sequence[Reward],
        failures: RewardFailures,
        rollouts: Rollouts,
        spans: Spans,
        group: RankGroup | None,
        acting: Acting | None = None,
    ) -> None:
        self._job, self._grpo, self._asked, self._columns = job, grpo, asked, columns
        self.shown = shown_in(job, asked)
        self.failures, self.rollouts, self._spans = failures, rollouts, spans
        self._group, self._acting = group, acting
        self._own = None if acting is None else _of_environment(acting)
        rewards = self._rewards = [*rewards, *([] if self._own is None else [self._own])]
        self._rank, self._ranks = (0, 1) if group is None else (group.rank, group.size)
        self.names = [reward.name for reward in rewards] + ([OVERLONG] if grpo.overlong_buffer else [])
        weights = [reward.weight for reward in rewards] + ([grpo.overlong_penalty] if grpo.overlong_buffer else [])
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self._tokens = 0
        self._noted: list[tuple[str, float]] = []

    def with_spread(self, prompts: Sequence[int], step: int, rollout: int) -> tuple[Drawn, int]:
        """Completions of ``prompts``, where groups without spread have made way for others as often as the recipe lets
        them; and how many groups were drawn again.

        Which prompts take their place follows from the run's seed, the rollout and the round. Where none is left, the
        same one is completed again.
        """
        each, drawn, again = self._grpo.num_generations, self.draw(prompts, step), 0
        used = set(prompts)
        for turn in range(self._grpo.max_resample_times):
            alike = without_spread(drawn.rewards, self.weights, self._grpo).nonzero().flatten().tolist()
            if not alike:
                break
            generator = torch.Generator()
            generator.manual_seed(((self._job.recipe.run.seed * SEED_STRIDE + rollout) * SEED_STRIDE + turn) % 2**63)
            order = torch.randperm(len(self._asked), generator=generator).tolist()
            others = [row for row in order if row not in used][: len(alike)]
            others += [drawn.completions[group * each].row for group in alike[len(others) :]]
            used.update(others)
            drawn.replace([group * each + at for group in alike for at in range(each)], self.draw(others, step))
            again += len(alike)
        return drawn, again

    def draw(self, prompts: Sequence[int], step: int) -> Drawn:
        """Completions of prompts by their numbers, judged."""
        rows = [row for row in prompts for _ in range(self._grpo.num_generations)]
        own = share_of(len(rows), self._rank, self._ranks)
        texts = [self._asked[row].text for row in rows]
        episodes: list[Episode] = []
        self._spans.enter(ROLLOUT)
        if self._acting is not None:
            texts, episodes = self._begun(self._acting, rows, own)
        prompt_ids = self._encoded(texts)
        shown = [self.shown[row] for row in rows]
        prompt_ids = [ids if one is None else one.row.input_ids for ids, one in zip(prompt_ids, shown, strict=True)]
        mine = self.rollouts.complete(prompt_ids, step, own, self._turns(episodes, prompt_ids[own]), shown)
        sampled = gather_completions(self._group, mine)
        rest = gather_rest(self._group, [_rest(*pair) for pair in zip(mine, episodes, strict=True)] if episodes else [])
        self._spans.enter(None)
        self._note_turns(rest)
        self._spans.count(ROLLOUT, sum(len(tokens) for tokens, _ in sampled))
        self._tokens += sum(map(len, prompt_ids)) + sum(len(tokens) for tokens, _ in sampled)
        made = [
            self._made(*one) for one in zip(rows, prompt_ids, texts, sampled, rest or [None] * len(rows), strict=True)
        ]
        return Drawn(made, self._judge(made, step))

    def begin(self, prompts: Sequence[int], step: int) -> None:
        """Has a server complete the prompts of a later step meanwhile."""
        each = self._grpo.num_generations
        self.rollouts.begin(self._encoded([self._asked[row].text for row in prompts for _ in range(each)]), step)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        # The template has written BOS; a tokenizer that adds another would shift every prompt by a token.
        found: list[list[int]] = self._job.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        return found

    def _made(
        self, row: int, prompt: list[int], text: str, sampled: tuple[list[int], list[float]], rest: JsonObject | None
    ) -> DrawnCompletion:
        tokens, known = sampled
        ended = self.rollouts.stopping.stopped(tokens)
        if rest is None:
            return DrawnCompletion(row, prompt, text, tokens, known, self._answer(row, tokens), ended)
        given, turn = rest["given"], tokens[rest["turn"] :]
        shown = str(self._job.tokenizer.decode(tokens))
        said = self._answer(row, turn) if turn else Answer("")
        verdict = verdict_of_json(rest["verdict"])
        return DrawnCompletion(row, prompt, text, tokens, known, said, ended, given, verdict, shown, rest["state"])

    def _begun(self, acting: Acting, rows: Sequence[int], own: slice) -> tuple[list[str], list[Episode]]:
        """The prompts of all, as their environments leave them, and this rank's rollouts.

        Raises FtcliError FT472 for an environment that fails, or says more than a prompt may have.
        """
        mine = [self._asked[row].prompt for row in rows[own]]
        named = [str(one.row.origin) for one in mine]
        instances, said = acting.pool.begin([one.row.fields for one in mine], named)
        texts = [acting.talk.prompt(*pair) for pair in zip(mine, said, strict=True)]
        ids = self._encoded(texts) if texts else []
        for where, tokens in zip(named, ids, strict=True):
            if len(tokens) > self._grpo.max_prompt_length:
                raise acting.pool.failure(
                    f"makes a prompt of {len(tokens):,} tokens, with its tools, of {where}; grpo.max_prompt_length is "
                    f"{self._grpo.max_prompt_length:,}",
                    "raise grpo.max_prompt_length, shorten what reset says, or offer fewer tools",
                )
        episodes = [Episode(*pair) for pair in zip(instances, ids, strict=True)]
        return gather_rest(self._group, texts), episodes

    def _turns(
        self, episodes: Sequence[Episode], prompts: Sequence[Sequence[int]]
    ) -> Callable[[Mapping[tuple[int, int], int]], Episodes] | None:
        acting = self._acting
        if acting is None or not prompts:
            return None
        return lambda places: Episodes(acting, episodes, self._grpo.max_completion_length, places)

    def _note_turns(self, rest: Sequence[JsonObject]) -> None:
        if not rest:
            return
        calls = sum(one["calls"] for one in rest)
        for name, value in (
            ("tools/call_frequency", calls / len(rest)),
            ("tools/failure_frequency", sum(one["failures"] for one in rest) / calls if calls else 0.0),
            ("seconds/tools", sum(one["seconds"] for one in rest) / len(rest)),
            ("completions/turns", sum(one["rounds"] + 1 for one in rest) / len(rest)),
        ):
            self._noted.append((name, value))

    def take_tokens(self) -> int:
        """Tokens of prompts and completions since the last call."""
        found, self._tokens = self._tokens, 0
        return found

    def take_noted(self) -> list[tuple[str, float]]:
        """Metrics of each draw since the last call: the share of completions that a reward failed on, and what judges
        have counted.
        """
        found, self._noted = self._noted, []
        return found

    def _answer(self, row: int, tokens: Sequence[int]) -> Answer:
        """A completion as rewards and people see it: the answer, up to a stop string, beside its reasoning."""
        asked = self._asked[row]
        said = self._job.reasoning_marks.split(tokens, asked.text, templated=asked.templated)
        return replace(said, text=cut(said.text, self._grpo.stop_strings))

    def _judge(self, made: Sequence[DrawnCompletion], step: int) -> Tensor:
        """(completions, rewards): each rank judges whole groups."""
        spans, each = self._spans, self._grpo.num_generations
        spans.enter(REWARDS)
        groups = share_of(len(made) // each, self._rank, self._ranks)
        own = made[groups.start * each : groups.stop * each]
        mine = torch.zeros(len(own), len(self._rewards))
        for index, reward in enumerate(self._rewards if own else ()):
            mine[:, index] = torch.tensor([math.nan if value is None else value for value in self._scores(reward, own)])
        rewards = mine if self._group is None else gather_rows(self._group, "rewards", mine)
        spans.enter(None)
        self._count_failures()
        if self._grpo.overlong_buffer:
            lengths = torch.tensor([len(one.tokens) for one in made])
            rewards = torch.cat([rewards, overlong_penalties(lengths, self._grpo)[:, None]], 1)
        if self._grpo.shuffle_rewards:  # the control experiment
            generator = torch.Generator().manual_seed(self._job.recipe.run.seed + step)
            rewards = rewards[torch.randperm(len(rewards), generator=generator)]
        return rewards

    def _scores(self, reward: Reward, made: Sequence[DrawnCompletion]) -> Sequence[float | None]:
        """The reward of each completion; it gets the values of rows as the data has them."""
        lent = {name: [values[one.row] for one in made] for name, values in self._columns.items()}
        if self._acting is not None and self._acting.lends:
            lent["environments"] = [one.state for one in made]
        if reward is self._own:
            lent = {_VERDICT: [one.verdict for one in made]}
        asked = [self._asked[one.row].prompt for one in made]
        scores = reward.scores(
            [one.text for one in made],
            [one.said.text for one in made],
            lent,
            [one.row.origin for one in asked],
            [one.said.reasoning for one in made],
            asked,
        )
        self.failures.note(reward, scores)
        return scores.values

    def _count_failures(self) -> None:
        """Adds up over ranks what rewards have failed on. Raises FtcliError FT456 where that is too much."""
        mine = self.failures.newest()
        told: list[Any] = [mine] if self._group is None else gather_json(self._group, "telling", mine)
        for reward in self._rewards:
            noted = [each[reward.name] for each in told if reward.name in each]
            judged, failed = (sum(one[at] for one in noted) for at in (0, 1))
            self._noted.append((f"rewards/{reward.name}/failed", failed / max(judged, 1)))
            for name in noted[0][3] if noted else ():
                self._noted.append((f"rewards/{reward.name}/{name}", sum(one[3][name] for one in noted)))
            self.failures.add(reward.name, judged, failed, next((one[2] for one in noted if one[2]), None))
