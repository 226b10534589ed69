"""Pairs whose rows ranks share: loss, gradients and metrics are those of whole rows. Threads stand for the ranks."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ftcli.errors import FtcliError
from ftcli.methods.preference.objective import PairObjective
from ftcli.methods.preference.pairs import HERE, SCORED
from ftcli.model.loss import SUPERVISED
from ftcli.model.sequence_parallel import SequencePart
from ftcli.plan.batches import Batches
from ftcli.train.parallel import TokenCounts, float_bits
from tests.unit.methods.preference import steps
from tests.unit.methods.preference.steps import PADDED, UNPADDED, Result, objective_of, require_same, step
from tests.unit.methods.preference.test_objective import SETTINGS
from tests.unit.model.test_sequence_parallel import Meeting
from tests.unit.model.test_stack import adapted, taken

#: Beside answers that lie across parts, a long prompt and a long answer: parts without a scored token.
SIZES = ((3, 7, 2), (30, 2, 3), (4, 3, 9), (2, 4, 29))
SPLIT = [[0, 2], [1], [3]]


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted("gemma2")  # caps, and a window on every other layer


class Exchanged:
    """Stands for a group of ranks in threads: what each says of itself reaches all."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.parts
        self._exchange = meeting.exchange(rank)

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        return self._exchange(mine.expand(self.size, *mine.shape).contiguous())

    def agree(self, _where: str, numbers: Any = ()) -> list[list[int]]:
        found: list[list[int]] = self._all(torch.tensor(list(numbers))).tolist()
        return found

    def all_reduce(self, tensors: Any) -> None:
        for tensor in tensors:
            tensor.copy_(self._all(tensor).sum(0))


def shared(
    model: Any, parts: int, batches: Batches = PADDED, *, blanks: int = 0, stacked: bool = False, **settings: Any
) -> tuple[Result, list[dict[str, Any]]]:
    """A step of ranks that share rows, and the sums of metrics of each; gradients and losses are those of all."""
    meeting, models = Meeting(parts), [copy.deepcopy(model) for _ in range(parts)]

    def work(sequence: SequencePart) -> Any:
        own = models[sequence.part]
        objective = objective_of(own, steps.rows(SIZES), batches, sequence=sequence, **settings)
        objective._group = objective._sums._group = Exchanged(meeting, sequence.part)  # type: ignore[assignment]
        objective._stack = taken(own) if stacked else None
        return step(objective, own, SPLIT, blanks, group=objective._group), objective.state()

    found = meeting.together(work)
    summed = {name: sum(each[0][1][name] for each in found) for name in found[0][0][1]}
    return (sum(each[0][0] for each in found), summed), [each[1] for each in found]


#: Of two and of four ranks; a blank micro-batch; layers as a stack and one by one.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"parts": 2, "stacked": True, **settings} for name, settings in SETTINGS.items()},
    "unpadded, of four": {"parts": 4, "batches": UNPADDED, "blanks": 1, **SETTINGS["all at once"]},
    "padded, of four": {"parts": 4, "blanks": 1, **SETTINGS["ipo"]},
    "weighed by the policy": {"parts": 2, "beta": 0.3, "use_weighting": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_of_pairs_give_the_step_of_whole_pairs(model: Any, case: dict[str, Any]) -> None:
    own = copy.deepcopy(model)
    of_ranks = ("parts", "stacked", "blanks")
    alone = objective_of(own, steps.rows(SIZES), **{k: v for k, v in case.items() if k not in of_ranks})
    wanted = step(alone, own, SPLIT)
    found, said = shared(model, **case)
    require_same(found, wanted, rel=2e-5)
    assert all(each == said[0] for each in said)
    assert said[0]["pair_sums"] == pytest.approx(alone.state()["pair_sums"], rel=1e-5, abs=1e-4)


def test_the_first_part_counts_and_all_know_the_whole_answers(model: Any) -> None:
    """Of the second pair the first half is the prompt's alone: it has nothing to score."""
    whole = objective_of(model, steps.rows(SIZES)).micro_batch([1], blank=False)
    made = [
        objective_of(model, steps.rows(SIZES), sequence=SequencePart(part, 2, lambda sent: sent)).micro_batch(
            [1], blank=False
        )
        for part in range(2)
    ]
    assert (made[0].counts, made[1].counts) == (
        TokenCounts(whole.counts.supervised, whole.counts.real, made[0].inputs["input_ids"].numel(), 1),
        TokenCounts(computed=made[1].inputs["input_ids"].numel()),
    )
    assert made[0].rows == made[1].rows == whole.rows
    assert all(torch.equal(each.inputs[SCORED], whole.inputs[SCORED]) for each in made)
    assert [each.inputs[SUPERVISED].numel() for each in made] == [0, 5]
    assert not made[0].inputs[HERE].any()
    assert torch.equal(made[1].inputs[HERE], whole.inputs[SCORED] > 0)


class Apart:
    """Stands for a group of two ranks whose other one has found ``difference`` each time."""

    def __init__(self, differences: list[float]) -> None:
        self.rank, self.size, self.asked = 0, 2, 0
        self._differences = differences

    def agree(self, _where: str, numbers: Any = ()) -> list[list[int]]:
        self.asked += 1
        return [list(numbers), [float_bits(self._differences[self.asked - 1])]]


@pytest.mark.parametrize(
    ("differences", "asked", "refused"),
    [([0.0], 1, False), ([1.0, 0.0], 2, False), ([1.0, 1.0], 2, True), ([math.nan], 1, False)],
    ids=["alike", "dropout on the other rank", "another reference on the other rank", "not a number"],
)
def test_all_ranks_compare_the_start_again_or_none(
    model: Any, differences: list[float], asked: int, refused: bool
) -> None:
    """A rank that scores again alone would wait for ever for the others' weights, or for their part of a row."""
    fresh = at_the_start(model)
    group: Any = Apart(differences)
    objective = objective_of(fresh, steps.rows(SIZES), started=False)
    objective._group = group
    with pytest.raises(FtcliError, match="FT714") if refused else nullcontext():
        loss_of_first(objective)
    assert group.asked == asked


def at_the_start(model: Any) -> Any:
    """The model with adapters that do nothing yet."""
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    return fresh


def loss_of_first(objective: PairObjective) -> float:
    batch = objective.micro_batch([0], blank=False)
    return float(objective.loss(dict(batch.inputs), steps.divisors(batch.counts)).detach())
