"""Runs llama.cpp's own converter, and holds what it writes to what it was given.

It is a program of its own, which is given a folder in transformers' layout and no shell. What it makes of a family is
in no table here, so its tensors are held to those of the folder by their rows: each row of each tensor has to be in
the file, in its layer, wherever the converter puts it. In which order, and what the metadata mean, is for llama.cpp's
library to say, where it is there (``ftcli.export.gguf.converted``).
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.gguf.file import add_value
from ftcli.export.tensorfile import TensorFile
from ftcli.export.verify import shortened
from ftcli.facts.llama_cpp import (
    CONVERTER,
    CONVERTER_COMMIT,
    CONVERTER_DIGEST,
    CONVERTER_SCRIPT,
    WITHOUT_CONVERTER,
    converter,
)
from ftcli.gguf import ReadFile, Value, no_place

#: Types that the converter writes itself, by the dtype of the weights that it is given.
PLAIN_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
#: Patience: for any model, and for each GiB of it. Memory besides as much as the model has: it goes tensor by tensor.
_SECONDS, _SECONDS_A_GIB, _MEMORY = 900.0, 180.0, 8 << 30
#: Lines of what it said that an error repeats.
_TAIL = 4
_LAYER_IN_FILE, _LAYER = re.compile(r"blk\.(\d+)\."), re.compile(r"(?:^|\.)(\d+)\.")
#: How many numbers are looked at at once.
_PIECE = 1 << 22
#: Odd numbers whose bits are mixed, as in splitmix64.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def require_converter(stated: str | None, reason: str) -> tuple[str, ...]:
    """The converter's command. Raises FtcliError FT758 (exit 3), with what it is needed for, where it is not there."""
    command = converter(stated)
    if command is None:
        where = f"is not at {stated}" if stated else "is not on the PATH"
        message = f"{reason}: that is for llama.cpp's own converter ({CONVERTER_SCRIPT}), which {where}"
        raise FtcliError.single("FT758", message, exit_code=ExitCode.PREFLIGHT, help=WITHOUT_CONVERTER)
    return command


def version_of(command: Sequence[str]) -> str:
    """The commit of a converter that ftcli was tried with, or which other sources it has."""
    script = Path(command[-1])
    sources = [script, *sorted((script.parent / "conversion").glob("*.py"))]
    found = hashlib.sha256()
    for path in sorted(sources):
        found.update(path.name.encode() + path.read_bytes())
    digest = found.hexdigest()[: len(CONVERTER_DIGEST)]
    return CONVERTER_COMMIT if digest == CONVERTER_DIGEST else f"another version than {CONVERTER_COMMIT}: {digest}"


def convert(command: Sequence[str], model: Path, target: Path, *options: str) -> None:
    """Have the converter make ``target`` of the folder ``model``.

    Raises FtcliError FT756 where it refuses, fails, or takes too long or too much memory; OSError: it is no program.
    """
    size = sum(path.stat().st_size for path in model.iterdir())
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converted-") as made, tempfile.TemporaryFile() as said:
        arguments = [*command, str(model), "--outfile", str(Path(made) / "model.gguf"), *options]
        running = subprocess.Popen(  # noqa: S603
            arguments, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        seconds = _SECONDS + _SECONDS_A_GIB * size / 2**30
        ended = "did not end"
        try:
            if hasattr(resource, "prlimit"):
                resource.prlimit(running.pid, resource.RLIMIT_DATA, (_MEMORY + size, _MEMORY + size))
            ended = f"ended with status {running.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {seconds:,.0f} s"
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        written = sorted(Path(made).glob("*.gguf"))  # of a projector it puts something before the name
        if running.returncode != 0 or len(written) != 1:
            said.seek(0)
            raise _refused(ended, said.read().decode(errors="replace"))
        written[0].replace(target)


def _refused(ended: str, said: str) -> FtcliError:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    error = no_place(f"llama.cpp's converter {ended}: {' | '.join(lines[-_TAIL:]) or 'it said nothing'}")
    missing = re.search(r"No module named '(\w+)'", said)
    if missing is None:
        return error
    (finding,) = error.findings
    help = f"pip install {missing[1]} (into the environment of {CONVERTER}, if that is not ftcli's)"
    return FtcliError.single(finding.code, finding.message, exit_code=error.exit_code, help=help)


def rewrite(path: Path, changes: Mapping[str, Value]) -> None:
    """Give a file the values of ``changes`` beside its others, tensors as they are. Raises OSError, ValueError."""
    import gguf

    read = gguf.GGUFReader(path)
    fields = {key: field for key, field in read.fields.items() if not key.startswith("GGUF.")}
    spare = path.with_name(f"{path.name}.new")
    writer = gguf.GGUFWriter(spare, str(fields.pop("general.architecture").contents()))
    for key, field in fields.items():
        if key not in changes:
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=part)
    for key, value in changes.items():
        add_value(writer, key, value)
    for tensor in read.tensors:
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in read.tensors:
            writer.write_tensor_data(tensor.data)
    finally:
        writer.close()
    spare.replace(path)


