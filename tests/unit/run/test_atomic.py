"""Atomic files: complete or unchanged."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.source import resolve_source
from ftcli.pipeline.weights import result_of
from ftcli.reporting import SilentReporter
from ftcli.run import atomic
from ftcli.run.directory import RunDirectory


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


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
def test_nothing_is_renamed_over_what_is_no_file(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    make(path)
    kind = path.stat().st_mode
    with pytest.raises(OSError, match="not a regular file"):
        atomic.write_text(path, "new")
    assert path.stat().st_mode == kind
    assert names(tmp_path) == ["report.html"]


def test_a_link_of_a_run_is_replaced_and_one_that_is_named_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for write, left in ((atomic.write_bytes, "old"), (atomic.write_named, "new")):
        target.write_text("old")
        link = tmp_path / write.__name__
        link.symlink_to(target)
        write(link, b"new")
        assert (link.read_text(), target.read_text()) == ("new", left)
        assert link.is_symlink() == (write is atomic.write_named)


def test_what_another_process_has_left_aside_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "page.html"
    victim.write_text("mine")
    (tmp_path / f".tmp-page.html.{os.getpid()}").symlink_to(victim)
    atomic.write_named(path, b"new")
    assert (path.read_bytes(), victim.read_text()) == (b"new", "mine")


def test_a_pipe_with_a_reader_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_named(tmp_path / "pipe", b"page", overwrite=False)
    assert os.read(reader, 100) == b"page"
    os.close(reader)


def test_stdout_by_name_is_the_commands_own(tmp_path: Path) -> None:
    """Also where it is a file: what the command writes after that must not go into one that was replaced."""
    program = "import sys; from pathlib import Path; from ftcli.run.atomic import write_named\n"
    program += "print('before'); write_named(Path('/dev/stdout'), b'page\\n'); print('after')"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\npage\nafter\n"


def test_only_regular_files_of_some_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 5 << 30)
    for name, reason in (
        ("pipe", "a pipe"),
        ("zero", "a device"),
        ("large", "5,368,709,120 bytes"),
        (".", "directory"),
    ):
        with pytest.raises(OSError, match=reason):
            atomic.read_bytes(tmp_path / name)
        assert atomic.read_json_object(tmp_path / name) == {}
    (tmp_path / "small").write_bytes(b"12345")
    assert atomic.read_bytes(tmp_path / "small", 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, and 4"):
        atomic.read_bytes(tmp_path / "small", 4)


def test_what_is_no_file_in_a_folder_of_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "inner" / "weights")
    (tmp_path / "dangling").symlink_to("nowhere")
    assert atomic.irregular_file(tmp_path) == ""
    os.mkfifo(tmp_path / "inner" / "pipe")
    assert atomic.irregular_file(tmp_path) == "inner/pipe: it is a pipe, not a regular file"
    (tmp_path / "a").symlink_to("/dev/zero")
    assert atomic.irregular_file(tmp_path) == "a: it is a device, not a regular file"


def test_weights_that_are_a_pipe_are_neither_exported_nor_evaluated(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "bundled:tiny-gemma2", "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": True}))
    os.mkfifo(adapter / "adapter_model.safetensors")
    with pytest.raises(FtcliError, match=r"FT742: .*adapter_model.safetensors: it is a pipe"):
        resolve_source(adapter)
    (tmp_path / "recipe.yaml").write_text("version: 1\n")
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(FtcliError, match=r"FT727: .*adapter_model.safetensors: it is a pipe"):
        result_of(RunDirectory(tmp_path), SilentReporter())
