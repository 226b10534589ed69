"""Checkpoints: complete or absent, and never the last good one lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftcli.errors import FtcliError
from ftcli.run import atomic
from ftcli.run import checkpoint as module
from ftcli.run.checkpoint import Checkpoints, damage, step_of
from tests.unit.run.saving import save


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_a_checkpoint_appears_only_when_its_block_ends(checkpoints: Checkpoints) -> None:
    with checkpoints.staging(7) as folder:
        (folder / "weights").write_text("half")
        assert checkpoints.newest() is None
        assert checkpoints.scan().usable == ()
    assert checkpoints.newest() == checkpoints.path(7)
    assert checkpoints.path(7).name == "step-00000007"
    assert step_of(checkpoints.path(7)) == 7


def test_an_error_while_saving_leaves_nothing_and_keeps_the_previous(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.staging(2) as folder:  # noqa: PT012
        (folder / "weights").write_text("half")
        raise ZeroDivisionError
    assert names(checkpoints.root) == ["step-00000001"]


def test_a_full_disk_while_saving_is_ft724_and_keeps_the_previous(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    with pytest.raises(FtcliError) as caught, checkpoints.staging(2):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.findings[0].code == "FT724"
    assert names(checkpoints.root) == ["step-00000001"]


def test_every_file_is_flushed_before_the_rename_that_makes_it_count(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut cannot be tried here; the order in which things are handed to the disk can."""
    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> Path:
        flushed.append(f"rename to {Path(target).name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(checkpoints, 5)
    there = flushed.index("rename to step-00000005")
    staged = f".tmp-step-00000005.{os.getpid()}"
    for name in ("state.bin", "model.safetensors", "optimizer", staged):
        assert name in flushed[:there], name
    assert any("complete.json" in name for name in flushed[:there])
    assert "checkpoints" in flushed[there:], "the folder's entry"


@pytest.mark.parametrize("library", ["torch", "safetensors", "numpy"])
def test_a_refused_write_that_a_library_reports_in_its_own_way_is_ft724(checkpoints: Checkpoints, library: str) -> None:
    """A limit on the size of files, in a process of its own, is a full disk that needs no disk."""
    import torch
    from safetensors.torch import save_file

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        said = "nothing was raised"
        try:
            with checkpoints.staging(2) as folder:
                tensors = {"a": torch.zeros(200_000)}
                if library == "torch":
                    torch.save(tensors, folder / "optimizer.pt")
                elif library == "numpy":
                    with (folder / "model.gguf").open("wb") as file:
                        tensors["a"].numpy().tofile(file)
                else:
                    save_file(tensors, folder / "model.safetensors")
        except FtcliError as error:
            said = f"{error.findings[0].code} {error.findings[0].message}"
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    assert said == f"FT724 no space left while writing {checkpoints.path(2)}: File too large"
    assert names(checkpoints.root) == []


def test_an_error_that_has_nothing_to_do_with_the_disk_stays_what_it_is(checkpoints: Checkpoints) -> None:
    with pytest.raises(RuntimeError, match="shape"), checkpoints.staging(2):
        raise RuntimeError("mat1 and mat2 have the wrong shape")


def test_a_run_directory_that_has_vanished_is_not_half_made_again(tmp_path: Path) -> None:
    with pytest.raises(FtcliError) as caught, Checkpoints(tmp_path / "gone" / "checkpoints").staging(2):
        pass
    assert caught.value.findings[0].code == "FT723"
    assert names(tmp_path) == []


def test_a_changed_byte_in_a_large_file_is_found_before_a_run_goes_on(checkpoints: Checkpoints) -> None:
    good, bad = (save(checkpoints, step, size=(9 << 20) + 5) for step in (1, 2))  # more than one block
    assert checkpoints.newest_sound().newest == bad
    with (bad / "model.safetensors").open("r+b") as file:
        file.seek((8 << 20) + 1)
        file.write(b"x")
    scan = checkpoints.newest_sound()
    assert scan.newest == good
    assert [*scan.damaged] == [bad]
    assert "model.safetensors differs from what was written" in scan.warnings[0].message


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer/state.bin", "complete.json"])
@pytest.mark.parametrize("how", ["truncated", "missing", "changed"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    checkpoints: Checkpoints, name: str, how: str
) -> None:
    good, bad = save(checkpoints, 1), save(checkpoints, 2)
    victim = bad / name
    if how == "truncated":
        os.truncate(victim, victim.stat().st_size - 2)
    elif how == "missing":
        victim.unlink()
    else:
        data = victim.read_bytes()
        victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    scan = checkpoints.scan()
    assert checkpoints.newest() == scan.newest == good
    assert [w.code for w in scan.warnings] == ["FT726"]
    assert str(bad) in scan.warnings[0].message
    assert name in scan.warnings[0].message


def test_rotation_keeps_the_newest(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 10):
        save(checkpoints, step)
    checkpoints.rotate(2)
    assert [step_of(p) for p in checkpoints.scan().usable] == [3, 10]
    assert names(checkpoints.root) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_rotation_never_deletes_the_only_good_one(checkpoints: Checkpoints, keep_last: int) -> None:
    good = save(checkpoints, 1)
    for step in (2, 3):
        os.truncate(save(checkpoints, step) / "model.safetensors", 1)
    checkpoints.rotate(keep_last)
    assert checkpoints.newest() == good


def test_rotation_without_any_good_one_deletes_nothing(checkpoints: Checkpoints) -> None:
    os.truncate(save(checkpoints, 3) / "model.safetensors", 1)
    checkpoints.rotate(1)
    assert checkpoints.path(3).exists()


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5)
    with checkpoints.staging(5) as folder:
        (folder / "new").write_text("new")
    assert names(checkpoints.root) == ["step-00000005"]
    assert (checkpoints.path(5) / "new").read_text() == "new"


def test_a_kill_between_both_renames_of_a_replacement_loses_nothing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 5)
    rename = atomic.rename_directory

    def killed_at_the_second(source: Path, destination: Path) -> None:
        if destination == checkpoints.path(5):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, destination)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(atomic, "rename_directory", killed_at_the_second)
        save(checkpoints, 5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert checkpoints.newest() is None  # the very moment
    checkpoints.clean()
    assert checkpoints.newest() == checkpoints.path(5)
    assert names(checkpoints.root) == ["step-00000005"]


def test_thirty_kills_during_saving_leave_the_last_complete_one_usable(checkpoints: Checkpoints) -> None:
    """Each counts only if it met a save half done; then the newest usable one loads and is what was promised."""
    chance = random.Random(20)
    step, interrupted, longest = 1, 0, 0.012
    save(checkpoints, step, size=100_000)
    read, write = os.pipe()
    os.set_blocking(read, False)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.run.saving", str(checkpoints.root), str(write)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[write],
        text=True,
    ) as saving:
        assert saving.stdin is not None
        assert saving.stdout is not None
        for attempt in range(400):
            if interrupted == 30:
                break
            print(step, 1 + attempt % 2, file=saving.stdin, flush=True)
            child = int(saving.stdout.readline())
            time.sleep(chance.uniform(0.001, longest))
            os.kill(child, signal.SIGKILL)
            assert saving.stdout.readline() == "ended\n"
            promised = step
            with contextlib.suppress(BlockingIOError):  # it was killed before it could promise anything
                promised = int.from_bytes(os.read(read, 1 << 20)[-4:], "big")
            met = any(name.startswith(".") for name in names(checkpoints.root))
            interrupted += met
            if not met:  # too late, or too early on this machine
                longest *= 0.9 if promised > step else 1.1
            checkpoints.clean()
            newest = checkpoints.newest_sound().newest
            assert newest is not None
            assert step_of(newest) in (promised, promised + 1)
            step = step_of(newest) or 0
            assert (newest / "model.safetensors").read_bytes() == bytes([step % 256]) * 100_000
            assert not [name for name in names(checkpoints.root) if name.startswith(".")]
            assert checkpoints.scan().warnings == ()
    os.close(read)
    os.close(write)
    assert interrupted == 30, "the kills never met a save: this test proves nothing"


