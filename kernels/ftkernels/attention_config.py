"""Tiles of the attention kernels: a short table by GPU generation, head size and softcap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's block: queries x keys, warps a program, stages of the software pipeline, loads by TMA or not."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """One tile a kernel. ``d_key_value`` None means dk and dv come from two launches, of ``d_key`` and ``d_value``."""

    forward: Tile
    d_query: Tile
    d_key: Tile
    d_value: Tile
    d_key_value: Tile | None
