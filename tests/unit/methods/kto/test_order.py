"""The order of labelled answers, which ones are mismatched, and what is said of their labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ftcli.data.tokens import RowImage, TokenizedRow, TokenStore, TokenTable, TokenWriter, encoded_of
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.kto.losses import LabelSettings
from ftcli.methods.kto.reference import answer_start, mismatched_rows, partners_of
from ftcli.methods.kto.train import (
    contradictions,
    label_counts,
    label_findings,
    labelled_epochs,
    require_both_labels,
)
from ftcli.rows.row import Row


def row(number: int, label: float, prompt: tuple[int, ...] = (1, 2), answer: tuple[int, ...] = (7, 8)) -> TokenizedRow:
    labels = [IGNORE_INDEX] * len(prompt) + list(answer)
    return TokenizedRow(Row("d.jsonl", number, {}), [*prompt, *answer], labels, label)


def table_of(folder: Path, *sources: list[TokenizedRow]) -> TokenTable:
    stores = []
    for number, rows in enumerate(sources):
        place = folder / str(number)
        place.mkdir()
        writer = TokenWriter(place)
        writer.append(encoded_of(rows))
        writer.finish({})
        stores.append(TokenStore(place))
    return TokenTable(stores)


def labels(*counts: int) -> list[TokenizedRow]:
    """So many good answers, then so many bad ones, and so on: as a file that lists the good ones first."""
    values = [1.0 if n % 2 == 0 else -1.0 for n, count in enumerate(counts) for _ in range(count)]
    return [row(number, value) for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(("good", "bad", "size"), [(50, 50, 4), (75, 25, 8), (10, 90, 20), (67, 33, 6)])
def test_every_step_holds_both_labels_as_the_data_does(tmp_path: Path, good: int, bad: int, size: int) -> None:
    epochs = labelled_epochs(table_of(tmp_path, labels(good, bad)), None, seed=3)
    assert label_counts(epochs) == (good, bad)
    seen: list[int] = []
    for epoch in range(2):
        for batch in epochs.batches(epoch, size):
            values = [epochs.members(unit)[0].value for unit in batch]
            expected = len(batch) * good / (good + bad)
            assert abs(values.count(1.0) - expected) <= 1
            assert len(batch) < size or set(values) == {1.0, -1.0}
            seen += [epochs.members(unit)[0].row.number for unit in batch]
    assert Counter(seen) == dict.fromkeys(range(1, good + bad + 1), 2)
    assert seen[: good + bad] != seen[good + bad :]


def test_the_order_follows_from_seed_and_epoch_alone(tmp_path: Path) -> None:
    table = table_of(tmp_path, labels(20, 12))
    one, again, other = (labelled_epochs(table, None, seed) for seed in (1, 1, 2))
    assert one.order(4) == again.order(4) != other.order(4)
    ranks = [one.batches(0, 2, rank, 2) for rank in range(2)]
    assert [batch for turn in zip(*ranks, strict=True) for batch in turn] == one.batches(0, 2)


def test_sources_with_weights_keep_their_shares_and_labels(tmp_path: Path) -> None:
    """The second source is seen three times as often for its size; it has no bad answers."""
    table = table_of(tmp_path, labels(30, 10), labels(10))
    epochs = labelled_epochs(table, [0.5, 0.5], seed=0)
    shown = [epochs.members(unit)[0] for unit in epochs.order(0)]
    assert len(shown) == 80
    assert label_counts(epochs) == (70, 10)
    assert Counter(value.value for value in shown) == {1.0: 70, -1.0: 10}
    plain = labelled_epochs(table, None, seed=0)
    assert label_counts(plain) == (40, 10)


@pytest.mark.parametrize(("count", "which"), [((5,), "5 answers are desirable and none is un"), ((0, 3), "3 answers")])
def test_one_label_alone_is_refused_by_count(tmp_path: Path, count: tuple[int, ...], which: str) -> None:
    with pytest.raises(FtcliError, match=which) as error:
        require_both_labels(table_of(tmp_path, labels(*count)))
    assert (error.value.findings[0].code, error.value.exit_code) == ("FT465", 4)
    assert error.value.findings[0].origin is not None
    assert error.value.findings[0].help


BALANCED = [(100, 100, LabelSettings(0.1)), (133, 100, LabelSettings(0.1)), (50, 100, LabelSettings(0.1, 2.5, 1.0))]
OTHERS = [
    (
        100,
        300,
        LabelSettings(0.1),
        "weigh 0.333 times",
        "desirable_weight: 3.5, or preference.undesirable_weight: 0.29",
    ),
    (300, 100, LabelSettings(0.1), "weigh 3 times", "desirable_weight: 0.39, or preference.undesirable_weight: 2.6"),
    (100, 100, LabelSettings(0.1, 1.0, 2.0), "weigh 0.5 times", "desirable_weight: 2.3"),
]


@pytest.mark.parametrize(("good", "bad", "how"), BALANCED)
def test_labels_in_balance_are_not_told_of(good: int, bad: int, how: LabelSettings) -> None:
    assert list(label_findings(good, bad, how, 8)) == []


@pytest.mark.parametrize(("good", "bad", "how", "said", "help"), OTHERS)
def test_others_are_with_weights_that_balance_them(
    good: int, bad: int, how: LabelSettings, said: str, help: str
) -> None:
    (finding,) = label_findings(good, bad, how, 8)
    assert (finding.code, finding.severity) == ("FT466", "warning")
    assert said in finding.message
    assert help in str(finding.help)


def test_the_weights_that_are_proposed_are_taken() -> None:
    for good, bad in ((100, 300), (1000, 10), (30, 41)):
        middle = (1 + 4 / 3) / 2
        assert list(label_findings(good, bad, LabelSettings(0.1, middle * bad / good), 500)) == []
        assert list(label_findings(good, bad, LabelSettings(0.1, 1.0, good / bad / middle), 500)) == []


def test_a_label_that_most_steps_lack_is_told_of() -> None:
    found = list(label_findings(99, 1, LabelSettings(0.1, 1.0, 80.0), 16))
    assert [finding.message for finding in found] == [
        "1.0% of the answers are undesirable: most steps of 16 rows have none"
    ]


def test_an_answer_with_both_labels_is_named_by_its_row() -> None:
    rows = [row(1, 1.0), row(2, -1.0, answer=(9,)), row(3, -1.0), row(4, 1.0)]
    (finding,) = contradictions(rows)
    assert (finding.code, finding.severity, str(finding.origin)) == ("FT467", "warning", "d.jsonl:3")
    assert "d.jsonl:1" in finding.message
    shown = replace(row(3, -1.0), images=(RowImage("other.png", None, 1, 1, (1, 1), 3),))
    assert list(contradictions([rows[0], shown])) == []
    many = [row(1, 1.0), *(row(number, -1.0) for number in range(2, 10))]
    found = list(contradictions(many))
    assert len(found) == 6
    assert found[-1].message == "and 3 more answers like these"


# -- mismatched rows ----------------------------------------------------------------------------------------------


def brute(prompts: list[int]) -> list[int]:
    size = len(prompts)
    circle = [[(n + k) % size for k in range(1, size)] for n in range(size)]
    return [next((m for m in others if prompts[m] != prompts[n]), others[0]) for n, others in enumerate(circle)]


def test_partners_are_the_next_rows_with_another_prompt() -> None:
    rng = np.random.default_rng(0)
    for size in range(2, 9):
        for _ in range(30):
            prompts = [int(n) for n in rng.integers(0, 3, size)]
            assert partners_of([(prompt,) for prompt in prompts]) == brute(prompts), prompts


def test_a_prompt_gets_the_answer_of_another_one() -> None:
    rows = [row(1, 1.0, (1, 2, 3), (11, 12)), row(2, -1.0, (4,), (21,)), row(3, 1.0, (5, 6), (31, 32, 33))]
    made = mismatched_rows(rows, 5)
    assert [one.input_ids for one in made] == [[1, 2, 3, 31, 32], [5, 6, 21], [4, 11, 12]]
    assert [[n for n, label in enumerate(one.labels) if label != IGNORE_INDEX] for one in made] == [[3, 4], [2], [1, 2]]
    assert [one.row.number for one in made] == [1, 3, 2]
    assert mismatched_rows(rows[:1], 5) == []
    assert [one.row.number for one in mismatched_rows(rows, 5, 2)] == [1, 3]
    assert len(mismatched_rows(rows, 5, 9)) == 3


def test_pairs_pass_on_as_many_answers_of_either_label() -> None:
    """Good and bad answers to one prompt stand side by side in the file."""
    rows = [row(2 * n + k, 1.0 if k == 0 else -1.0, (n, n), (100 * (k + 1) + n,)) for n in range(6) for k in range(2)]
    made = mismatched_rows(rows, 9)
    assert sorted(one.input_ids[-1] for one in made) == sorted(one.input_ids[-1] for one in rows)
    assert all(one.input_ids[-1] % 100 != one.input_ids[0] for one in made)


def test_what_is_not_scored_within_an_answer_is_not_scored_elsewhere() -> None:
    """A tool's turn within the answer; the opening of the assistant's turn belongs to the prompt."""
    called = TokenizedRow(Row("d", 1, {}), [1, 2, 5, 6, 7, 8], [-100, -100, 5, -100, -100, 8], 1.0)
    plain = row(2, 1.0, (3,), (9,))
    assert (answer_start(called), answer_start(plain)) == (2, 1)
    made = mismatched_rows([called, plain], 9)
    assert made[1].input_ids == [3, 5, 6, 7, 8]
    assert made[1].labels == [-100, 5, -100, -100, 8]


def test_a_prompt_of_any_length_leaves_room_for_a_token() -> None:
    rows = [row(1, 1.0, tuple(range(8)), (50,)), row(2, -1.0, (1,), (60, 61, 62))]
    assert [one.input_ids[-1] for one in mismatched_rows(rows, 9)] == [60, 50]
