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


def _imports(node: ast.AST, *, types: bool) -> Iterator[str]:
    """Names of imported modules of ftcli, also inside of functions, and with ``types`` those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING" and not types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in MODULES)
        elif isinstance(child, ast.ImportFrom):
            full = ((f"{child.module}.{alias.name}", str(child.module)) for alias in child.names)
            yield from (name if name in MODULES else module for name, module in full if module in MODULES)
        else:
            yield from _imports(child, types=types)


def _circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


#: Rooms whose modules still import each other for types. No room has a circle of imports at run time.
KNOWN = frozenset({"cli"})


@pytest.mark.parametrize("types", [False, True], ids=["run-time", "with-types"])
@pytest.mark.parametrize("room", sorted({name.split(".")[1] for name in MODULES if name.count(".") > 1}))
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: str, types: bool) -> None:
    """Inside of functions counts, too: an import that only works late hides a circle, it does not open it."""
    inside = {name for name in MODULES if name.startswith(f"ftcli.{room}.")}
    graph = {
        name: {one for one in _imports(ast.parse(MODULES[name].read_text("utf-8")), types=types) if one in inside}
        for name in inside
    }
    assert all(name not in imported for name, imported in graph.items())
    circle = _circle(graph)
    assert bool(circle) == (types and room in KNOWN), circle


def test_a_circle_would_be_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})
    tree = ast.parse("def f():\n    from ftcli.model import attention\n    from ftcli.model.masks import CallMask")
    assert list(_imports(tree, types=False)) == ["ftcli.model.attention", "ftcli.model.masks"]
