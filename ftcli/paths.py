"""Paths as people write them: `~` is the home folder, `scheme://` is no file, nor is a name that no file can have. And
temporary folders that go away: with their owner, and those of owners that were killed when the next one is made.

Such a folder is held by a lock of the kernel's (``flock``), which dies with the last process that has it open. Process
ids would not do: another container may share the folder, and has other ids.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftcli.errors import ExitCode, FtcliError, Origin

#: How files of recipes end.
RECIPE_SUFFIXES = (".yaml", ".yml")
#: A run's own recipe: a folder with this file is a run directory.
RUN_RECIPE = "recipe.yaml"


_SCHEME = re.compile(r"\s*(?:\w+::)*([A-Za-z][A-Za-z0-9+.-]*)://")
_OF_THE_HUB = re.compile(
    r"\s*(?:hf|hub|https?://(?:www\.)?(?:huggingface\.co|hf\.co))(?:://|/)(datasets/)?([\w.-]+/[\w.-]+)/?"
)


_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def samples_sha256(path: Path, size: int) -> str:
    """SHA-256 of 64 samples of 64 KiB, spread over a file of ``size`` bytes; of 4 MiB and less all is in it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def unserved(name: str) -> tuple[str, str] | None:
    """The reason why ``name`` is no path of this machine, and what to write instead; None for a name without
    ``scheme://``.
    """
    found = _SCHEME.match(name)
    if found is None:
        return None
    # Who may read a bucket can stand before `@` or behind `?`.
    shown = re.sub(r"//[^/@]*@", "//...@", name.strip()).partition("?")[0]
    hub = _OF_THE_HUB.fullmatch(name)
    if found[1].lower() == "file":
        help = f"write the path alone: {shown[found.end() :]}"
    elif hub is not None:
        kind, prefix = ("dataset", "hub:") if hub[1] else ("model", "")
        help = f"a {kind} of the Hugging Face Hub is written {prefix}{hub[2]}"
    else:
        help = "name a path of this machine: copy the files, or mount the storage and name the folder"
    return f"{shown} is no path of this machine, and `{found[1]}://` is not served", help


def expanded(name: str) -> Path:
    """``name`` as a path, ``~`` and ``~user`` replaced by that home; left as it is where there is no such user.

    Raises FtcliError FT165 (exit RECIPE) for a name with a ``scheme://``, which would become a folder called ``s3:``.
    """
    refusal = unserved(name)
    if refusal is not None:
        message, help = refusal
        raise FtcliError.single("FT165", message, exit_code=ExitCode.RECIPE, origin=Origin("command line"), help=help)
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_file(path: Path) -> bool:
    """True if there is a file. False, where pathlib raises: too long a name, a folder that may not be entered."""
    return os.path.isfile(path)  # noqa: PTH113 - says False to every error


def is_folder(path: Path) -> bool:
    """True if there is a folder; False as for :func:`is_file`."""
    return os.path.isdir(path)  # noqa: PTH112 - says False to every error


def exists(path: Path) -> bool:
    """True if there is anything; False as for :func:`is_file`."""
    return os.path.exists(path)  # noqa: PTH110 - says False to every error


#: Folders within each other: Python makes and removes them by calls within each other, up to a thousand.
_DEEPEST = 250


def is_too_deep(folder: Path) -> bool:
    """True for a path of more folders within each other than are made."""
    return len(folder.parts) > _DEEPEST


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it. Raises OSError, also where it is too deep."""
    if is_too_deep(folder):
        raise OSError(errno.ENAMETOOLONG, f"more than {_DEEPEST} folders within each other", str(folder))
    folder.mkdir(parents=True, exist_ok=True)


#: What helps where a folder is closed.
OPEN_IT = "check its name, and the permissions of the folder and of those above it (`ls -ld`)"


def why_closed(folder: Path) -> str | None:
    """The reason why nobody can say what a folder holds; None for one that is open, and for what is no folder or not
    there.
    """
    try:
        os.listdir(folder)  # noqa: PTH208 - as the error is, so is its reason
        os.stat(os.path.join(folder, "."))  # noqa: PTH116, PTH118 - pathlib would drop the dot
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


_LOCK = ".held"
#: Between making a folder and locking it lie microseconds; a folder that is not locked after this is nobody's.
_YOUNG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder. ``descriptor`` holds it: processes that inherit it hold the folder, too."""

    path: Path
    descriptor: int


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Scratch]:
    """A folder ``ftcli-<kind>-…`` among the system's temporary files for the block.

    Raises OSError where none can be made.
    """
    prefix = f"ftcli-{kind}-"
    _clear(Path(tempfile.gettempdir()), prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody clears there either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Scratch(path, descriptor)
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _clear(folder: Path, prefix: str) -> None:
    """Removes folders of this user that nobody holds. Those of ftcli 0.2 and before have no lock, and stay."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(prefix) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        descriptor = os.open(Path(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(descriptor).st_mtime < _YOUNG_SECONDS:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
