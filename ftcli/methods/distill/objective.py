"""The objective of distillation: the student's own completions, and the teacher's distribution at each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.data.asked import RenderedPrompt
from ftcli.data.collate import documents_batch
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.job import Job
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.distill.checks import no_column
from ftcli.methods.distill.settings import DistillConfig
from ftcli.methods.grpo.rollouts import Rollouts, SampledObjective, sampling
from ftcli.methods.grpo.spans import OPTIMIZER, ROLLOUT, TRAINING, Spans
from ftcli.model.backbone import compute_context, head_of, hidden_states, within_root
from ftcli.model.loss import next_token_divergence, supervised_positions
from ftcli.model.shards import reshard_model
from ftcli.plain import JsonObject
from ftcli.plan.batches import Batches
from ftcli.run.process_group import gather_json
from ftcli.train.assembly import of_reference
from ftcli.train.checkpoint_state import Progress, draw_of_epoch
from ftcli.train.loop import StepMonitor
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.fused import DecoderStack
    from ftcli.run.process_group import RankGroup

#: The parts of a step whose time is told.
PARTS = (ROLLOUT, TRAINING, OPTIMIZER)
_POSITIONS, _TEACHER = "positions", "teacher."


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher: another model, with the layout of its batches; or the student's without adapters, where ``model`` is
    None. ``texts`` are its prompts where it sees others than the student.
    """

    model: PreTrainedModel | None
    batches: Batches
    texts: Sequence[str] | None = None

    @contextmanager
    def at_hand(self, student: PreTrainedModel | PeftModel) -> Iterator[PreTrainedModel | PeftModel]:
        """A block in which the model that it gives is the teacher."""
        with of_reference(self.model, student):
            yield student if self.model is None else self.model


@dataclass(slots=True)
class _Batch:
    """A micro-batch's completions: their tokens, whether they ended, and once it is known the mean entropy, and at how
    many tokens the student's likeliest is the teacher's.
    """

    lengths: list[int]
    ended: list[bool]
    entropy: float | None = None
    agreed: int = 0


