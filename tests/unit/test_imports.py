"""Importing all of ftcli changes nothing outside it, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.e2e.drill import Server

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_importing_everything_changes_nothing_outside(drill_server: Server) -> None:
    """No patched library, setting, handler or environment variable."""
    found = drill_server.imported()
    assert found["changed"] == []
    assert found["lost"] == []
    assert found["settings"] == {}
    assert found["modules"] > 120
    assert found["attributes"] > 10_000


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in (ROOT / "ftcli").rglob("*.py")}


def _imports(node: ast.AST) -> Iterator[str]:
    """Names of imported modules of ftcli, also those inside of functions and for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in MODULES)
        elif isinstance(child, ast.ImportFrom):
            full = ((f"{child.module}.{alias.name}", str(child.module)) for alias in child.names)
            yield from (name if name in MODULES else module for name, module in full if module in MODULES)
        else:
            yield from _imports(child)


def _circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize("room", sorted({name.split(".")[1] for name in MODULES if name.count(".") > 1}))
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    """Inside of functions counts, and for types: such an import hides a circle, it does not open it."""
    inside = {name for name in MODULES if name.startswith(f"ftcli.{room}.")}
    graph = {
        name: {one for one in _imports(ast.parse(MODULES[name].read_text("utf-8"))) if one in inside} for name in inside
    }
    assert all(name not in imported for name, imported in graph.items())
    assert _circle(graph) == []


def test_a_circle_would_be_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})
    late, types = "from ftcli.model import attention", "from ftcli.model.masks import CallMask"
    tree = ast.parse(f"def f():\n    {late}\nif TYPE_CHECKING:\n    {types}")
    assert list(_imports(tree)) == ["ftcli.model.attention", "ftcli.model.masks"]
