"""Other tools' names for settings, and ours.

Facts about names only, gathered from the settings of axolotl, LLaMA-Factory, TRL and transformers, torchtune, Unsloth
and litgpt: the table is dialects.txt. `ftcli check` answers their keys by it (FT202), and `ftcli recipes convert`
translates by it. A test holds that every key on the left exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

#: The tools by the letters that stand for them in the table; the names of others are written out.
TOOLS = {
    "A": "axolotl", "C": "torchtune", "F": "LLaMA-Factory", "H": "transformers", "L": "litgpt", "T": "TRL",
    "U": "Unsloth",
}  # fmt: skip
_TEXT = Path(__file__).with_name("dialects.txt").read_text(encoding="utf-8")
#: The table's lines, each with those that continue it.
_LINES = [line for line in re.sub(r"\n +", " ", _TEXT).splitlines() if line and not line.startswith("#")]
_VALUE = "[value] "


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Our name (``target``, with its value where that is known; None: there is no such thing) for a key of other tools.
    It holds of the values ``only``, of all if there are none; of ``usual`` ones nothing need be said. ``rule``: what
    `recipes convert` does, as the table says.
    """

    tools: str
    target: str | None
    note: str | None = None
    only: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    rule: str = ""

    @property
    def key(self) -> str | None:
        """The target without its value."""
        return self.target.partition(":")[0] if self.target else None


_ROW = re.compile(
    r"(?:\[(?P<section>[\w.]+)\] )?(?P<rule>(?:steps|lost|note|differs|refuse|read)\b)? ?(?P<target>[^=|\s][^=|]*?)?"
    r" ?= (?P<names>[^|]*?)(?: \| (?P<note>.*))?"
)
_NAME = re.compile(r"([\w.*]+):(\w+)(?:\((!?)([\w.,-]+)\))?")


def _rows() -> Iterator[tuple[str, str, ForeignKey]]:
    """Section (empty: any), name and meaning of every name in the table."""
    for line in _LINES:
        if line.startswith(_VALUE):
            continue
        row = _ROW.fullmatch(line)
        assert row is not None, line  # a slip in the table, which would be passed over
        names = [_NAME.fullmatch(name) for name in row["names"].split()]
        assert all(names), line
        for name, tools, usual, words in (name.groups() for name in names if name):
            known = ", ".join(TOOLS[letter] for letter in tools) if set(tools) <= set(TOOLS) else tools
            values = tuple(words.split(",")) if words else ()
            only, usual = ((), values) if usual else (values, ())
            yield (
                row["section"] or "",
                name,
                ForeignKey(known, row["target"], row["note"], only, usual, row["rule"] or ""),
            )


_ROWS = tuple(_rows())


@lru_cache
def rows_of(tool: str) -> Mapping[str, Sequence[ForeignKey]]:
    """The rows of a tool by the name of the setting: the first that is for its value counts."""
    found: dict[str, list[ForeignKey]] = {}
    for section, name, row in _ROWS:
        if section in ("", "convert") and tool in row.tools.split(", "):
            found.setdefault(name, []).append(row)
    return found


def _foreign() -> dict[str, ForeignKey]:
    """By the last part of the name: the first row of each, with the tools of all rows that say the same."""
    found: dict[str, list[ForeignKey]] = {}
    for section, dotted, row in _ROWS:
        if not section and (row.target or row.note):
            found.setdefault(dotted.removesuffix(".*").rpartition(".")[2], []).append(row)
    return {name: _first(rows) for name, rows in found.items()}


def _first(rows: Sequence[ForeignKey]) -> ForeignKey:
    """The row that `ftcli check` cites: the one for all values. A key with rows for some values only has none for the
    others.
    """
    kept = [row for row in rows if row.rule != "refuse"] or rows[:1]
    first = next((row for row in kept if not row.only), kept[0])
    tools = dict.fromkeys(tool for row in rows if row.target == first.target for tool in row.tools.split(", "))
    refused = len(rows) > 1 and all(row.rule == "refuse" for row in rows if row is not first)
    note = None if first.note is None else first.note.replace(" -> ", "; ")
    return replace(first, tools=", ".join(tools), only=first.only if refused else (), note=note)


#: Tools that write `_component_` under every key.
_COMPONENT = ForeignKey("torchtune", None, "recipes name no Python classes; see docs/recipes.md for the keys")

FOREIGN: Mapping[str, ForeignKey] = _foreign()
#: Foreign names by section.
FOREIGN_IN: Mapping[tuple[str, str], ForeignKey] = {
    (section, name): key for section, name, key in _ROWS if section not in ("", "convert")
}
#: Words that have a meaning of their own, where the key has another or none with other words.
_BY_VALUE: Mapping[tuple[str, str], ForeignKey] = {
    (name, word): row
    for section, name, row in reversed(_ROWS)
    if not section and row.target and row.key == row.target and "." not in name
    for word in row.only
    if FOREIGN[name].only
}


def foreign(section: str, name: str, value: object = None) -> ForeignKey | None:
    """The meaning of another tool's key in this section (dotted, list positions left out) with this value; None if
    unknown.
    """
    if name == "_component_" and section != "model":
        return _COMPONENT
    return FOREIGN_IN.get((section, name)) or _BY_VALUE.get((name, str(value).lower())) or FOREIGN.get(name)


def _values() -> dict[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in _LINES:
        if line.startswith(_VALUE):
            target, _, theirs = line.removeprefix(_VALUE).partition(" = ")
            key, _, ours = target.partition(": ")
            found.setdefault(key, {}).update(dict.fromkeys(theirs.split(), ours))
    return {**found}


#: Values of other tools, by our key: what they are called here.
VALUES: Mapping[str, Mapping[str, str]] = _values()
