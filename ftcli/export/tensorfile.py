"""safetensors files read and written tensor by tensor, with no more than one of them in memory.

The library maps a file as a whole, and writes what is in memory as a whole. Here a tensor is read into memory of its
own, and a file is written from its header on, as each tensor comes. The layout is the library's: eight bytes that say
how long the header is, the header as JSON, the tensors one behind the other.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.source import unusable
from ftcli.facts.weights import WEIGHTS_INDEX
from ftcli.model.released import WHOLE, Form, form_of, grouped, read_group
from ftcli.plain import JsonMap, JsonObject
from ftcli.plan.disk import existing_ancestor
from ftcli.units import size

#: The layout's names of the dtypes that weights have.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_LENGTH_BYTES, _ALIGNMENT = 8, 8
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in its file: ``dtype`` by the layout's name, ``start`` and ``nbytes`` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """A file, whose tensors are read one by one.

    Raises OSError: it cannot be read; safetensors.SafetensorError: it is damaged, or cut short.
    """

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt"):  # the library looks whether header and length agree
            pass
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header: JsonObject = json.loads(file.read(length))
        begin = _LENGTH_BYTES + length
        self.entries: Mapping[str, TensorEntry] = {
            key: TensorEntry(told["dtype"], tuple(told["shape"]), begin + first, last - first)
            for key, told in header.items()
            if key != "__metadata__"
            for first, last in [told["data_offsets"]]
        }

    def dtype(self, key: str) -> torch.dtype:
        """A tensor's dtype. Raises SafetensorError for one that torch is not asked to read here."""
        name = self.entries[key].dtype
        if name not in DTYPES:
            raise SafetensorError(f"{key} is stored as {name}")
        return DTYPES[name]

    def read(self, key: str) -> Tensor:
        """A tensor in memory of its own. Raises OSError or SafetensorError as the class does."""
        entry, dtype = self.entries[key], self.dtype(key)
        memory = torch.from_numpy(np.fromfile(self._path, np.uint8, entry.nbytes, offset=entry.start))
        if len(memory) < entry.nbytes:
            raise SafetensorError(f"{self._path} ends within {key}")
        return memory.view(dtype).view(entry.shape)

    def pieces(self, key: str) -> Iterator[bytes]:
        """A tensor's bytes as they are, in pieces. Raises OSError or SafetensorError as the class does."""
        entry, done = self.entries[key], 0
        with self._path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            while done < entry.nbytes:
                piece = file.read(min(_PIECE, entry.nbytes - done))
                if not piece:
                    raise SafetensorError(f"{self._path} ends within {key}")
                done += len(piece)
                yield piece


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


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor that is to be written: ``dtype`` by the layout's name, and what gives its bytes when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterator[Any]]


def copied(key: str, file: TensorFile) -> TensorToWrite:
    """A tensor as it is in ``file``, byte for byte."""
    entry = file.entries[key]
    return TensorToWrite(key, entry.dtype, entry.shape, entry.nbytes, lambda: file.pieces(key))


def computed(key: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> TensorToWrite:
    """A tensor of this shape and dtype that ``make`` gives."""
    size = torch.empty((), dtype=dtype).element_size() * math.prod(shape)

    def pieces() -> Iterator[Any]:
        made = make()
        if made.dtype != dtype or tuple(made.shape) != tuple(shape):
            raise ValueError(f"{key} was made as {made.dtype} {tuple(made.shape)}, not as {dtype} {tuple(shape)}")
        yield made.contiguous().view(-1).view(torch.uint8).numpy().data

    return TensorToWrite(key, _NAMES[dtype], tuple(shape), size, pieces)


def in_memory(key: str, tensor: Tensor) -> TensorToWrite:
    """A tensor that is there already."""
    return computed(key, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def write_shards(folder: Path, outputs: Sequence[TensorToWrite], shard_bytes: int) -> None:
    """Writes ``outputs`` under transformers' names: one file, or several with their index.

    Outputs are made in their order, but within a file those of wider dtypes go first: so each lies at a multiple of its
    elements' size, as readers that map a file need it.

    Raises OSError: they cannot be written.
    """
    shards: list[list[TensorToWrite]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard)
    if len(shards) > 1:
        places = {output.key: name for name, shard in zip(names, shards, strict=True) for output in shard}
        _write_index(folder, places, sum(output.nbytes for output in outputs))


def add_shard(folder: Path, name: str, outputs: Sequence[TensorToWrite]) -> None:
    """Writes further tensors of a complete model as the file ``name``, and an index of them all.

    Raises OSError, safetensors.SafetensorError: they cannot be written, or the model's files not be read.
    """
    places = {key: path.name for path in sorted(folder.glob("*.safetensors")) for key in TensorFile(path).entries}
    _write_file(folder / name, outputs)
    places |= {output.key: name for output in outputs}
    size = sum(entry.nbytes for path in folder.glob("*.safetensors") for entry in TensorFile(path).entries.values())
    _write_index(folder, places, size)


def _write_index(folder: Path, places: Mapping[str, str], size: int) -> None:
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, outputs: Sequence[TensorToWrite]) -> None:
    ordered = sorted(outputs, key=lambda output: -(output.nbytes // max(1, math.prod(output.shape))))  # stable
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in ordered:
        header[output.key] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for output in ordered:
            _write_pieces(file, output)


def _write_pieces(file: BinaryIO, output: TensorToWrite) -> None:
    written = 0
    for piece in output.pieces():
        file.write(piece)
        written += len(piece)
    if written != output.nbytes:
        raise ValueError(f"{output.key} gave {written} bytes and not {output.nbytes}")


def tensor_files(folder: Path) -> dict[str, TensorFile]:
    """The file that each stored tensor in ``folder`` is in. Raises as :class:`TensorFile`."""
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {key: file for file in files for key in file.entries}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in ``folder``.

    Raises OSError, safetensors.SafetensorError: a file cannot be read or is damaged.
    """
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def finite_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter. Raises FtcliError FT742 when its file is damaged, empty or holds NaN or infinity."""
    try:
        tensors = read_tensors(folder)
    except (OSError, SafetensorError) as error:
        raise unusable(folder, f"its weights cannot be read ({error})") from error
    if not tensors:
        raise unusable(folder, "it has no weights")
    bad = next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)
    if bad is not None:
        raise unusable(folder, f"{bad} holds NaN or infinity")
    return tensors


def require_room(folder: Path, needed: int) -> None:
    """Raises FtcliError FT724 (exit 3) where ``folder``, or where it would be, has less than ``needed`` bytes free."""
    place = existing_ancestor(folder)
    free = shutil.disk_usage(place).free
    if needed > free:
        message = f"the export takes {size(needed)}, and {size(free)} are free in {place}"
        help = "free disk space, or name another folder with --output"
        raise FtcliError.single("FT724", message, exit_code=ExitCode.PREFLIGHT, help=help)
