"""Identities of weight files: every byte counts, wherever it lies."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from ftcli.errors import FtcliError
from ftcli.plain import plain_fields
from ftcli.run import inputs
from ftcli.run.inputs import Inputs, WeightFile, require_same_inputs, weight_identities

SIZE = 9_000_001


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("model-00001.safetensors", "model-00002.safetensors"):
        (tmp_path / name).write_bytes(os.urandom(SIZE))
    return tmp_path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_one_byte_between_the_samples_is_told(base: Path) -> None:
    before = weight_identities(base)
    known = {"inputs": plain_fields(Inputs(weights=before))}
    require_same_inputs(known, Inputs(weights=weight_identities(base)))
    flip(base / "model-00002.safetensors", 100_000)
    now = weight_identities(base)
    assert [each.samples_sha256 for each in now] == [each.samples_sha256 for each in before]
    with pytest.raises(FtcliError, match=r"model-00002\.safetensors \(9,000,001 bytes, .*, crc32 ") as caught:
        require_same_inputs(known, Inputs(weights=now))
    assert caught.value.findings[0].code == "FT735"
    assert "model-00001" not in caught.value.findings[0].message


@pytest.mark.parametrize("at", [0, 1 << 20, (1 << 20) - 1, 3_999_999, 4_000_000, SIZE - 1])
def test_pieces_make_one_checksum_of_all_bytes(base: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(inputs, "_PIECE_BYTES", 4_000_000)
    content = (base / "model-00001.safetensors").read_bytes()
    pieces = [zlib.crc32(content[first : first + 4_000_000]).to_bytes(4, "big") for first in range(0, SIZE, 4_000_000)]
    first, other = weight_identities(base)
    assert first.crc32 == f"{zlib.crc32(b''.join(pieces)):08x}"
    flip(base / "model-00001.safetensors", at)
    changed, same = weight_identities(base)
    assert changed.crc32 != first.crc32
    assert same == other


def test_files_beyond_free_memory_are_sampled(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weight_identities(base)
    monkeypatch.setattr(inputs, "free_host_bytes", lambda: 2 * SIZE - 1)
    sampled = weight_identities(base)
    assert sampled == tuple(WeightFile(each.name, each.bytes, each.samples_sha256) for each in whole)
    require_same_inputs({"inputs": plain_fields(Inputs(weights=whole))}, Inputs(weights=sampled))
    require_same_inputs({"inputs": plain_fields(Inputs(weights=sampled))}, Inputs(weights=whole))


def test_an_empty_file_has_an_identity(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (found,) = weight_identities(tmp_path)
    assert (found.bytes, len(found.crc32)) == (0, 8)
