"""GRPO: TRL's GRPOTrainer with our prompts, our rewards and our precision plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from ftcli.config.training import GrpoConfig
from ftcli.data.asked import RenderedPrompt
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.precision import DtypePlan
from ftcli.job import Job
from ftcli.judges import columns_of
from ftcli.model.backbone import compute_context
from ftcli.model.checkpointing import checkpointing_kept
from ftcli.model.finite import NotFinite
from ftcli.plain import JsonObject
from ftcli.preflight.memory.terms import BACKWARD, FORWARD, GENERATION
from ftcli.trainers.base import RunTrainerMixin
from ftcli.trainers.graphed import use_stack
from ftcli.trainers.hooks import TrainerHooks
from ftcli.trainers.optimisation import Arguments
from ftcli.trainers.parity import Parity, check_parity
from ftcli.trainers.policy import PolicyMixin
from ftcli.trainers.rewards import Reward, RewardFailures, build_rewards
from ftcli.trainers.rollouts import Rollouts
from ftcli.trainers.said import REASONING, Answers, newest, packed, restore
from ftcli.trainers.sft import config_kept, own_ranks, training_arguments, use_one_gpu, use_policy
from ftcli.trainers.sharing import SharingMixin
from ftcli.trainers.spans import LOG_PROBS, OPTIMIZER, REWARDS, ROLLOUT, TRAINING, Spans
from ftcli.trainers.stagnation import Stagnation
from ftcli.trainers.stop_strings import StopStringsMixin

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.group import RankGroup


#: The column of the dataset that says which row a prompt is.
_ROW = "ftcli_row"
#: Lies in a checkpoint that was written between two uses of the same completions.
_COMPLETIONS = "completions.pt"


@dataclass(frozen=True, slots=True)
class _Before:
    """What TRL's trainer held before a step: its count of micro-batches, the completions in use, the averages of a line
    of metrics, what rewards have failed on, and all tokens sampled.
    """

    micro_batch: int
    buffered: Any
    metrics: Mapping[str, list[float]]
    failures: JsonObject
    tokens: int


class GrpoTrainer(SharingMixin, RunTrainerMixin, PolicyMixin, StopStringsMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer over rendered prompts, so that sampling sees the same text as evaluation and serving."""

    plan: DtypePlan
    rollouts: Rollouts
    stagnation: Stagnation
    failures: RewardFailures
    answers: Answers
    control_seed: int | None = None
    #: Is told how well log-probabilities agree, before the first step of this process; None once that is known.
    tell_parity: Callable[[Parity], None] | None = None
    #: The step whose weights the completions in use were sampled with; None before the first ones of this process.
    _sampled_at: int | None = None
    #: The same of those that were written last.
    _kept: int | None = None

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        # The template has written BOS; a tokenizer that adds another would shift every prompt by a token.
        return self.processing_class(text=prompts, add_special_tokens=False)["input_ids"], None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.phase = GENERATION
        self.check_finite()  # sampling waits for the device anyway, and would fail on what came of it
        try:
            with (
                checkpointing_kept(self.accelerator.unwrap_model(self.model)),
                compute_context(self.accelerator.device, self.plan.compute, self.plan.autocast),
            ):
                output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        except NotFinite as error:
            raise FtcliError.single(
                "FT702",
                f"the model's logits are not finite when completions of step {self.state.global_step + 1} are sampled: "
                "training has diverged",
                exit_code=ExitCode.DIVERGED,
                help="lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm",
            ) from error
        self.phase = FORWARD
        self._sampled_at = self.state.global_step
        # Equal rewards leave rounding in the advantages, which a division by no spread at all makes larger.
        output["advantages"] = output["advantages"].masked_fill(self._alike, 0.0)
        # TRL's is of the whole batch where rewards are scaled by the deviation of the batch.
        self._metrics["train"]["frac_reward_zero_std"][-1] = float(self._alike.float().mean())
        return output

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: None, *_: Any, **__: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Tokens of one completion for each prompt, by our engine in place of TRL's call of ``generate``, and their
        log-probabilities where the engine knows them all.
        """
        self.spans.enter(ROLLOUT)
        own = self.own_rows(len(prompt_ids))
        found = self.completed(self.rollouts.complete(prompt_ids, self.state.global_step, own))
        self.spans.enter(None)
        self.spans.count(ROLLOUT, sum(len(tokens) for tokens, _ in found))
        known = all(len(log_probs) == len(tokens) for tokens, log_probs in found)
        return [tokens for tokens, _ in found], [log_probs for _, log_probs in found] if known else None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: list[str], ids: Any) -> Tensor:
        """As its base, of answers without their reasoning, which TRL keeps beside them from here on."""
        self.spans.enter(REWARDS)
        found = [self.answers.of(row[_ROW], tokens) for row, tokens in zip(inputs, ids, strict=True)]
        completions[:] = [one.text for one in found]
        self._log_completion_extra(REASONING, [one.reasoning for one in found])
        inputs = [{**row, REASONING: one.reasoning} for row, one in zip(inputs, found, strict=True)]
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, ids)
        self.spans.enter(None)
        self._count_failures()
        if self.control_seed is not None:
            generator = torch.Generator().manual_seed(self.control_seed + self.state.global_step)
            rewards = rewards[torch.randperm(rewards.shape[0], generator=generator).to(rewards.device)]
        groups = without_spread(rewards, self.reward_weights.to(rewards.device), self.num_generations)
        self._alike = groups.repeat_interleave(self.num_generations)
        self._metrics["train"]["groups_without_spread"].append(float(groups.sum()))
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, None]:
        """As :class:`PolicyMixin`; passes before training, of the reference or of older weights, are told apart."""
        before = self.phase == GENERATION
        if before:
            self.spans.enter(LOG_PROBS)
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if before:
            self.spans.enter(None)
        return found

    def _count_failures(self) -> None:
        """Adds up over ranks what rewards have failed on. Raises FtcliError FT456 where that is too much."""
        told = self.told(self.failures.newest())
        for name in self.reward_func_names:
            noted = [each[name] for each in told if name in each]
            judged, failed = (sum(one[at] for one in noted) for at in (0, 1))
            self._metrics["train"][f"rewards/{name}/failed"].append(failed / max(judged, 1))
            self.failures.add(name, judged, failed, next((one[2] for one in noted if one[2]), None))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL; completions are kept for people to look at, each batch of them once."""
        is_step = "loss" in logs
        if is_step:
            self._take_spans()
            logs.update(_rates(self._metrics["train"]))
        super().log(logs, start_time)
        if self.hooks.completions is not None and is_step and self._kept != self._sampled_at:
            self.hooks.completions(self.state.global_step, newest(self._logs))
            self._kept = self._sampled_at

    def _take_spans(self) -> None:
        """Adds the time of each finished step to what TRL averages."""
        for numbers in self.spans.take():
            for name, value in numbers.items():
                self._metrics["train"][name].append(value)

    def begin_step(self) -> None:
        """As the base class; also notes the completions in use and the metrics gathered so far."""
        super().begin_step()
        self.spans.begin_step(self.state.global_step + 1)
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        self._before = _Before(
            self._step,
            self._buffered_inputs,
            metrics,
            self.failures.state(),
            self.state.num_input_tokens_seen,
        )

    def end_step(self) -> None:
        """As the base class; also looks whether rewards and entropy still leave something to learn."""
        self.spans.enter(None)
        super().end_step()
        before, now = self._before.metrics, self._metrics["train"]
        rewards, entropies = (now.get(name, [])[len(before.get(name, ())) :] for name in ("reward", "entropy"))
        self.stagnation.note(self.state.global_step, rewards, entropies)

    @property
    def why_over(self) -> str | None:
        """As the base class, or what the section `early_stopping` has found."""
        return super().why_over or self.stagnation.reason

    def undo_step(self) -> None:
        """Restores the completions and metrics that :meth:`begin_step` has noted."""
        self.spans.forget_after(self.state.global_step)
        before = self._before
        self._step, self._buffered_inputs = before.micro_batch, before.buffered
        self.state.num_input_tokens_seen = before.tokens
        self.failures.restore(before.failures)
        self._metrics["train"].clear()
        self._metrics["train"].update(before.metrics)

    def extra_window(self) -> JsonObject:
        """Rewards, lengths and all else that TRL averages from one line to the next; and what rewards failed on."""
        self._take_spans()
        metrics = {name: [float(v) for v in values] for name, values in self._metrics["train"].items()}
        return {
            "metrics": metrics,
            "completions_of": self._kept,
            "stagnation": self.stagnation.state(),
            "reward_failures": self.failures.state(),
        }

    def restore_extra_window(self, extra: JsonObject) -> None:
        """Continues these averages and counts."""
        self.failures.restore(extra.get("reward_failures", {}))
        self._metrics["train"].update({name: list(values) for name, values in extra.get("metrics", {}).items()})
        self._kept = extra.get("completions_of")
        if "stagnation" in extra:
            self.stagnation.restore(extra["stagnation"])

    def save_more(self, folder: Path) -> None:
        """Saves the completions in use, where further steps need them (``num_iterations`` above 1)."""
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            said = {"logs": packed(self._logs), "sampled_at": self._sampled_at}
            torch.save({"step": self._step, "inputs": self._buffered_inputs, "said": said}, folder / _COMPLETIONS)

    def load_more(self, folder: Path) -> None:
        """Loads those completions; TRL would sample new ones."""
        if (folder / _COMPLETIONS).exists():
            saved = torch.load(folder / _COMPLETIONS, map_location=self.accelerator.device, weights_only=True)
            self._step, self._buffered_inputs = saved["step"], saved["inputs"]
            if "said" in saved:  # not in checkpoints of older versions
                restore(self._logs, saved["said"]["logs"])
                self._sampled_at = saved["said"]["sampled_at"]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the base class; what follows the last backward pass is the optimizer's."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self.spans.enter(OPTIMIZER if self.accelerator.sync_gradients else None)
        return loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """TRL's loss under our precision plan, watched for NaN."""
        self.count_tokens(inputs["completion_mask"])
        if self.tell_parity is not None:
            fresh = self._sampled_at == self.state.global_step  # weights have moved since others were sampled
            self.tell_parity(check_parity(self, inputs, inputs.get("sampling_per_token_logps") if fresh else None))
            self.tell_parity = None
        self.spans.enter(TRAINING)
        with compute_context(self.accelerator.device, self.plan.compute, self.plan.autocast):
            loss: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.watch_loss(loss)
        self.phase = BACKWARD
        return loss


