"""The machines that run the attention kernels, and their tiles: a short table by GPU generation and head size.

All rows were compiled for their architecture (registers, shared memory). Those of Hopper start from tiles that were
measured on an H200; no other generation has been measured. With them what all launches share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ftkernels.attention_mask import TokenRanges
from ftkernels.device import (
    BackendChoice,
    BackendName,
    choose_backend,
    dtype_name,
    interpreting,
    store_dtype,
    triton_store_dtype,
)
from ftkernels.limits import Generation, Gpu, attention_generation, why_no_attention

# No tile is longer.
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Constants of one call's forward and backward, compiled into the kernels."""

    scale: float
    softcap: float
    head_size: int
    group: int
    dtype: torch.dtype


def padded_size(head_size: int) -> int:
    """The power of two that holds ``head_size``: blocks of Triton have no other widths."""
    return max(16, int(triton.next_power_of_2(head_size)))


def common_constants(settings: AttentionSettings, tile: AttentionTile, ranges: TokenRanges) -> dict[str, Any]:
    """The constexpr arguments, and the launch options, that all kernels take."""
    return {
        "GROUP": settings.group,
        "SCALE": settings.scale,
        "SOFTCAP": settings.softcap,
        "FAST_TANH": settings.dtype != torch.float32 and not interpreting(),
        "D": settings.head_size,
        "BLOCK_D": padded_size(settings.head_size),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "CD": triton_store_dtype(settings.dtype),
        "PRECISION": "ieee",
        "TMA": tile.tma,
        "HOLES": ranges.key_holes is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def strides(*tensors: Tensor) -> list[int]:
    """Batch, head and sequence strides of (B, H, S, D) tensors, one after the other."""
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1, 2)]


def token_major_like(tensor: Tensor) -> Tensor:
    """An empty (B, H, S, D) for an output: a view of a contiguous (B, S, H, D), the layout that projections read."""
    batch, heads, length, size = tensor.shape
    dtype = store_dtype(tensor.dtype)
    return torch.empty((batch, length, heads, size), dtype=dtype, device=tensor.device).transpose(1, 2)


def loadable(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels can address it: itself, or a copy where its last dimension has another stride than 1,
    or where rows of one tile lie further apart than int32 reaches (offsets between tiles are int64).
    """
    far = tensor.stride(2) * _MOST_ROWS >= 2**31
    return tensor.contiguous() if tensor.stride(-1) != 1 or far else tensor


def takes_descriptor(*tensors: Tensor) -> bool:
    """True when tensor memory access (TMA) can address all of the (B, H, S, D) tensors: Hopper wants 16-byte steps."""
    return all(
        tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and padded_size(tensor.shape[-1]) == tensor.shape[-1]
        and all(s > 0 and s * tensor.element_size() % 16 == 0 for s in tensor.stride()[:-1])
        for tensor in tensors
    )


def tile_source(tensor: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """The source of ``load_tile``: the tensor's pointer, or a descriptor of tiles of ``rows`` rows of one head."""
    if not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, tensor.shape[-1]])


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
