"""Host memory: what ``gradient_checkpointing: offload`` and ``lean`` pin, and how much they may pin."""

from __future__ import annotations

#: The smallest piece of pinned memory that activations are kept in: no tensor wastes more.
SMALLEST_PIECE = 1 << 20
#: Share of the host's free memory that may be pinned: the rest is the process's and the system's.
_PINNABLE = 0.9


def pinned_bytes(tensors: int, tensor_bytes: int) -> int:
    """Bytes of pinned memory that hold ``tensors`` tensors: for each of them whole pieces."""
    return tensors * -(-tensor_bytes // SMALLEST_PIECE) * SMALLEST_PIECE


def pinned_whole(tensor_bytes: int) -> int:
    """Bytes of pinned memory that torch's allocator takes for one tensor: a power of two."""
    return 1 << (tensor_bytes - 1).bit_length() if tensor_bytes else 0


def pinnable_bytes(host_free_bytes: int) -> int:
    """The part of the host's free memory that a run may pin."""
    return int(_PINNABLE * host_free_bytes)
