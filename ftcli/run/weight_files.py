"""Identities of weight files, which may be large: the SHA-256 of samples of each, and a CRC-32 of every byte."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

from ftcli.facts.device import free_host_bytes, usable_cores

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
#: What a thread reads at a time, and what one CRC-32 is of.
_READ_BYTES, _PIECE_BYTES = 1 << 20, 1 << 26
_MOST_THREADS = 8


#: Answers with what has been read, or raises its error, once that is done.
WeightIdentities = Callable[[], "tuple[WeightFile, ...]"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Identity of one weight file.

    Attributes:
        samples_sha256: SHA-256 of 64 samples of 64 KiB, spread over it: all of a file of 4 MiB and less.
        crc32: CRC-32 of every byte (of each 64 MiB, and of those together); empty where it was not read whole. It tells
            accidents; somebody who wants to can find other bytes with the same.
    """

    name: str
    bytes: int
    samples_sha256: str
    crc32: str = ""


def weight_identities(folder: Path) -> tuple[WeightFile, ...]:
    """Identities of the weight files in a model's folder (:func:`begin`)."""
    return begin(folder)()


def begin(folder: Path) -> WeightIdentities:
    """Begins to read the weight files in a model's folder, by threads that work beside the caller.

    All bytes are read where the files fit into free memory: they come from it where they were just read, and stay in it
    for whoever reads them next. Else samples alone. The first sample holds the header, which lists every tensor with
    its shape. A process that ends does not wait for the threads.

    Raises:
        OSError: there is a file that cannot be looked at; of one that cannot be read, the answer raises it.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    sizes = [file.stat().st_size for file in files]
    free = free_host_bytes()
    whole = files if free is not None and sum(sizes) <= free else []
    spans = [(file, range(0, max(size, 1), _PIECE_BYTES)) for file, size in zip(whole, sizes, strict=False)]
    pieces = [(file, offset) for file, offsets in spans for offset in offsets]
    threads = ThreadPool(min(_MOST_THREADS, usable_cores()))
    samples = threads.starmap_async(_samples, zip(files, sizes, strict=True), 1)
    checksums = threads.map_async(_crc32, pieces, 1)
    threads.close()

    def answer() -> tuple[WeightFile, ...]:
        of_file: dict[Path, bytes] = {}
        for (file, _), value in zip(pieces, checksums.get(), strict=True):
            of_file[file] = of_file.get(file, b"") + value.to_bytes(4, "big")
        return tuple(
            WeightFile(file.name, size, digest, f"{zlib.crc32(of_file[file]):08x}" if file in of_file else "")
            for file, size, digest in zip(files, sizes, samples.get(), strict=True)
        )

    return answer


def _samples(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _crc32(piece: tuple[Path, int]) -> int:
    """CRC-32 of the piece of a file that begins at an offset; reading and counting leave Python's lock to others."""
    path, offset = piece
    value, buffer = 0, bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        left = _PIECE_BYTES
        while left and (count := file.readinto(view[: min(left, _READ_BYTES)])):
            value = zlib.crc32(view[:count], value)
            left -= count
    return value
