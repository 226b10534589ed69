"""Learning from pairs as a run on rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.methods.preference.choice import beta_of, caches, compares, losses_of, needs_second_model
from ftcli.methods.preference.settings import PreferenceConfig
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


class Preference(RowMethod):
    """Pairs of answers, of which one is to become likelier than the other."""

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Pairs. Reports what is compared."""
        from ftcli.methods.preference.pairs import epochs_of_pairs

        job.reporter.info(f"loss: {_summary(job.recipe)}")
        return epochs_of_pairs(job, prepared)

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Pairs that teach something else than they say."""
        from ftcli.methods.preference.pairs import pair_findings

        return pair_findings(table)

    def synthetic(self, rows: Sequence[TokenizedRow], prompt: int | None, seed: int) -> Epochs:
        """Pairs of two rows in turn, with one prompt."""
        from ftcli.methods.preference.pairs import synthetic_pairs

        return synthetic_pairs(rows, prompt, seed)

    def held_out_findings(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
        """A model that has forgotten to stop."""
        from ftcli.methods.preference.figures import stop_findings

        return stop_findings(before, after)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        """Pairs."""
        return TrainingRows(rows // 2, "pairs", tokens)

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
        from ftcli.methods.preference.reference import scored_ahead

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
        """Loss, accuracy, margin."""
        from ftcli.methods.preference.evaluate import PairEvaluator
        from ftcli.methods.preference.reference import Reference

        compared = reference or Reference()
        known = {pair: values.tolist() for pair, values in compared.held_out.items()}
        return PairEvaluator(job, rows, judges or {}, group, reference=compared.model, known=known)

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
        from ftcli.methods.preference.objective import build_pairs

        return build_pairs(job, model, epochs, hooks, group, reference)


def _summary(recipe: Recipe) -> str:
    settings = recipe.preference or PreferenceConfig()
    names = losses_of(recipe.train.method, settings)
    parts = [f"{name} (beta {beta_of(name, settings):g})" for name, _ in names]
    if not compares(recipe.train.method, settings):
        return f"{' + '.join(parts)}, compared with nothing"
    copied = "the model as it starts" if caches(recipe, "surely") else "a second copy of the model as it starts"
    start = "the model without its adapters" if recipe.lora is not None else copied
    return f"{' + '.join(parts)}, compared with {start}"
