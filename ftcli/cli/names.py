"""Names on the command line: what one meant (a recipe of the package, a recipe here, a run), and shell completion.

Each function of completion is asked for one word, in a process of its own, so it must answer at once: nothing heavy is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from ftcli.paths import RECIPE_SUFFIXES, RUN_RECIPE, is_file


def shipped() -> dict[str, Path]:
    """Recipes by name: those inside an installed package, or those of the checkout that this package stands in."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "assets" / "recipes"
    folder = inside if inside.is_dir() else package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


#: Where recipes and runs lie when nobody said otherwise.
_RECIPES, _RUNS = Path("recipes"), Path("runs")


def recipe_meant(path: Path) -> str | None:
    """Help for a recipe that is not there; None if nothing like it is known."""
    here = _RECIPES / f"{_stem(path)}.yaml"
    if is_file(here):
        return f"did you mean {here}?"
    known = shipped()
    found = get_close_matches(_stem(path), known, n=1, cutoff=0.8)
    if not found:
        return None
    return f"`ftcli recipes copy {found[0]}` writes the recipe of that name, which ships with ftcli, to {found[0]}.yaml"


def run_meant(path: Path) -> str | None:
    """A run of a similar name, beside the one that is not there or below ``runs``."""
    for folder in dict.fromkeys((path.parent, _RUNS)):
        names = [entry.name for entry in _entries(folder) if is_file(folder / entry.name / RUN_RECIPE)]
        found = get_close_matches(path.name, names, n=1, cutoff=0.6)
        if found:
            return f"did you mean {folder / found[0]}?"
    return None


def is_run(word: str) -> bool:
    """True if a word names a run's folder."""
    return is_file(Path(word) / RUN_RECIPE)


def is_shipped(word: str) -> bool:
    """True if a word is the name of a recipe that ships with ftcli."""
    return word in shipped()


def _stem(path: Path) -> str:
    return path.name.removesuffix(".yaml").removesuffix(".yml")


#: A folder with more entries than this is not looked through.
_MOST = 2000


def recipe_files(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to them."""
    return _paths(incomplete, lambda path: path.suffix in RECIPE_SUFFIXES)


def shipped_recipes(incomplete: str) -> list[str]:
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
