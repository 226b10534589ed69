"""Files that ship with ftcli: model configs, the tiny model, tokenizers, chat templates, sample data."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from ftcli.paths import expanded

#: How a recipe names what ships with ftcli.
BUNDLED = "bundled:"


def asset(*parts: str) -> Path:
    """The path of a file or folder below ``ftcli/assets``; it need not exist.

    ftcli is installed as plain files (hatchling wheels are always unpacked), so the path is a real one.
    """
    return Path(str(files("ftcli.assets").joinpath(*parts)))


def bundled(name: str, folder: str) -> Path | None:
    """The path of ``bundled:NAME`` in ``assets/FOLDER``, whether or not it exists; None for any other name."""
    return bundled_file(folder, name.removeprefix(BUNDLED)) if name.startswith(BUNDLED) else None


def bundled_file(folder: str, name: str) -> Path:
    """The path of a recipe's ``name`` in ``assets/FOLDER``, whether or not it exists; nothing outside can be named."""
    return asset(folder, re.sub(r"[/\\\0]|^\.", "-", name))


def is_template_file(name: str) -> bool:
    """True if ``data.chat_template`` names a file, and not a template that ships with ftcli."""
    return name.endswith((".jinja", ".j2"))


def template_path(name: str) -> Path:
    """The file that ``data.chat_template`` means, whether or not it exists."""
    return expanded(name) if is_template_file(name) else bundled_file("templates", f"{name}.jinja")
