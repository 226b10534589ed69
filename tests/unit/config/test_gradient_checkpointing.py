"""`train.gradient_checkpointing`: two booleans and three words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.config.load import Override, load_recipe
from ftcli.config.yaml import dump_recipe
from ftcli.errors import FtcliError


def loaded(folder: Path, value: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text("version: 1\nmodel: {name_or_path: x}\n", encoding="utf-8")
    return load_recipe(path, [Override(f"train.gradient_checkpointing={value}", "--set")]).recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("false", False), ("offload", "offload"), ("selective", "selective"), ("auto", "auto")],
)
def test_what_is_accepted_comes_back_from_a_dumped_recipe(text: str, value: Any, tmp_path: Path) -> None:
    recipe = loaded(tmp_path, text)
    assert recipe.train.gradient_checkpointing is value or recipe.train.gradient_checkpointing == value
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(again).recipe.train == recipe.train


def test_a_recipe_that_says_nothing_leaves_it_open(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nmodel: {name_or_path: x}\n", encoding="utf-8")
    assert load_recipe(path).recipe.train.gradient_checkpointing == "auto"


@pytest.mark.parametrize(
    ("text", "code", "help"),
    [
        ("unsloth", "FT205", "did you mean `offload`?"),
        ("offlaod", "FT205", "did you mean `offload`?"),
        ("atuo", "FT205", "did you mean `auto`?"),
        ("yes", "FT205", "did you mean `true`?"),
        ("1", "FT204", "write true (without quotes)"),
    ],
)
def test_what_is_refused_is_told_what_to_write(text: str, code: str, help: str, tmp_path: Path) -> None:
    with pytest.raises(FtcliError) as raised:
        loaded(tmp_path, text)
    (finding,) = raised.value.findings
    assert (finding.code, finding.help) == (code, help)


def test_other_tools_switches_for_offloading_are_recognised(tmp_path: Path) -> None:
    for key in ("enable_activation_offloading", "activation_offloading"):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"version: 1\nmodel: {{name_or_path: x}}\ntrain: {{{key}: true}}\n", encoding="utf-8")
        with pytest.raises(FtcliError) as raised:
            load_recipe(path)
        (finding,) = raised.value.findings
        assert finding.help == "write `gradient_checkpointing: offload` in section `train`"
