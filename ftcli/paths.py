"""Paths as people write them: `~` is the home folder, and a name that no file can have is no file."""

from __future__ import annotations

import os
from pathlib import Path

#: How files of recipes end.
RECIPE_SUFFIXES = (".yaml", ".yml")
#: A run's own recipe: a folder with this file is a run directory.
RUN_RECIPE = "recipe.yaml"


def expanded(name: str) -> Path:
    """``name`` as a path, ``~`` and ``~user`` replaced by that home; left as it is where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_file(path: Path) -> bool:
    """Whether there is a file. False, where pathlib raises: too long a name, a folder that may not be entered."""
    return os.path.isfile(path)  # noqa: PTH113 - says False to every error


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False as for :func:`is_file`."""
    return os.path.isdir(path)  # noqa: PTH112 - says False to every error


def exists(path: Path) -> bool:
    """Whether there is anything; False as for :func:`is_file`."""
    return os.path.exists(path)  # noqa: PTH110 - says False to every error
