"""Distillation on the answers of rows: the distribution of each supervised token is brought nearer to the likeliest
tokens of a teacher that was asked before the student was loaded, or on another machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from ftkernels.linear_divergence import LinearHead, TopLogProbs, top_log_probs
from torch import Tensor

from ftcli.data.collate import documents_batch
from ftcli.data.order import Epochs
from ftcli.data.prepare import PreparedData
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import FtcliError
from ftcli.evaluate.loss import in_batches, in_step
from ftcli.job import Job
from ftcli.methods.distill import stored
from ftcli.methods.distill.settings import DistillConfig
from ftcli.methods.distill.stored import IDS, LOG_PROBS, REST, PartWriter, StoredLogProbs
from ftcli.methods.sft.train import SftObjective, Supervised
from ftcli.model.backbone import compute_context, head_of, hidden_states, root_of, within_root
from ftcli.model.loss import SUPERVISED, next_token_divergence, supervised_positions
from ftcli.model.shards import reshard_model, try_forward
from ftcli.model.weight_digests import weight_digests
from ftcli.paths import expanded
from ftcli.plain import JsonObject
from ftcli.run.metrics import MetricsLine
from ftcli.train.checkpoint_state import Progress
from ftcli.train.epochs import StepSums, seen_units, steps_of
from ftcli.train.on_rows import ObjectiveParts
from ftcli.train.parallel import Divisors, MicroBatch

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup

_DOING = "asking the teacher"


class OfflineObjective(SftObjective):
    """The mean divergence from the teacher over the supervised tokens of a step, all but its likeliest as one class."""

    def __init__(
        self, job: Job, model: Any, epochs: Epochs, kept: StoredLogProbs, **parts: Unpack[ObjectiveParts]
    ) -> None:
        super().__init__(job, model, epochs, **parts)
        if self._vocab_size < kept.vocabulary:
            message = f"{kept.folder} is of {kept.vocabulary:,} tokens, and the student has {self._vocab_size:,}"
            raise stored.unfit(message, "ask the teacher again, for this student: name another folder")
        self._kept, self._settings = kept, job.recipe.distill or DistillConfig()
        self._sums = StepSums("teacher", 3, job.device, self._group)

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """As in supervised fine-tuning, with what the teacher thinks of the tokens that are supervised."""
        made = super().micro_batch(units, blank=blank)
        rows = [] if blank else [row for unit in units for row in self._epochs.members(unit)]
        return replace(made, inputs={**made.inputs, **self._kept.of(rows)})

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The sum of the divergences of a micro-batch's supervised tokens, over those of the whole step."""
        model, settings, where = self._model, self._settings, inputs[SUPERVISED]
        teacher = TopLogProbs(inputs[IDS].long(), inputs[LOG_PROBS], inputs[REST], self._kept.vocabulary)
        beside = ("labels", "attention_mask", SUPERVISED, IDS, LOG_PROBS, REST)
        own = {name: value for name, value in inputs.items() if name not in beside}
        weights = (1.0 / step.supervised).expand(where.shape[0])

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            learnt = hidden_states(model, own, self._stack).rows(where), head_of(model)
            found = next_token_divergence(
                learnt, teacher, weights, beta=settings.beta, temperature=settings.temperature
            )
            return found.loss, found.entropies, found.agreed

        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            loss, entropies, agreed = within_root(model, compute)
        count = torch.full_like(agreed, True)
        self._sums.add(torch.stack([one.double().sum() for one in (agreed, entropies, count)]))
        return loss

    def metrics(self) -> MetricsLine:
        """Means over the tokens since the last line."""
        agreed, entropy, tokens = self._sums.take()
        return {"teacher_agreement": agreed / max(tokens, 1), "entropy": entropy / max(tokens, 1)}

    def begin(self, step: int) -> None:
        self._sums.begin()

    def reduced(self) -> None:
        self._sums.reduce()

    def undo(self, step: int) -> None:
        self._sums.undo()

    def state(self) -> JsonObject:
        return {**self._sums.state(), "of_teacher": self._kept.identity}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """The sums. Raises FtcliError FT735 (exit 2) where the log-probabilities are of another teacher."""
        if state.get("of_teacher", self._kept.identity) != self._kept.identity:
            message = f"the teacher of {self._kept.folder} has changed since this run began"
            help = (
                "restore the folder to continue; or start over with --resume never, which keeps the old run beside it"
            )
            raise FtcliError.single("FT735", message, help=help)
        self._sums.restore(state)


