"""The reference of pairs: which of them a run sees, and their log-probabilities ahead of its first step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.preference.ahead import AheadOfTraining, Units, cache_folder
from ftcli.methods.preference.cache import WIDTHS, LogProbs
from ftcli.methods.preference.choice import caches, compares
from ftcli.methods.preference.settings import PreferenceConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.reporting import Reporter
    from ftcli.run.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class Reference:
    """What pairs are compared with.

    Attributes:
        model: A second model; None where the trained one can be computed without its adapters, or nothing is needed.
        of_units: Log-probabilities of the training pairs, (pairs, 4) float32; NaN for those that are not seen. None
            where the reference is computed in each step.
        held_out: Those of held-out pairs, by :func:`~ftcli.methods.preference.cache.unit_digest`.
    """

    model: PreTrainedModel | None = None
    of_units: LogProbs | None = None
    held_out: Mapping[bytes, LogProbs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSteps:
    """The steps of a run: how many there are, of so many units each over all ranks, and of an epoch."""

    total: int
    of_epoch: int
    units: int


def steps_of(job: Job, epochs: Epochs, group: RankGroup | None) -> RunSteps:
    """As the loop takes them."""
    train, ranks = job.recipe.train, 1
    if group is not None:
        ranks = group.size // job.recipe.launch.context_parallel_size
    units = train.per_device_train_batch_size * ranks * train.gradient_accumulation_steps
    of_epoch = math.ceil(len(epochs) / units)
    return RunSteps(train.max_steps or math.ceil(train.num_train_epochs * of_epoch), of_epoch, units)


def seen_units(epochs: Epochs, steps: RunSteps) -> tuple[Sequence[int], bool]:
    """The units that training sees, and whether it sees some of them more than once."""
    if steps.total >= steps.of_epoch:
        return range(epochs.units), steps.total > steps.of_epoch or len(epochs) > epochs.units
    seen = epochs.order(0)[: steps.total * steps.units]
    return sorted(set(seen)), len(set(seen)) < len(seen)


def goes_on_live(began: str | None, reporter: Reporter, *, known: bool, can_compute: bool) -> bool:
    """Whether a resumed run computes its reference in each step, as it ``began``: another run may have filled the cache
    since then. Says so where what a run began with is gone.
    """
    if began == "ahead" and not known:
        reporter.warn(
            "the reference's log-probabilities that this run began with are gone: they are computed in each step "
            "from here on, which rounds them otherwise"
        )
    return not known or (began == "live" and can_compute)


def scored_ahead(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
    *,
    keep: bool = True,
) -> Reference:
    """Log-probabilities of all pairs that training and evaluation will see, where that pays; ``model`` has not been
    trained yet. What is missing in the cache is computed and kept there, unless it is not to be looked at. All ranks
    call it.
    """
    recipe = job.recipe
    settings = recipe.preference or PreferenceConfig()
    if not compares(recipe.train.method, settings) or not caches(recipe, "possibly"):
        return Reference()
    units, again = seen_units(epochs, steps_of(job, epochs, group))
    folder = cache_folder(settings, job.session.cache_dir) if keep else None
    scoring = AheadOfTraining(job, model, group, 2, recipe.launch.context_parallel_size, settings.ld_alpha, folder)
    found = scoring.score(
        lambda: Units(len(units), lambda number: tuple(epochs.members(units[number]))),
        lambda: Units(len(held_out) // 2, lambda pair: (held_out[2 * pair], held_out[2 * pair + 1])),
        certain=again or caches(recipe, "surely"),
    )
    if found is None:
        return Reference()
    of_units = np.full((epochs.units, WIDTHS[2]), np.nan, np.float32)
    of_units[list(units)] = found[0].values
    return Reference(None, of_units, found[1].by_digest())
