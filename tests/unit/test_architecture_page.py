"""docs/architecture.md is in step with the tree: what it names is there, and the floors are those of the linter."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
#: Paths are named from the repository, from the package, from the kernels, or from beside the page.
PLACES = (ROOT, ROOT / "ftcli", ROOT / "kernels", ROOT / "docs")


def is_there(path: str) -> bool:
    return any((place / path).exists() for place in PLACES)


def quoted(page: str) -> list[str]:
    """What stands in backticks and looks like a file or a folder."""
    found = [word for word in re.findall(r"`([^`\n]+)`", page) if re.fullmatch(r"[\w./-]+(?:\.\w+|/)", word)]
    return [word for word in found if "/" in word or word.endswith((".py", ".toml"))]


def lines_of(section: str) -> list[str]:
    return PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()


def test_every_path_is_there() -> None:
    missing = []
    for block in PAGE.split("\n\n"):
        words = quoted(block)
        folders = {word.rpartition("/")[0] for word in words if "/" in word}  # a file named alone is in one of them
        missing += [
            word for word in words if not any(is_there(each) for each in (word, *(f"{f}/{word}" for f in folders)))
        ]
    assert missing == []
    assert len(quoted(PAGE)) > 80


def test_every_link_is_there() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert [link for link in links if link and not (ROOT / "docs" / link).exists()] == []


def test_every_package_and_module_of_the_top_has_a_row() -> None:
    rows = "\n".join(line.split("|")[1] for line in lines_of("Folders") if line.startswith("| `"))
    named = set(re.findall(r"`ftcli/([\w.]+?)(?:\.py|/)`", rows))
    top = {path.name.removesuffix(".py") for path in (ROOT / "ftcli").iterdir() if not path.name.startswith("_")}
    assert {name for name in top if re.fullmatch(r"\w+", name)} - named == set()


def test_every_name_of_a_class_is_there() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for top in ("ftcli", "kernels") for path in (ROOT / top).rglob("*.py")
    )
    known = set(re.findall(r"^(?:class )?(\w+)(?:[(:]| = |: TypeAlias)", source, re.MULTILINE))
    names = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)`", PAGE))
    assert len(names) > 10
    assert names - known == set()


def test_the_order_of_the_floors_is_the_linters() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    said = re.search(r"Who may import whom: `([^`]+)`", PAGE)
    assert said is not None
    assert said[1].split(" > ") == [each.replace("ftcli.", "") for each in layers]


def test_every_table_has_a_row() -> None:
    told = set(re.findall(r"`tables/(\w+)\.py`", "\n".join(lines_of("One row for each"))))
    assert told == {path.stem for path in (ROOT / "ftcli" / "tables").glob("*.py")} - {"__init__"}


def test_a_name_that_is_gone_would_be_found() -> None:
    assert not is_there("ftcli/policies.py")
    assert quoted("`a/b.py`, `x.py`, `Job`, `plain`, `c/`") == ["a/b.py", "x.py", "c/"]
