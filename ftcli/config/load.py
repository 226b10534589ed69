"""Loads a recipe file: a validated :class:`Recipe`, and where each of its values came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from ftcli.config.dump import dump_recipe
from ftcli.config.findings import validate
from ftcli.config.overrides import MergedRecipe, Override, apply_overrides, read_merged
from ftcli.config.recipe import Recipe
from ftcli.config.tree import Origins
from ftcli.config.yaml import parse_file
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.paths import expanded
from ftcli.tables import methods

#: So many keys of other tools in one file mean that it is one of theirs.
_MANY_FOREIGN_KEYS = 4
SectionOfRecipe = TypeVar("SectionOfRecipe", bound=BaseModel)

__all__ = ["LoadedRecipe", "Override", "dump_recipe", "load_recipe", "load_text"]


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, the origin of its values, and the file it was read from."""

    recipe: Recipe
    origins: Origins
    path: Path


def load_recipe(path: Path, overrides: Sequence[Override] = ()) -> LoadedRecipe:
    """Read, merge, override and validate. ``run.name`` and ``run.output_dir`` are never None in the result.

    Raises FtcliError (exit RECIPE) with the first problem that keeps a file from being read as YAML, or with all other
    problems together: duplicate keys, secrets, overrides that cannot be applied, and everything the models refuse.
    """
    return _loaded(read_merged(path), path, overrides)


def load_text(text: str, path: Path) -> LoadedRecipe:
    """Loads, like :func:`load_recipe`, a text that is to become the file ``path``. It extends nothing."""
    parsed = parse_file(text, str(path))
    return _loaded(MergedRecipe(parsed.tree, parsed.findings), path, ())


def _loaded(merged: MergedRecipe, path: Path, overrides: Sequence[Override]) -> LoadedRecipe:
    tree, refused = apply_overrides(merged.tree, overrides)
    origins = Origins(tree)
    recipe, invalid = validate(tree, origins)
    findings = [*merged.findings, *refused, *invalid]
    if recipe is None or findings:
        raise FtcliError(_with_converter(sorted(findings, key=_reading_order), path), ExitCode.RECIPE)
    return LoadedRecipe(_with_run_defaults(_with_method_defaults(recipe), path), origins, path)


def _with_converter(findings: list[Finding], path: Path) -> list[Finding]:
    """The findings; the last of many keys of other tools says that the whole file can be converted."""
    foreign = [number for number, finding in enumerate(findings) if finding.code == "FT202"]
    if len(foreign) >= _MANY_FOREIGN_KEYS:
        last = findings[foreign[-1]]
        hint = f"`ftcli recipes convert {path}` makes a recipe of the whole file"
        findings[foreign[-1]] = replace(last, help=f"{last.help}; {hint}")
    return findings


def _reading_order(finding: Finding) -> tuple[bool, str, int, int]:
    """Findings of files from top to bottom, then those of options."""
    origin = finding.origin
    if origin is None or origin.source.startswith("--"):
        return (True, "", 0, 0)
    return (False, origin.source, origin.line or 0, origin.column or 0)


def _with_method_defaults(recipe: Recipe) -> Recipe:
    """The values that the training method has where the recipe says nothing."""
    method = methods.row(recipe.train.method)
    full = method.full_defaults if recipe.lora is None else {}
    for key, value in {**method.defaults, **full}.items():
        section, name = key.split(".")
        held: BaseModel = getattr(recipe, section)
        if name not in held.model_fields_set:
            recipe = recipe.model_copy(update={section: held.model_copy(update={name: value})})
    return recipe


def _with_run_defaults(recipe: Recipe, path: Path) -> Recipe:
    name = recipe.run.name or _name_from(path)
    output_dir = recipe.run.output_dir or f"runs/{name}"
    named = {"name": name, "output_dir": _home(output_dir), "resume": _home(recipe.run.resume)}
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update=named),
            "model": _with_homes(recipe.model, "name_or_path", "tokenizer"),
            "data": _with_homes(recipe.data, "chat_template"),
        }
    )


def _with_homes(section: SectionOfRecipe, *names: str) -> SectionOfRecipe:
    """The section with ``~`` in its paths replaced by the home folder."""
    return section.model_copy(update={name: _home(getattr(section, name)) for name in names})


def _home(value: str | None) -> str | None:
    return str(expanded(value)) if value is not None and value.startswith("~") else value


def _name_from(path: Path) -> str:
    """The file's stem with everything that `run.name` does not allow replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:100]
    return name or "run"
