"""What crosses a module has a type: a map from text to anything is only there by a name that says whose it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ftcli"
ANYTHING = re.compile(r"\b(?:dict|Mapping|MutableMapping)\[str, (?:Any|object)\]")


def public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def annotations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each annotation in signatures and attributes that other modules see."""
    bodies = [
        tree.body,
        *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and public(node.name)),
    ]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.FunctionDef) and public(node.name):
            found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            texts = [each.annotation for each in found] + [node.returns]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and public(node.target.id):
            texts = [node.annotation]
        else:
            continue
        yield from ((text.lineno, ast.unparse(text)) for text in texts if text is not None)


def nameless(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(PACKAGE)
    return [f"{where}:{line}: {text}" for line, text in annotations(tree) if ANYTHING.search(text)]


def aliases(path: Path) -> Iterator[tuple[str, bool]]:
    """Each module's names for such maps, and whether a comment above says what they are."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if ANYTHING.search(line) and re.match(r"\w+(: TypeAlias)? = ", line):
            yield f"{path.relative_to(PACKAGE)}:{number + 1}: {line}", lines[number - 1].startswith("#")


def test_no_map_of_anything_crosses_a_module() -> None:
    assert [each for path in sorted(PACKAGE.rglob("*.py")) for each in nameless(path)] == []


def test_every_name_for_such_a_map_says_what_it_is() -> None:
    found = [each for path in sorted(PACKAGE.rglob("*.py")) for each in aliases(path)]
    assert len(found) <= 5, "JsonObject, JsonMap, Settings, MetricsLine and Arguments are there already"
    assert [line for line, told in found if not told] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(a: dict[str, Any]) -> None: ...", 1),
        ("def f(a: int, *, b: list[dict[str, Any]] | None) -> Mapping[str, object]: ...", 2),
        ("class C:\n    a: Mapping[str, Any]\n    def g(self) -> dict[str, Any]: ...", 2),
        ("def _f(a: dict[str, Any]) -> None:\n    b: dict[str, Any] = {}", 0),
        ("class _C:\n    a: dict[str, Any]", 0),
        ("def f(a: dict[str, int]) -> JsonObject: ...", 0),
    ],
)
def test_the_search_finds_what_it_should(source: str, count: int) -> None:
    assert sum(bool(ANYTHING.search(text)) for _, text in annotations(ast.parse(source))) == count
