"""An export format is a row and a function: the program writes, verifies and names one that it has never seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.export.source import ExportSource, not_verified
from ftcli.export.tensorfile import read_tensors
from ftcli.export.verify import Verified
from ftcli.facts.weights import EXPORT_RECORD
from ftcli.tables import code_of, exports
from tests.e2e.conftest import User


def write_names(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """The made-up format: the names of the adapter's tensors, a line each."""
    say("writing names")
    names = sorted(read_tensors(source.folder))
    (folder / "names.txt").write_text("\n".join(names))
    return Verified("the number of names", {"names": len(names)})


def write_nonsense(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """One that fails its verification."""
    (folder / "names.txt").write_text("nonsense")
    raise not_verified(folder, ["nonsense"])


@pytest.fixture
def user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shared_clean: None
) -> User:
    rows = {
        "names": exports.ExportFormat(f"{__name__}:write_names", needs_adapter=True),
        "nonsense": exports.ExportFormat(f"{__name__}:write_nonsense"),
    }
    monkeypatch.setattr(exports, "TABLE", {**exports.TABLE, **rows})
    return User(tmp_path, capsys)


def test_a_made_up_format_is_written_verified_and_named(user: User) -> None:
    recipe = user.recipe("r", train={"max_steps": 1}, data={"eval": []}, export={"formats": ["names"]})
    user.done("train", recipe)
    (result,) = user.done("export", recipe)["exports"]
    folder = user.folder / "r" / "export" / "names"
    assert result["path"] == str(folder)
    assert result["verification"] == {"compared": "the number of names", "names": 2 * 28}
    assert "lora_A" in (folder / "names.txt").read_text()
    assert json.loads((folder / EXPORT_RECORD).read_text())["format"] == "names"

    status, document = user.run("export", recipe, "--set", "export.formats=[nonsense]")
    assert status == 1
    assert document["findings"][-1]["code"] == "FT741"
    assert [path.name for path in folder.parent.iterdir()] == ["names"]


def test_what_its_row_says_is_known_to_the_checks(user: User) -> None:
    full = {"train": {"learning_rate": 1e-4}, "lora": None, "export": {"formats": ["safetensors", "names"]}}
    status, document = user.run("check", user.recipe("full", **full))
    (finding,) = [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert status == 2
    assert finding["code"] == "FT269"
    usable = [name for name in exports.names() if not exports.row(name).needs_adapter]
    assert f"formats: [{', '.join(usable)}]" in finding["help"]
    assert "nonsense" in usable


def test_a_format_without_a_row_is_refused_in_a_recipe_and_on_the_command_line(user: User) -> None:
    recipe = user.recipe("r", train={"max_steps": 1}, export={"formats": ["adapter"]})
    for given in (["check", recipe, "--set", "export.formats=[exl3]"], ["export", recipe, "--format", "exl3"]):
        status, document = user.run(*given)
        assert status == 2
        assert "exl3" in document["findings"][0]["message"]
        assert "nonsense" in str(document["findings"][0]), "the rows are named"


def test_every_code_reference_resolves() -> None:
    for row in exports.TABLE.values():
        assert callable(code_of(row.write))
