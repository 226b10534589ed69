"""The reference of labelled answers: log-probabilities ahead of a run's first step, found by the content of each row.

The KL of a step is estimated from mismatched rows, whose prompts and answers the step's composition brings together.
That is known ahead, so they are scored like the others. What is known is asked for by the tokens of the row that a step
has made: whatever brings a prompt and an answer together, no other row's number is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow, by_file, unit_digest
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.kto.losses import LabelLoss
from ftcli.methods.preference.checks import caches
from ftcli.methods.preference.reference import (
    AheadOfTraining,
    Reference,
    Rows,
    Units,
    Wanted,
    cache_folder,
    no_units,
    shares_of,
)
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.train.epochs import RunSteps, seen_units, steps_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup


def known_of(known: Mapping[bytes, float], rows: Sequence[TokenizedRow]) -> Tensor:
    """Log-probabilities of rows, (R, 1) float32. Raises KeyError for one that is not known."""
    return torch.tensor([[known[unit_digest(row)]] for row in rows], dtype=torch.float32)


def units_of_step(order: Sequence[int], index: int, size: int) -> list[int]:
    """The units of the step ``index`` of an epoch in one order however the step is split: it decides which answer is
    held against which prompt.
    """
    return sorted(order[index * size : (index + 1) * size])


def scored_ahead(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs | None,
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
    *,
    keep: bool = True,
) -> Reference:
    """Log-probabilities of all rows that training and evaluation will see, mismatched ones included, where that pays;
    ``model`` has not been trained yet. As of pairs (:func:`ftcli.methods.preference.reference.scored_ahead`).
    """
    recipe = job.recipe
    if not caches(recipe, "possibly"):
        return Reference()
    settings, loss = recipe.preference or PreferenceConfig(), LabelLoss.of(recipe.preference)
    longest = recipe.data.max_seq_len
    training, again = (no_units, False) if epochs is None else _trained(job, epochs, loss, group)
    files = by_file(held_out).values() if loss.estimates_kl else ()
    measured = [*held_out, *(row for rows in files for row in mismatched_rows(rows, longest))]
    folder = cache_folder(settings, job.session.cache_dir) if keep else None
    found = AheadOfTraining(job, model, group, 1, shares_of(job, group), 1.0, folder).score(
        training,
        lambda: Units(len(measured), lambda number: (measured[number],)),
        certain=again or caches(recipe, "surely"),
    )
    if found is None:
        return Reference()
    of_training, of_held_out = (scored.by_digest() for scored in found)
    return Reference(of_rows={row: value for row, (value,) in of_training.items()}, held_out=of_held_out)


def _trained(job: Job, epochs: Epochs, loss: LabelLoss, group: RankGroup | None) -> tuple[Wanted, bool]:
    """The rows that training sees, mismatched ones included, and whether it sees some more than once."""
    steps, longest = steps_of(job, epochs, group), job.recipe.data.max_seq_len
    units, again = seen_units(epochs, steps)

    def training() -> Units:
        made = dict.fromkeys(_mismatches_of(epochs, steps, loss.kl_rows)) if loss.estimates_kl else ()
        asked = [*((unit, unit) for unit in units), *made]

        def rows(number: int) -> Rows:
            prompt, answer = asked[number]
            (row,) = epochs.members(prompt)
            return (row if prompt == answer else mismatched_row(row, epochs.members(answer)[0], longest),)

        return Units(len(asked), rows)

    return training, again


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


def mismatched_rows(rows: Sequence[TokenizedRow], longest: int, most: int | None = None) -> list[TokenizedRow]:
    """The rows of :func:`mismatches`.

    Args:
        longest: Tokens that a row may have; answers are cut to fit. One token of each always does.
        most: How many are wanted, evenly spread over the rows; None: all.
    """
    return [mismatched_row(rows[asked], rows[answered], longest) for asked, answered in mismatches(rows, most)]


def mismatches(rows: Sequence[TokenizedRow], most: int | None = None) -> list[tuple[int, int]]:
    """The number of each row, whose prompt is taken, with that of the next row that has another prompt, whose answer
    is, in a circle; where no other row has another prompt, of the next row. A single row has no partner.

    Good answers come first: where both kinds answer one prompt, each kind is passed on to its own, and the answers that
    are compared with are as many of either label as the rows have.
    """
    if len(rows) < 2:
        return []
    order = sorted(range(len(rows)), key=lambda number: -rows[number].value)
    count = len(rows) if most is None else min(most, len(rows))
    partners = partners_of([tuple(rows[number].input_ids[: answer_start(rows[number])]) for number in order])
    chosen = (index * len(rows) // count for index in range(count))
    return [(order[index], order[partners[index]]) for index in chosen]


def partners_of(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """For each prompt the number of the next one that differs from it, in a circle; of the next one where none does."""
    size = len(prompts)
    following = [(index + 1) % size for index in range(size)]
    if all(prompt == prompts[0] for prompt in prompts):
        return following
    found = following.copy()
    # Twice round, from the end: what follows an equal prompt is what follows that one.
    for index in reversed(range(2 * size)):
        here, after = index % size, following[index % size]
        found[here] = found[after] if prompts[here] == prompts[after] else after
    return found


def answer_start(row: TokenizedRow) -> int:
    """The first token that is scored; what stands before it is the prompt, with the opening of the answer's turn."""
    return next(n for n in range(1, len(row.labels)) if row.labels[n] != IGNORE_INDEX)


def mismatched_row(row: TokenizedRow, other: TokenizedRow, longest: int) -> TokenizedRow:
    """The prompt of a row with the answer of another."""
    asked, begin = answer_start(row), answer_start(other)
    ids = [*row.input_ids[:asked], *other.input_ids[begin:]]
    labels = [*[IGNORE_INDEX] * asked, *other.labels[begin:]]
    return TokenizedRow(row.row, ids[:longest], labels[:longest])
