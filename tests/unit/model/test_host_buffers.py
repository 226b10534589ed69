"""Pieces of host memory: every tensor fits, little is wasted, nothing grows from step to step."""

from __future__ import annotations

import random

import pytest
import torch

from ftcli.model.offload import LARGEST_PIECE, SMALLEST_PIECE, HostBuffers, matched

MIB = 2**20


def sizes(pieces: tuple[torch.Tensor, ...]) -> list[int]:
    return [piece.numel() // MIB for piece in pieces]


@pytest.mark.parametrize(
    ("mib", "pieces"),
    [
        (64, [64]),  # the residual stream of Llama-3.1-8B at 8192 tokens: one copy, as ever
        (56, [32, 16, 8]),  # of Gemma-2-9B
        (1, [1]),
        (200, [64, 64, 64, 8]),
        (2680, [64] * 41 + [32, 16, 8]),  # of Llama-3.1-8B at 343,040 tokens
    ],
)
def test_a_tensor_takes_the_largest_pieces_that_fit(mib: int, pieces: list[int]) -> None:
    buffers = HostBuffers(pinned=False)
    assert sizes(buffers.take(mib * MIB)) == pieces
    assert buffers.allocated_bytes == mib * MIB


def test_less_than_the_smallest_piece_is_wasted() -> None:
    for count in (1, 3 * MIB + 1, 17 * MIB - 1, 131 * MIB + 12345):
        buffers = HostBuffers(pinned=False)
        taken = buffers.take(count)
        assert 0 <= sum(piece.numel() for piece in taken) - count < SMALLEST_PIECE
        assert all(SMALLEST_PIECE <= piece.numel() <= LARGEST_PIECE for piece in taken)


def test_pieces_serve_tensors_of_other_sizes() -> None:
    """Short batches, a long one, short ones again: the pieces of the short ones are part of the long one."""
    buffers = HostBuffers(pinned=False)
    short = [buffers.take(16 * MIB) for _ in range(4)]
    for pieces in short:
        buffers.give_back(pieces)
    assert (buffers.allocated_bytes, buffers.free_bytes) == (64 * MIB, 64 * MIB)
    long = buffers.take(128 * MIB)
    assert sizes(long) == [16] * 4 + [64]
    assert (buffers.allocated_bytes, buffers.free_bytes) == (128 * MIB, 0)
    buffers.give_back(long)
    assert sizes(buffers.take(16 * MIB)) == [16]
    assert sizes(buffers.take(60 * MIB)) == [64]  # whole and a little too large rather than in parts
    assert buffers.allocated_bytes == 128 * MIB


def test_the_rest_of_one_tensor_takes_no_whole_piece_from_the_next() -> None:
    """64 tensors of 66 MiB, then of 72: what is there is added to, and nothing is allocated twice."""
    buffers = HostBuffers(pinned=False)
    for mib in (66, 72, 66, 72):
        for pieces in [buffers.take(mib * MIB) for _ in range(64)]:
            buffers.give_back(pieces)
    assert buffers.allocated_bytes <= 64 * 74 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_nothing_grows_once_a_step_of_each_length_has_run(seed: int) -> None:
    """Steps of a run: every tensor of one is of one size, all are taken, all are given back in any order."""
    draw = random.Random(seed)
    buffers = HostBuffers(pinned=False)
    lengths = [draw.randrange(1, 200 * MIB) for _ in range(4)]

    def step(length: int) -> None:
        taken = [buffers.take(length) for _ in range(6)]
        assert len({piece.data_ptr() for pieces in taken for piece in pieces}) == sum(map(len, taken))
        assert all(sum(piece.numel() for piece in pieces) >= length for pieces in taken)
        draw.shuffle(taken)
        for pieces in taken:
            buffers.give_back(pieces)

    for length in lengths:
        step(length)
    held = buffers.allocated_bytes
    for _ in range(20):
        step(draw.choice(lengths))
    assert buffers.allocated_bytes == held == buffers.free_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_what_went_into_pieces_comes_back(dtype: torch.dtype) -> None:
    buffers = HostBuffers(pinned=False)
    tensor = torch.randint(-9, 9, (3, 1000, 701)).to(dtype)
    pieces = buffers.take(tensor.nbytes)
    assert len(pieces) > 1
    for part, piece in matched(tensor, pieces):
        piece.copy_(part)
    back = torch.empty_like(tensor)
    for part, piece in matched(back, pieces):
        part.copy_(piece)
    assert torch.equal(back, tensor)
