"""Tokenized rows in memory-mapped files: what training and evaluation read, however large the data is."""

from __future__ import annotations

import hashlib
import json
from array import array as packed
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from ftcli.labels import IGNORE_INDEX
from ftcli.plain import JsonMap, JsonObject
from ftcli.rows.row import Row

Ints = NDArray[np.int64]
#: Of what tells rows apart.
DIGEST_BYTES = 16
#: Of what tells images apart, in hexadecimal.
_SHOWN_DIGITS = 32
_META = "meta.json"
#: Bytes of a file that are read at a time.
_BLOCK = 2**20
_CHECKSUM = "checksum"
#: Kept rows: end of the row in ids.bin, end in spans.bin, number of the row, index of its file's name.
_INDEX_COLUMNS = 4
#: Images: number of the row, rows and columns of tokens, width, height, bytes, and begin and end in images.bin of the
#: path with a digest of its content, if that is what it is, or of the content.
_IMAGE_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a tokenized row; its pixels stay where they are.

    Attributes:
        path, content: Where the file lies, or what the row held.
        width, height: As it is shown, in pixels.
        grid: Rows and columns of the tokens that stand for it.
        done: What is done with it when it is read (:class:`ftcli.rows.pictures.Picture`).
        digest: Of the file's content, in hexadecimal; empty where the row held it.
    """

    path: str | None
    content: bytes | None
    width: int
    height: int
    grid: tuple[int, int]
    bytes: int
    done: tuple[str, ...] = ()
    digest: str = ""

    @property
    def id(self) -> str:
        """A digest that tells it from others."""
        held = f"{self.path}:{self.bytes}".encode() if self.content is None else self.content
        return hashlib.sha256(held).hexdigest()[:16]

    @property
    def content_digest(self) -> str:
        """A digest of what it shows."""
        return self.digest or shown_digest(self.content or b"")


def shown_digest(content: bytes) -> str:
    """A digest of an image's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()[:_SHOWN_DIGITS]


def content_of(image: RowImage) -> Path | bytes:
    """The file of an image, or what the row held of it."""
    return Path(image.path) if image.path is not None else image.content or b""


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """One tokenized row: ``input_ids`` and ``labels`` of equal length, and where it came from (without its fields).

    Attributes:
        value: A number that the row gives its answer; 0 where it gives none (:class:`ftcli.rows.row.Example`).
    """

    row: Row
    input_ids: list[int]
    labels: list[int]
    value: float = 0.0
    images: tuple[RowImage, ...] = ()

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.input_ids)

    @property
    def image_tokens(self) -> int:
        """Tokens that stand for what is seen."""
        return sum(image.grid[0] * image.grid[1] for image in self.images)


def by_file(rows: Sequence[TokenizedRow]) -> dict[str, list[TokenizedRow]]:
    """The rows of each file, by its name."""
    files: dict[str, list[TokenizedRow]] = {}
    for row in rows:
        files.setdefault(row.row.source, []).append(row)
    return files


