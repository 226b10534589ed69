"""Recipes, model folders and estimates for tests of what is known before a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.load import LoadedRecipe, Override, load_recipe
from ftcli.preflight.checks.context import Command, Context
from tests.estimates import Case

Load = Callable[..., LoadedRecipe]

GEMMA = "model: {name_or_path: google/gemma-2-2b}\n"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(yaml_text, *overrides)``: a loaded recipe; version and model are added when missing."""

    def _load(text: str = "", *overrides: str) -> LoadedRecipe:
        if "model:" not in text:
            text = GEMMA + text
        path = tmp_path / "recipe.yaml"
        path.write_text(f"version: 1\n{text}", encoding="utf-8")
        return load_recipe(path, [Override(item, f"--set {item}") for item in overrides])

    return _load


@pytest.fixture
def context(load: Load) -> Callable[..., Context]:
    """``context(yaml_text, *overrides, command=...)``: what a rule gets."""

    def _context(text: str = "", *overrides: str, command: Command = "check") -> Context:
        loaded = load(text, *overrides)
        return Context(loaded.recipe, loaded.origins, command)

    return _context


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(name, config, **files)``: a model folder with a config.json (None: without) and further JSON files."""

    def _folder(name: str, config: dict[str, Any] | None = None, **files: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        if config is not None:
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for stem, value in files.items():
            (path / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
        return path

    return _folder


@pytest.fixture
def case(load: Load) -> Callable[..., Case]:
    """Makes a case of a model's name, a recipe's further text, and overrides."""

    def _case(name: str, text: str, *overrides: str) -> Case:
        return Case(load(f"model: {{name_or_path: {name}}}\n{text}", *overrides))

    return _case
