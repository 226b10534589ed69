"""Shell completion of recipe files, shipped recipes, run folders and names of GPUs.

Each function is asked for one word, in a process of its own, so it must answer at once: nothing heavy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ftcli.paths import RECIPE_SUFFIXES, RUN_RECIPE

#: A folder with more entries than this is not looked through.
_MOST = 2000


def recipe_files(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to them."""
    return _paths(incomplete, lambda path: path.suffix in RECIPE_SUFFIXES)


def shipped_recipes(incomplete: str) -> list[str]:
    """Names of the recipes that ship with ftcli."""
    from ftcli.cli.suggest import shipped

    return [name for name in shipped() if name.startswith(incomplete)]


def run_folders(incomplete: str) -> list[str]:
    """Run folders, those below ``runs`` where nothing has been typed, and folders on the way to them."""
    start = incomplete if "/" in incomplete or not Path("runs").is_dir() else f"runs/{incomplete}"
    found = _paths(start, lambda _: False)
    return found or _paths(incomplete, lambda _: False)


def runs_and_recipes(incomplete: str) -> list[str]:
    """Completions of `export`'s argument."""
    return list(dict.fromkeys((*recipe_files(incomplete), *run_folders(incomplete))))


def gpus(incomplete: str) -> list[str]:
    """Names for ``--gpu``."""
    from ftcli.facts.device import DEVICE_NAMES

    return [name for name in DEVICE_NAMES if name.startswith(incomplete)]


def machines(incomplete: str) -> list[str]:
    """Names for ``--as``."""
    return [*gpus(incomplete), *(name for name in ("all",) if name.startswith(incomplete))]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    """Paths that begin so: run folders as they are, other folders with a slash, and the files that are ``wanted``."""
    folder, _, start = incomplete.rpartition("/")
    shown = f"{folder}/" if folder or incomplete.startswith("/") else ""
    found = []
    for entry in _entries(Path(shown or ".")):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        if entry.is_dir():
            is_run = Path(entry.path, RUN_RECIPE).is_file()
            found.append(f"{shown}{entry.name}" if is_run else f"{shown}{entry.name}/")
        elif wanted(Path(entry.name)):
            found.append(f"{shown}{entry.name}")
    return sorted(found)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder.expanduser()) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST:
                    return
                yield entry
    except (OSError, RuntimeError):
        return
