"""Tables of everything that is meant to be extended: one row each, whose name nothing else in the program knows.

A row is a frozen value. Where it needs code it names that code as ``package.module:attribute``, and whoever needs it
calls :func:`code_of`: so the tables stand below the whole program, import nothing of it, and cost nothing to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package that a row needs: its name, what to give to ``pip install``, and what it is for."""

    name: str
    install: str
    use: str


@cache
def installed_version(package: str) -> str | None:
    """The version of a package that is installed. Read once, and without importing it: all of them take 10 ms."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_of(reference: str) -> Any:
    """The object that ``package.module:attribute`` names; imports the module. Raises ImportError or AttributeError for
    a row that names what is not there, which is a bug.
    """
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
