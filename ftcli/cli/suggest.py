"""Guesses what a name on the command line meant: a recipe of the package, a recipe here, or a run."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from ftcli.paths import RUN_RECIPE, is_file, is_folder


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
        names = [entry for entry in _folders(folder) if is_file(folder / entry / RUN_RECIPE)]
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


def _folders(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if is_folder(Path(entry.path))]
    except OSError:
        return []
