"""Learning from pairs as a run on rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from ftcli.config.recipe import Recipe
from ftcli.data.ledger import raise_without_images
from ftcli.data.order import Epochs
from ftcli.data.prepare import PreparedData
from ftcli.data.tokens import TokenizedRow, TokenTable
from ftcli.errors import Finding
from ftcli.evaluate.suite import Evaluator
from ftcli.facts.adapters import start_folder
from ftcli.job import Job
from ftcli.judges import Judge
from ftcli.methods.preference.checks import (
    beta_of,
    caches,
    compares,
    losses_of,
    needs_second_model,
    other_model,
    start_adapter,
)
from ftcli.methods.preference.evaluate import ComparedEvaluator, PairEvaluator
from ftcli.methods.preference.figures import stop_findings
from ftcli.methods.preference.losses import PairLoss
from ftcli.methods.preference.objective import PairObjective
from ftcli.methods.preference.pairs import epochs_of_pairs, pair_findings, synthetic_pairs
from ftcli.methods.preference.reference import Reference
from ftcli.methods.preference.reference import scored_ahead as pairs_ahead
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.initial_adapters import remember_start
from ftcli.model.initial_adapters import start_of as started
from ftcli.run.process_group import RankGroup
from ftcli.train.on_rows import ObjectiveParts, RowMethod
from ftcli.train.progress import TrainingRows

if TYPE_CHECKING:
    from ftcli.train.loop import TrainerHooks, TrainingLoop


class Compared(RowMethod):
    """A method whose answers are compared with a reference, which may be scored ahead of the first step."""

    evaluates: ClassVar[type[ComparedEvaluator]]

    #: The reference, scored where that pays, as :func:`ftcli.methods.preference.reference.scored_ahead` does it of
    #: pairs; its ``model`` is still open.
    scored_ahead: ClassVar[Callable[..., Any]]

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
        """Scores the reference ahead where that pays. Of adapters that are gone on from it is what they are now."""
        if start_adapter(job.recipe) is not None:
            remember_start(model)
        return replace(self.scored_ahead(job, model, epochs, held_out, group, keep=keep), model=reference)

    def build(
        self,
        job: Job,
        model: Any,
        epochs: Epochs,
        hooks: TrainerHooks,
        group: RankGroup | None,
        reference: Any = None,
    ) -> TrainingLoop:
        """The loop. Beside another model, too, the policy is held to its own start before the first step."""
        lora = job.recipe.lora
        if lora is not None and lora.start_from is not None and not started(model):
            remember_start(model)
        return super().build(job, model, epochs, hooks, group, reference)

    def ask_other(
        self, job: Job, model: Any, epochs: Epochs | None, held_out: Sequence[TokenizedRow], group: RankGroup | None
    ) -> Any:
        """Scores another model, which is the reference."""
        found = self.scored_ahead(job, model, epochs, held_out, group)
        return replace(found, other=job.recipe.model.name_or_path)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Of adapters the reference is the model without them; else it may be scored before the model changes."""
        return needs_second_model(recipe)

    def start_of(self, recipe: Recipe) -> str | None:
        return start_adapter(recipe)

    def held_out_findings(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
        """A model that has forgotten to stop."""
        return stop_findings(before, after)

    def evaluator(
        self,
        job: Job,
        rows: Sequence[TokenizedRow],
        group: RankGroup | None = None,
        *,
        judges: Mapping[str, Judge] | None = None,
        reference: Any = None,
    ) -> Evaluator:
        """An evaluator that knows what was scored ahead."""
        compared = reference or Reference()
        known, gone = dict(compared.held_out), compared.other is not None
        return self.evaluates(job, rows, judges or {}, group, reference=compared.model, known=known, gone=gone)


class OfPairs(RowMethod):
    """A method whose units are pairs."""

    compares_rows = True

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        return epochs_of_pairs(job, prepared)

    def synthetic(self, rows: Sequence[TokenizedRow], prompt: int | None, seed: int) -> Epochs:
        """Pairs of two rows in turn, with one prompt."""
        return synthetic_pairs(rows, prompt, seed)

    def training_rows(self, recipe: Recipe, rows: int, tokens: int) -> TrainingRows:
        return TrainingRows(rows // 2, "pairs", tokens)


class Preference(OfPairs, Compared):
    """Pairs of answers, of which one is to become likelier than the other."""

    evaluates = PairEvaluator
    scored_ahead = staticmethod(pairs_ahead)

    def epochs(self, job: Job, prepared: PreparedData) -> Epochs:
        """Pairs. Reports what is compared."""
        job.reporter.info(f"loss: {_summary(job.recipe)}")
        return epochs_of_pairs(job, prepared)

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Pairs that teach something else than they say."""
        if len(table) and not table.has_images:
            raise_without_images(recipe)
        return pair_findings(table)

    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> PairObjective:
        loss = PairLoss.of(job.recipe.train.method, job.recipe.preference)
        return PairObjective(job, model, epochs, loss, reference=reference, **parts)


def _summary(recipe: Recipe) -> str:
    settings = recipe.preference or PreferenceConfig()
    names = losses_of(recipe.train.method, settings)
    parts = [f"{name} (beta {beta_of(name, settings):g})" for name, _ in names]
    start = start_of(recipe) if compares(recipe.train.method, settings) else "nothing"
    return f"{' + '.join(parts)}, compared with {start}"


def start_of(recipe: Recipe) -> str:
    """In words: what is taken for the reference."""
    other = other_model(recipe)
    if other is not None:
        return other.model.name_or_path
    if (start := start_adapter(recipe)) is not None:
        return f"the adapter in {start_folder(start)} as it was loaded"
    if recipe.lora is not None:
        return "the model without its adapters"
    return "the model as it starts" if caches(recipe, "surely") else "a second copy of the model as it starts"
