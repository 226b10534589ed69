"""Best-fit packing: everything is in, nothing is over, little is wasted, and the same every time."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ftcli.data.collate import packed_batch
from ftcli.data.order import best_fit, computed_by, epochs_of, mixture, plain_epochs, rows_of
from ftcli.data.tokens import TokenizedRow, TokenTable
from ftcli.labels import IGNORE_INDEX
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row


def tokens(number: int, ids: list[int], masked: int = 1) -> TokenizedRow:
    return TokenizedRow(Row("d", number, {}), ids, [IGNORE_INDEX] * masked + ids[masked:])


def chat_lengths(count: int, capacity: int) -> list[int]:
    rng = Random(0)
    return [min(capacity, max(8, round(rng.lognormvariate(5.2, 0.8)))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_exactly_one_pack_and_none_is_too_long(seed: int) -> None:
    rng = Random(seed)
    capacity = rng.randint(1, 60)
    lengths = [rng.randint(1, capacity) for _ in range(rng.randint(0, 80))]
    packs = best_fit(lengths, capacity)
    members = [packs.members(n) for n in range(len(packs))]
    assert sorted(row for pack in members for row in pack) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in pack) for pack in members]
    assert all(total <= capacity for total in sums)
    assert packs.lengths(np.asarray(lengths, dtype=np.int64)).tolist() == sums
    # No two packs would fit into one: with a greedy fit that is so for any input.
    smallest = sorted(sums)[:2]
    assert len(smallest) < 2 or sum(smallest) > capacity


def test_the_fullest_pack_with_room_is_chosen() -> None:
    packs = best_fit([7, 6, 3, 4, 2], 10)
    assert [packs.members(n) for n in range(len(packs))] == [[0, 2], [1, 3], [4]]
    assert [best_fit([5, 5, 5], 10).members(n) for n in range(2)] == [[0, 1], [2]]
    both_have_room = best_fit([6, 7, 3], 10)
    assert [both_have_room.members(n) for n in range(2)] == [[0], [1, 2]]


def test_at_the_lengths_of_chats_little_is_padding() -> None:
    lengths = chat_lengths(20_000, 2048)
    packs = best_fit(lengths, 2048)
    assert sum(lengths) / (len(packs) * 2048) > 0.999


def test_a_row_may_occur_several_times_and_order_is_by_first_row() -> None:
    packs = best_fit([4, 9], 10, rows=[0, 1, 0, 0])
    assert [packs.members(n) for n in range(len(packs))] == [[0, 0], [1], [0]]
    with pytest.raises(ValueError, match="do not fit"):
        best_fit([11], 10)
    with pytest.raises(ValueError, match="do not fit"):
        best_fit([0], 10)


def test_positions_begin_anew_and_no_first_token_is_a_label() -> None:
    first, second = tokens(1, [5, 6, 7], masked=0), tokens(2, [8, 9], masked=0)
    batch = packed_batch([[first, second], [second]], pad_token_id=1)
    assert set(batch) == {"input_ids", "labels", "position_ids", "lengths", "document_starts"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [8, 9, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 9, -100, -100, -100]]
    assert batch["lengths"].tolist() == [5, 2]
    assert batch["document_starts"].tolist() == [[0, 0, 0, 3, 3], [0, 0, 2, 2, 2]]


def test_no_position_of_what_fills_a_row_up_is_beyond_those_of_documents() -> None:
    """Rotations that scale with the largest position would change for all."""
    batch = packed_batch([[tokens(1, [5, 6, 7]), tokens(2, [8, 9])]], pad_token_id=1, width=12)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]]
    assert batch["document_starts"].tolist() == [[0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8, 11]]
    assert batch["lengths"].tolist() == [5]


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    rows = [tokens(n, [1] * (n + 2)) for n in range(10)]
    one, same, other = plain_epochs(rows, 3), plain_epochs(rows, 3), plain_epochs(rows, 4)
    assert one.order(0) == same.order(0)
    assert one.order(2) == same.order(2)
    assert sorted(one.order(1)) == list(range(10))
    assert len({tuple(e.order(n)) for e in (one, other) for n in (0, 7)}) == 4


def test_mixtures_show_every_row_and_keep_their_shares_all_along() -> None:
    import torch

    mix = mixture([100, 10, 40], [0.5, 0.3, 0.2])
    assert mix.counts == (100, 60, 40)
    assert mix.repeats == (1.0, 6.0, 1.0)
    rows = rows_of(mix, torch.Generator().manual_seed(0))
    assert set(rows) == set(range(150))
    for seen in range(1, len(rows) + 1):
        for share, low, high in ((0.5, 0, 100), (0.3, 100, 110), (0.2, 110, 150)):
            assert abs(sum(low <= row < high for row in rows[:seen]) - share * seen) <= 1
    counts = np.bincount(rows)
    assert set(counts[100:110]) == {6}
    uneven = mixture([10, 4], [0.5, 0.5])
    assert uneven.counts == (10, 10)
    assert sorted(np.bincount(rows_of(uneven, torch.Generator().manual_seed(1)))[10:]) == [2, 2, 3, 3]
    assert mixture([3, 4], None).counts == (3, 4)


def test_padding_is_counted_as_the_batches_are_made() -> None:
    epochs = plain_epochs([tokens(n, [1] * length) for n, length in enumerate((2, 5, 3))], 0)
    lengths = np.asarray([2, 5, 3], dtype=np.int64)
    computed = computed_by(epochs, lengths, 2, Batches("padded", "a test"))
    ordered = [int(lengths[i]) for i in epochs.order(0)]
    expected = 2 * max(ordered[:2]) + ordered[2]
    assert (computed.tokens, computed.tokens + computed.filler) == (10, expected)


def test_an_empty_table_packs_to_nothing() -> None:
    assert len(epochs_of(TokenTable([]), None, packing=True, capacity=10, seed=0)) == 0
