"""Blocks of tokens that see each other in both directions, as Gemma's images do, among tokens that look back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.attention import attention, attention_reference
from ftkernels.attention_config import AttentionTile, AttentionTiles
from ftkernels.attention_mask import AttentionMask
from torch import Tensor

OBLONG = AttentionTiles(*(AttentionTile(*sides, 4, 1) for sides in ((32, 16), (16, 32), (16, 32), (32, 16), (16, 32))))
# Documents, each of pieces: a number of tokens by themselves, or one of a block, written as negative.
ROWS = ((3, -9, 5, -1, 4), (-20, 11), (7,), (2, -4, 1, -4))


def blocks(*documents: tuple[int, ...], window: int | None = None, device: str = "cpu") -> AttentionMask:
    """The mask of one row of documents."""
    starts: list[int] = []
    ends: list[int] = []
    for document in documents:
        first = len(starts)
        for piece in document:
            ends += range(len(ends) + 1, len(ends) + piece + 1) if piece > 0 else [len(ends) - piece] * -piece
        starts += [first] * sum(map(abs, document))
    of = torch.tensor([starts, ends], dtype=torch.int32, device=device)
    return AttentionMask(window=window, document_starts=of[:1], length=len(starts), block_ends=of[1:])


def seen_by_definition(documents: tuple[tuple[int, ...], ...], window: int | None) -> Tensor:
    pieces = [(number, piece) for number, document in enumerate(documents) for piece in document]
    of = [(number, at, piece < 0) for at, (number, piece) in enumerate(pieces) for _ in range(abs(piece))]
    return torch.tensor(
        [
            [
                key[0] == query[0]
                and (k <= q or (key[1] == query[1] and key[2]))
                and (window is None or q - k < window)
                for k, key in enumerate(of)
            ]
            for q, query in enumerate(of)
        ]
    )


def call(function: Callable[..., Tensor], mask: AttentionMask, **options: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.25, **options).transpose(1, 2)

    return run


@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
def test_intervals_say_what_the_definition_says(window: int | None) -> None:
    wanted, mask = seen_by_definition(ROWS, window), blocks(*ROWS, window=window)
    length = len(wanted)
    assert torch.equal(mask.dense(length, length)[0, 0], wanted)
    ranges = mask.ranges(length, length, "cpu")
    assert torch.equal(ranges.dense()[0, 0], wanted)
    queries = torch.arange(length)[:, None]
    assert torch.equal((queries >= ranges.query_lo) & (queries < ranges.query_hi), wanted)


@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (5.0, 12)])
def test_output_and_gradients(device: str, tools: Any, softcap: float, window: int | None) -> None:
    mask = blocks(*ROWS, window=window, device=device)
    length = sum(abs(piece) for document in ROWS for piece in document)
    tensors = tuple(torch.randn(1, length, heads, 16, device=device) for heads in (4, 2, 2))
    for tiles in (None, OBLONG):
        kernels = call(attention, mask, backend="triton", softcap=softcap, tiles=tiles)
        tools.assert_float32(kernels, call(attention_reference, mask, softcap=softcap), tensors)


def test_blocks_are_for_causal_rows_without_branches() -> None:
    ends = torch.tensor([[2, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match="causal"):
        AttentionMask(causal=False, length=2, block_ends=ends)
    with pytest.raises(ValueError, match="length"):
        AttentionMask(block_ends=ends)