@dataclass(frozen=True, slots=True)
class EncodedArrays:
    """A few tokenized rows as arrays, so that they are cheap to send and to write.

    ``ids`` int32 of all rows in one; ``index`` int64 (rows, 4) with running ends as in :data:`_INDEX_COLUMNS`;
    ``spans`` int32 (spans, 2), half-open and relative to their row: the supervised positions; ``values`` float64
    (rows,); ``names`` of the files; ``images`` with the number of the row that each belongs to.
    """

    ids: NDArray[np.int32]
    spans: NDArray[np.int32]
    index: Ints
    values: NDArray[np.float64]
    names: tuple[str, ...]
    images: tuple[tuple[int, RowImage], ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A tokenized row without images whose supervised positions are known, so that no list of labels is made of it.

    Attributes:
        ids: int32.
        spans: Half-open runs of supervised positions, in order; no two touch.
    """

    row: Row
    ids: NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]
    value: float = 0.0

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.ids)

    @property
    def image_tokens(self) -> int:
        """None: it has no images."""
        return 0

    @property
    def input_ids(self) -> list[int]:
        """The ids, as those of :class:`TokenizedRow`."""
        ids: list[int] = self.ids.tolist()
        return ids

    def tokenized(self) -> TokenizedRow:
        """The row with its labels."""
        ids = self.input_ids
        labels = [IGNORE_INDEX] * len(ids)
        for first, last in self.spans:
            labels[first:last] = ids[first:last]
        return TokenizedRow(self.row, ids, labels, self.value)


def encoded_of(rows: Sequence[TokenizedRow | PlacedRow]) -> EncodedArrays:
    """Rows as arrays."""
    placed = [row for row in rows if isinstance(row, PlacedRow)]
    if len(placed) == len(rows):
        return _encoded_placed(placed)
    return _encoded([row.tokenized() if isinstance(row, PlacedRow) else row for row in rows])


def _encoded_placed(rows: Sequence[PlacedRow]) -> EncodedArrays:
    names = {name: n for n, name in enumerate(dict.fromkeys([one.row.source for one in rows]))}
    numbers = [(len(one.ids), len(one.spans), one.row.number, names[one.row.source]) for one in rows]
    index = np.asarray(numbers, dtype=np.int64).reshape(-1, _INDEX_COLUMNS)
    index[:, :2] = index[:, :2].cumsum(axis=0)
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(one.ids for one in rows)])
    spans = np.asarray([span for one in rows for span in one.spans], dtype=np.int32).reshape(-1, 2)
    values = np.asarray([one.value for one in rows], dtype=np.float64)
    return EncodedArrays(ids, spans, index, values, tuple(names))


def _encoded(rows: Sequence[TokenizedRow]) -> EncodedArrays:
    names = tuple(dict.fromkeys(tokens.row.source for tokens in rows))
    numbers = [(len(t.input_ids), 0, t.row.number, names.index(t.row.source)) for t in rows]
    index = np.asarray(numbers, dtype=np.int64).reshape(-1, _INDEX_COLUMNS)
    ids, labels = packed("i"), packed("i")
    for tokens in rows:
        ids.extend(tokens.input_ids)
        labels.extend(tokens.labels)
    spans, index[:, 1] = _spans_of(np.asarray(labels, dtype=np.int32), index[:, 0])
    index[:, :2] = index[:, :2].cumsum(axis=0)
    values = np.asarray([tokens.value for tokens in rows], dtype=np.float64)
    images = tuple((n, image) for n, tokens in enumerate(rows) for image in tokens.images)
    return EncodedArrays(np.asarray(ids, dtype=np.int32), spans, index, values, names, images)


def _spans_of(labels: NDArray[np.int32], lengths: Ints) -> tuple[NDArray[np.int32], Ints]:
    """Half-open runs of supervised positions of rows that lie one after the other, and how many each row has.

    A position without loss is put before each row and after the last, so that no run goes on into another row.
    """
    ends = lengths.cumsum()
    starts = ends - lengths
    apart = np.zeros(len(labels) + len(lengths) + 1, dtype=np.int8)
    apart[np.arange(len(labels)) + np.repeat(np.arange(1, len(lengths) + 1), lengths)] = labels != IGNORE_INDEX
    edges = (np.flatnonzero(np.diff(apart)) + 1).reshape(-1, 2)
    rows = np.searchsorted(starts + np.arange(len(lengths)), edges[:, 0], side="right") - 1
    spans = edges - (starts + np.arange(1, len(lengths) + 1))[rows, None]
    return spans.astype(np.int32), np.bincount(rows, minlength=len(lengths))


class TokenWriter:
    """Appends :class:`EncodedArrays` rows to the files of one source in ``folder``, which exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {name: (folder / f"{name}.bin").open("wb") for name in _FILES}
        self._names: dict[str, int] = {}
        self._ends = np.zeros(2, dtype=np.int64)
        self._rows = self._images_end = 0
        self._shown = hashlib.sha256()

    def append(self, encoded: EncodedArrays) -> None:
        """Adds rows after those that are there."""
        index = encoded.index.copy()
        index[:, :2] += self._ends
        if len(index):
            self._ends = index[-1, :2].copy()
            translate = [self._names.setdefault(name, len(self._names)) for name in encoded.names]
            index[:, 3] = np.asarray(translate, dtype=np.int64)[index[:, 3]]
        self._add_images(encoded)
        self._rows += len(index)
        for name, array in (
            ("ids", encoded.ids),
            ("spans", encoded.spans),
            ("index", index),
            ("values", encoded.values),
        ):
            self._files[name].write(np.ascontiguousarray(array).tobytes())

    def _add_images(self, encoded: EncodedArrays) -> None:
        for n, image in encoded.images:
            named = f"{image.path}{image.digest:0>{_SHOWN_DIGITS}}"
            held = image.content if image.path is None else named.encode()
            if image.path is not None:
                self._shown.update(_state_of(image.path))
            begin = self._images_end
            self._images_end += self._files["images"].write(held or b"")
            place = (begin, self._images_end, int(image.path is not None))
            numbers = (self._rows + n, *image.grid, image.width, image.height, image.bytes, *place)
            self._files["pictures"].write(np.asarray(numbers, dtype=np.int64).tobytes())

    def finish(self, facts: JsonObject) -> None:
        """Closes the files and writes what is known about them, ``facts`` and a checksum of everything included."""
        self.close()
        sizes = {name: (self._folder / f"{name}.bin").stat().st_size for name in _FILES}
        shown = self._shown.hexdigest()
        meta = {"rows": self._rows, "names": list(self._names), "sizes": sizes, "facts": facts, "shown": shown}
        content = _digest(self._folder, _arrays(self._folder))
        whole = {**meta, _CHECKSUM: _checksum(meta, content)}
        (self._folder / _META).write_text(json.dumps(whole), encoding="utf-8")

    def close(self) -> None:
        """Closes the files; more than once is fine."""
        for file in self._files.values():
            file.close()


_FILES: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "spans": np.int32,
    "index": np.int64,
    "values": np.float64,
    "pictures": np.int64,
    "images": np.uint8,
}