def unlike_rows(
    file: ReadFile, files: Mapping[str, TensorFile], keys: Collection[str], *, by_layer: bool = True
) -> list[str]:
    """Problems: tensors ``keys`` of which a row is in none of the file's tensors of the same layer.

    A row counts as found where its numbers are there in their order, rounded as that tensor is stored; of a tensor that
    is not there so: turned (a matrix of each head), with one added (norms), as minus its exponential (decays), or with
    another order within a vector or the filter of an output.

    Args:
        by_layer: Layers of the folder are ``blk.N`` of the file.
    """
    stored: dict[str, list[str]] = {}
    for name in file.names:
        layer = _LAYER_IN_FILE.match(name) if by_layer else None
        stored.setdefault(layer[1] if layer else "", []).append(name)
    wanted: dict[str, list[str]] = {}
    for key in keys:
        layer = _LAYER.search(key) if by_layer else None
        wanted.setdefault(layer[1] if layer else "", []).append(key)
    problems = []
    for layer_number, tensors in wanted.items():
        place = _Place(file, stored.get(layer_number, []))
        problems += [f"{key} {_LOST}" for key in tensors if not place.holds(files[key].read(key).float())]
    return shortened(problems)


_LOST = "is not in the file as it was merged"
_MADE: tuple[Callable[[Tensor], Tensor], ...] = (lambda t: t, lambda t: t + 1.0, lambda t: -t.exp())


def _whole(tensor: Tensor) -> Tensor:
    """A vector as one row; of other tensors a row for each output."""
    return tensor.reshape(1, -1) if tensor.dim() < 2 or tensor.shape[-1] == 1 else tensor.flatten(1)


class _Place:
    """Tensors of a file by their rows' fingerprints for each type; turned matrices only where asked for."""

    def __init__(self, file: ReadFile, names: Sequence[str]) -> None:
        self._file, self._names = file, names
        self._plain = self._prints(lambda tensor: tensor.reshape(-1, tensor.shape[-1]))
        self._turned: dict[str, Tensor] | None = None
        self._filters: dict[str, Tensor] | None = None

    def holds(self, tensor: Tensor) -> bool:
        rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
        if any(_found(made(rows), self._plain) for made in _MADE):
            return True
        if (
            self._turned is None
        ):  # also of a tensor that is turned in part, like that of keys and values made of latents
            both = self._prints(lambda tensor: tensor.mT.reshape(-1, tensor.shape[-2]), dimensions=2)
            self._turned = {kind: torch.cat((each, both.get(kind, each[:0]))) for kind, each in self._plain.items()}
        if _found(rows, self._turned) or (tensor.dim() == 2 and _found(rows.mT, self._plain)):
            return True
        if self._filters is None:
            self._filters = self._prints(_whole, ordered=False)
        return any(_found(_whole(made(tensor)), self._filters, ordered=False) for made in _MADE)

    def _prints(
        self, rows_of: Callable[[Tensor], Tensor], *, dimensions: int = 0, ordered: bool = True
    ) -> dict[str, Tensor]:
        """Fingerprints of the rows of tensors of so many dimensions at least, by type."""
        found: dict[str, list[Tensor]] = {}
        for name in self._names:
            if len(self._file.shape(name)) >= dimensions:
                rows = fingerprints(rows_of(self._file.read(name)), ordered=ordered)
                found.setdefault(self._file.type_name(name), []).extend(rows)
        return {kind: torch.cat(each).unique() for kind, each in found.items()}


def _found(rows: Tensor, known: Mapping[str, Tensor], *, ordered: bool = True) -> bool:
    """True if each row is known, rounded to one of the types."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return any(
        all(bool(torch.isin(each, known[kind]).all()) for each in fingerprints(rows.to(dtype).float(), ordered=ordered))
        for kind, dtype in dtypes.items()
        if kind in known
    )


def fingerprints(rows: Tensor, *, ordered: bool = True) -> Iterator[Tensor]:
    """Numbers of 64 bits that stand for rows (n, columns) of float32, in their order or any, a piece at a time."""
    columns = torch.arange(rows.shape[1]) * (_MIX[0] if ordered else 0)
    for piece in torch.split(rows, max(1, _PIECE // max(1, rows.shape[1]))):
        bits = (piece + 0.0).contiguous().view(torch.int32).long()  # -0 is 0
        yield _mixed(_mixed(bits + columns).sum(1))


def _mixed(value: Tensor) -> Tensor:
    value = (value ^ (value >> 30)) * _MIX[1]
    value = (value ^ (value >> 27)) * _MIX[2]
    return value ^ (value >> 31)
