"""Loads a recipe file: a validated :class:`Recipe`, and where each of its values came from.

On top of a recipe lies `--set section.key=value`, beneath it the recipes that it `extends`. Maps merge, lists and
single values replace. Values of the command line are validated like those of the recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from ftcli.config.findings import validate
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_file import read_text
from ftcli.config.secrets import is_secret_key, is_secret_value, mask
from ftcli.config.yaml import (
    MAX_DEPTH,
    NO_TEXT,
    Leaf,
    ListNode,
    MapEntry,
    MapNode,
    Origins,
    ParsedYaml,
    Tree,
    describe_kind,
    dump_recipe,
    merge,
    parse_file,
    parse_value,
)
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.paths import expanded, unserved
from ftcli.tables import methods

#: A chain of recipes longer than this is a mistake.
MAX_CHAIN = 16


def _read_merged(path: Path, named_by: Origin | None = None, chain: tuple[Path, ...] = ()) -> ParsedYaml:
    """Read `path` and what it extends. Raises FtcliError with all findings up to the one that stopped the reading."""
    parsed = parse_file(read_text(path, named_by=named_by), str(path))
    findings = [*parsed.findings, *secrets_in(parsed.tree)]
    assert isinstance(parsed.tree, MapNode)  # parse_file promises it
    entries = dict(parsed.tree.entries)
    extends = entries.pop("extends", None)
    tree = MapNode(parsed.tree.origin, entries)
    if extends is None:
        return ParsedYaml(tree, tuple(findings))
    if isinstance(extends.value, Leaf) and NO_TEXT.search(str(extends.value.value)):  # FT120, which says it all
        raise FtcliError(findings, ExitCode.RECIPE)
    try:
        target = _target(extends.value, path)
        base = _read_merged(target, extends.value.origin, _extended(chain, path, target, extends.value.origin))
    except FtcliError as error:
        raise FtcliError([*findings, *error.findings], error.exit_code) from None
    return ParsedYaml(merge(base.tree, tree), (*base.findings, *findings))


def _target(value: Tree, path: Path) -> Path:
    if not isinstance(value, Leaf) or not isinstance(value.value, str) or not value.value.strip():
        help = "write `extends: base.yaml`, one file; that file may itself extend another"
        raise _error("FT121", "`extends` must be the path of one recipe", value.origin, help)
    refusal = unserved(value.value)
    if refusal is not None:
        raise _error("FT165", f"`extends` {refusal[0]}", value.origin, refusal[1])
    return Path(os.path.normpath(path.parent / expanded(value.value)))


def _extended(chain: tuple[Path, ...], path: Path, target: Path, origin: Origin) -> tuple[Path, ...]:
    """The chain with `path` in it, or the error of extending `target` from there."""
    chain = (*chain, path)
    resolved = [_real(link) for link in chain]
    if _real(target) in resolved:
        start = resolved.index(_real(target))
        round_trip = " -> ".join(str(link) for link in (*chain[start:], target))
        raise _error("FT123", f"`extends` forms a cycle: {round_trip}", origin, "remove one of these `extends`")
    if len(chain) >= MAX_CHAIN:
        raise _error("FT124", f"more than {MAX_CHAIN} recipes extend one another", origin, "merge some of them")
    return chain


def _real(path: Path) -> str:
    """The target of a path's links; the path itself if they lead nowhere, or no file can have its name."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):
        return str(path)


def secrets_in(tree: Tree, key: str = "") -> list[Finding]:
    """A finding (FT209) for every secret, without showing it."""
    if isinstance(tree, MapNode):
        found = []
        for name, entry in tree.entries.items():
            if is_secret_key(name) and not (isinstance(entry.value, Leaf) and entry.value.value is None):
                found.append(_secret(f"`{name}` is a secret, and recipes are copied into run directories", entry.key))
            else:
                found += secrets_in(entry.value, name)
        return found
    if isinstance(tree, ListNode):
        return [finding for item in tree.items for finding in secrets_in(item, key)]
    if isinstance(tree.value, str) and is_secret_value(tree.value):
        return [_secret(f"the value of `{key}` looks like an access token", tree.origin)]
    return []


def _secret(message: str, origin: Origin) -> Finding:
    help = "remove it, and revoke it if the file was shared; use `hf auth login`, `wandb login` or HF_TOKEN instead"
    return Finding("FT209", message, origin, help)


def _error(code: str, message: str, origin: Origin, help: str) -> FtcliError:
    return FtcliError.single(code, message, origin=origin, help=help)


