"""What each foreign recipe of the tests becomes, to the letter: nothing is lost when a rule is written in another way.

`python -m tests.unit.config.conversion.test_converted` writes the expected answers anew; read their difference.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ftcli.config.conversion.convert import convert
from tests.foreign_recipes import FILES, PREFERENCES
from tests.unit.config.conversion import test_code as code

RECIPES = {
    **FILES,
    "unsloth-script": ("unsloth.py", code.UNSLOTH),
    "trl-script": ("trl.py", code.TRL),
    **{f"{tool}-dpo": recipe for tool, recipe in PREFERENCES.items()},
}
EXPECTED = Path(__file__).parent / "converted"


def answer(name: str) -> str:
    """The recipe, and below it what is said: severity, code, line and message."""
    file, text = RECIPES[name]
    Path(file).write_text(text)
    made = convert(Path(file))
    said = [f"# {f.severity} {f.code} {f.origin.line if f.origin else '-'}: {f.message}" for f in made.findings]
    return "\n".join([made.text.rstrip(), "", *said, ""])


@pytest.mark.parametrize("name", RECIPES)
def test_a_foreign_recipe_becomes_what_it_became(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(name) == (EXPECTED / f"{name}.yaml").read_text()


if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for each in RECIPES:
            (EXPECTED / f"{each}.yaml").write_text(answer(each))