class TokenStore:
    """One source's rows, read from the files of a :class:`TokenWriter` without loading them.

    The files are read once when they are opened, at the speed of the disk, and compared with their checksum.

    Raises ValueError or OSError when they are not what was written.
    """

    def __init__(self, folder: Path) -> None:
        meta = _read_meta(folder / _META)
        for name in _FILES:
            if (folder / f"{name}.bin").stat().st_size != meta["sizes"][name]:
                raise ValueError(f"{name}.bin is not complete")
        self._ids, self._spans, self._index, self.values, self._pictures, self._images = arrays = _arrays(folder)
        self._digest = _digest(folder, arrays)
        if meta.pop(_CHECKSUM) != _checksum(meta, self._digest):
            raise ValueError("its content is not what was written")
        self.facts: JsonObject = meta["facts"]
        self._names: list[str] = meta["names"]
        self._shown = meta.get("shown")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def has_images(self) -> bool:
        """True if some row has an image."""
        return bool(self._pictures.size)

    def shows_the_same(self) -> bool:
        """True if the files of the images have the size and the time of change that they had."""
        shown = hashlib.sha256()
        for *_, begin, end, is_path in self._pictures.tolist():
            if is_path:
                shown.update(_state_of(self._images[begin : end - _SHOWN_DIGITS].tobytes().decode()))
        return not self.has_images or shown.hexdigest() == self._shown

    @property
    def lengths(self) -> Ints:
        """Tokens of each row."""
        return np.diff(self._index[:, 0], prepend=0)

    @property
    def supervised(self) -> Ints:
        """Supervised tokens of each row."""
        running = np.concatenate(([0], (self._spans[:, 1] - self._spans[:, 0]).cumsum(dtype=np.int64)))
        return np.diff(running[self._index[:, 1]], prepend=0)

    def digest(self) -> bytes:
        """SHA-256 over ids, supervised positions and row numbers, as they were when the files were opened."""
        return self._digest

    def row(self, index: int) -> TokenizedRow:
        """Row ``index``, counted from 0."""
        starts = self._index[index - 1, :2] if index else np.zeros(2, dtype=np.int64)
        end, span_end, number, name = (int(value) for value in self._index[index])
        ids = [int(i) for i in self._ids[int(starts[0]) : end]]
        labels = [IGNORE_INDEX] * len(ids)
        for a, b in self._spans[int(starts[1]) : span_end].tolist():
            labels[a:b] = ids[a:b]
        row = Row(self._names[name], number, {})
        return TokenizedRow(row, ids, labels, float(self.values[index]), self._images_of(index))

    def _images_of(self, index: int) -> tuple[RowImage, ...]:
        first, end = np.searchsorted(self._pictures[:, 0], (index, index + 1))
        return tuple(self._image(*(int(value) for value in line)) for line in self._pictures[first:end])

    def _image(
        self, _row: int, rows: int, columns: int, width: int, height: int, size: int, begin: int, end: int, is_path: int
    ) -> RowImage:
        held = self._images[begin:end].tobytes()
        if not is_path:
            return RowImage(None, held, width, height, (rows, columns), size)
        path, digest = held[:-_SHOWN_DIGITS].decode(), held[-_SHOWN_DIGITS:].decode()
        return RowImage(path, None, width, height, (rows, columns), size, digest=digest)


