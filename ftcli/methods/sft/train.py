"""Supervised fine-tuning: rows in the order of each epoch, and the mean loss of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from ftcli.config.recipe import Recipe
from ftcli.data.collate import EpochCollator, part_of
from ftcli.data.ledger import raise_without_images
from ftcli.data.order import Epochs
from ftcli.data.prepare import PreparedData
from ftcli.errors import Finding
from ftcli.evaluate.suite import Evaluator
from ftcli.job import Job
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import compute_context, head_of
from ftcli.model.loss import SUPERVISED, forward_loss, next_tokens, target_positions
from ftcli.model.routing import RouterBalance, counted_tokens
from ftcli.plan.trained import adds_router_loss
from ftcli.train.data import training_epochs
from ftcli.train.epochs import EpochObjective
from ftcli.train.on_rows import ObjectiveParts, RowMethod
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts
from ftcli.train.progress import TrainingRows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.data.tokens import TokenTable


#: Where a micro-batch holds which of its tokens the routers' auxiliary loss counts.
COUNTED = "counted"


class SftObjective(EpochObjective):
    """Cross-entropy over the supervised tokens of a step, whatever micro-batches and ranks it is split into."""

    def __init__(
        self, job: Job, model: PreTrainedModel | PeftModel, epochs: Epochs, **parts: Unpack[ObjectiveParts]
    ) -> None:
        self._pad, self._batches = job.pad_token_id, job.batches(model)
        super().__init__(job, model, epochs, **parts)
        self._vocab_size = head_of(model).weight.shape[0]
        self._balance: RouterBalance | None = None
        if adds_router_loss(job.recipe, job.facts):
            coefficient = job.recipe.train.router_aux_loss_coef
            self._balance = RouterBalance(model, coefficient, job.device)

    def use(self, epochs: Epochs) -> None:
        super().use(epochs)
        self._collate = EpochCollator(epochs, self._pad, self._batches, self._pixels)

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The batch of these sequences, or this rank's part of it, with the positions that bear loss, for which the
        loss would have to wait for the device.
        """
        batch = self._collate(units)
        if blank:
            batch["labels"].fill_(IGNORE_INDEX)
        if self._sequence is not None:
            batch = part_of(batch, self._sequence.part, self._sequence.parts)
        targets = batch["targets"].reshape(-1) if "targets" in batch else next_tokens(batch["labels"])
        supervised = target_positions(targets, self._vocab_size)
        # Padded rows come with a mask, others with their lengths. The sum of either is the number of tokens.
        real = batch["attention_mask"] if "attention_mask" in batch else batch["lengths"]
        counts = TokenCounts(supervised.numel(), 0 if blank else int(real.sum()), batch["input_ids"].numel())
        inputs = {name: value for name, value in batch.items() if name != "lengths"}
        if self._balance is not None:
            inputs[COUNTED] = counted_tokens(batch)
        return MicroBatch({**inputs, SUPERVISED: supervised}, () if blank else tuple(units), counts)

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """Summed loss in nats over the supervised tokens, divided by those of the whole step; and by the same share the
        auxiliary loss of the micro-batch's routing.
        """
        if self._balance is not None:
            self._balance.begin(inputs[COUNTED])
            inputs = {name: value for name, value in inputs.items() if name != COUNTED}
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            found = forward_loss(
                self._model,
                inputs,
                num_items=step.supervised,
                stack=self._stack,
                sequence=self._sequence,
                balance=self._balance,
            )
        return found.loss


class Supervised(RowMethod):
    """Rows of which some tokens bear loss; measured are loss, perplexity and token accuracy."""

    evaluates = Evaluator

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        return training_epochs(job, prepared)

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Nothing. Raises FtcliError FT448 (exit 4) where a tower is to be trained and no row has an image."""
        if len(table) and not table.has_images:
            raise_without_images(recipe)
        return iter(())

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Rows; a step takes packs of them where they are packed."""
        return TrainingRows(rows, "rows", tokens, batch="packed rows" if recipe.data.packing else None)

    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> SftObjective:
        return SftObjective(job, model, epochs, **parts)
