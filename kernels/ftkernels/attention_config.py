"""The machines that run the attention kernels, and their tiles: a short table by GPU generation and head size.

All rows were compiled for their architecture (registers, shared memory). Those of Hopper start from tiles that were
measured on an H200; no other generation has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ftkernels.device import BackendChoice, BackendName, choose_backend, dtype_name
from ftkernels.limits import Generation, Gpu, attention_generation, why_no_attention


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """A kernel's block: queries x keys, warps a program, stages of the software pipeline, loads by TMA or not."""

    queries: int
    keys: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class StoredTiles:
    """Tiles of the backward that stores weights (``ftkernels.attention_stored``).

    Attributes:
        weights: A tile of weights and their gradients.
        d_query, d_key: Of the products that read them: queries of ``d_query`` and keys of ``d_key`` are those of
            ``weights``, the other side is a step.
        depth: Columns of a head that one step of the scores takes.
        width: Columns of a head that a program of a product has.
        workspace: Bytes of the weights and gradients that are stored at a time, if a tile of queries fits.
    """

    weights: AttentionTile
    d_query: AttentionTile
    d_key: AttentionTile
    depth: int
    width: int
    workspace: int = 1 << 29

    def without_tma(self) -> StoredTiles:
        """The same tiles with plain loads."""
        plain = {name: replace(getattr(self, name), tma=False) for name in ("weights", "d_query", "d_key")}
        return replace(self, **plain)


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """One tile a kernel. ``d_key_value`` None: dk and dv come from two launches, with ``d_key`` and ``d_value``.
    ``stored``: the backward is the one that stores weights, and the other tiles of a backward are not used.
    """

    forward: AttentionTile
    d_query: AttentionTile
    d_key: AttentionTile
    d_value: AttentionTile
    d_key_value: AttentionTile | None
    stored: StoredTiles | None = None

    def without_tma(self) -> AttentionTiles:
        """The same tiles with plain loads, for tensors that TMA cannot address."""
        joint = self.d_key_value
        return AttentionTiles(
            forward=replace(self.forward, tma=False),
            d_query=replace(self.d_query, tma=False),
            d_key=replace(self.d_key, tma=False),
            d_value=replace(self.d_value, tma=False),
            d_key_value=None if joint is None else replace(joint, tma=False),
            stored=None if self.stored is None else self.stored.without_tma(),
        )


def choose_attention_backend(
    device: torch.device, gpu: Gpu, dtype: torch.dtype, head_size: int, backend: BackendName = "auto"
) -> BackendChoice:
    """Triton kernels or plain torch for attention on ``device``, and why: a function of its arguments alone.

    Args:
        gpu: What ``ftkernels.device.gpu_of`` says of the device.

    Raises:
        ValueError: ``backend="triton"`` where the kernels cannot run.
    """
    choice = choose_backend(device, backend)
    if not choice.is_triton:
        return choice
    refusal = why_no_attention(gpu, dtype_name(dtype), head_size)
    if refusal is None:
        return choice
    if backend == "triton":
        raise ValueError(f"backend='triton' was asked for, but {refusal}")
    return BackendChoice("torch", refusal)


def choose_tiles(gpu: Gpu, dtype: torch.dtype, block_size: int) -> AttentionTiles:
    """The tiles for heads padded to ``block_size``, on a GPU that ``choose_attention_backend`` sends to Triton.

    Raises:
        ValueError: no tiles fit the GPU's shared memory.
    """
    row = attention_generation(gpu)
    if row is None:
        raise ValueError(str(why_no_attention(gpu, dtype_name(dtype), block_size)))
    width = 64 if block_size <= 64 else block_size
    if row == "interpreter":
        return _INTERPRETER
    if dtype == torch.float32:
        return _FLOAT32[width]
    return _TILES[row, width]


def _two_tiles(forward: AttentionTile, backward: AttentionTile) -> AttentionTiles:
    """One tile for the forward, one for every kernel of the backward; dk and dv from two launches."""
    return AttentionTiles(forward, backward, backward, backward, None)


_INTERPRETER = _two_tiles(AttentionTile(32, 32, 4, 1), AttentionTile(32, 32, 4, 1))

