"""Held-out rows one by one: classes of length, ties, length-controlled accuracy, what ranks gather, what is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.evaluate.margins import (
    KEPT_ROWS,
    LENGTH_CLASSES,
    SHOWN_CHARACTERS,
    WORST_ROWS,
    Margins,
    RowTable,
    length_controlled,
    margins_of_answers,
    margins_of_pairs,
)
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.row import Row

TOKENIZER: Any = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))


def tokens(prompt: str, answer: str, source: str = "a.jsonl", number: int = 1, value: float = 0.0) -> TokenizedRow:
    ids = [ord(char) for char in prompt + answer]
    return TokenizedRow(Row(source, number, {}), ids, [IGNORE_INDEX] * len(prompt) + ids[len(prompt) :], value)


def of_pairs(values: Sequence[float], lengths: Sequence[tuple[int, int]]) -> Margins:
    names = ["a"] * len(values)
    return Margins("pairs", np.array(values), np.array(lengths, dtype=float), None, names, ())


@pytest.mark.parametrize(
    ("chosen", "rejected", "name"),
    [
        (11, 10, "within 10%"),
        (10, 11, "within 10%"),
        (12, 10, "chosen 1.1 to 1.5 times as long"),
        (15, 10, "chosen 1.1 to 1.5 times as long"),
        (10, 16, "rejected 1.5 to 2 times as long"),
        (20, 10, "chosen 1.5 to 2 times as long"),
        (21, 10, "chosen over twice as long"),
        (1, 300, "rejected over twice as long"),
    ],
)
def test_a_pair_is_in_the_class_of_its_lengths(chosen: int, rejected: int, name: str) -> None:
    (found,) = of_pairs([1.0], [(chosen, rejected)]).by_length()
    assert found["length"] == name


def test_each_class_tells_its_share_and_a_tie_is_one_half() -> None:
    lengths = [(10, 10), (10, 10), (10, 10), (30, 10), (10, 30)]
    found = {each["length"]: each for each in of_pairs([2.0, 0.0, -1.0, 4.0, -3.0], lengths).by_length()}
    alike = found["within 10%"]
    assert (alike["pairs"], alike["accuracy"], alike["margin"]) == (3, 0.5, pytest.approx(1 / 3))
    assert found["chosen over twice as long"]["accuracy"] == 1
    assert found["rejected over twice as long"]["accuracy"] == 0
    assert list(found) == [name for name in LENGTH_CLASSES if name in found]


def test_who_goes_by_length_alone_has_one_half_however_the_data_is() -> None:
    """90 of 100 chosen answers are longer, so that the longer answer is right 90 times."""
    lengths = np.array([(20, 12)] * 70 + [(12, 20)] * 7 + [(40, 10)] * 20 + [(10, 40)] * 3, dtype=float)
    by_length = lengths[:, 0] - lengths[:, 1]
    assert ((by_length > 0).mean(), length_controlled(by_length, lengths)) == (0.9, 0.5)
    assert length_controlled(-by_length, lengths) == 0.5
    assert length_controlled(np.ones(100), lengths) == 1.0


def test_the_length_controlled_accuracy_weighs_classes_by_their_pairs() -> None:
    lengths = np.array([(10, 10)] * 4 + [(20, 12)] * 3 + [(12, 20)], dtype=float)
    values = np.array([1, 1, 1, -1, 1, 1, -1, -1], dtype=float)
    # Alike 3 of 4; of the class 1.5 to 2 times 2 of 3 and 0 of 1, each side one half.
    assert length_controlled(values, lengths) == pytest.approx((4 * 0.75 + 4 * (2 / 3 + 0) / 2) / 8)


def test_a_class_without_a_counterpart_is_left_out() -> None:
    assert length_controlled(np.array([1.0, 1.0]), np.array([(30, 10), (20, 12)], dtype=float)) is None
    assert length_controlled(np.array([1.0, -1.0]), np.array([(30, 10), (10, 10)], dtype=float)) == 0.0


class _Group:
    """A rank among others that have filled in their tables."""

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self.size, self._tables = len(tables), tables

    def exchanging(self) -> Any:
        return nullcontext()

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [table._values for table in self._tables]


def test_ranks_gather_each_row_from_the_one_that_had_its_batch() -> None:
    """Rank 1 has no batch in the last turn and repeats the last row; rank 0 repeats it by itself afterwards."""
    tables = [RowTable(5, 2), RowTable(5, 2)]
    for rank, rows in ((0, [0, 1]), (1, [2, 3]), (0, [4]), (1, [4]), (0, [4])):
        value = torch.tensor([10.0 * row for row in rows])
        tables[rank].fill(rows, (value + (rows == [4] and rank), value.float()))
    tables[0].fill([4], (torch.tensor([99.0]), torch.tensor([99.0])))
    group: Any = _Group(tables)
    found = tables[1].gathered(group, batch_size=2)
    assert found.tolist() == [[10.0 * row, 10.0 * row] for row in range(5)]
    assert tables[0].gathered(None, 2)[[0, 1, 4], 0].tolist() == [0, 10, 40]


def test_what_is_kept_is_bounded_and_evenly_taken() -> None:
    count = 3 * KEPT_ROWS + 7
    values = np.arange(count, dtype=float) - 5
    found = of_pairs(values.tolist(), [(10, 8)] * count).record()
    assert (found["rows"], found["wrong"], len(found["margins"])) == (count, 5, KEPT_ROWS)
    assert found["margins"][0] == -5
    assert found["margins"] == sorted(set(found["margins"]))
    assert found["margins"][-1] >= count - 10
    assert set(found["lengths"]) == {2}
    assert found["by_length"][0]["pairs"] == count
    json.dumps(found, allow_nan=False)


def test_the_worst_pairs_are_told_with_their_texts_cut_to_size() -> None:
    rows = []
    for number in range(12):
        rows += [tokens(f"p{number}:", "right.", number=number), tokens(f"p{number}:", "w" * 5000, number=number)]
    values = np.array([-1.0, 0.0, *np.linspace(-9, 3, 10)])
    found = margins_of_pairs(rows, values, np.ones((12, 2)), TOKENIZER)
    assert [each.margin for each in found.worst] == sorted(values)[:WORST_ROWS]
    worst = found.worst[0]
    assert (worst.origin, worst.prompt.text, worst.chosen.text) == ("a.jsonl:2", "p2:", "right.")
    assert worst.rejected is not None
    assert (len(worst.rejected.text), worst.rejected.left_out) == (SHOWN_CHARACTERS, 5000 - SHOWN_CHARACTERS)
    assert margins_of_pairs(rows[:4], np.array([0.0, 2.0]), np.ones((2, 2)), TOKENIZER).worst == ()


def test_a_labelled_answer_is_wrong_on_the_side_of_the_other_label() -> None:
    rows = [tokens("p", "good", "a", 1, 1.0), tokens("p", "bad", "b", 2, -1.0), tokens("q", "bad", "b", 3, -1.0)]
    found = margins_of_answers(rows, np.array([0.5, 2.0, -1.0]), np.array([4.0, 3.0, 3.0]), TOKENIZER)
    (wrong,) = found.worst
    assert (wrong.origin, wrong.margin, wrong.label, wrong.chosen.text, wrong.rejected) == ("b:2", 2.0, -1, "bad", None)
    assert [(each["source"], each["rows"], each["accuracy"]) for each in found.by_source()] == [
        ("a", 1, 1.0),
        ("b", 2, 0.5),
    ]
    record = found.record()
    assert (record["labels"], record["margins"], record["lengths"]) == ([1, -1, -1], [0.5, 2.0, -1.0], [4, 3, 3])
    assert found.as_dict() == {}
