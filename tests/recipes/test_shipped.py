"""Every recipe that ships runs on the GPU that its header names, as far as preflight can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftcli.config.load import dump_recipe, load_recipe
from ftcli.facts.device import named_device
from ftcli.preflight.stages import preflight

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.rglob("*.yaml"))

#: What the contract promises and this version carries out.
PROMISED = {
    "gemma2-9b",
    "gemma2-9b-qlora",
    "gemma2-2b",
    "llama3.1-8b",
    "llama3.1-8b-qlora",
    "llama3.1-70b-qlora",
    "qwen3-8b",
    "mistral-7b-grpo",
    "llama3.1-8b-grpo",
    "smoke",
    "smoke-grpo",
}


def header(recipe: Path) -> str:
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def stated_gpu(recipe: Path) -> str:
    found = re.search(r"(?m)^# gpu: (\S+)", header(recipe))
    assert found is not None, f"{recipe.name} states no GPU: its header needs a line `# gpu: NAME`"
    return found.group(1)


def test_the_promised_recipes_are_there() -> None:
    assert {path.stem for path in ALL} >= PROMISED


@pytest.mark.parametrize("recipe", ALL, ids=lambda path: path.stem)
def test_it_passes_preflight_as_its_stated_gpu(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)
    loaded = load_recipe(recipe)
    report = preflight(loaded, command="check", device=named_device(stated_gpu(recipe)), offline=True)
    assert report.verdict is not None
    assert report.verdict.level == "fits"
    assert [f.message for f in report.findings if f.severity == "warning"] == []


@pytest.mark.parametrize("recipe", ALL, ids=lambda path: path.stem)
def test_its_header_gives_the_command_and_says_what_was_measured(recipe: Path) -> None:
    text = header(recipe)
    command = re.search(r"ftcli (train|grpo|eval) recipes/(\S+)", text)
    assert command is not None
    assert command.group(2) == recipe.name
    assert (command.group(1) == "grpo") == (load_recipe(recipe).recipe.grpo is not None)
    assert "measured" in text


@pytest.mark.parametrize("recipe", ALL, ids=lambda path: path.stem)
def test_it_runs_as_it_stands_on_bundled_data(recipe: Path) -> None:
    data = load_recipe(recipe).recipe.data
    assert data.train
    assert all(source.path.startswith("bundled:") for source in (*data.train, *data.eval))


@pytest.mark.parametrize("recipe", ALL, ids=lambda path: path.stem)
def test_its_resolved_form_is_the_same_recipe(recipe: Path, tmp_path: Path) -> None:
    recipe_model = load_recipe(recipe).recipe
    copy = tmp_path / recipe.name
    copy.write_text(dump_recipe(recipe_model), encoding="utf-8")
    assert load_recipe(copy).recipe == recipe_model