_TILES: dict[tuple[Generation, int], AttentionTiles] = {
    ("hopper", 512): AttentionTiles(
        forward=AttentionTile(64, 64, 8, 1, tma=True),
        d_query=AttentionTile(64, 32, 8, 1, tma=True),
        d_key=AttentionTile(32, 64, 8, 1, tma=True),
        d_value=AttentionTile(64, 64, 8, 1, tma=True),
        d_key_value=None,
        stored=StoredTiles(
            weights=AttentionTile(128, 128, 8, 3, tma=True),
            d_query=AttentionTile(128, 64, 8, 3, tma=True),
            d_key=AttentionTile(64, 128, 8, 3, tma=True),
            depth=64,
            width=256,
        ),
    ),
    ("hopper", 256): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2, tma=True),
        d_query=AttentionTile(128, 32, 8, 3, tma=True),
        d_key=AttentionTile(32, 64, 4, 4, tma=True),
        d_value=AttentionTile(64, 128, 8, 2, tma=True),
        d_key_value=None,
    ),
    ("hopper", 128): AttentionTiles(
        forward=AttentionTile(128, 128, 8, 2, tma=True),
        d_query=AttentionTile(128, 64, 8, 2, tma=True),
        d_key=AttentionTile(64, 128, 8, 2, tma=True),
        d_value=AttentionTile(64, 128, 8, 2, tma=True),
        d_key_value=AttentionTile(64, 128, 8, 2, tma=True),
    ),
    ("hopper", 64): AttentionTiles(
        forward=AttentionTile(128, 128, 8, 2, tma=True),
        d_query=AttentionTile(128, 128, 8, 2, tma=True),
        d_key=AttentionTile(64, 128, 8, 2, tma=True),
        d_value=AttentionTile(64, 128, 8, 2, tma=True),
        d_key_value=AttentionTile(64, 128, 8, 2, tma=True),
    ),
    ("blackwell", 512): AttentionTiles(
        forward=AttentionTile(64, 32, 8, 2, tma=True),
        d_query=AttentionTile(64, 16, 8, 2, tma=True),
        d_key=AttentionTile(16, 64, 8, 2, tma=True),
        d_value=AttentionTile(32, 64, 8, 2, tma=True),
        d_key_value=None,
    ),
    ("blackwell", 256): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2, tma=True),
        d_query=AttentionTile(128, 32, 8, 2, tma=True),
        d_key=AttentionTile(64, 64, 4, 2, tma=True),
        d_value=AttentionTile(64, 64, 4, 2, tma=True),
        d_key_value=None,
    ),
    ("blackwell", 128): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2, tma=True),
        d_query=AttentionTile(128, 64, 8, 2, tma=True),
        d_key=AttentionTile(64, 128, 8, 2, tma=True),
        d_value=AttentionTile(64, 128, 8, 2, tma=True),
        d_key_value=AttentionTile(64, 128, 8, 2, tma=True),
    ),
    ("blackwell", 64): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2, tma=True),
        d_query=AttentionTile(128, 64, 8, 2, tma=True),
        d_key=AttentionTile(64, 128, 8, 2, tma=True),
        d_value=AttentionTile(64, 128, 8, 2, tma=True),
        d_key_value=AttentionTile(64, 128, 8, 2, tma=True),
    ),
    ("ampere", 512): AttentionTiles(
        forward=AttentionTile(64, 32, 8, 1),
        d_query=AttentionTile(32, 32, 8, 1),
        d_key=AttentionTile(32, 32, 8, 1),
        d_value=AttentionTile(32, 32, 8, 2),
        d_key_value=None,
    ),
    ("ampere", 256): AttentionTiles(
        forward=AttentionTile(64, 64, 8, 2),
        d_query=AttentionTile(64, 32, 8, 2),
        d_key=AttentionTile(32, 64, 8, 2),
        d_value=AttentionTile(64, 64, 8, 2),
        d_key_value=None,
    ),
    ("ampere", 128): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2),
        d_query=AttentionTile(64, 64, 8, 2),
        d_key=AttentionTile(64, 64, 8, 2),
        d_value=AttentionTile(64, 64, 8, 2),
        d_key_value=AttentionTile(64, 64, 8, 2),
    ),
    ("ampere", 64): AttentionTiles(
        forward=AttentionTile(128, 64, 4, 3),
        d_query=AttentionTile(128, 64, 8, 2),
        d_key=AttentionTile(64, 128, 8, 2),
        d_value=AttentionTile(64, 128, 8, 2),
        d_key_value=AttentionTile(64, 128, 8, 2),
    ),
    ("small", 512): AttentionTiles(
        forward=AttentionTile(32, 16, 8, 1),
        d_query=AttentionTile(16, 16, 8, 1),
        d_key=AttentionTile(16, 16, 8, 1),
        d_value=AttentionTile(16, 32, 8, 1),
        d_key_value=None,
    ),
    ("small", 256): AttentionTiles(
        forward=AttentionTile(64, 32, 8, 2),
        d_query=AttentionTile(64, 32, 8, 1),
        d_key=AttentionTile(32, 64, 8, 1),
        d_value=AttentionTile(32, 64, 8, 2),
        d_key_value=None,
    ),
    ("small", 128): AttentionTiles(
        forward=AttentionTile(128, 64, 8, 2),
        d_query=AttentionTile(64, 32, 4, 2),
        d_key=AttentionTile(64, 64, 8, 2),
        d_value=AttentionTile(64, 64, 8, 2),
        d_key_value=AttentionTile(32, 64, 8, 2),
    ),
    ("small", 64): AttentionTiles(
        forward=AttentionTile(128, 64, 4, 3),
        d_query=AttentionTile(128, 64, 8, 2),
        d_key=AttentionTile(64, 128, 8, 2),
        d_value=AttentionTile(64, 128, 8, 2),
        d_key_value=AttentionTile(64, 128, 8, 2),
    ),
}

# Without tensor cores: every product runs on the ordinary units, and operands live in registers.
_FLOAT32: dict[int, AttentionTiles] = {
    512: _two_tiles(AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
    256: _two_tiles(AttentionTile(32, 32, 8, 1), AttentionTile(16, 16, 8, 1)),
    128: _two_tiles(AttentionTile(32, 32, 8, 1), AttentionTile(32, 32, 8, 1)),
    64: _two_tiles(AttentionTile(32, 32, 4, 1), AttentionTile(32, 32, 4, 1)),
}
