"""Parses YAML text into a tree that knows its lines and columns. Trees are immutable; merging makes new ones.

PyYAML scans and composes; this module decides what the nodes mean. It is stricter than YAML: one document, a mapping at
the top, text keys, no duplicate keys, no tags, no merge keys, bounded nesting and aliases.

Unquoted words follow YAML 1.2's core rules, without the traps of YAML 1.1: ``true`` and ``false`` are the only
booleans; ``yes``, ``no``, ``on`` and ``off`` are text. ``1e-4``, ``1E-4`` and ``.5e-3`` are numbers. ``1:30`` is text,
not 90; ``010`` is text, because some readers take it for 8 and some for 10; ``1_000`` is text; a date is text. Where a
number is asked for, such text is an error that says what to write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_file import lines_of
from ftcli.config.secrets import mask_lines
from ftcli.errors import ExitCode, Finding, FtcliError, Origin

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar. ``text`` is how it was written; ``quoted`` values are always text."""

    origin: Origin
    value: Scalar
    text: str
    quoted: bool = False

    @property
    def blank(self) -> bool:
        """True if nothing at all was written (``lora:``), unlike an explicit ``null``."""
        return self.value is None and self.text == ""


@dataclass(frozen=True, slots=True)
class ListNode:
    """A YAML list."""

    origin: Origin
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class MapEntry:
    """A key's value, and where the key stands."""

    key: Origin
    value: Tree


@dataclass(frozen=True, slots=True)
class MapNode:
    """A YAML mapping with text keys, in the order in which they were written."""

    origin: Origin
    entries: Mapping[str, MapEntry]


Tree = Leaf | ListNode | MapNode


def plain_tree(tree: Tree) -> Any:
    """The values alone: dicts, lists and scalars."""
    if isinstance(tree, MapNode):
        return {key: plain_tree(entry.value) for key, entry in tree.entries.items()}
    if isinstance(tree, ListNode):
        return [plain_tree(item) for item in tree.items]
    return tree.value