def _state_of(path: str) -> bytes:
    """What a file is told by without reading it."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return f"{path}\0gone\0".encode()
    return f"{path}\0{found.st_size} {found.st_mtime_ns}\0".encode()


_Arrays = tuple[NDArray[np.int32], NDArray[np.int32], Ints, NDArray[np.float64], Ints, NDArray[np.uint8]]


def _arrays(folder: Path) -> _Arrays:
    """Ids, spans, index, values and both of images. Raises ValueError when the sizes of the files cannot be those of
    such arrays.
    """
    ids, spans, index, values, pictures, images = (
        _mapped(folder / f"{name}.bin", dtype) for name, dtype in _FILES.items()
    )
    index = np.asarray(index.reshape(-1, _INDEX_COLUMNS))
    return ids, spans.reshape(-1, 2), index, values, pictures.reshape(-1, _IMAGE_COLUMNS), images


def _digest(folder: Path, arrays: _Arrays) -> bytes:
    """SHA-256 of what training sees; values and images are left out where no row has any, as they were before rows had
    them.

    The files are read for it: pages of a mapped one would stay, and count as this process' memory.
    """
    digest = hashlib.sha256()
    found: dict[str, NDArray[Any]] = dict(zip(_FILES, arrays, strict=True))
    left = {"values"} if not found["values"].any() else set[str]()
    left |= {"pictures", "images"} if not found["pictures"].size else set()
    for name in (name for name in _FILES if name not in left):
        digest.update(len(found[name]).to_bytes(8, "little"))
        with (folder / f"{name}.bin").open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.digest()


def _checksum(meta: JsonMap, content: bytes) -> str:
    """SHA-256, in hexadecimal, of what is known about the arrays and of their digest."""
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + content).hexdigest()


def _read_meta(path: Path) -> JsonObject:
    """Reads a writer's metadata. Raises OSError, or ValueError for anything else."""
    try:
        meta: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    sizes = meta.get("sizes") if isinstance(meta, dict) else None
    if not isinstance(sizes, dict) or set(sizes) != set(_FILES) or not {_CHECKSUM, "facts", "names"} <= set(meta):
        raise ValueError(f"{path.name} is not what was written")
    return meta


def _mapped(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def digest_of(row: TokenizedRow) -> bytes:
    """Of its tokens and images. The tokens themselves, of all pairs, would be gigabytes."""
    digest = hashlib.blake2b(np.asarray(row.input_ids, dtype=np.int32).tobytes(), digest_size=DIGEST_BYTES)
    for image in row.images:
        digest.update(image.content or str(image.path).encode())
    return digest.digest()


def unit_digest(*rows: TokenizedRow) -> bytes:
    """Of the token ids of all rows, of which of them are supervised, and of what their images hold."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for row in rows:
        ids = np.asarray(row.input_ids, dtype="<i8")
        supervised = np.asarray(row.labels, dtype="<i8") != IGNORE_INDEX
        found.update(len(ids).to_bytes(8, "little"))
        found.update(ids.tobytes())
        found.update(supervised.tobytes())
        for image in row.images:  # as many tokens stand for any other of its size
            found.update(repr((image.grid, image.width, image.height)).encode() + image.content_digest.encode())
    return found.digest()


class TokenTable(Sequence[TokenizedRow]):
    """The rows of several stores, one after the other. ``starts`` says where each store begins, and the total."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self._stores = tuple(stores)
        self.starts: list[int] = [0]
        for store in self._stores:
            self.starts.append(self.starts[-1] + len(store))
        empty = np.zeros(0, dtype=np.int64)
        self.lengths: Ints = np.concatenate([empty, *(store.lengths for store in stores)])
        self.supervised: Ints = np.concatenate([empty, *(store.supervised for store in stores)])
        self.values: NDArray[np.float64] = np.concatenate([np.zeros(0), *(store.values for store in stores)])

    @property
    def has_images(self) -> bool:
        """True if some row has an image."""
        return any(store.has_images for store in self._stores)

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that training sees of the rows: a run is held to it when it resumes."""
        return hashlib.sha256(b"".join(store.digest() for store in self._stores)).hexdigest()

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, index: int) -> TokenizedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedRow]: ...
    def __getitem__(self, index: int | slice) -> TokenizedRow | list[TokenizedRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self._stores[part].row(position - self.starts[part])

    def __iter__(self) -> Iterator[TokenizedRow]:
        for store in self._stores:
            yield from (store.row(index) for index in range(len(store)))