def test_an_earlier_step_sets_later_ones_aside_and_deletes_none(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(checkpoints, step)
    moved = checkpoints.set_aside_after(1)
    assert [p.name for p in moved] == ["step-00000002.superseded-1", "step-00000003.superseded-1"]
    assert all(damage(p) is None for p in moved)
    assert checkpoints.newest() == checkpoints.path(1)


def test_a_named_checkpoint_is_read_whole(checkpoints: Checkpoints) -> None:
    path = save(checkpoints, 3, size=5 << 20)
    assert checkpoints.named("3") == path
    listed = json.loads((path / "complete.json").read_text())["files"]
    assert [sorted(each) for each in listed] == [["bytes", "name", "sha256_of_blocks"]] * 2
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"x")
    with pytest.raises(FtcliError, match=r"model\.safetensors differs") as caught:
        checkpoints.named("3")
    assert caught.value.findings[0].code == "FT725"


def test_a_checkpoint_of_the_first_version_is_read(checkpoints: Checkpoints) -> None:
    path = save(checkpoints, 3, size=5 << 20)
    listed = (path / "complete.json").read_text()
    (path / "complete.json").write_text(listed.replace("sha256_of_blocks", "sha256"))
    assert damage(path, thorough=True) is None


def test_a_pipe_in_a_checkpoint_is_damage_and_not_waited_for(checkpoints: Checkpoints) -> None:
    with checkpoints.staging(1) as folder:
        (folder / "empty").touch()
    path = checkpoints.path(1)
    assert damage(path) is None
    (path / "empty").unlink()
    os.mkfifo(path / "empty")
    assert "a pipe" in (damage(path) or "")
    (path / module.COMPLETE_NAME).unlink()
    os.mkfifo(path / module.COMPLETE_NAME)
    assert "a pipe" in (damage(path) or "")
