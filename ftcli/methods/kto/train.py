"""Learning from labelled answers as a run on rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.methods.preference.choice import caches, needs_second_model
from ftcli.train.on_rows import RowMethod
from ftcli.train.start import TrainingRows

if TYPE_CHECKING:
    from ftcli.data.order import Epochs
    from ftcli.data.prepare import PreparedData
    from ftcli.data.tokens import TokenizedRow, TokenTable
    from ftcli.evaluate.suite import Evaluator
    from ftcli.job import Job
    from ftcli.judges import Judge
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import TrainerHooks, TrainingLoop


class Labelled(RowMethod):
    """Answers that are called good or bad: the one are to become likelier, the other less likely."""

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Both labels, interleaved. Reports what is compared."""
        from ftcli.methods.kto import order
        from ftcli.methods.kto.losses import LabelLoss

        recipe, loss = job.recipe, LabelLoss.of(job.recipe.preference)
        epochs = _epochs(recipe, prepared.sequences)
        wanted, unwanted = order.label_counts(epochs)
        copied = "the model as it starts" if caches(recipe, "surely") else "a second copy of the model as it starts"
        start = "the model without its adapters" if recipe.lora is not None else copied
        job.reporter.info(f"labels: {wanted:,} desirable and {unwanted:,} undesirable answers an epoch")
        job.reporter.info(f"loss: {loss.name} (beta {loss.beta:g}), compared with {start}")
        return epochs

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Labels that teach something else than they say. Raises FtcliError FT465 (exit 4) where all are one."""
        from ftcli.methods.kto import order
        from ftcli.methods.kto.losses import LabelLoss

        order.require_both_labels(table)
        wanted, unwanted = order.label_counts(_epochs(recipe, table))
        settings = LabelLoss.of(recipe.preference).settings
        yield from order.label_findings(wanted, unwanted, settings, rows_a_step(recipe))
        yield from order.contradictions(table)

    def held_out_findings(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
        """A model that has forgotten to stop."""
        from ftcli.methods.preference.figures import stop_findings

        return stop_findings(before, after)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Answers."""
        return TrainingRows(rows, "labelled answers", tokens)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Of adapters the reference is the model without them; else it may be scored before the model changes."""
        return needs_second_model(recipe)

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
    ) -> Any:
        """Scores the reference ahead where that pays."""
        from ftcli.methods.kto.reference import scored_ahead

        return replace(scored_ahead(job, model, epochs, held_out, group, keep=keep), model=reference)

    def evaluator(
        self,
        job: Job,
        rows: Sequence[TokenizedRow],
        group: RankGroup | None = None,
        *,
        judges: Mapping[str, Judge] | None = None,
        reference: Any = None,
    ) -> Evaluator:
        """Loss, accuracy, margin, KL."""
        from ftcli.methods.kto.evaluate import LabelEvaluator
        from ftcli.methods.kto.reference import LabelReference

        compared = reference or LabelReference()
        return LabelEvaluator(job, rows, judges or {}, group, reference=compared.model, known=dict(compared.held_out))

    def build(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        hooks: TrainerHooks,
        group: RankGroup | None,
        reference: Any = None,
    ) -> TrainingLoop:
        """The loop over the answers' mean loss."""
        from ftcli.methods.kto.objective import build_labelled

        return build_labelled(job, model, epochs, hooks, group, reference)


def _epochs(recipe: Recipe, table: TokenTable) -> Epochs:
    from ftcli.methods.kto.order import labelled_epochs

    weights = [source.weight for source in recipe.data.train]
    shares = [float(weight) for weight in weights if weight is not None]
    return labelled_epochs(table, shares if len(shares) == len(weights) else None, recipe.run.seed)


def rows_a_step(recipe: Recipe) -> int:
    """Rows of an optimizer step, over all processes."""
    train = recipe.train
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * recipe.launch.row_shares
