"""Chooses the implementation of an operation, its Triton kernels or plain torch, and says why.

Triton kernels run on a CUDA device. Everywhere else the operations run their torch form, so a model trains on a CPU
with the same code. Triton's interpreter (``TRITON_INTERPRET=1`` before triton is first imported) runs the kernels on
CPU tensors, for tests; being slow, it is never chosen by itself, only by ``backend="triton"``.

Tile sizes of the kernels: one fixed choice an operation, the same on every run, never searched for while training.

The table holds what ``kernels/bench/tune.py`` measured to be best; it is edited by hand, with the measurement. Where
shared memory grows with the adapters' rank, it is a list, the best first, and the first one that fits the GPU is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.limits import Gpu, why_no_products

BackendName = Literal["auto", "triton", "torch"]

_NO_GPU = Gpu(None, 0)
# Looked up for every product of every layer: faster than making the string.
_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that runs (``triton`` or ``torch``), and the reason as one clause for a report."""

    name: Literal["triton", "torch"]
    reason: str

    @property
    def is_triton(self) -> bool:
        """True when the Triton kernels run."""
        return self.name == "triton"


def interpreting() -> bool:
    """True when Triton kernels run in Triton's interpreter, on CPU tensors.

    TRITON_INTERPRET decides that when triton is imported, and may have changed since. So this looks at how one of
    Triton's own functions was made.
    """
    return not isinstance(tl.sum, triton.JITFunction)


def choose_backend(device: torch.device | str, backend: BackendName = "auto") -> BackendChoice:
    """Pick the implementation for tensors on ``device``.

    ``backend="torch"`` always means plain torch; ``"triton"`` insists on the kernels.

    Raises:
        ValueError: ``backend="triton"`` where no Triton kernel can run, or an unknown name.
    """
    kind = torch.device(device).type
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend must be 'auto', 'triton' or 'torch', got {backend!r}")
    if backend == "torch":
        return BackendChoice("torch", "plain torch was asked for")
    if kind == "cuda":
        return BackendChoice("triton", "tensors on a CUDA device")
    if backend == "triton" and kind == "cpu" and interpreting():
        return BackendChoice("triton", "asked for, in Triton's interpreter")
    reason = f"tensors on {kind}: Triton kernels need a CUDA device"
    if backend == "triton":
        raise ValueError(f"backend='triton' was asked for, but {reason}")
    return BackendChoice("torch", reason)


def fuses_products(device: torch.device, dtype: torch.dtype) -> bool:
    """True where small products ride in elementwise kernels: as ``limits.why_no_products``, and in the interpreter."""
    if device.type != "cuda":
        return interpreting()
    return why_no_products(gpu_of(device), dtype_name(dtype)) is None


def gpu_of(device: torch.device) -> Gpu:
    """The GPU's facts, for the kernels' limits. Each GPU is asked once; operations call this on every launch."""
    if device.type != "cuda":
        return _NO_GPU
    return _ask(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _ask(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu((int(properties.major), int(properties.minor)), int(shared_memory))


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of ``dtype`` without ``torch.``, as ``ftkernels.limits`` takes it."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic inside a kernel: float64 for float64 tensors, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """``accumulate_dtype(dtype)`` as Triton names it, for a kernel's constexpr ``ACC``."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def store_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a kernel's output buffer.

    The interpreter truncates when it casts float32 to bfloat16; there kernels write float32 and torch rounds
    (``rounded``).
    """
    return accumulate_dtype(dtype) if interpreting() else dtype


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``. Outside the interpreter ``store_dtype`` gave that dtype already, and nothing happens."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which ``tensor``'s GPU is the current one: that is where Triton launches, wherever the data is."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context without autocast on ``tensor``'s device: inside an operation every dtype is chosen, none is guessed."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_TRITON_NAMES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def triton_store_dtype(dtype: torch.dtype) -> tl.dtype:
    """``store_dtype(dtype)`` as Triton names it: kernels round intermediates and the operands of dots to it."""
    return _TRITON_NAMES[store_dtype(dtype)]


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
