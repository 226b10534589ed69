"""Host memory: what ``gradient_checkpointing: offload`` pins, and how much it may pin."""

from __future__ import annotations

#: The smallest piece of pinned memory that activations are kept in: no tensor wastes more.
SMALLEST_PIECE = 1 << 20
#: Share of the host's free memory that may be pinned: the rest is the process's and the system's.
_PINNABLE = 0.9


def pinned_bytes(tensors: int, tensor_bytes: int) -> int:
    """Bytes of pinned memory that hold ``tensors`` tensors: for each of them whole pieces."""
    return tensors * -(-tensor_bytes // SMALLEST_PIECE) * SMALLEST_PIECE


def pinnable_bytes(host_free_bytes: int) -> int:
    """How much of the host's free memory activations may take."""
    return int(_PINNABLE * host_free_bytes)