def without_spread(rewards: Tensor, weights: Tensor, group: int) -> Tensor:
    """(groups,) bool: which groups teach nothing, since all of their completions that have a reward have the same one.

    Args:
        rewards: (completions, rewards), NaN where a reward had no opinion; groups one after the other.
        weights: (rewards,).
    """
    unscorable = rewards.isnan().all(1)
    total = (rewards * weights).nansum(1)
    highest = total.masked_fill(unscorable, -math.inf).view(-1, group).amax(1)
    lowest = total.masked_fill(unscorable, math.inf).view(-1, group).amin(1)
    return highest <= lowest


def _rates(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Tokens per second of rollouts and of training passes, where there were any."""
    seconds = {part: math.fsum(metrics.get(f"seconds/{part}", ())) for part in (ROLLOUT, TRAINING)}
    tokens = {part: math.fsum(metrics.get(f"processed_tokens/{part}", ())) for part in seconds}
    return {f"throughput/{part}": tokens[part] / taken for part, taken in seconds.items() if taken}


def build_grpo_trainer(
    job: Job,
    grpo: GrpoConfig,
    model: PreTrainedModel | PeftModel,
    asked: Sequence[RenderedPrompt],
    hooks: TrainerHooks,
    scratch_dir: str,
    tell_parity: Callable[[Parity], None],
    group: RankGroup | None = None,
) -> GrpoTrainer:
    """A trainer over ``asked``, prompts that fit ``grpo.max_prompt_length``.

    Args:
        tell_parity: Called before the first step with what :func:`check_parity` found.
        group: The ranks that train together; None for one process.

    Raises FtcliError as :func:`build_rewards`.
    """
    columns = columns_of([one.prompt for one in asked])
    rewards = build_rewards(grpo.rewards, columns)
    failures = RewardFailures(grpo.reward_failures.max_fraction, job.reporter)
    train = job.recipe.train
    batches = grpo.micro_batches(train.gradient_accumulation_steps) * (1 if group is None else group.size)
    with own_ranks():
        settings = _grpo_arguments(grpo, rewards, job.stops)
        args = GRPOConfig(**training_arguments(job, scratch_dir), **settings, steps_per_generation=batches)
    use_policy(job, model)
    use_one_gpu(args, job.reporter)
    with config_kept(model):
        trainer = GrpoTrainer(
            model=model,
            reward_funcs=[_of_rows(reward, failures, asked, columns) for reward in rewards],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [one.text for one in asked], _ROW: list(range(len(asked)))}),
            processing_class=job.tokenizer,
        )
    trainer.group, trainer.failures = group, failures
    trainer.answers = Answers(job.reasoning_marks, asked, grpo.stop_strings)
    trainer.plan, trainer.own_optimizer = job.plan, job.report.setup.own_optimizer
    trainer.spans = Spans(job.device, (ROLLOUT, REWARDS, LOG_PROBS, TRAINING, OPTIMIZER), counted=(ROLLOUT, TRAINING))
    trainer.stagnation = Stagnation(grpo.early_stopping)
    trainer.rollouts = Rollouts(trainer.accelerator.unwrap_model(trainer.model), job, grpo)
    trainer.stop_strings, trainer.stopping = grpo.stop_strings, trainer.rollouts.stopping
    trainer.batches, trainer.pad_token_id = job.batches(model), job.pad_token_id
    trainer.stack, trainer.graphs = use_stack(job, model)
    trainer.aux_loss_enabled = False  # as in supervised training (FT318)
    trainer.tell_parity = tell_parity
    trainer.control_seed = job.recipe.run.seed if grpo.shuffle_rewards else None
    trainer.bind(hooks, train)
    return trainer


def _of_rows(
    reward: Reward, failures: RewardFailures, asked: Sequence[RenderedPrompt], columns: Mapping[str, Sequence[Any]]
) -> Callable[..., list[float | None]]:
    """The reward as TRL calls it: with the numbers of rows, whose values it gets as the data has them.

    A dataset would bring all values of a column into one type, or refuse them.
    """

    def score(prompts: Sequence[str], completions: Sequence[str], **given: Any) -> list[float | None]:
        rows = given.pop(_ROW)
        lent = {name: [values[row] for row in rows] for name, values in columns.items()}
        origins = [asked[row].prompt.row.origin for row in rows]
        scores = reward.scores(prompts, completions, lent, origins, given[REASONING])
        failures.note(reward, scores)
        return scores.values

    score.__name__ = reward.name  # TRL logs rewards under the function's name
    return score


def _grpo_arguments(grpo: GrpoConfig, rewards: Sequence[Reward], stops: Sequence[int]) -> Arguments:
    return {
        "num_generations": grpo.num_generations,
        "max_completion_length": grpo.max_completion_length,
        "temperature": grpo.temperature,
        "top_p": grpo.top_p,
        "top_k": grpo.top_k,
        "beta": grpo.beta,
        "epsilon": grpo.epsilon,
        "epsilon_high": grpo.epsilon_high,
        "loss_type": grpo.loss_type,
        "importance_sampling_level": grpo.importance_sampling_level,
        "scale_rewards": grpo.scale_rewards,
        "num_iterations": grpo.num_iterations,
        "mask_truncated_completions": grpo.mask_truncated_completions,
        "reward_weights": [reward.weight for reward in rewards],
        "generation_kwargs": {"eos_token_id": list(stops)},
    }
