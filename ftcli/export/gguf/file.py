"""Writes GGUF files: tensor by tensor through the gguf library, K-quants through llama.cpp's ``llama-quantize``."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.gguf.names import Value
from ftcli.tables.gguf import TYPES

#: Elements that are rounded at once.
_PIECE = 1 << 24
_PROGRAM = "llama-quantize"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is to be written: its shape, its type's name in the gguf library, and what reads it."""

    shape: tuple[int, ...]
    type: str
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return stored_bytes(self.shape, self.type)


def stored_bytes(shape: Sequence[int], ggml: str) -> int:
    """Bytes of a tensor in a file."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml]]
    return math.prod(shape) // int(block) * int(size)


def type_of(stored: str, shape: Sequence[int], wanted: str) -> str:
    """The type of one tensor in a file of type ``wanted``: vectors, and the choice among experts, stay in float32, as
    llama.cpp wants them.

    Rows that are no multiple of a block are in float16; so are, in ternary types, embedding and head.
    """
    if len(shape) < 2 or ".ffn_gate_inp." in stored:
        return "F32"
    row = TYPES[wanted]
    if row.outer is not None and stored in ("token_embd.weight", "output.weight"):
        row = TYPES[row.outer]
    return "F16" if shape[-1] % row.block else row.ggml


def as_stored(tensor: Tensor, ggml: str) -> Tensor:
    """The numbers in float32 that a file's tensor of this type stands for."""
    import gguf

    if ggml == "F32":
        return tensor.float()
    kind = gguf.GGMLQuantizationType[ggml]
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    found = torch.empty_like(rows)
    step = max(1, _PIECE // rows.shape[-1])  # the library takes three times the memory of what it makes
    for first in range(0, len(rows), step):
        data = gguf.quants.quantize(rows[first : first + step].contiguous().numpy(), kind)
        found[first : first + step] = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), np.float32))
    return found.view(tensor.shape)


def write_file(
    path: Path, architecture: str, values: Mapping[str, Value], tensors: Mapping[str, PlannedTensor]
) -> None:
    """Write a file; one tensor at a time is in memory.

    Raises:
        OSError: it cannot be written.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        _add(writer, key, value)
    for name, planned in tensors.items():
        kind = gguf.GGMLQuantizationType[planned.type]
        dtype = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}.get(planned.type, np.dtype(np.uint8))
        shape = gguf.quant_shape_to_byte_shape(planned.shape, kind) if dtype == np.uint8 else planned.shape
        writer.add_tensor_info(name, shape, dtype, planned.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for planned in tensors.values():
            data = planned.read().float().contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(data, gguf.GGMLQuantizationType[planned.type]))
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantize_file(source: Path, target: Path, kind: str) -> None:
    """Make ``target`` of the 16-bit file ``source``.

    Raises:
        FtcliError: FT758 where the program is not on the PATH, or fails.
    """
    program = shutil.which(_PROGRAM)
    if program is None:
        raise _unavailable(f"{TYPES[kind].ggml} is made by llama.cpp's {_PROGRAM}, which is not on the PATH")
    arguments = [program, str(source), str(target), TYPES[kind].ggml]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, errors="replace")  # noqa: S603
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise _unavailable(f"{_PROGRAM} failed (exit {done.returncode}): {said[-1] if said else 'it said nothing'}")


def _unavailable(reason: str) -> FtcliError:
    return FtcliError.single(
        "FT758",
        reason,
        exit_code=ExitCode.PREFLIGHT,
        help="install llama.cpp (brew install llama.cpp, or its releases), or use export.gguf.types: [q8_0]",
    )
