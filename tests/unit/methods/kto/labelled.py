"""What tests of steps on labelled answers share: rows, an objective over them, and a step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ftcli.data.order import Epochs, Mixture, Packs
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.kto.losses import LabelLoss
from ftcli.methods.kto.objective import LabelObjective
from ftcli.methods.preference.reference import Reference
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row
from ftcli.train.checkpoint_state import Progress
from ftcli.train.parallel import Divisors, TokenCounts
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, Result

#: Tokens of a prompt and of its answer, and the answer's label.
SIZES = ((3, 7, 1), (5, 4, -1), (2, 6, 1), (4, 3, -1), (6, 5, 1), (1, 8, -1), (4, 4, 1), (3, 2, 1))
LONGEST = 12


def rows(sizes: Sequence[tuple[int, int, float]] = SIZES, seed: int = 2) -> list[TokenizedRow]:
    """Labelled answers of random tokens, each to a prompt of its own. Their KL under a model of
    :func:`steps.adapted_model` is 0.195 nats; that of seed 1 would be below 0.
    """
    rng, made = Random(seed), []
    for number, (asked, size, label) in enumerate(sizes, 1):
        prompt, answer = ([rng.randrange(5, 250) for _ in range(count)] for count in (asked, size))
        row = Row("rows.jsonl", number, {})
        made.append(TokenizedRow(row, prompt + answer, [IGNORE_INDEX] * asked + answer, float(label)))
    return made


def epochs_of(documents: Sequence[TokenizedRow], seed: int = 0) -> Epochs:
    """As :func:`ftcli.methods.kto.train.labelled_epochs`, of rows in memory."""
    strata = [[n for n, row in enumerate(documents) if (row.value > 0) == wanted] for wanted in (True, False)]
    sizes = (len(strata[0]), len(strata[1]))
    units = np.asarray([*strata[0], *strata[1]], dtype=np.int64)
    packs = Packs(units, np.arange(1, len(units) + 1, dtype=np.int64))
    return Epochs(list(documents), Mixture(sizes, sizes, weighted=True), packs, seed)


def objective_of(
    model: Any,
    documents: Sequence[TokenizedRow] | None = None,
    batches: Batches = PADDED,
    *,
    size: int = 8,
    accumulation: int = 1,
    group: Any = None,
    reference: Any = None,
    known: Any = None,
    other: str | None = None,
    started: bool = True,
    dtype: str = "float32",
    **settings: Any,
) -> LabelObjective:
    """What a run on labelled answers trains on; ``started``: its first step has been made."""
    job = steps.job_of(batches, size=size, accumulation=accumulation)
    job.recipe.data = SimpleNamespace(max_seq_len=LONGEST)
    job.dtypes = replace(job.dtypes, compute=dtype)
    loss = LabelLoss.of(PreferenceConfig.model_validate(settings))
    epochs = epochs_of(rows() if documents is None else documents)
    compared = Reference(reference, of_rows=known, other=other)
    made = LabelObjective(job, model, epochs, loss, group=group, stack=None, sequence=None, reference=compared)
    if started:
        made.restore({"reference": "live" if known is None else "ahead"}, Progress(1, 2, 0.0, 0))
    return made


class Monitor:
    """Takes note of nothing."""

    def enter(self, doing: str) -> None:
        """Of what is being done."""

    def check_finite(self) -> None:
        """Of numbers."""


def step(objective: LabelObjective, model: Any, number: int = 0, blanks: int = 0) -> Result:
    """Loss and gradients of the numbered step, as the loop makes it; with so many micro-batches that stand for none."""
    model.zero_grad(set_to_none=True)
    objective.begin(number)
    made = objective.micro_batches(number, Monitor())
    made += [objective.micro_batch([0], blank=True) for _ in range(blanks)]
    counts = sum((batch.counts for batch in made), TokenCounts())
    divisors = Divisors(torch.tensor(float(counts.supervised)), torch.tensor(float(counts.pairs)))
    total = 0.0
    for batch in made:
        loss = objective.loss(dict(batch.inputs), divisors)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    objective.reduced()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
