"""A teacher's likeliest tokens on disk: a folder with what they are of, and parts with some rows each.

A row is found by its token ids and which of them are supervised; each part names the teacher by its weights, tokens and
settings, and its own content by a digest. What was written of another teacher, other tokens or another row is never
read. Parts are written aside and renamed, and never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from ftcli.data.tokens import TokenizedRow, unit_digest
from ftcli.errors import ExitCode, FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.distill.checks import TOLD, differing, does_not_fit
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.atomic import json_object_in, storage_errors, write_bytes, write_json

if TYPE_CHECKING:
    from ftkernels.linear_divergence import TopLogProbs
    from transformers import PreTrainedTokenizerBase

FORMAT = "ftcli teacher log-probabilities 1"
#: Where a micro-batch has a teacher's likeliest tokens (R, k) int32, their log-probabilities (R, k) and the logarithm
#: of what all others have (R,), float32, for its supervised positions in their order.
IDS, LOG_PROBS, REST = "teacher_ids", "teacher_log_probs", "teacher_rest"
#: Of a part, after which the next one begins.
_PART_BYTES = 1 << 26
_NAMES = ("rows", "ends", "ids", "log_probs", "rest")


def tokens_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all tokens by their ids."""
    return digest(sorted((number, token) for token, number in tokenizer.get_vocab().items()))


def digest(value: Any) -> str:
    """A digest of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def positions_of(row: TokenizedRow) -> int:
    """How many positions predict a supervised token."""
    return sum(label != IGNORE_INDEX for label in row.labels[1:])


@dataclass(slots=True)
class StoredLogProbs:
    """The log-probabilities in a folder, of the teacher that ``told`` describes.

    Raises FtcliError FT474 (exit 4) for a folder of another teacher, and for a part that is damaged.
    """

    folder: Path
    told: JsonObject
    _parts: list[Any] = field(default_factory=list)
    _places: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            self._open(path)

    @property
    def identity(self) -> str:
        """A digest of the teacher, its tokens and the settings that it was asked with."""
        return digest(self.told)

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary that the log-probabilities are of."""
        return int(self.told["vocabulary"])

    def __len__(self) -> int:
        return len(self._places)

    def lacks(self, rows: Iterable[TokenizedRow]) -> list[TokenizedRow]:
        """Those that are not there, each once."""
        found = {unit_digest(row): row for row in rows}
        return [row for key, row in found.items() if key not in self._places]

    def of(self, rows: Sequence[TokenizedRow]) -> dict[str, Tensor]:
        """The parts of a micro-batch for rows in turn, all of which are there."""
        top = int(self.told["teacher_top_k"])
        found: dict[str, list[Any]] = {
            IDS: [np.zeros((0, top), np.int32)],
            LOG_PROBS: [np.zeros((0, top), np.float32)],
            REST: [np.zeros(0, np.float32)],
        }
        for row in rows:
            part, start, end = self._places[unit_digest(row)]
            for values, name in zip(found.values(), _NAMES[2:], strict=True):
                values.append(self._parts[part].get_slice(name)[start:end])
        return {name: torch.from_numpy(np.concatenate(values)) for name, values in found.items()}

    def _open(self, path: Path) -> None:
        try:
            part: Any = safe_open(str(path), framework="numpy")
            said = part.metadata() or {}
            tensors = {name: part.get_tensor(name) for name in _NAMES}
        except (OSError, SafetensorError) as error:
            raise unfit(f"{path} cannot be read ({error})", "remove it, and ask the teacher again") from error
        if said.get("content") != _content(tensors):
            raise unfit(
                f"{path} is damaged: its content is not what was written", "remove it, and ask the teacher again"
            )
        if said.get("teacher") != self.identity:
            message = f"{path} was written of another teacher than {TOLD} beside it names"
            raise unfit(message, "keep the files of each teacher in a folder of their own")
        number, start = len(self._parts), 0
        self._parts.append(part)
        for row, end in zip(tensors["rows"], tensors["ends"].tolist(), strict=True):
            self._places.setdefault(row.tobytes(), (number, start, end))
            start = end


@dataclass(slots=True)
class PartWriter:
    """Writes rows into a folder, a part whenever there are enough for one, and the rest when it is closed."""

    folder: Path
    identity: str
    _rows: list[tuple[bytes, tuple[Any, ...]]] = field(default_factory=list)
    _bytes: int = 0

    def add(self, rows: Sequence[TokenizedRow], top: TopLogProbs) -> None:
        """Adds the teacher's likeliest tokens at the supervised positions of these rows, in turn."""
        values = (top.ids.int(), top.log_probs.float(), top.rest.float())
        counts = [positions_of(row) for row in rows]
        split = zip(*(value.cpu().split(counts) for value in values), strict=True)
        for row, of_row in zip(rows, split, strict=True):
            self._rows.append((unit_digest(row), tuple(value.numpy() for value in of_row)))
        self._bytes += sum(value.nbytes for value in values)
        if self._bytes >= _PART_BYTES:
            self.close()

    def close(self) -> None:
        """Writes what is left. Raises FtcliError FT723 or FT724 where it cannot."""
        if not self._rows:
            return
        digests, values = zip(*self._rows, strict=True)
        tensors = {name: np.concatenate(part) for name, part in zip(_NAMES[2:], zip(*values, strict=True), strict=True)}
        tensors["rows"] = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
        tensors["ends"] = np.cumsum([len(one[-1]) for one in values], dtype=np.int64)
        content = _content(tensors)
        with storage_errors(self.folder):
            data = save(tensors, {"format": FORMAT, "teacher": self.identity, "content": content})
            write_bytes(self.folder / f"{content[:16]}.safetensors", data)
        self._rows, self._bytes = [], 0


def _content(tensors: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name in _NAMES:
        found.update(json.dumps([name, str(tensors[name].dtype), list(tensors[name].shape)]).encode())
        found.update(np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()


def read(folder: Path, expected: JsonMap) -> StoredLogProbs:
    """Reads a folder. Raises FtcliError FT474 (exit 4) where it says something else than ``expected``."""
    try:
        told = json_object_in(folder / TOLD)
    except (OSError, ValueError) as error:
        raise unfit(f"{folder / TOLD} cannot be read ({error})", "name the distill.teacher to be asked") from error
    other = [does_not_fit(str(folder), *one) for one in differing(told, {"format": FORMAT, **expected})]
    if other:
        raise FtcliError(other, ExitCode.DATA)
    return StoredLogProbs(folder, told)


def begin(folder: Path, told: JsonObject) -> None:
    """Makes the folder where it is not there, with what it is of. Raises FtcliError FT723 or FT724 where it cannot."""
    if not (folder / TOLD).is_file():
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / TOLD, told)


def unfit(message: str, help: str, row: TokenizedRow | None = None) -> FtcliError:
    """FT474 (exit 4)."""
    origin = None if row is None else row.row.origin
    return FtcliError.single("FT474", message, exit_code=ExitCode.DATA, origin=origin, help=help)
