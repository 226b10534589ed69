"""A tool whose recipes are converted is a row and its rules: a made-up one is recognised, converted and offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.cli.app import main
from ftcli.config.conversion import rules as r
from ftcli.config.load import load_recipe
from ftcli.tables import dialects

RULES = r.Rules(
    computed={
        "brain": r.to("model.name_or_path"),
        "width": r.to("lora.r"),
        "breadth": r.to("lora.r"),
        "colour": lambda draft, given: draft.lost(given, "models have no colour"),
    },
    defaults={"train.learning_rate": 3e-4},
)


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = dialects.Dialect("Made-Up", f"{__name__}:RULES")
    monkeypatch.setattr(dialects, "TABLE", {**dialects.TABLE, "made-up": row})
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text("brain: org/m\nwidth: 4\ncolour: red\nweight_decay: 0.1\n")


@pytest.mark.parametrize("more", [[], ["--from", "made-up"]])
def test_a_made_up_tool_is_converted(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "convert", "theirs.yaml", *more]) == 0
    out, err = capsys.readouterr()
    Path("ours.yaml").write_text(out)
    recipe = load_recipe(Path("ours.yaml")).recipe
    assert recipe.lora is not None
    assert (recipe.model.name_or_path, recipe.lora.r, recipe.train.weight_decay) == ("org/m", 4, 0.1)
    assert recipe.train.learning_rate == 3e-4
    assert "Made-Up's default" in out
    assert "models have no colour" in err


def test_it_is_offered_where_tools_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text("learning_rate: 1\n")
    assert main(["recipes", "convert", "x.yaml"]) == 2
    assert "made-up" in capsys.readouterr().err
