"""The mask of attention: its intervals say exactly what its definition says, and what it cannot say is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from ftkernels.attention_mask import AttentionMask
from torch import Tensor

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1]])
RIGHT = LEFT.flip(1)
BOTH = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]])


def _masks() -> dict[str, AttentionMask]:
    """Every combination of padding, documents, causality and window on 9 tokens."""
    masks = {}
    paddings = {"": None, "left": LEFT, "right": RIGHT, "both": BOTH}
    for (side, padding), packed, window in itertools.product(paddings.items(), (False, True), (None, 1, 3, 9, 40, 0)):
        causal = window != 0  # 0 stands for no mask at all
        options = {"causal": causal, "window": window or None}
        mask = AttentionMask.from_document_ids(DOCUMENTS, **options) if packed else AttentionMask(**options)
        mask = mask if padding is None else mask.padded(padding)
        masks[f"{side or 'dense'}-{'packed' if packed else 'single'}-window{window}"] = mask
    return masks


MASKS = _masks()


@pytest.mark.parametrize("q_len", [9, 4, 1])
def test_intervals_say_what_the_definition_says(q_len: int) -> None:
    for name, mask in MASKS.items():
        ranges = mask.ranges(q_len, 9, "cpu")
        seen = mask.dense(q_len, 9).expand(ranges.batch, 1, q_len, 9)
        assert torch.equal(ranges.dense(), seen), name
        queries = torch.arange(q_len)[:, None]
        by_key = (queries >= ranges.query_lo[:, None, :]) & (queries < ranges.query_hi[:, None, :])
        assert torch.equal(by_key[:, None], seen), name
        for bound in (ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi):
            assert bound.dtype == torch.int32, name
            assert bound.is_contiguous(), name
            # The kernels' loop bounds need ends that never move left.
            assert (bound.diff(dim=1) >= 0).all(), name


def test_a_window_of_w_sees_w_keys() -> None:
    """transformers 39408: W + 1 keys."""
    for window in (1, 2, 8):
        seen = AttentionMask.causal_mask(window).dense(20, 20)[0, 0]
        assert seen.sum(1).tolist() == [min(i + 1, window) for i in range(20)]
        assert torch.equal(AttentionMask.causal_mask(window).ranges(20, 20, "cpu").dense()[0, 0], seen)


def test_a_window_keeps_documents_apart() -> None:
    """transformers 31670: the sliding window's mask forgot packing."""
    packed = AttentionMask.from_document_ids(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    seen = packed.with_window(3).ranges(7, 7, "cpu").dense()[0, 0]
    assert not seen[3:, :3].any()
    assert seen[6].tolist() == [False, False, False, False, True, True, True]
    assert seen[4].tolist() == [False, False, False, True, True, False, False]


@pytest.mark.parametrize("packed", [
    AttentionMask.from_document_ids(torch.tensor([[4, 4, 7, 7, 7, 4]])),
    AttentionMask.from_cu_seqlens(torch.tensor([0, 2, 5, 6]), 6),
    AttentionMask.from_cu_seqlens(torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), 6),
])  # fmt: skip
def test_the_ways_to_name_documents_agree(packed: AttentionMask) -> None:
    assert packed.document_starts is not None
    assert packed.document_starts.tolist() == [[0, 0, 2, 2, 2, 5]]
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (2, 3, 1))).bool()
    assert torch.equal(packed.dense(6, 6)[0, 0], expected)


@pytest.mark.parametrize(("padding", "starts", "ends"), [
    (LEFT, [2, 0, 8], [9, 9, 9]), (RIGHT, [0, 0, 0], [7, 9, 1]), (BOTH, [1, 0, 0], [7, 0, 9]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_becomes_one_interval_a_row(padding: Tensor, starts: list[int], ends: list[int], dtype: torch.dtype) -> None:  # fmt: skip  # noqa: E501
    mask = AttentionMask.from_padding(padding.to(dtype))
    assert mask.starts is not None
    assert mask.ends is not None
    assert (mask.starts.tolist(), mask.ends.tolist()) == (starts, ends)


def test_a_mask_without_padding_leaves_no_trace() -> None:
    mask = AttentionMask.from_padding(torch.ones(3, 5, dtype=torch.int64), window=2)
    assert (mask.starts, mask.ends, mask.length, mask.window) == (None, None, None, 2)
    assert mask.ranges(5, 5, "cpu").batch == 1


def test_padding_neither_sees_nor_is_seen() -> None:
    mask = AttentionMask.from_padding(BOTH)
    seen = mask.ranges(9, 9, "cpu").dense()[:, 0]
    assert not seen[~BOTH.bool()].any()
    assert not seen.transpose(1, 2)[~BOTH.bool()].any()
    assert seen.sum() == 6 * 7 // 2 + 9 * 10 // 2


def test_queries_after_a_cached_prefix_are_the_last_positions() -> None:
    mask = AttentionMask.from_padding(LEFT, window=4)
    assert torch.equal(mask.dense(3, 9), mask.dense(9, 9)[:, :, 6:])
    assert torch.equal(mask.ranges(3, 9, "cpu").dense(), mask.ranges(9, 9, "cpu").dense()[:, :, 6:])


def test_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has a hole"):
        AttentionMask.from_padding(torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]))


@pytest.mark.parametrize(("options", "message"), [
    ({"window": 0}, "at least 1"),
    ({"window": 4, "causal": False}, "needs causal"),
    ({"starts": torch.zeros(2, dtype=torch.int32)}, "come together"),
    ({"starts": torch.zeros(2), "ends": torch.zeros(3), "length": 5}, "differ in shape"),
    ({"document_starts": torch.zeros(1, 4)}, "length is needed"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMask(**options)  # type: ignore[arg-type]


def test_lengths_that_the_mask_was_not_made_for_are_refused() -> None:
    with pytest.raises(ValueError, match="made for 9 keys, there are 10"):
        AttentionMask.from_padding(LEFT).ranges(10, 10, "cpu")
    with pytest.raises(ValueError, match="5 queries for 4 keys"):
        AttentionMask.causal_mask().ranges(5, 4, "cpu")
    with pytest.raises(ValueError, match="padding mask"):
        AttentionMask.from_padding(torch.ones(5))


def test_no_tokens_and_one_token() -> None:
    assert AttentionMask.causal_mask(2).ranges(0, 0, "cpu").dense().shape == (1, 1, 0, 0)
    assert AttentionMask.from_document_ids(torch.zeros(2, 1)).ranges(1, 1, "cpu").dense().tolist() == [[[[True]]]] * 2
