"""Supervised fine-tuning as a run on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.train.on_rows import RowMethod
from ftcli.train.start import TrainingRows

if TYPE_CHECKING:
    from ftcli.data.order import Epochs
    from ftcli.data.prepare import PreparedData
    from ftcli.data.tokens import TokenizedRow
    from ftcli.evaluate.suite import Evaluator
    from ftcli.job import Job
    from ftcli.judges import Judge
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import TrainerHooks, TrainingLoop


class Supervised(RowMethod):
    """Rows of which some tokens bear loss."""

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Rows, or packs of them."""
        from ftcli.train.data import training_epochs

        return training_epochs(job, prepared)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Rows; a step takes packs of them where they are packed."""
        return TrainingRows(rows, "rows", tokens, batch="packed rows" if recipe.data.packing else None)

    def evaluator(
        self,
        job: Job,
        rows: Sequence[TokenizedRow],
        group: RankGroup | None = None,
        *,
        judges: Mapping[str, Judge] | None = None,
        reference: Any = None,
    ) -> Evaluator:
        """Loss, perplexity and token accuracy."""
        from ftcli.evaluate.suite import Evaluator

        return Evaluator(job, rows, judges or {}, group)

    def build(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        hooks: TrainerHooks,
        group: RankGroup | None,
        reference: Any = None,
    ) -> TrainingLoop:
        """The loop over the rows' mean cross-entropy."""
        from ftcli.methods.sft.objective import build_sft

        return build_sft(job, model, epochs, hooks, group)
