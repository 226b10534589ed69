"""`extends`: a recipe on top of another. Maps merge, lists and single values replace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.recipe_file import read_text
from ftcli.config.secrets import is_secret_key, is_secret_value
from ftcli.config.tree import Leaf, ListNode, MapNode, Tree, merge
from ftcli.config.yaml import parse_file
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.paths import expanded, unserved

#: A chain of recipes longer than this is a mistake.
MAX_CHAIN = 16


@dataclass(frozen=True, slots=True)
class MergedRecipe:
    """A recipe merged with everything that it extends, and the faults in those files that did not stop the reading."""

    tree: Tree
    findings: tuple[Finding, ...]


def read_merged(path: Path) -> MergedRecipe:
    """Read `path` and what it extends. Raises FtcliError with all findings up to the one that stopped the reading."""
    return _read(path, None, ())


def _read(path: Path, named_by: Origin | None, chain: tuple[Path, ...]) -> MergedRecipe:
    parsed = parse_file(read_text(path, named_by=named_by), str(path))
    findings = [*parsed.findings, *secrets_in(parsed.tree)]
    assert isinstance(parsed.tree, MapNode)  # parse_file promises it
    entries = dict(parsed.tree.entries)
    extends = entries.pop("extends", None)
    tree = MapNode(parsed.tree.origin, entries)
    if extends is None:
        return MergedRecipe(tree, tuple(findings))
    try:
        target = _target(extends.value, path)
        base = _read(target, extends.value.origin, _extended(chain, path, target, extends.value.origin))
    except FtcliError as error:
        raise FtcliError([*findings, *error.findings], error.exit_code) from None
    return MergedRecipe(merge(base.tree, tree), (*base.findings, *findings))


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
            if is_secret_key(name) and not _is_empty(entry.value):
                found.append(_secret(f"`{name}` is a secret, and recipes are copied into run directories", entry.key))
            else:
                found += secrets_in(entry.value, name)
        return found
    if isinstance(tree, ListNode):
        return [finding for item in tree.items for finding in secrets_in(item, key)]
    if isinstance(tree.value, str) and is_secret_value(tree.value):
        return [_secret(f"the value of `{key}` looks like an access token", tree.origin)]
    return []


def _is_empty(tree: Tree) -> bool:
    return isinstance(tree, Leaf) and tree.value is None


def _secret(message: str, origin: Origin) -> Finding:
    help = "remove it, and revoke it if the file was shared; use `hf auth login`, `wandb login` or HF_TOKEN instead"
    return Finding("FT209", message, origin, help)


def _error(code: str, message: str, origin: Origin, help: str) -> FtcliError:
    return FtcliError.single(code, message, origin=origin, help=help, exit_code=ExitCode.RECIPE)
