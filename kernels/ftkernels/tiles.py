"""Tile sizes of the kernels: one fixed choice an operation, the same on every run, never searched for while training.

The table holds what ``kernels/bench/tune.py`` measured to be best; it is edited by hand, with the measurement. Where
shared memory grows with the adapters' rank, it is a list, the best first, and the first one that fits the GPU is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftkernels.device import interpreting


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows and columns of a tile, warps of a program, and stages of its column loop's software pipeline.

    ``programs``: kernels that sum over columns or over rows, and those of few rows, split their work so that about this
    many programs run.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs: int = 1024


# Measured by `python kernels/bench/tune.py --model llama3.1-8b` on one H200 (torch 2.11, Triton 3.6, 2026-11-21), the
# first of each list; what follows it was compiled for other GPUs and other ranks, not timed.
_TILES = {
    "glu_forward": (Tile(4, 256, 4),),
    "glu_backward": (Tile(1, 1024, 4),),
    "glu_forward_lora": (
        Tile(64, 128, 4, 3, 256),
        Tile(64, 128, 4, 2, 256),
        Tile(64, 64, 4, 2, 256),
        Tile(64, 64, 4, 1, 256),
        Tile(32, 32, 4, 1, 256),
    ),
    "glu_backward_lora": (
        Tile(64, 64, 4, 3),
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 1),
        Tile(32, 32, 4, 1),
    ),
    "lowrank_add": (Tile(32, 128, 4),),
    # Of seven models' shapes at 512 to 8192 rows, on an H200, 2026-11-24.
    "thin_products": (Tile(64, 128, 4, 3, 132), Tile(64, 128, 4, 2, 132), Tile(32, 64, 4, 2, 132)),
    # Columns here are heads of one program.
    "qkv_rope_forward": (Tile(16, 8, 4, 3),),
    # For few rows, as in decoding: a head a program, or most of the GPU would have nothing to do.
    "qkv_rope_forward_few": (Tile(16, 1, 4, 3),),
    "qkv_rope_backward": (Tile(32, 8, 4, 3, 264), Tile(16, 8, 4, 3, 264)),
    "qkv_norm_rope_forward": (Tile(16, 4, 4, 3, 264),),
    "qkv_norm_rope_forward_lora": (Tile(16, 16, 4, 3, 264),),
    "qkv_norm_rope_forward_few": (Tile(16, 1, 4, 3),),
    "qkv_norm_rope_backward": (Tile(32, 8, 4, 1, 264), Tile(8, 8, 4, 1, 264)),
    "qkv_norm_rope_backward_lora": (
        Tile(32, 16, 4, 3, 264),
        Tile(32, 8, 8, 3, 264),
        Tile(16, 4, 4, 3, 264),
        Tile(16, 4, 4, 1, 264),
    ),
    # Heads of OLMo-3-7B on an H200, 2026-11-24.
    "qkv_width_sums": (Tile(32, 8, 4, 1, 264), Tile(8, 8, 4, 1, 264)),
    "qkv_width_backward_lora": (Tile(32, 4, 4, 3, 264), Tile(16, 4, 4, 3, 264), Tile(16, 4, 4, 1, 264)),
}
# A program costs the interpreter about a millisecond, whatever its tile.
_INTERPRETED = Tile(64, 64, 4, 1, 2)


def tile_for(operation: str, fits: Callable[[Tile], bool] = lambda _: True) -> Tile:
    """The tile of a kernel, by name: the best that ``fits``, the smallest where none does.

    Raises:
        KeyError: no such kernel.
    """
    tiles = _TILES[operation]
    return _INTERPRETED if interpreting() else next(filter(fits, tiles), tiles[-1])
