"""Reads GGUF files through the gguf library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonObject

#: Elements that are dequantized at once.
_PIECE = 1 << 24


class ReadFile:
    """A file as the gguf library's reader finds it.

    Raises:
        OSError, ValueError, IndexError, KeyError: it is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def values(self) -> JsonObject:
        """The metadata, by full key."""
        return {key: field.contents() for key, field in self._reader.fields.items()}

    @property
    def names(self) -> Sequence[str]:
        """The tensors."""
        return tuple(self._tensors)

    def type_name(self, name: str) -> str:
        """The type that a tensor is stored in."""
        return str(self._tensors[name].tensor_type.name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, in torch's order."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape.tolist()))

    def read(self, name: str) -> Tensor:
        """A tensor in float32, dequantized."""
        import gguf

        tensor = self._tensors[name]
        shape, stored = self.shape(name), np.asarray(tensor.data)
        if len(shape) < 2:
            values = gguf.quants.dequantize(stored, tensor.tensor_type)
            return torch.from_numpy(np.array(values, np.float32)).view(shape)
        found = torch.empty(shape, dtype=torch.float32)
        rows, into = stored.reshape(-1, stored.shape[-1]), found.view(-1, shape[-1])
        step = max(1, _PIECE // shape[-1])  # the library takes three times the memory of what it makes
        for first in range(0, len(rows), step):
            piece = gguf.quants.dequantize(rows[first : first + step], tensor.tensor_type)
            into[first : first + step] = torch.from_numpy(np.array(piece, np.float32)).view(-1, shape[-1])
        return found


def require_gguf_package() -> None:
    """Raises FtcliError FT758 where the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise FtcliError.single(
            "FT758",
            "GGUF files need the package gguf, which is not installed",
            exit_code=ExitCode.PREFLIGHT,
            help="pip install 'ftcli[gguf]'",
        ) from error
