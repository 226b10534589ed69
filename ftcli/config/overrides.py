"""`--set section.key=value`: values of the command line, on top of the recipe and validated like it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ftcli.config.extends import secrets_in
from ftcli.config.secrets import is_secret_key, mask
from ftcli.config.tree import Leaf, ListNode, MapEntry, MapNode, Tree, describe_kind
from ftcli.config.yaml import MAX_DEPTH, parse_value
from ftcli.errors import Finding, FtcliError, Origin

#: Dotted keys of a recipe and the values that they are to have.
Settings: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Override:
    """One change: ``text`` is ``lora.r=8``, ``label`` names the option in messages (``--set lora.r=8``)."""

    text: str
    label: str


class _Refused(Exception):
    """An override that cannot be applied."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def apply_overrides(tree: Tree, overrides: Sequence[Override]) -> tuple[Tree, tuple[Finding, ...]]:
    """`tree` with every override that can be applied, and a finding for each that cannot (FT130 to FT132)."""
    findings: list[Finding] = []
    for override in overrides:
        try:
            tree = _applied(tree, override, findings)
        except _Refused as refused:
            findings.append(refused.finding)
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
        raise _Refused(Finding("FT130", f"the override {problem}", origin, help))
    if len(path) > MAX_DEPTH:
        help = "recipes nest about five deep"
        raise _Refused(Finding("FT130", f"the override names a key {len(path):,} levels deep", origin, help))
    if path[0] == "extends":
        help = "write `extends` in a recipe file, or set the values one by one"
        raise _Refused(Finding("FT132", "`extends` cannot be set on the command line", origin, help))
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
        raise _Refused(Finding("FT131", f"{where} is {describe_kind(tree)} and has no keys", origin, help))
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
    raise _Refused(Finding("FT131", message, origin, help))
