"""Files of released weights in packed forms, seen as files in full precision.

Whoever merges, verifies or copies sees the tensors that the forms stand for, and dequantizes one when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ftcli.export.tensorfile import TensorEntry, TensorFile
from ftcli.model.released import WHOLE, Form, form_of, grouped, read_group
from ftcli.plain import JsonMap


class DequantizedFiles(TensorFile):
    """All files of a model as one.

    Attributes:
        entries: Of each weight in full precision; packed ones are in bfloat16, as which they are written.

    Args:
        dtype: What training read packed weights into.
    """

    def __init__(self, files: Sequence[TensorFile], form: Form, dtype: torch.dtype) -> None:
        self._holders: Mapping[str, TensorFile] = {key: file for file in files for key in file.entries}
        self._form, self._dtype = form, dtype
        self._groups = grouped(self._holders, form)
        self.entries = {name: self._entry(name, group) for name, group in self._groups.items()}

    def _entry(self, name: str, group: Mapping[str, str]) -> TensorEntry:
        stored = {role: self._holders[key].entries[key] for role, key in group.items()}
        if not self._is_packed(name):
            return stored[WHOLE]
        shape = self._form.shape(name, {role: entry.shape for role, entry in stored.items()})
        return TensorEntry("BF16", shape, 0, 2 * math.prod(shape))

    def _is_packed(self, name: str) -> bool:
        return set(self._groups[name]) != {WHOLE}

    def read(self, key: str) -> Tensor:
        """A tensor as training read it. Raises also FtcliError FT323 for parts that do not fit together."""
        cpu = torch.device("cpu")
        return read_group(self._form, key, self._groups[key], self._stored, self._dtype, cpu)

    def _stored(self, key: str) -> Tensor:
        return self._holders[key].read(key)

    def pieces(self, key: str) -> Iterator[bytes]:
        """A tensor's bytes as they are, or of what it stands for in bfloat16."""
        if not self._is_packed(key):
            yield from self._holders[key].pieces(key)
            return
        yield self.read(key).to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def opened(paths: Sequence[Path], config: JsonMap, dtype: torch.dtype) -> list[TensorFile]:
    """The files of a model, of which config.json says whether they are in a packed form. Raises as the classes do."""
    files, form = [TensorFile(path) for path in paths], form_of(config)
    return list(files) if form is None else [DequantizedFiles(files, form, dtype)]
