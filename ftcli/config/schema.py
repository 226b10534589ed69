"""The recipe's JSON Schema, and questions to it: which keys exist, and what a value must be, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TypeAlias

from ftcli.config.base import Word
from ftcli.config.recipe import Recipe
from ftcli.plain import JsonMap, JsonObject
from ftcli.tables import loggers

#: A part of a JSON schema.
Node: TypeAlias = JsonMap


class RecipeSchema:
    """The JSON Schema of recipes, and answers about it. It is made from what the tables hold now."""

    def __init__(self) -> None:
        switches = tuple((name, loggers.row(name).about, loggers.row(name).install) for name in loggers.names())
        self.root: Node = _made(tuple(word.names() for word in _words()), switches)

    def resolve(self, node: Node) -> Node:
        """`node`, with its reference replaced by what it refers to. Keys beside the reference are kept."""
        reference = node.get("$ref")
        if reference is None:
            return node
        target = self.root["$defs"][reference.rpartition("/")[2]]
        return {**target, **{key: value for key, value in node.items() if key != "$ref"}}

    def variants(self, node: Node) -> tuple[Node, ...]:
        """The alternatives of a union, without null. A node that is no union is its own only alternative."""
        node = self.resolve(node)
        if "anyOf" not in node:
            return (node,)
        parts = (self.resolve(part) for part in node["anyOf"])
        return tuple(part for part in parts if part.get("type") != "null")

    def properties(self, node: Node) -> Mapping[str, Node]:
        """The keys of a section, of a list's sections, or of a union's section; empty for anything else."""
        for variant in self.variants(node):
            if "properties" in variant:
                found: Mapping[str, Node] = variant["properties"]
                return found
        return {}

    def at(self, path: Sequence[str]) -> Node | None:
        """The schema of the value at `path`; numbers step into lists. None where there is no such key."""
        node: Node | None = self.root
        for part in path:
            node = self._child(node, part)
            if node is None:
                return None
        return node

    def _child(self, node: Node | None, part: str) -> Node | None:
        if node is None:
            return None
        for variant in self.variants(node):
            if part in variant.get("properties", {}):
                found: Node = variant["properties"][part]
                return found
            if part.isdecimal() and variant.get("type") == "array":
                items: Node = variant["items"]
                return items
            if isinstance(variant.get("additionalProperties"), Mapping):
                rest: Node = variant["additionalProperties"]
                return rest
        return None

    def keys(self) -> Iterator[str]:
        """Every key of a recipe, dotted, sections before what is in them; ``[]`` marks the items of a list."""
        yield from self._keys(self.root, "")

    def _keys(self, node: Node, prefix: str) -> Iterator[str]:
        for variant in self.variants(node):
            if variant.get("type") == "array":
                yield from self._keys(variant["items"], prefix.removesuffix(".") + "[].")
            for name, child in variant.get("properties", {}).items():
                yield prefix + name
                yield from self._keys(child, f"{prefix}{name}.")

    def choices(self, node: Node) -> tuple[str, ...]:
        """The words that are allowed here, where only certain words are."""
        found: list[str] = []
        for variant in self.variants(node):
            found += [str(value) for value in variant.get("enum", ())]
            found += [str(variant["const"])] if "const" in variant else []
        return tuple(found)

    def describe(self, node: Node) -> str:
        """Description of a node's values: ``a whole number from 1 to 4096``, ``one of auto, eager``, ``a list of
        text``.
        """
        said = list(dict.fromkeys(self._describe(variant) for variant in self.variants(node)))
        return " or ".join(said) if said else "any value"

    def _describe(self, node: Node) -> str:
        if "enum" in node:
            return "one of " + ", ".join(str(value) for value in node["enum"])
        if "const" in node:
            return str(node["const"])
        kind = node.get("type")
        if kind in ("integer", "number"):
            return ("a whole number" if kind == "integer" else "a number") + _range(node)
        if kind == "array":
            items = self.describe(node["items"])
            return f"a list of {items.replace('a section (', 'sections (').removeprefix('one of ')}"
        if kind == "object":
            return _section(node)
        words = {"boolean": "true or false", "string": "text", "null": "null"}
        return words.get(str(kind), "any value")


@lru_cache(maxsize=2)
def _made(words: tuple[tuple[str, ...], ...], switches: tuple[tuple[str, ...], ...]) -> Node:
    """The schema, which takes pydantic 20 ms, of tables that hold these ``words`` and ``switches``."""
    return Recipe.model_json_schema()


@cache
def _words() -> tuple[Word, ...]:
    """All values of a recipe that are words of a table."""
    return tuple(_words_in(Recipe.__pydantic_core_schema__))


def _words_in(part: object) -> Iterator[Word]:
    owner = getattr(part, "__self__", None)
    if isinstance(owner, Word):
        yield owner
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _words_in(value)
    elif isinstance(part, list | tuple):
        for value in part:
            yield from _words_in(value)


def _section(node: Node) -> str:
    if "properties" not in node:
        return "a map"
    names = list(node["properties"])
    return f"a section ({', '.join(names) if len(names) <= 4 else ', '.join(names[:3]) + ', ...'})"


def _range(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {_shown(low)} to {_shown(high)}"
    lower = f"greater than {_shown(above)}" if above is not None else ""
    upper = f"less than {_shown(below)}" if below is not None else ""
    lower = f"at least {_shown(low)}" if low is not None else lower
    upper = f"at most {_shown(high)}" if high is not None else upper
    both = " and ".join(part for part in (lower, upper) if part)
    return f" of {both}" if both.startswith("at") else f" {both}" if both else ""


def _shown(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def published() -> JsonObject:
    """The schema for editors: as the models have it, with `extends`, which the loader resolves."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "ftcli recipe"
    schema["properties"] = {
        "version": schema["properties"]["version"],
        "extends": {
            "type": "string",
            "minLength": 1,
            "title": "Extends",
            "description": "A recipe that this one builds on, relative to this file: maps merge, lists replace.",
        },
        **schema["properties"],
    }
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    return schema
