"""Identities of weight files, which may be large: the SHA-256 of samples of each, and a CRC-32 of every byte."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ftcli.facts.device import free_host_bytes, usable_cores

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
#: What a thread reads at a time, and what one CRC-32 is of.
_READ_BYTES, _PIECE_BYTES = 1 << 20, 1 << 26
_MOST_THREADS = 8


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
    """Identities of the weight files in a model's folder.

    All bytes are read by several threads where the files fit into free memory, and so come from it where they have just
    been read, or stay there for whoever reads them next; else samples alone. The first sample holds the header, which
    lists every tensor with its shape.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    sizes = [file.stat().st_size for file in files]
    free = free_host_bytes()
    checksums = [""] * len(files) if free is None or sum(sizes) > free else _checksums(files, sizes)
    return tuple(
        WeightFile(file.name, size, _samples(file, size), checksum)
        for file, size, checksum in zip(files, sizes, checksums, strict=True)
    )


def _samples(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _checksums(files: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    pieces = [
        (file, at) for file, size in zip(files, sizes, strict=True) for at in range(0, max(size, 1), _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as threads:
        found = list(threads.map(_crc32, pieces))
    of_file: dict[Path, bytes] = dict.fromkeys(files, b"")
    for (file, _), value in zip(pieces, found, strict=True):
        of_file[file] += value.to_bytes(4, "big")
    return [f"{zlib.crc32(values):08x}" for values in of_file.values()]


def _crc32(piece: tuple[Path, int]) -> int:
    """Of the piece of a file that begins at an offset; reading and counting leave Python's lock to others."""
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
