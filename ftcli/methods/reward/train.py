"""Reward modelling as a run on rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.rows.row import data_error
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


def _margin_findings(recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
    """FT409, a note, for margins that nobody asks for. Raises FtcliError FT462 (exit 4) where one is missing that is
    asked for.
    """
    margins = table.values[0::2]
    if (recipe.reward or RewardModelConfig()).margin:
        missing = int((margins == 0).argmax()) if (margins == 0).any() else None
        if missing is not None:
            count = int((margins == 0).sum())
            raise data_error(
                "FT462",
                f"reward.margin asks for the column `margin`, and {count:,} of {len(margins):,} pairs have none, or 0",
                table[2 * missing].row.origin,
                help="add it, map another column in data.columns, or remove reward.margin",
            )
    elif margins.any():
        yield Finding("FT409", "the column `margin` is not read", None, "reward.margin: true asks for it", "note")


class RewardModelling(RowMethod):
    """Pairs of answers, of which one is to get the higher score."""

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Pairs."""
        from ftcli.methods.preference.pairs import epochs_of_pairs

        return epochs_of_pairs(job, prepared)

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Pairs that teach something else than they say, and margins as :func:`_margin_findings` has it."""
        from ftcli.methods.preference.pairs import pair_findings

        yield from _margin_findings(recipe, table)
        yield from pair_findings(table)

    def synthetic(self, rows: Sequence[TokenizedRow], prompt: int | None, seed: int) -> Epochs:
        """Pairs of two rows in turn, with one prompt."""
        from ftcli.methods.preference.pairs import synthetic_pairs

        return synthetic_pairs(rows, prompt, seed)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Pairs."""
        return TrainingRows(rows // 2, "pairs", tokens)

    def evaluator(
        self,
        job: Job,
        rows: Sequence[TokenizedRow],
        group: RankGroup | None = None,
        *,
        judges: Mapping[str, Judge] | None = None,
        reference: Any = None,
    ) -> Evaluator:
        """Loss, accuracy, margin."""
        from ftcli.methods.reward.evaluate import RewardEvaluator

        return RewardEvaluator(job, rows, judges or {}, group)

    def build(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        hooks: TrainerHooks,
        group: RankGroup | None,
        reference: Any = None,
    ) -> TrainingLoop:
        """The loop over the pairs' mean loss."""
        from ftcli.methods.reward.objective import build_reward

        return build_reward(job, model, epochs, hooks, group)
