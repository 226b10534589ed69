"""What GRPO learns from: completions that the policy samples, judged and compared with others of their prompt.

One set of completions serves ``steps_per_generation`` micro-batches, ``num_iterations`` times over. On several ranks
each does what one process would that accumulates as many micro-batches more, but for what takes long: completions,
rewards and passes without gradients are shared out and gathered. So every rank has all completions of a step with their
advantages, mixes them into the same micro-batches, and trains on every N-th of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from ftcli.data.asked import RenderedPrompt
from ftcli.errors import ExitCode, FtcliError
from ftcli.job import Job
from ftcli.judges import columns_of
from ftcli.methods.distill.objective import Teacher
from ftcli.methods.grpo.advantages import Advantages, advantages_of, deviation
from ftcli.methods.grpo.draws import Acting, Drawn, DrawnCompletion, Draws, share_of
from ftcli.methods.grpo.losses import Completions, StepShape, loss_mask
from ftcli.methods.grpo.policy import (
    PROMPT_ROWS,
    SAMPLER_GAP,
    Metrics,
    Parity,
    ParityCheck,
    PolicyScores,
    joined,
    scored_loss,
)
from ftcli.methods.grpo.reference import Reference
from ftcli.methods.grpo.rewards import Reward, RewardFailures, Stagnation
from ftcli.methods.grpo.rollouts import Rollouts, SampledObjective, gather_rows, sampling
from ftcli.methods.grpo.served import ServedGenerator, uses_adapter
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.grpo.spans import LOG_PROBS, OPTIMIZER, REWARDS, ROLLOUT, TRAINING, Spans
from ftcli.model.backbone import compute_context
from ftcli.model.initial_adapters import as_base
from ftcli.model.shards import reshard_model
from ftcli.plain import JsonObject
from ftcli.run.completions import ScoredCompletion
from ftcli.run.metrics import MetricsLine
from ftcli.run.process_group import gather_json
from ftcli.train.build import build_loop
from ftcli.train.checkpoint_state import Progress, draw_of_epoch
from ftcli.train.loop import StepMonitor, TrainerHooks, TrainingLoop
from ftcli.train.parallel import SEED_STRIDE, Divisors, MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup

#: Lies in a checkpoint that was written between two uses of the same completions, or while others are on their way.
_COMPLETIONS = "completions.pt"

_SERVED_OTHERWISE = (
    "it has to serve the recipe's model in its dtype, with --logprobs-mode processed_logprobs, as docs/grpo.md says; "
    "export the last checkpoint as `adapter` to see which of its modules the served class has"
)


class Sampled(TypedDict):
    """The completions of a rollout for people to look at, as lists of one length."""

    prompt: list[str]
    completion: list[str]
    reasoning: NotRequired[list[str | None]]
    rewards: dict[str, list[float]]
    advantages: list[float]


@dataclass(slots=True)
class Rollout:
    """The completions in use.

    Attributes:
        step: The step whose weights they were sampled for; None where a checkpoint does not say.
        stale: They were sampled with the weights of the rollout before.
    """

    batches: list[dict[str, Tensor]]
    sampled: Sampled | None = None
    step: int | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True)
class _Before:
    """What a failed step is undone to."""

    rollout: Rollout | None
    failures: JsonObject
    num_tokens: int


class GrpoObjective(SampledObjective):
    """GRPO over rendered prompts, so that sampling sees the same text as evaluation and serving.

    Args:
        policy: Scores completions; its model is what learns.
        parity: Looks before the first step how well log-probabilities agree.
        completions: Takes the completions of a logging step; None where nobody does.
        teacher: With ``teacher_coef``, and what scores completions under it.
    """

    def __init__(
        self,
        job: Job,
        grpo: GrpoConfig,
        policy: PolicyScores,
        draws: Draws,
        reference: Reference,
        parity: ParityCheck,
        completions: Callable[[int, Sequence[ScoredCompletion]], None] | None,
        *,
        prompts: int,
        spans: Spans,
        group: RankGroup | None,
        teacher: tuple[Teacher, PolicyScores] | None = None,
    ) -> None:
        self._teacher = teacher
        train, ranks = job.recipe.train, 1 if group is None else group.size
        self._grpo, self._policy, self._draws, self._reference = grpo, policy, draws, reference
        self._parity, self._completions, self._stagnation = parity, completions, Stagnation(grpo.early_stopping)
        self._size = train.per_device_train_batch_size
        self._accumulation = train.gradient_accumulation_steps * ranks
        self._generated = grpo.micro_batches(train.gradient_accumulation_steps) * ranks
        #: Optimizer steps that one set of completions serves.
        self._serves = self._generated * grpo.num_iterations // self._accumulation
        super().__init__(job, prompts, self._generated * self._size // grpo.num_generations, spans, group)
        self.steps_per_epoch = prompts // self._at_once * self._serves
        self._rollout: Rollout | None = None
        self._logged_rollout: int | None = None
        self._of_batches: list[Metrics] = []
        self._num_tokens = 0
        #: A server has been seen to use the adapters that it is given.
        self._adapts = False
        self._steps = train.max_steps or math.ceil(train.num_train_epochs * self.steps_per_epoch)
        self._before = _Before(None, {}, 0)
        self._began = 0.0

    # -- what a step learns from -----------------------------------------------------------------------------

    def epochs_done(self, step: int) -> float:
        """How often all prompts have been completed after so many steps."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch + index / self.steps_per_epoch

    def micro_batches(self, step: int, monitor: StepMonitor) -> list[MicroBatch]:
        """This rank's micro-batches, of completions that are sampled when the last ones have been used up."""
        if step % self.steps_per_epoch == 0 and self._group is None:
            draw_of_epoch()
        if step % self._serves == 0 or self._rollout is None:
            self._rollout = self._roll_out(step, monitor)
        first = step * self._accumulation
        found = []
        for turn in range(first, first + self._accumulation, self._ranks):
            at = turn % self._generated
            real = [int(loss_mask(batch).sum()) for batch in self._rollout.batches[at : at + self._ranks]]
            inputs = self._rollout.batches[at + self._rank]
            found.append(MicroBatch(inputs, (), TokenCounts(0, real[self._rank], 0)))
        self._spans.enter(TRAINING)
        return found

    def _roll_out(self, step: int, monitor: StepMonitor) -> Rollout:
        with sampling(self._job, self._policy.model, step, monitor):
            torch.manual_seed(
                (self._job.recipe.run.seed * SEED_STRIDE + step) % 2**63
            )  # decides what shares a micro-batch
            shuffled = torch.randperm(self._generated * self._size)
            batch, sampled = self._complete_and_judge(step)
        mixed = {name: value[shuffled] if value.dim() else value for name, value in batch.items()}
        batches = [
            {name: value[at : at + self._size] if value.dim() else value for name, value in mixed.items()}
            for at in range(0, self._generated * self._size, self._size)
        ]
        stale = self._draws.rollouts.stale
        if self._grpo.server is not None:
            self._metrics["stale_tokens"].append(float(stale * sum(int(loss_mask(one).sum()) for one in batches)))
        self._begin_next(step)
        return Rollout(batches, sampled, step, stale)

    def _begin_next(self, step: int) -> None:
        """Has a server sample the rollout behind that of a step, once it is known to use adapters."""
        after = step + self._serves
        if self._grpo.steps_ahead and self._adapts and after < self._steps:
            self._draws.begin(self.prompts_of(after // self._serves), after)

    def _complete_and_judge(self, step: int) -> tuple[dict[str, Tensor], Sampled]:
        """Completions of a rollout with all that a loss asks of them, and the same for people."""
        draws, grpo = self._draws, self._grpo
        rollout = step // self._serves
        drawn, again = draws.with_spread(self.prompts_of(rollout), step, rollout)
        self._num_tokens += draws.take_tokens()
        if grpo.max_resample_times:
            self._metrics["groups_drawn_again"].append(float(again))
        self._note_lengths(drawn)
        batch = self._padded(drawn)
        self._add_log_probs(batch)
        if self._teacher is not None:
            batch["teacher_per_token_logps"] = self._taught(*self._teacher, drawn, batch)
        rewards = drawn.rewards.to(self._job.device)
        found = advantages_of(rewards, draws.weights.to(rewards.device), grpo)
        self._note_rewards(rewards, found)
        batch["advantages"] = found.values
        columns = {name: rewards[:, i].tolist() for i, name in enumerate(draws.names)}
        return batch, Sampled(
            prompt=[one.text for one in drawn.completions],
            completion=[one.said.text if one.shown is None else one.shown for one in drawn.completions],
            reasoning=[one.said.reasoning for one in drawn.completions],
            rewards=columns,
            advantages=found.values.tolist(),
        )

    def _padded(self, drawn: Drawn) -> dict[str, Tensor]:
        """Prompts padded on the left and completions on the right, on the device."""
        pad, device = self._job.pad_token_id, self._job.device
        made = drawn.completions
        completions = [one.tokens for one in made]
        mask = _right(completions, 0, ones=True)
        if self._grpo.mask_truncated_completions:
            mask = mask * torch.tensor([one.ended for one in made], dtype=torch.int32)[:, None]
        batch = {
            **_prompts([one.prompt for one in made], pad),
            "completion_ids": _right(completions, pad),
            "completion_mask": mask,
        }
        if any(self._policy.shown):
            batch[PROMPT_ROWS] = torch.tensor([one.row for one in made])
        if any(one.given for one in made):
            batch["tool_mask"] = _right([_written(one) for one in made], 1)
        batch["num_items_in_batch"] = loss_mask(batch).sum()
        if all(len(one.known) == len(one.tokens) for one in made):
            width = batch["completion_ids"].shape[1]
            rows = [one.known + [0.0] * (width - len(one.known)) for one in made]
            batch["sampling_per_token_logps"] = torch.tensor(rows)
        return {name: value.to(device) for name, value in batch.items()}

    def _add_log_probs(self, batch: dict[str, Tensor]) -> None:
        """Adds the log-probabilities under the weights that sampled, where steps follow that change them, and under the
        reference."""
        if self._grpo.server is not None:
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"]  # another engine, or other weights
        elif self._accumulation % (self._generated * self._grpo.num_iterations):
            batch["old_per_token_logps"] = self._scored(batch)
        if self._grpo.beta:
            with self._reference.at_hand() as model:
                batch["ref_per_token_logps"] = self._scored(batch, model)

    def _taught(self, teacher: Teacher, scores: PolicyScores, drawn: Drawn, batch: dict[str, Tensor]) -> Tensor:
        """(B, C): the teacher's log-probabilities, behind the prompts that it sees."""
        shown, pad = batch, self._job.pad_token_id
        if teacher.texts is not None:
            texts = [teacher.texts[one.row] for one in drawn.completions]
            prompts = _prompts(self._job.tokenizer(text=texts, add_special_tokens=False)["input_ids"], pad)
            shown = batch | {name: value.to(self._job.device) for name, value in prompts.items()}
        known = int(scores.model.get_input_embeddings().weight.shape[0])  # entries that pad the student's are more
        shown = shown | {"completion_ids": batch["completion_ids"].where(batch["completion_ids"] < known, pad)}
        with teacher.at_hand(self._policy.model):
            found = self._scored(shown, scores=scores)
        if teacher.model is not None:
            reshard_model(teacher.model)
        return found

    def _scored(
        self, batch: Completions, model: PreTrainedModel | None = None, scores: PolicyScores | None = None
    ) -> Tensor:
        """(B, C), this rank's rows computed and all gathered."""
        own = share_of(len(batch["completion_ids"]), self._rank, self._ranks)
        ids, mask = joined(batch)
        self._spans.enter(LOG_PROBS)
        written = batch["tool_mask"][own] if "tool_mask" in batch else None
        width = batch["completion_ids"].shape[1]
        rows = batch[PROMPT_ROWS][own] if PROMPT_ROWS in batch else None
        found, _ = (scores or self._policy).log_probs(
            ids[own], mask[own], width, rows_at_a_time=self._size, model=model, written=written, prompt_rows=rows
        )
        self._spans.enter(None)
        return found if self._group is None else gather_rows(self._group, "log-probs", found)

    def _note_rewards(self, rewards: Tensor, found: Advantages) -> None:
        note = self._note
        for index, name in enumerate(self._draws.names):
            note(f"rewards/{name}/mean", torch.nanmean(rewards[:, index]))
            note(f"rewards/{name}/std", deviation(rewards[:, index]))
        for name, value in self._draws.take_noted():
            self._metrics[name].append(value)
        note("reward", torch.nanmean(found.rewards))
        note("reward_std", deviation(found.rewards))
        note("groups_without_spread", found.without_spread.float().sum())
        note("frac_reward_zero_std", found.without_spread.float().mean())

    def _note_lengths(self, drawn: Drawn) -> None:
        self._metrics["num_tokens"] = [self._num_tokens]
        lengths = torch.tensor([len(one.tokens) - len(one.given) for one in drawn.completions]).float()
        ended = torch.tensor([one.ended for one in drawn.completions])
        whole = lengths[ended] if ended.any() else torch.zeros(1)
        self._note("completions/clipped_ratio", 1.0 - ended.float().mean())
        for name, found in (("length", lengths), ("terminated_length", whole)):
            for kind, value in (("mean", found.mean()), ("min", found.min()), ("max", found.max())):
                self._note(f"completions/{kind}_{name}", value)

    def _note(self, name: str, value: Tensor) -> None:
        self._metrics[name].append(value.item())

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Notes the completions in use and the metrics gathered so far."""
        super().begin(step)
        self._before = _Before(self._rollout, self._draws.failures.state(), self._num_tokens)
        self._of_batches = []
        self._began = time.perf_counter()

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The policy's loss on a micro-batch; before the first step of this process its log-probabilities are held
        against the model's own and the sampler's."""
        plan, policy = self._job.dtypes, self._policy
        assert self._rollout is not None
        # Else weights have moved since they were sampled.
        fresh = self._before.rollout is not self._rollout and not self._rollout.stale
        if fresh and self._grpo.server is not None and not self._adapts:
            self._require_adapter(inputs)
            self._begin_next(self._rollout.step or 0)
        if self._parity(inputs, inputs.get("sampling_per_token_logps") if fresh else None):
            self._spans.enter(TRAINING)
        shape = StepShape(self._accumulation, self._generated)
        with compute_context(policy.device, plan.compute, plan.autocast):
            loss, metrics = scored_loss(policy, self._grpo, inputs, shape)
        gap = metrics.get(SAMPLER_GAP, [0.0])[0]
        if fresh and gap > self._parity.allowed:
            message = (
                f"the server samples with other log-probabilities than training: they differ by {gap:.2g} nats a token "
                f"on average over a micro-batch of step {self._rollout.step}; {self._parity.allowed:g} is allowed"
            )
            raise FtcliError.single("FT708", message, exit_code=ExitCode.BUG, help=_SERVED_OTHERWISE)
        self._of_batches.append(metrics)
        return loss

    def _require_adapter(self, inputs: dict[str, Tensor]) -> None:
        """Looks whether the server uses the adapter, as soon as that can be told. Raises FtcliError FT716 (exit 3)."""
        mask, plan = loss_mask(inputs).bool(), self._job.dtypes
        with torch.no_grad(), compute_context(self._job.device, plan.compute, plan.autocast):
            now = self._scored(inputs)[mask]
            with as_base(self._policy.model):
                base = self._scored(inputs)[mask]
        self._spans.enter(TRAINING)
        found = uses_adapter(inputs["sampling_per_token_logps"][mask], now, base)
        if found is False:
            message = "grpo.server samples by the base model: its log-probabilities are not those of the adapter"
            raise FtcliError.single("FT716", message, exit_code=ExitCode.PREFLIGHT, help=_SERVED_OTHERWISE)
        self._adapts = found is True

    def reduced(self) -> None:
        """Notes the metrics of all ranks' micro-batches, in the order of one process."""
        spans, tokens = self._spans, self._spans.counted(TRAINING)
        told: list[Any] = [[self._of_batches, tokens]]
        if self._group is not None:
            told = gather_json(self._group, "metrics", told[0])
            spans.count(TRAINING, sum(each for _, each in told) - tokens)
        for batch in range(len(self._of_batches)):
            for batches, _ in told:
                for name, values in batches[batch].items():
                    self._metrics[name].extend(values)
        self._metrics["step_time"].append(time.perf_counter() - self._began)
        spans.enter(OPTIMIZER)

    def end(self, step: int) -> None:
        """Looks whether rewards and entropy still leave something to learn; a reference may follow."""
        self._reference.follow(step)
        super().end(step)
        before, now = self._metrics_before, self._metrics
        rewards, entropies = (now.get(name, [])[len(before.get(name, ())) :] for name in ("reward", "entropy"))
        assert self._rollout is not None
        if self._grpo.mask_truncated_completions and not any(
            bool(batch["completion_mask"].any()) for batch in self._rollout.batches
        ):
            entropies = []  # no tokens, which is not a collapse
        self._stagnation.note(step, rewards, entropies)

    def undo(self, step: int) -> None:
        """Restores the completions and metrics that :meth:`begin` has noted."""
        super().undo(step)
        self._rollout, self._num_tokens = self._before.rollout, self._before.num_tokens
        self._draws.failures.restore(self._before.failures)

    @property
    def why_over(self) -> str | None:
        """What the section `early_stopping` has found."""
        return self._stagnation.reason

    # -- logs and checkpoints --------------------------------------------------------------------------------

    def metrics(self) -> MetricsLine:
        """Rates of tokens, and the mean of each number."""
        self._take_spans()
        return {**_rates(self._metrics), **super().metrics()}

    def logged(self, step: int) -> None:
        """Hands on the newest completions, each batch of them once."""
        rollout, keep = self._rollout, self._completions
        if keep is None or rollout is None or rollout.sampled is None or self._logged_rollout == rollout.step:
            return
        keep(step, _scored_completions(rollout.sampled))
        self._logged_rollout = rollout.step

    def state(self) -> JsonObject:
        """Rewards, lengths and all else that is averaged from one line to the next; and what rewards failed on."""
        return {
            "metrics": self.metrics_state(),
            "completions_of": self._logged_rollout,
            "stagnation": self._stagnation.state(),
            "reward_failures": self._draws.failures.state(),
            "num_tokens": self._num_tokens,
            "adapts": self._adapts,
        }

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with these averages and counts."""
        self._draws.failures.restore(state.get("reward_failures", {}))
        self.restore_metrics(state.get("metrics", {}))
        self._logged_rollout = state.get("completions_of")
        self._adapts = bool(state.get("adapts"))
        self._num_tokens = state.get("num_tokens", progress.tokens_seen)  # where 0.1 kept it
        if "stagnation" in state:
            self._stagnation.restore(state["stagnation"])

    def save(self, folder: Path) -> None:
        """Saves the completions in use, where further steps need them, and a reference that has moved."""
        self._reference.save(folder)
        kept: dict[str, Any] = {}
        if self._rollout is not None and self._serves > 1:
            said = {"logs": self._rollout.sampled, "sampled_at": self._rollout.step, "stale": self._rollout.stale}
            kept = {"inputs": self._rollout.batches, "said": said}
        if ahead := self._draws.rollouts.ahead():
            kept["ahead"] = ahead
        if kept:
            torch.save(kept, folder / _COMPLETIONS)

    def load(self, folder: Path, device: torch.device) -> None:
        """Loads them."""
        self._reference.load(folder)
        if (folder / _COMPLETIONS).exists():
            saved = torch.load(folder / _COMPLETIONS, map_location=device, weights_only=True)
            said = saved.get("said", {})
            if "inputs" in saved:
                self._rollout = Rollout(
                    saved["inputs"], said.get("logs"), said.get("sampled_at"), bool(said.get("stale"))
                )
            self._draws.rollouts.restore_ahead(saved.get("ahead", {}))


def _right(rows: Sequence[Sequence[int]], fill: int, *, ones: bool = False) -> Tensor:
    """(rows, longest) int64, padded on the right with ``fill``; ``ones`` in place of the values."""
    longest = max(map(len, rows))
    values = ([1] * len(row) if ones else list(row) for row in rows)
    return torch.tensor([row + [fill] * (longest - len(row)) for row in values])


def _prompts(prompts: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Ids and mask, padded on the left."""
    ids, mask = _right([one[::-1] for one in prompts], pad), _right(prompts, 0, ones=True)
    return {"prompt_ids": ids.flip(1), "prompt_mask": mask.flip(1)}


def _written(one: DrawnCompletion) -> list[int]:
    """1 for each token that the model wrote, 0 for those that stand between its turns."""
    given = set(one.given)
    return [int(place not in given) for place in range(len(one.tokens))]


def _scored_completions(sampled: Sampled) -> list[ScoredCompletion]:
    def opinion(reward: float) -> float | None:
        return None if math.isnan(reward) else float(reward)

    reasoning = sampled.get("reasoning") or [None] * len(sampled["prompt"])  # a checkpoint of 0.1
    return [
        ScoredCompletion(
            prompt,
            text,
            {name: opinion(values[i]) for name, values in sampled["rewards"].items()},
            float(advantage),
            reasoning[i],
        )
        for i, (prompt, text, advantage) in enumerate(
            zip(sampled["prompt"], sampled["completion"], sampled["advantages"], strict=True)
        )
    ]


def _rates(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Tokens per second of rollouts and of training passes, where there were any."""
    seconds = {part: math.fsum(metrics.get(f"seconds/{part}", ())) for part in (ROLLOUT, TRAINING)}
    tokens = {part: math.fsum(metrics.get(f"processed_tokens/{part}", ())) for part in seconds}
    return {f"throughput/{part}": tokens[part] / taken for part, taken in seconds.items() if taken}


def build_grpo(
    job: Job,
    grpo: GrpoConfig,
    model: PreTrainedModel | PeftModel,
    asked: Sequence[RenderedPrompt],
    rewards: Sequence[Reward],
    hooks: TrainerHooks,
    tell_parity: Callable[[Parity], None],
    group: RankGroup | None = None,
    reference: PreTrainedModel | None = None,
    acting: Acting | None = None,
    teacher: Teacher | None = None,
    served: ServedGenerator | None = None,
) -> TrainingLoop:
    """The loop that trains ``model`` on completions of ``asked``, prompts that fit ``grpo.max_prompt_length``.

    Args:
        tell_parity: Called before the first step with what :func:`check_parity` found.
        acting: What rollouts of several turns need; None: they have one.
        reference: What ``grpo.beta`` compares with; None for adapters, which are switched off for it.
        teacher: With ``grpo.teacher_coef``.
        served: With ``grpo.server``.
    """
    columns = columns_of([one.prompt for one in asked])
    spans = Spans(job.device, (ROLLOUT, REWARDS, LOG_PROBS, TRAINING, OPTIMIZER), counted=(ROLLOUT, TRAINING))

    def objective(stack: DecoderStack | None, _sequence: SequencePart | None) -> GrpoObjective:
        failures = RewardFailures(grpo.reward_failures.max_fraction, job.reporter)
        rollouts = Rollouts(model, job, grpo, group, served)
        draws = Draws(job, grpo, asked, columns, rewards, failures, rollouts, spans, group, acting)
        asks: dict[str, Any] = {"pad_token_id": job.pad_token_id, "temperature": grpo.temperature, "device": job.device}
        asks |= {"group": group, "shown": draws.shown}
        policy = PolicyScores(model, job.batches(model), stack=stack, spans=spans, **asks)
        taught = None
        if teacher is not None:
            taught = teacher, PolicyScores(teacher.model or model, teacher.batches, **asks)
        parity = ParityCheck(policy, job.dtypes, tell_parity)
        kept = Reference(model, reference, grpo), parity, hooks.completions
        return GrpoObjective(
            job, grpo, policy, draws, *kept, prompts=len(asked), spans=spans, group=group, teacher=taught
        )

    return build_loop(job, model, objective, hooks, group)