class Offline(Supervised):
    """Rows that hold their answers, whose tokens a teacher has judged by its likeliest ones."""

    def __init__(self) -> None:
        self._vocabulary, self._tokens = 0, ""

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        self._vocabulary, self._tokens = job.vocab_size, stored.tokens_digest(job.tokenizer)
        return super().epochs(job, prepared)

    def ask_other(
        self, job: Job, model: Any, epochs: Epochs | None, held_out: Sequence[TokenizedRow], group: RankGroup | None
    ) -> StoredLogProbs:
        """Asks the teacher about the rows that training will see and the folder lacks. All ranks call it."""
        settings, config = job.recipe.distill or DistillConfig(), job.recipe.model
        folder = expanded(settings.teacher_logprobs or "")
        told: JsonObject = {
            "format": stored.FORMAT,
            "teacher": config.name_or_path,
            "revision": config.revision,
            "quantization": job.recipe.quantization.method,
            "weights": stored.digest(weight_digests(model)),
            "tokens": self._tokens,
            "vocabulary": min(self._vocabulary, head_of(model).weight.shape[0]),
            "teacher_top_k": settings.teacher_top_k,
            "temperature": settings.temperature,
        }
        told["teacher_top_k"] = min(settings.teacher_top_k, told["vocabulary"])
        if group is None or group.leads:
            stored.begin(folder, told)
        if group is not None:
            group.agree("opened the folder")
        kept = stored.read(folder, told)
        rows = list(_seen(job, epochs, group))
        missing = kept.lacks(rows)
        _Asking(job, model, group, told).ask(missing, kept)
        job.reporter.info(f"teacher: {len(rows):,} rows, {len(missing):,} of them asked now, kept in {folder}")
        return stored.read(folder, told) if missing else kept

    def before_training(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        held_out: Sequence[TokenizedRow],
        group: RankGroup | None,
        reference: Any = None,
        *,
        keep: bool = True,
    ) -> StoredLogProbs:
        """The folder's log-probabilities where no teacher is named. Raises FtcliError FT474 (exit 4) where rows are not
        in it, or their tokens were others.
        """
        settings = job.recipe.distill or DistillConfig()
        folder = expanded(settings.teacher_logprobs or "")
        kept = stored.read(folder, {"tokens": self._tokens})
        missing = kept.lacks(_seen(job, epochs, group))
        if missing:
            message = f"{len(missing):,} of the rows that are trained on, such as this one, are not in {folder}, which "
            message += f"has {len(kept):,}"
            help = "name distill.teacher, which is asked about them; or restore the rows, the template and data.loss_on"
            raise stored.unfit(message, help, missing[0])
        job.reporter.info(f"teacher: {kept.told['teacher']}, by its {kept.told['teacher_top_k']} likeliest tokens")
        return kept

    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> OfflineObjective:
        return OfflineObjective(job, model, epochs, reference, **parts)


def _seen(job: Job, epochs: Epochs | None, group: RankGroup | None) -> Iterator[TokenizedRow]:
    """The rows that training will see."""
    if epochs is not None:
        units, _ = seen_units(epochs, steps_of(job, epochs, group))
        yield from (row for unit in units for row in epochs.members(unit))


class _Asking:
    """Asks a teacher, each rank about rows of its own."""

    def __init__(self, job: Job, model: Any, group: RankGroup | None, told: JsonObject) -> None:
        self._job, self._model, self._group, self._told = job, model, group, told
        self._sharded = root_of(model) is not None

    def ask(self, missing: Sequence[TokenizedRow], kept: StoredLogProbs) -> None:
        """Writes what it thinks of these rows, the longest first, into the folder."""
        if not missing:
            return
        job, group = self._job, self._group
        ordered = sorted(missing, key=lambda row: -len(row.input_ids))
        writer = PartWriter(kept.folder, kept.identity)
        with torch.no_grad(), job.reporter.progress(len(ordered), _DOING) as progress:
            for rows, top in self._asked(ordered):
                progress.advance(len(rows) * (1 if group is None else group.size))
                if top is not None:
                    writer.add(rows, top)
        writer.close()
        reshard_model(self._model)
        if group is not None:
            group.agree("asked the teacher")
            group.stop_if_asked(_DOING)

    def _asked(self, ordered: Sequence[TokenizedRow]) -> Iterator[tuple[Sequence[TokenizedRow], TopLogProbs | None]]:
        size, reporter, group = self._job.recipe.train.per_device_train_batch_size, self._job.reporter, self._group
        if group is not None and self._sharded:
            turns = in_step(
                group, ordered, size, self._top, where=_origin, reporter=reporter, what="the teacher", doing=_DOING
            )
            yield from ((turn.items, turn.found) for turn in turns)
            return
        if group is not None:
            batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
            ordered = [row for batch in batches[group.rank :: group.size] for row in batch]
        yield from in_batches(ordered, size, self._top, where=_origin, reporter=reporter, what="the teacher")

    def _top(self, rows: Sequence[TokenizedRow]) -> TopLogProbs | None:
        """Of all supervised positions of some rows, in turn; None where they do not fit into memory."""
        job, model, told = self._job, self._model, self._told
        batch = documents_batch(rows, job.batches(model), job.pad_token_id)
        where = supervised_positions(batch.pop("labels"), head_of(model).weight.shape[0]).to(job.device)
        inputs = {name: value.to(job.device) for name, value in batch.items()}

        def compute() -> tuple[Tensor, Tensor, Tensor]:
            states, head = hidden_states(model, inputs, None).rows(where), head_of(model)
            one = LinearHead(states, head.weight, head.bias, head.softcap, head.logit_scale).within(told["vocabulary"])
            found = top_log_probs(one, told["teacher_top_k"], temperature=told["temperature"])
            return found.ids, found.log_probs, found.rest

        with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
            whole = partial(within_root, model, compute)
            found = try_forward(model, whole) if self._sharded else whole()
        return None if found is None else TopLogProbs(*found, told["vocabulary"])


def _origin(row: TokenizedRow) -> Any:
    return row.row.origin