def merge(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`: maps merge key by key, everything else (lists too) is replaced."""
    if not (isinstance(base, MapNode) and isinstance(over, MapNode)):
        return over
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        entries[key] = entry if below is None else replace(entry, value=merge(below.value, entry.value))
    return MapNode(over.origin, entries)


def describe_kind(tree: Tree) -> str:
    """A message's name for this value: ``text `abc` ``, ``3``, ``a list``."""
    if isinstance(tree, MapNode):
        return "a section"
    if isinstance(tree, ListNode):
        return "a list"
    if tree.value is None:
        return "nothing" if tree.blank else "null"
    if isinstance(tree.value, bool):
        return str(tree.value).lower()
    if isinstance(tree.value, int | float):
        return _clip(tree.text)
    return f"text `{_clip(str(tree.value))}`"


def _clip(text: str, limit: int = 60) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else text[: limit - 3] + "..."


Path = tuple[str, ...]


class Origins:
    """Finds the place of a value by its path: ``data.train.0.path``, or the parts of that as a sequence."""

    def __init__(self, tree: Tree) -> None:
        self._values: dict[Path, Origin] = {}
        self._keys: dict[Path, Origin] = {}
        self._collect(tree, ())

    def at(self, path: str | Sequence[str | int]) -> Origin | None:
        """The value's place, or that of its nearest written ancestor, in the end the file itself."""
        return self._nearest(self._values, _parts(path))

    def key(self, path: str | Sequence[str | int]) -> Origin | None:
        """The key's place (list items: the item's), or the nearest ancestor's."""
        return self._nearest(self._keys, _parts(path))

    def explicit(self, path: str | Sequence[str | int]) -> bool:
        """True if the recipe or an override sets this value; False for a default."""
        return _parts(path) in self._values

    def standing_in(self, path: str, other: str) -> Origins:
        """The same, but that all below ``path`` is found where ``other`` stands."""
        made, below, there = copy(self), _parts(path), _parts(other)

        def moved(table: dict[Path, Origin]) -> dict[Path, Origin]:
            place = self._nearest(table, there)
            kept = {key: origin for key, origin in table.items() if key[: len(below)] != below}
            return kept if place is None else {**kept, below: place}

        made._values, made._keys = moved(self._values), moved(self._keys)
        return made

    def _collect(self, tree: Tree, path: Path) -> None:
        self._values[path] = tree.origin
        self._keys.setdefault(path, tree.origin)
        if isinstance(tree, MapNode):
            for name, entry in tree.entries.items():
                self._keys[(*path, name)] = entry.key
                self._collect(entry.value, (*path, name))
        elif isinstance(tree, ListNode):
            for index, item in enumerate(tree.items):
                self._collect(item, (*path, str(index)))

    @staticmethod
    def _nearest(table: dict[Path, Origin], path: Path) -> Origin | None:
        for length in range(len(path), -1, -1):
            found = table.get(path[:length])
            if found is not None:
                return found
        return None


def _parts(path: str | Sequence[str | int]) -> Path:
    if isinstance(path, str):
        return tuple(path.split(".")) if path else ()
    return tuple(str(part) for part in path)


_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE = frozenset(("true", "True", "TRUE"))
_FALSE = frozenset(("false", "False", "FALSE"))
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_OCTAL = re.compile(r"0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset((".nan", ".NaN", ".NAN"))

#: Python refuses to read longer decimal integers; no recipe needs them.
_MAX_DIGITS = 400


def plain_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) <= _MAX_DIGITS else float(text)
    if _HEXADECIMAL.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text, 16)
    if _OCTAL.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text[2:], 8)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return float("nan") if text in _NAN else None


def number_hint(text: str) -> str | None:
    """Help for a text in the place of a number, if it looks like one."""
    if re.fullmatch(r"[-+]?[0-9]+:[0-5]?[0-9](:[0-5]?[0-9])*", text):
        return "a value such as 1:30 is not a number here; write it in one unit"
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        return f"write {text.lstrip('+-0') or '0'} without the leading zero"
    if re.fullmatch(r"[-+]?[0-9][0-9_,]*[0-9](\.[0-9]+)?", text):
        return f"write {text.replace('_', '').replace(',', '')}"
    if re.fullmatch(r"[0-9.]+ ?[kKmMgG]", text):
        return "write the number out, without a suffix"
    bare = text.strip().strip("'\"")
    return f"write {bare} without quotes" if _number(bare) is not None else None


#: Recipes nest about five deep and hold about a hundred values.
MAX_DEPTH = 32
MAX_NODES = 10_000

#: Halves of surrogate pairs, which UTF-8 does not have, and the null character, which no path can have (FT120).
NO_TEXT = re.compile("[\0\ud800-\udfff]")


def no_text(text: str, origin: Origin) -> tuple[Finding, ...]:
    """FT120 for a text that no file can hold."""
    found = NO_TEXT.search(text)
    if found is None:
        return ()
    message = f"the escape of U+{ord(found.group()):04X} stands for no character that a file can hold"
    return (Finding("FT120", message, origin, "write the character itself, or remove it"),)


_AnyNode = yaml.ScalarNode | yaml.SequenceNode | yaml.MappingNode


@dataclass(frozen=True, slots=True)
class ParsedYaml:
    """A tree, and the faults in it that did not stop the reading."""

    tree: Tree
    findings: tuple[Finding, ...]


def parse_file(text: str, source: str, *, any_key: bool = False) -> ParsedYaml:
    """Parse a recipe. Raises FtcliError (FT110 to FT112, FT115, FT116, FT119) where there is no tree to go on with.
    ``any_key``: numbers and switches are keys as well, by what is written, as in recipes of other tools.
    """
    parsed = _parse(text, source, any_key=any_key)
    if not isinstance(parsed.tree, MapNode):
        blank = isinstance(parsed.tree, Leaf) and parsed.tree.value is None
        if blank:
            message, code, help = "holds comments only", "FT105", "`ftcli recipes list` shows recipes to start from"
        else:
            message, code = "a recipe is a list of `key: value` lines at its top level", "FT119"
            help = "start with `version: 1`; a space follows each colon"
        raise FtcliError.single(code, message, origin=parsed.tree.origin, help=help)
    root = MapNode(Origin(source), parsed.tree.entries)
    return ParsedYaml(root, parsed.findings)


def parse_value(text: str, label: str) -> ParsedYaml:
    """Parse the value of an option. Every origin in it is the option's ``label``, without line numbers."""
    origin = Origin(label)
    if not text.strip():
        return ParsedYaml(Leaf(origin, None, ""), ())
    return _parse(text, label, fixed=origin)


def _parse(text: str, source: str, fixed: Origin | None = None, *, any_key: bool = False) -> ParsedYaml:
    places = _Places(source, mask_lines(lines_of(text)), fixed)
    try:
        composer = _Composer(text, places)
        try:
            node = cast("_AnyNode | None", composer.get_single_node())
        except (ValueError, OverflowError):  # PyYAML hands every `\\U` to chr()
            place, help = places.point(composer.line, composer.column), "Unicode ends at `\\U0010FFFF`"
            message = "an escape that stands for no character"
            raise FtcliError.single("FT110", message, origin=place, help=help) from None
    except yaml.YAMLError as error:
        raise FtcliError([_syntax_finding(error, places)], ExitCode.RECIPE) from None
    if node is None:
        return ParsedYaml(Leaf(places.point(0, 0), None, ""), ())
    converter = _Converter(places, any_key=any_key)
    tree = converter.tree(node)
    return ParsedYaml(tree, tuple(converter.findings))


class _Places:
    """Marks of PyYAML to origins."""

    def __init__(self, source: str, lines: list[str], fixed: Origin | None) -> None:
        self._source = source
        self._lines = lines
        self._fixed = fixed

    def point(self, line: int, column: int, length: int = 1) -> Origin:
        """An origin from zero-based line and column."""
        if self._fixed is not None:
            return self._fixed
        line = min(line, len(self._lines) - 1)
        return Origin(self._source, line + 1, column + 1, self._lines[line], length)

    def of(self, node: yaml.Node) -> Origin:
        start, end = node.start_mark, node.end_mark
        if isinstance(node, yaml.ScalarNode):
            whole = len(self._lines[min(start.line, len(self._lines) - 1)].rstrip())
            stop = end.column if end.line == start.line else whole
            return self.point(start.line, start.column, max(1, stop - start.column))
        return self.point(start.line, start.column)


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML's composer, without PyYAML's types: it bounds size and depth, and refuses tags."""

    def __init__(self, text: str, places: _Places) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._places = places
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if self._depth >= MAX_DEPTH:
            self._refuse("FT115", f"nested more than {MAX_DEPTH} deep", mark, "recipes nest about five deep")
        if getattr(event, "tag", None) not in (None, "!"):
            self._refuse("FT117", f"YAML tags such as `{event.tag}` have no meaning in a recipe", mark, "remove it")
        before = self._count
        self._count += self._size_of_alias(event) if isinstance(event, yaml.AliasEvent) else 1
        if self._count > MAX_NODES:
            help = "write the values out, or use `extends`; long lists belong in data files"
            self._refuse("FT116", f"more than {MAX_NODES:,} values, aliases (`*`) expanded", mark, help)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes.setdefault(id(node), self._count - before)
        return node

    def _size_of_alias(self, event: yaml.AliasEvent) -> int:
        """Number of values that the alias stands for. An alias inside its own anchor has no end."""
        target = self.anchors.get(event.anchor)
        if target is not None and id(target) not in self._sizes:
            message = f"the anchor `&{event.anchor}` contains its own alias"
            self._refuse("FT116", message, event.start_mark, "write the values out")
        return self._sizes.get(id(target), 1)

    def _refuse(self, code: str, message: str, mark: Any, help: str) -> None:
        origin = self._places.point(mark.line, mark.column)
        raise FtcliError.single(code, message, origin=origin, help=help)


class _Converter:
    """Turns nodes into trees and collects findings. The composer has made sure that the tree is finite and small."""

    def __init__(self, places: _Places, *, any_key: bool = False) -> None:
        self.findings: list[Finding] = []
        self._places = places
        self._any_key = any_key

    def tree(self, node: _AnyNode, introduced_by: Origin | None = None) -> Tree:
        """The tree of a node. Findings about a block of lines point at ``introduced_by``, the key before it."""
        origin = self._places.of(node)
        if isinstance(node, yaml.ScalarNode):
            return self._leaf(node, origin, introduced_by)
        if introduced_by is not None and not node.flow_style:
            origin = introduced_by
        if isinstance(node, yaml.MappingNode):
            return self._section(node, origin)
        return ListNode(origin, tuple(self.tree(item) for item in node.value))

    def _leaf(self, node: yaml.ScalarNode, origin: Origin, introduced_by: Origin | None) -> Leaf:
        self._require_text(node.value, origin)
        if node.style is not None:
            return Leaf(origin, node.value, node.value, quoted=True)
        if node.value == "" and introduced_by is not None:
            origin = introduced_by
        return Leaf(origin, plain_scalar(node.value), node.value)

    def _section(self, node: yaml.MappingNode, origin: Origin) -> MapNode:
        entries: dict[str, MapEntry] = {}
        for key_node, value_node in node.value:
            key_origin = self._places.of(key_node)
            key = self._key(key_node, key_origin)
            value = self.tree(value_node, introduced_by=key_origin)
            if key is None:
                continue
            if key in entries:
                first = entries[key].key
                where = f"line {first.line}" if first.line is not None else "this value"
                self._find("FT113", f"duplicate key `{key}`", key_origin, f"it is already set in {where}; keep one")
                continue
            entries[key] = MapEntry(key_origin, value)
        return MapNode(origin, entries)

    def _key(self, node: yaml.Node, origin: Origin) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._find("FT114", "a key must be text, not a list or a map", origin, "braces and brackets need quotes")
            return None
        self._require_text(node.value, origin)
        if node.style is not None:
            return str(node.value)
        if node.value == "<<":
            help = "use `extends: base.yaml`, or write the keys out"
            self._find("FT118", "merge keys (`<<`) have no meaning in a recipe", origin, help)
            return None
        if not self._any_key and not isinstance(plain_scalar(node.value), str):
            shown = node.value or "(nothing)"
            self._find("FT114", f"a key must be text, not {shown}", origin, f'in quotes it is text: "{node.value}"')
            return None
        return str(node.value)

    def _require_text(self, text: str, origin: Origin) -> None:
        self.findings += no_text(text, origin)

    def _find(self, code: str, message: str, origin: Origin, help: str) -> None:
        self.findings.append(Finding(code, message, origin, help))


#: (pattern in PyYAML's message, our message, help, whether the place is where the construct began)
_KNOWN: tuple[tuple[str, str, str, bool], ...] = (
    (r"mapping values are not allowed", "a second `: ` in one value, or a line indented too far",
     "put text that contains `: ` in quotes, and align keys of one section", False),
    (r"sequence entries are not allowed", "a list item (`- `) cannot stand here",
     "put `- ` on a line of its own, below the key", False),
    (r"unexpected end of stream|quoted scalar.*document separator", "the quotation mark is never closed",
     "close it on the same line", True),
    (r"flow sequence", "the list `[...]` is not closed, or a comma is missing",
     "close it with `]`, and separate items by `, `", True),
    (r"flow mapping", "the map `{...}` is not closed, or a comma is missing",
     "close it with `}`, and separate items by `, `", True),
    (r"unknown escape character", "a backslash in double quotes begins an escape",
     "use single quotes, or write `\\\\`", False),
    (r"block mapping.*expected <block end>", "this line is indented differently from the others of its section",
     "align keys of one section with spaces", False),
    (r"block collection.*expected <block end>|did not find expected '-'",
     "this line does not belong to the list above it", "align it with the keys of its section", False),
    (r"could not find expected ':'", "this line has no `: ` after its key", "write `key: value`", True),
    (r"undefined alias", "`*` begins an alias, and there is no anchor (`&`) of that name",
     "put text that begins with `*` in quotes", False),
    (r"character '[@`%]' that cannot start", "text cannot begin with this character",
     "put it in quotes", False),
    (r"directive|YAML document \(version", "lines that begin with `%` have no meaning in a recipe", "remove it", False),
)  # fmt: skip