#: Dotted keys of a recipe and the values that they are to have.
Settings: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Override:
    """One change: ``text`` is ``lora.r=8``, ``label`` names the option in messages (``--set lora.r=8``)."""

    text: str
    label: str


def apply_overrides(tree: Tree, overrides: Sequence[Override]) -> tuple[Tree, tuple[Finding, ...]]:
    """`tree` with every override that can be applied, and a finding for each that cannot (FT130 to FT132)."""
    findings: list[Finding] = []
    for override in overrides:
        try:
            tree = _applied(tree, override, findings)
        except FtcliError as error:
            findings += error.findings
    return tree, tuple(findings)


def _applied(tree: Tree, override: Override, findings: list[Finding]) -> Tree:
    origin = Origin(mask(override.label))
    key, separator, text = override.text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not separator or not all(path):
        problem = f"has no key, or an empty part in `{key}`" if separator else "has no `=`"
        help = "write --set section.key=value, as in --set train.learning_rate=1e-4"
        raise _error("FT130", f"the override {problem}", origin, help)
    if len(path) > MAX_DEPTH:
        message = f"the override names a key {len(path):,} levels deep"
        raise _error("FT130", message, origin, "recipes nest about five deep")
    if path[0] == "extends":
        help = "write `extends` in a recipe file, or set the values one by one"
        raise _error("FT132", "`extends` cannot be set on the command line", origin, help)
    parsed = parse_value(text, origin.source)
    findings += parsed.findings
    if is_secret_key(path[-1]):
        findings += secrets_in(MapNode(origin, {path[-1]: MapEntry(origin, parsed.tree)}))
        return tree
    findings += secrets_in(parsed.tree, path[-1])
    return _set(tree, path, 0, parsed.tree, origin)


def _set(tree: Tree, path: tuple[str, ...], depth: int, value: Tree, origin: Origin) -> Tree:
    """`tree`, which stands at `path[:depth]`, with `value` at `path`."""
    if depth == len(path):
        return value
    part = path[depth]
    if isinstance(tree, ListNode):
        index = _index(tree, path, depth, origin)
        items = list(tree.items)
        items[index] = _set(items[index], path, depth + 1, value, origin)
        return replace(tree, items=tuple(items))
    if isinstance(tree, Leaf) and tree.value is not None:
        where = ".".join(path[:depth])
        whole = "[...]" if part.isdecimal() else f"{{{part}: ...}}"
        help = f"set {where} as a whole: --set '{where}={whole}'"
        raise _error("FT131", f"{where} is {describe_kind(tree)} and has no keys", origin, help)
    entries = dict(tree.entries) if isinstance(tree, MapNode) else {}
    below = entries[part].value if part in entries else MapNode(origin, {})
    entries[part] = MapEntry(origin, _set(below, path, depth + 1, value, origin))
    return MapNode(tree.origin if isinstance(tree, MapNode) else origin, entries)


def _index(tree: ListNode, path: tuple[str, ...], depth: int, origin: Origin) -> int:
    where, part, count = ".".join(path[:depth]), path[depth], len(tree.items)
    if part.isdecimal() and int(part) < count:
        return int(part)
    message = f"{where} is a list of {count}, and `{part}` is not a position in it"
    help = f"positions are 0 to {count - 1}" if count else f"set the list itself: --set '{where}=[...]'"
    raise _error("FT131", message, origin, help)


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
    return _loaded(_read_merged(path), path, overrides)


def load_text(text: str, path: Path) -> LoadedRecipe:
    """Loads, like :func:`load_recipe`, a text that is to become the file ``path``. It extends nothing."""
    return _loaded(parse_file(text, str(path)), path, ())


def _loaded(merged: ParsedYaml, path: Path, overrides: Sequence[Override]) -> LoadedRecipe:
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
        if name not in recipe.value_of(section).model_fields_set:
            recipe = recipe.changed({key: value})
    return recipe


def _with_run_defaults(recipe: Recipe, path: Path) -> Recipe:
    # The file's stem with everything that `run.name` does not allow replaced.
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:100]
    name = recipe.run.name or stem or "run"
    recipe = recipe.changed({"run.name": name, "run.output_dir": recipe.run.output_dir or f"runs/{name}"})
    paths = {key: recipe.value_of(key) for key in _PATHS}
    homes = {key: str(expanded(path)) for key, path in paths.items() if path is not None and path.startswith("~")}
    return recipe.changed(homes)


#: Keys whose ``~`` is the home folder.
_PATHS = ("run.output_dir", "run.resume", "model.name_or_path", "model.tokenizer", "data.chat_template")