class DistillObjective(SampledObjective):
    """The mean divergence from the teacher over all tokens that the student samples for a step.

    Args:
        group: The ranks that train together: each completes the prompts of its own micro-batches.
    """

    def __init__(
        self,
        job: Job,
        settings: DistillConfig,
        model: PreTrainedModel | PeftModel,
        asked: Sequence[RenderedPrompt],
        teacher: Teacher,
        stack: DecoderStack | None,
        group: RankGroup | None = None,
    ) -> None:
        train = job.recipe.train
        self._size = train.per_device_train_batch_size
        self._accumulation = train.gradient_accumulation_steps * (1 if group is None else group.size)
        at_once, spans = self._size * self._accumulation, Spans(job.device, PARTS, counted=(ROLLOUT, TRAINING))
        super().__init__(job, len(asked), at_once, spans, group)
        self._settings, self._model, self._asked, self._teacher = settings, model, asked, teacher
        self._stack, self._batches = stack, job.batches(model)
        self.steps_per_epoch = len(asked) // at_once
        self._rollouts = Rollouts(model, job, settings, group)
        # Of a student whose vocabulary is padded to more entries, the teacher cannot read those.
        read_by = model if teacher.model is None else teacher.model
        self._known = int(read_by.get_input_embeddings().weight.shape[0])
        self._of_batches: list[_Batch] = []

    def epochs_done(self, step: int) -> float:
        """How often all prompts have been completed after so many steps."""
        return step / self.steps_per_epoch

    # -- a step ----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """No micro-batch of it has been computed."""
        super().begin(step)
        self._of_batches = []

    def micro_batches(self, step: int, monitor: StepMonitor) -> list[MicroBatch]:
        """Completions by the weights of now, for the student, and for the teacher behind the prompts that it sees."""
        if step % self.steps_per_epoch == 0 and self._group is None:
            draw_of_epoch()
        rows = self.prompts_of(step)
        mine = [self._asked[row].text for row in rows]
        theirs = mine if self._teacher.texts is None else [self._teacher.texts[row] for row in rows]
        encode = self._job.tokenizer
        # The template has written BOS; a tokenizer that adds another would shift every prompt by a token.
        prompts, others = (encode(text=texts, add_special_tokens=False)["input_ids"] for texts in (mine, theirs))
        turns = range(self._rank, self._accumulation, self._ranks)
        own = [turn * self._size + row for turn in turns for row in range(self._size)]
        completions = dict(zip(own, self._sampled(prompts, step, monitor, own), strict=True))
        self._spans.enter(TRAINING)
        found, pad = [], self._job.pad_token_id
        for turn in turns:
            part = slice(turn * self._size, (turn + 1) * self._size)
            said, known = [completions[at] for at in range(len(rows))[part]], [self._asked[row] for row in rows[part]]
            ended = [self._rollouts.stopping.stopped(tokens) for tokens in said]
            self._of_batches.append(_Batch([len(tokens) for tokens in said], ended))
            inputs = self._laid_out(known, prompts[part], said, self._batches)
            read = [[token if token < self._known else pad for token in tokens] for tokens in said]
            for name, value in self._laid_out(known, others[part], read, self._teacher.batches).items():
                inputs[_TEACHER + name] = value
            tokens = sum(map(len, said))
            real = tokens + sum(map(len, prompts[part]))
            self._spans.count(TRAINING, real)
            found.append(MicroBatch(inputs, (), TokenCounts(tokens, real, inputs["input_ids"].numel())))
        return found

    def _sampled(
        self, prompts: list[list[int]], step: int, monitor: StepMonitor, own: Sequence[int]
    ) -> list[list[int]]:
        self._spans.enter(ROLLOUT)
        with sampling(self._job, self._model, step, monitor):
            found = [one.tokens for one in self._rollouts.complete(prompts, step, own)]
        self._spans.enter(None)
        self._spans.count(ROLLOUT, sum(map(len, found)))
        return found

    def _laid_out(
        self,
        asked: Sequence[RenderedPrompt],
        prompts: Sequence[list[int]],
        completions: Sequence[list[int]],
        batches: Batches,
    ) -> dict[str, Tensor]:
        """A batch of prompts with completions, and the positions that predict the tokens of the latter."""
        documents = [
            TokenizedRow(one.prompt.row, [*prompt, *tokens], [IGNORE_INDEX] * len(prompt) + tokens)
            for one, prompt, tokens in zip(asked, prompts, completions, strict=True)
        ]
        batch = documents_batch(documents, batches, self._job.pad_token_id)
        labels = batch.pop("labels")
        return {**batch, _POSITIONS: supervised_positions(labels, int(labels.max()) + 1)}

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The sum of the divergences of a micro-batch's tokens, over the tokens of the whole step."""
        dtypes, settings, model = self._job.dtypes, self._settings, self._model
        shown = {name.removeprefix(_TEACHER): inputs[name] for name in inputs if name.startswith(_TEACHER)}
        own = {name: value for name, value in inputs.items() if not name.startswith(_TEACHER)}
        where, theirs = own.pop(_POSITIONS), shown.pop(_POSITIONS)

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad(), self._teacher.at_hand(model) as teacher:
                said = within_root(teacher, lambda: hidden_states(teacher, shown, None).rows(theirs))
                taught = said, head_of(teacher)
            learnt = hidden_states(model, own, self._stack).rows(where), head_of(model)
            weights = (1.0 / step.supervised).expand(where.shape[0])
            found = next_token_divergence(learnt, taught, weights, beta=settings.beta, temperature=settings.temperature)
            return found.loss, found.entropies, found.agreed

        with compute_context(self._job.device, dtypes.compute, dtypes.autocast):
            loss, entropies, agreed = within_root(model, compute)
        if self._teacher.model is not None:
            reshard_model(self._teacher.model)
        batch = next(one for one in self._of_batches if one.entropy is None)
        batch.entropy, batch.agreed = float(entropies.mean()), int(agreed.sum())
        return loss

    def reduced(self) -> None:
        """Notes the metrics of all ranks' micro-batches, in the order of one process."""
        spans, counted = self._spans, {part: self._spans.counted(part) for part in (ROLLOUT, TRAINING)}
        mine = [[one.lengths, one.ended, one.entropy, one.agreed] for one in self._of_batches]
        told: list[Any] = [[mine, counted]]
        if self._group is not None:
            told = gather_json(self._group, "metrics", told[0])
            for part, own in counted.items():
                spans.count(part, sum(each[part] for _, each in told) - own)
        every = [of_rank[at] for at in range(len(mine)) for of_rank, _ in told]
        lengths, ended = ([one for batch in every for one in batch[part]] for part in (0, 1))
        self._metrics["completions/mean_length"].append(math.fsum(lengths) / len(lengths))
        self._metrics["completions/clipped_ratio"].append(1.0 - sum(ended) / len(ended))
        self._metrics["entropy"] += [batch[2] for batch in every]
        self._metrics["teacher_agreement"].append(sum(batch[3] for batch in every) / sum(lengths))
        spans.enter(OPTIMIZER)

    def state(self) -> JsonObject:
        return {"metrics": self.metrics_state()}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        self.restore_metrics(state.get("metrics", {}))


def teacher_texts(job: Job, column: str, asked: Sequence[RenderedPrompt]) -> list[str]:
    """The prompts as the teacher sees them, with the text of a column at the end of the last turn.

    Raises FtcliError FT453 (exit 4) where a row lacks the column.
    """
    from ftcli.data.template import renderer_of

    renderer, found = renderer_of(job.tokenizer, job.recipe.data), []
    for one in asked:
        prompt, more = one.prompt, one.prompt.row.fields.get(column)
        if more is None:
            raise FtcliError([no_column(column, prompt.row.origin)], ExitCode.DATA)
        found.append(renderer.prompt(prompt.followed_by(str(more))))
    return found