def _syntax_finding(error: yaml.YAMLError, places: _Places) -> Finding:
    """The finding for what stopped PyYAML: FT111 for tabs, FT112 for a second document, else FT110."""
    point = places.point
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Finding("FT110", f"not valid YAML: {error}", point(0, 0), "see docs/recipes.md for the format")
    mark = error.problem_mark
    said = f"{error.context or ''} {error.problem or ''}"
    if "'\\t'" in said:
        help = "indent and separate with spaces; most editors can convert tabs"
        return Finding("FT111", "a tab character where YAML wants spaces", point(mark.line, mark.column), help)
    if "expected a single document" in said:
        help = "one file holds one recipe; remove the `---` and what follows it"
        return Finding("FT112", "a second YAML document begins here", point(mark.line, mark.column, 3), help)
    for pattern, message, help, at_start in _KNOWN:
        if re.search(pattern, said):
            begun = error.context_mark if at_start and error.context_mark is not None else mark
            return Finding("FT110", message, point(begun.line, begun.column), help)
    problem = (error.problem or "cannot be read").replace("<", "").replace(">", "")
    return Finding("FT110", f"not valid YAML: {problem}", point(mark.line, mark.column), "check the line above as well")


_TAG = "tag:yaml.org,2002:"


if TYPE_CHECKING:
    _Base = yaml.SafeDumper
