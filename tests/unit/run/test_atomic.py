"""Atomic files: complete or unchanged."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.run import atomic


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "status.json"
    atomic.write_text(target, "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(target, "new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["status.json"]


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "FT724"), (errno.EDQUOT, "FT724"), (errno.EROFS, "FT723")])
def test_failed_writes_are_typed(tmp_path: Path, number: int, code: str) -> None:
    with pytest.raises(FtcliError) as caught, atomic.storage_errors(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert caught.value.findings[0].code == code
    assert caught.value.exit_code is ExitCode.PREFLIGHT
    assert str(tmp_path / "file") in caught.value.findings[0].message


def test_a_systems_error_in_a_librarys_words_is_read_from_them(tmp_path: Path) -> None:
    """safetensors removes what it could not finish: the disk is not full any more when somebody looks."""
    error = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(FtcliError) as caught, atomic.writing_into(tmp_path, tmp_path / "adapter"):
        raise error
    assert caught.value.findings[0].code == "FT724"
    assert caught.value.__cause__ is error


def test_json_with_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic.write_json(tmp_path / "x.json", {"loss": float("nan")})


def test_half_a_surrogate_pair_survives_as_json(tmp_path: Path) -> None:
    text = "zo\u00eb \ud800 \U0001f600"
    atomic.write_json(tmp_path / "x.json", [text])
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == [text]


def test_replacing_a_folder_leaves_only_the_new_content(tmp_path: Path) -> None:
    destination, staged = tmp_path / "adapter", tmp_path / ".tmp-adapter"
    for folder, name in ((destination, "old"), (staged, "new")):
        folder.mkdir()
        (folder / name).write_text(name)
    atomic.replace_directory(staged, destination)
    assert names(tmp_path) == ["adapter"]
    assert names(destination) == ["new"]
