"""`ftcli recipes`, and the pages that are made from code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import recipes_page

from ftcli.cli import names
from ftcli.cli.app import main
from ftcli.config.schema import RecipeSchema

ROOT = Path(__file__).resolve().parents[3]
OWN_CODES = re.compile(r"\"(FT(?:1[0-9][0-9]|2[0-4][0-9]))\"")


def test_shipped_recipes_are_listed_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    assert main(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["result"]["recipes"]
    assert [entry["name"] for entry in listed] == [line.split()[0] for line in lines]


@pytest.mark.parametrize("name", ["smoke", "smoke.yaml", "recipes/smoke.yaml"])
def test_show_prints_the_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", name]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "smoke.yaml").read_text()


def test_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "recipes" / "smoke.yaml").read_text()
    (tmp_path / "folder").mkdir()
    assert main(["recipes", "copy", "smoke"]) == 0
    assert main(["recipes", "copy", "smoke", "folder"]) == 0
    assert main(["recipes", "copy", "smoke", "mine.yaml"]) == 0
    assert main(["recipes", "copy", "smoke", "mine.yaml", "--force"]) == 0
    assert "ftcli check mine.yaml" in capsys.readouterr().out
    assert all((tmp_path / name).read_text() == text for name in ("smoke.yaml", "folder/smoke.yaml", "mine.yaml"))


def test_installed_package_has_its_recipes_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "ftcli" / "cli" / "names.py"
    inside = tmp_path / "ftcli" / "assets" / "recipes"
    inside.mkdir(parents=True)
    (inside / "only.yaml").write_text("# One.\n")
    monkeypatch.setattr(names, "__file__", str(module))
    assert names.shipped() == {"only": inside / "only.yaml"}


def test_schema_is_all_that_stdout_gets(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["recipes", "schema"], ["recipes", "schema", "--json"]):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert err == ""
        schema = json.loads(out)
        assert schema["additionalProperties"] is False
        assert "learning_rate" in schema["$defs"]["TrainConfig"]["properties"]


def test_page_of_recipes_is_up_to_date() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == recipes_page.page(), "run `make docs`"


def test_page_of_recipes_has_every_key() -> None:
    page = recipes_page.page()
    for key in RecipeSchema().keys():  # noqa: SIM118
        section, _, inner = key.partition(".")
        assert f"### `{section}`" in page
        assert not inner or f"`{inner}`" in page


def test_page_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    assert recipes_page.main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == recipes_page.page()


def own_codes() -> set[str]:
    """Codes of loader, schema and command line, as they stand in the code."""
    files = [*(ROOT / "ftcli" / "config").rglob("*.py"), *(ROOT / "ftcli" / "cli").rglob("*.py")]
    files.append(ROOT / "ftcli" / "pipeline" / "benchmark.py")  # what --lengths says
    files.append(ROOT / "ftcli" / "pipeline" / "chatting.py")  # what the options of chat say
    files.append(ROOT / "ftcli" / "pipeline" / "sampling.py")  # and those of sample
    return {code for path in files for code in OWN_CODES.findall(path.read_text(encoding="utf-8"))}


def test_every_code_of_loader_and_command_line_is_documented_with_a_remedy() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = {text[:5]: text for text in page.split("\n## ")[1:]}
    assert own_codes() == {code for code in sections if OWN_CODES.fullmatch(f'"{code}"')}
    assert all("**Remedy:**" in sections[code] for code in own_codes())
    assert list(sections) == sorted(sections)


def test_every_code_of_loader_and_command_line_is_provoked_by_a_test() -> None:
    unit = ROOT / "tests" / "unit"
    folders = (ROOT / "tests/recipes/broken", unit / "cli", unit / "config" / "conversion", ROOT / "tests" / "e2e")
    tests = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("test_*.py"))
    assert {code for code in own_codes() if code not in tests} == set()