else:
    _Base = object


class _Rules(_Base):
    """Quotes text that our loader would take for something else, and text that a YAML 1.1 reader would."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        found = plain_scalar(value) if kind is yaml.ScalarNode and implicit[0] else ""
        if found is None:
            return _TAG + "null"
        if isinstance(found, str):
            return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return _TAG + type(found).__name__

    def represent_float(self, data: float) -> yaml.ScalarNode:
        """The shortest decimal that reads back the same, here and in YAML 1.1 (which wants a point: 1.0e-08)."""
        text = repr(data)
        if text in ("inf", "-inf", "nan"):
            text = text.replace("inf", ".inf").replace("nan", ".nan")
        mantissa, exponent, power = text.partition("e")
        return self.represent_scalar(
            _TAG + "float", text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
        )

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Dumper(_Rules, yaml.SafeDumper):
    """Written by PyYAML itself."""


class _QuickDumper(_Rules, getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Written by libyaml where PyYAML has it, in a quarter of the time."""


_Dumper.add_representer(float, _Rules.represent_float)
_QuickDumper.add_representer(float, _Rules.represent_float)

#: libyaml escapes what stands beyond the first 65,536 characters (emoji), which people would no longer read.
_ESCAPED = "\\U"

#: Levels of a recipe that was dumped, far beyond what there are.
_DEEPEST = 100


def dump_recipe(recipe: Recipe) -> str:
    """YAML text of `recipe` in the order of its models."""
    values, text = recipe.model_dump(), _ESCAPED
    for dumper in (_QuickDumper, _Dumper):
        if _ESCAPED in text:
            text = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def undumped(text: str) -> Any:
    """The values of a recipe that was dumped, read by libyaml where PyYAML has it (it takes a seventh of the time).

    Raises yaml.YAMLError, or ValueError, for what is no YAML, or nested deeper than any recipe: libyaml's bindings go
    down by recursion, without a limit.
    """
    return deepcopy(_undumped(text))


@lru_cache(maxsize=2)
def _undumped(text: str) -> Any:
    """Kept, as the report and the card of a run ask for its recipe each time that they are written."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias, which no dumped recipe has")
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
    return yaml.load(text, Loader=loader)  # noqa: S506 - both are safe


def flow_text(value: Any) -> str:
    """One value as YAML in a single line, as it may stand behind a key."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return text.removesuffix("\n").removesuffix("\n...")
