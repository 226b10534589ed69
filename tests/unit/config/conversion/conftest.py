"""What tests of the converter share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftcli.config.conversion.convert import convert
from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from tests.foreign_recipes import FILES


@dataclass(frozen=True)
class Made:
    """A converted recipe, what our loader makes of it, and what was said: code and message of each finding."""

    dialect: str
    text: str
    recipe: Recipe
    said: list[tuple[str, str, str]]
    warned: list[tuple[str, str, str]]

    def heard(self, code: str, part: str) -> bool:
        return any(found == code and part in message for found, message, _ in self.said)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    monkeypatch.chdir(tmp_path)

    def make(name: str, text: str | None = None, dialect: str | None = None) -> Made:
        file, whole = FILES.get(name, (name, ""))
        Path(file).write_text(whole if text is None else text)
        found = convert(Path(file), dialect)
        Path("ours.yaml").write_text(found.text)
        said = [(finding.code, finding.message, str(finding.help)) for finding in found.findings]
        warned = [each for each, finding in zip(said, found.findings, strict=True) if finding.severity == "warning"]
        return Made(found.dialect, found.text, load_recipe(Path("ours.yaml")).recipe, said, warned)

    return make
