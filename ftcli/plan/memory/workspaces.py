"""Memory that belongs to no layer: attention masks, what cuBLAS keeps, and host memory that ``gradient_checkpointing:
offload`` and ``lean`` pin, and may pin. Pure arithmetic; all answers in bytes.
"""

from __future__ import annotations

from ftcli.facts.device import DeviceFacts
from ftcli.plan.execution import Execution

#: What torch gives cuBLAS for each handle and stream, out of its own allocator; Hopper has the larger one.
_CUBLAS_BYTES, _CUBLAS_HOPPER_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8, 4096 * 1024 * 8


def cublas_bytes(device: DeviceFacts, execution: Execution, *, backward: bool, graphs: bool) -> int:
    """cuBLAS' workspaces: one for each thread that multiplies, and in it for each stream.

    Backward runs in a thread of its own; our layers multiply in two streams. CUDA graphs are captured on a stream of
    their own, which takes the place of the first, and in backward there is a third.
    """
    if device.kind != "cuda":
        return 0
    each = _CUBLAS_HOPPER_BYTES if device.capability is not None and device.capability[0] == 9 else _CUBLAS_BYTES
    streams = (2 if execution.layers.code == "fused" else 1) + graphs
    return each * ((2 if backward else 1) * streams + graphs)


def mask_bytes(
    execution: Execution, rows: int, queries: int, keys: int, window: int | None, element: int, *, padded: bool
) -> int:
    """Attention masks of ``rows`` rows. All layers share one; layers with a window share another.

    Causal attention over rows without padding needs no mask, and our kernels read intervals instead of one. Eager
    attention always has one: numbers of ``element`` bytes in transformers' form, bytes in ours.
    """
    if execution.dense == "triton":
        return 0
    if execution.dense == "eager":
        kinds = 2 if window else 1
        return (rows if padded else 1) * queries * keys * kinds * (1 if execution.on_kernels else element)
    windowed = window is not None and window < keys and execution.masked != "triton"
    return rows * queries * keys * (1 + windowed) if padded else queries * keys * windowed


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
