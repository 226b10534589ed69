"""The reference of labelled answers: log-probabilities ahead of a run's first step, found by the content of each row.

The KL of a step is estimated from mismatched rows, whose prompts and answers the step's composition brings together.
That is known ahead, so they are scored like the others. What is known is asked for by the tokens of the row that a step
has made: whatever brings a prompt and an answer together, no other row's number is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.kto.losses import LabelLoss
from ftcli.methods.kto.mismatched import mismatched_row, mismatched_rows, mismatches
from ftcli.methods.preference.ahead import AheadOfTraining, Rows, Units, cache_folder
from ftcli.methods.preference.cache import unit_digest
from ftcli.methods.preference.choice import caches
from ftcli.methods.preference.reference import RunSteps, seen_units, steps_of
from ftcli.methods.preference.settings import PreferenceConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class LabelReference:
    """What answers are compared with.

    Attributes:
        model: A second model; None where the trained one can be computed without its adapters, or nothing is needed.
        known: Log-probabilities of the training rows and of the mismatched rows of all steps, by
            :func:`~ftcli.methods.preference.cache.unit_digest`. None where the reference is computed in each step.
        held_out: Those of held-out rows, and of their mismatched ones.
    """

    model: PreTrainedModel | None = None
    known: Mapping[bytes, float] | None = None
    held_out: Mapping[bytes, float] = field(default_factory=dict)


def known_of(known: Mapping[bytes, float], rows: Sequence[TokenizedRow]) -> Tensor:
    """Log-probabilities of rows, (R,) float32. Raises KeyError for one that is not known."""
    return torch.tensor([known[unit_digest(row)] for row in rows], dtype=torch.float32)


def units_of_step(order: Sequence[int], index: int, size: int) -> list[int]:
    """The units of the step ``index`` of an epoch in one order however the step is split: it decides which answer is
    held against which prompt.
    """
    return sorted(order[index * size : (index + 1) * size])


def scored_ahead(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
    *,
    keep: bool = True,
) -> LabelReference:
    """Log-probabilities of all rows that training and evaluation will see, mismatched ones included, where that pays;
    ``model`` has not been trained yet. As of pairs (:func:`ftcli.methods.preference.reference.scored_ahead`).
    """
    recipe = job.recipe
    if not caches(recipe, "possibly"):
        return LabelReference()
    settings, loss = recipe.preference or PreferenceConfig(), LabelLoss.of(recipe.preference)
    steps, longest = steps_of(job, epochs, group), recipe.data.max_seq_len
    units, again = seen_units(epochs, steps)

    def training() -> Units:
        made = dict.fromkeys(_mismatches_of(epochs, steps, loss.kl_rows)) if loss.estimates_kl else ()
        asked = [*((unit, unit) for unit in units), *made]

        def rows(number: int) -> Rows:
            prompt, answer = asked[number]
            (row,) = epochs.members(prompt)
            return (row if prompt == answer else mismatched_row(row, epochs.members(answer)[0], longest),)

        return Units(len(asked), rows)

    measured = [*held_out, *(_mismatched_of_files(held_out, longest) if loss.estimates_kl else ())]
    folder = cache_folder(settings, job.session.cache_dir) if keep else None
    found = AheadOfTraining(job, model, group, 1, recipe.launch.context_parallel_size, 1.0, folder).score(
        training,
        lambda: Units(len(measured), lambda number: (measured[number],)),
        certain=again or caches(recipe, "surely"),
    )
    if found is None:
        return LabelReference()
    of_training, of_held_out = (
        dict(zip(scored.digests, scored.values[:, 0].tolist(), strict=True)) for scored in found
    )
    return LabelReference(None, of_training, of_held_out)


def _mismatches_of(epochs: Epochs, steps: RunSteps, most: int | None) -> Iterator[tuple[int, int]]:
    """The units whose prompt and whose answer each mismatched row of a run's steps has."""
    order: Sequence[int] = ()
    for step in range(steps.total):
        epoch, index = divmod(step, steps.of_epoch)
        if index == 0:
            order = epochs.order(epoch)
        units = units_of_step(order, index, steps.units)
        rows = [row for unit in units for row in epochs.members(unit)]
        yield from ((units[asked], units[answered]) for asked, answered in mismatches(rows, most))


def _mismatched_of_files(held_out: Sequence[TokenizedRow], longest: int) -> list[TokenizedRow]:
    """The mismatched rows of each held-out file, as evaluation makes them."""
    files: dict[str, list[TokenizedRow]] = {}
    for row in held_out:
        files.setdefault(row.row.source, []).append(row)
    return [row for rows in files.values() for row in mismatched_rows(rows, longest)]
