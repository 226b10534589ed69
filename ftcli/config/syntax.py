"""PyYAML's complaints in words that say what to change, and where."""

from __future__ import annotations

import re
from typing import Protocol

import yaml

from ftcli.errors import Finding, Origin


class Point(Protocol):
    """Turns a zero-based line and column into an origin."""

    def __call__(self, line: int, column: int, length: int = 1) -> Origin:
        """The origin of that place."""


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


def syntax_finding(error: yaml.YAMLError, point: Point) -> Finding:
    """The finding for what stopped PyYAML: FT111 for tabs, FT112 for a second document, else FT110."""
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
