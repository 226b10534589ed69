"""Which machines take the attention kernels, with which tiles, and why others do not."""

from __future__ import annotations

import pytest
import torch
from ftkernels.attention_config import (
    AttentionTile,
    AttentionTiles,
    choose_attention_backend,
    choose_tiles,
    padded_size,
    takes_descriptor,
)
from ftkernels.limits import Gpu, attention_generation

KIB = 1024
CUDA = torch.device("cuda")
GPUS = {
    "t4": Gpu((7, 5), 64 * KIB),
    "a100": Gpu((8, 0), 163 * KIB),
    "a10": Gpu((8, 6), 99 * KIB),
    "l4": Gpu((8, 9), 99 * KIB),
    "h200": Gpu((9, 0), 227 * KIB),
    "b200": Gpu((10, 0), 227 * KIB),
    "rtx5090": Gpu((12, 0), 99 * KIB),
}


@pytest.mark.parametrize(("name", "row"), [
    ("a100", "ampere"), ("a10", "small"), ("l4", "small"), ("h200", "hopper"), ("b200", "blackwell"),
    ("rtx5090", "small"),
])  # fmt: skip
def test_each_generation_has_its_row(name: str, row: str) -> None:
    assert attention_generation(GPUS[name]) == row
    assert choose_attention_backend(CUDA, GPUS[name], torch.bfloat16, 256).is_triton


@pytest.mark.parametrize(("device", "gpu", "dtype", "size", "reason"), [
    (CUDA, GPUS["t4"], torch.float16, 128, "capability 7.5"),
    (CUDA, GPUS["h200"], torch.float64, 128, "float64"),
    (CUDA, GPUS["h200"], torch.bfloat16, 72, "not 72"),
    (CUDA, GPUS["h200"], torch.bfloat16, 528, "not 528"),
    (CUDA, Gpu((8, 0), 48 * KIB), torch.bfloat16, 64, "shared memory"),
    (torch.device("meta"), Gpu(None, 0), torch.bfloat16, 64, "CUDA device"),
])  # fmt: skip
def test_a_refusal_has_a_reason(device: torch.device, gpu: Gpu, dtype: torch.dtype, size: int, reason: str) -> None:
    choice = choose_attention_backend(device, gpu, dtype, size)
    assert choice.name == "torch"
    assert reason in choice.reason
    with pytest.raises(ValueError, match="asked for, but"):
        choose_attention_backend(device, gpu, dtype, size, "triton")
    assert choose_attention_backend(device, gpu, dtype, size, "torch").reason == "plain torch was asked for"


def _shared_memory(tiles: AttentionTiles, size: int, itemsize: int) -> int:
    """The least that any kernel needs: the tiles of one step of its loop."""
    row = size * itemsize
    loops = [
        tiles.forward.stages * 2 * tiles.forward.keys,
        tiles.d_query.stages * 2 * tiles.d_query.keys,
        tiles.d_key.stages * 2 * tiles.d_key.queries,
        tiles.d_value.stages * 2 * tiles.d_value.queries,
    ]
    return max(loops) * row


@pytest.mark.parametrize("name", [name for name in GPUS if name != "t4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_head_size_has_tiles_that_fit(name: str, dtype: torch.dtype) -> None:
    for size in range(16, 513, 16):
        tiles = choose_tiles(GPUS[name], dtype, padded_size(size))
        assert _shared_memory(tiles, padded_size(size), dtype.itemsize) <= GPUS[name].shared_memory_bytes
        every = [tiles.forward, tiles.d_query, tiles.d_key, tiles.d_value, tiles.d_key_value]
        for tile in filter(None, every):
            assert tile.queries >= 16
            assert tile.keys >= 16
            assert not tile.tma or name in ("h200", "b200"), "only Hopper and Blackwell have TMA"
    assert choose_tiles(GPUS[name], dtype, 256).d_key_value is None


def test_tiles_are_the_same_every_time() -> None:
    first = choose_tiles(GPUS["h200"], torch.bfloat16, 256)
    assert first == choose_tiles(GPUS["h200"], torch.bfloat16, 256)


def test_without_tma_nothing_else_changes() -> None:
    tiles = AttentionTiles(*[AttentionTile(64, 32, 4, 2, tma=True)] * 5)
    assert tiles.without_tma() == AttentionTiles(*[AttentionTile(64, 32, 4, 2)] * 5)


def test_tma_takes_aligned_rows_of_a_power_of_two() -> None:
    x = torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16)
    assert takes_descriptor(x, x.transpose(1, 2))
    assert not takes_descriptor(x, x[..., 4:36]), "starts between two 16-byte steps"
    assert not takes_descriptor(torch.zeros(2, 3, 8, 48, dtype=torch.bfloat16)), "48 columns are padded to 64"
    assert not takes_descriptor(x[:1].expand(2, 3, 8, 64)), "all rows of the batch at one place"
    assert not takes_descriptor(x[:0])
