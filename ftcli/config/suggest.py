"""Suggestions for unknown keys and words: the nearest one, the right section, or our name for another tool's key."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from ftcli.config.dialect_values import VALUES
from ftcli.config.dialects import FOREIGN_IN, foreign
from ftcli.config.model import SUPPORTED_ATTENTION
from ftcli.config.origins import Path
from ftcli.config.schema import RecipeSchema
from ftcli.tables import methods


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The words of a finding."""

    code: str
    message: str
    help: str


def unknown_key(path: Path, schema: RecipeSchema, value: object = None) -> Suggestion:
    """The message about a key that does not exist: FT201, or FT202 for a key of another tool.

    Args:
        value: Of the key, where it is a single one: it may decide what the other tool means.
    """
    name, section = path[-1], _section(path[:-1])
    parent = schema.at(path[:-1])
    siblings = list(schema.properties(parent)) if parent is not None else []
    where = f" in {section}" if section else ""
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    missing = methods.not_offered(wanted) if not section else None
    if missing is not None:
        return Suggestion("FT201", f"unknown key `{name}`", missing)
    if wanted in siblings:
        return Suggestion("FT201", f"unknown key `{name}`{where}", f"did you mean `{wanted}`?")
    everywhere = list(schema.keys())
    known = foreign(section, wanted, value)
    homes = [key for key in everywhere if key.rpartition(".")[2] == wanted]
    if homes and (section, wanted) not in FOREIGN_IN:
        return Suggestion("FT201", f"unknown key `{name}`{where}", _homes(wanted, homes))
    if known is not None and known.only and isinstance(value, str) and value.lower() not in known.only:
        kind = "key" if known.target and "." in known.target else "section"
        help = f"`{name}: {known.only[0]}` has: the {kind} `{known.target}`"
        return _foreign(f"{name}: {value}", known.tools, None, help)
    if known is not None:
        return _foreign(name, known.tools, known.target, known.note)
    near = get_close_matches(wanted, siblings, n=1, cutoff=0.65)
    if near:
        return Suggestion("FT201", f"unknown key `{name}`{where}", f"did you mean `{near[0]}`?")
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    near = get_close_matches(wanted, leaves, n=1, cutoff=0.75)
    if near:
        return Suggestion("FT201", f"unknown key `{name}`{where}", f"did you mean `{leaves[near[0]]}`?")
    return Suggestion("FT201", f"unknown key `{name}`{where}", _list_of(siblings, section))


def word(path: Path, given: str, choices: tuple[str, ...]) -> str:
    """Help for a word that is not one of `choices`."""
    missing = methods.not_offered(given) if _section(path) == "train.method" else None
    if missing is not None:
        return missing
    said = VALUES.get(_section(path), {}).get(given) or VALUES.get(_section(path), {}).get(given.lower())
    has = usable_values(_section(path))
    usable = has or choices
    if has is not None and said is not None and said not in has:
        return f"`{said}`, as it is called here, is not in this version; use {' or '.join(usable)}"
    if said is None:
        near = get_close_matches(given.lower(), usable, n=1, cutoff=0.55)
        said = near[0] if near else None
    return f"did you mean `{said}`?" if said is not None else "choose one of these words"


def usable_values(key: str) -> tuple[str, ...] | None:
    """The usable values of a dotted key, as words; None where every value that the schema allows is usable."""
    return SUPPORTED_ATTENTION if key == "model.attention" else None


def _homes(name: str, homes: list[str]) -> str:
    if homes == [name]:
        return f"`{name}` is a section of its own: begin its line in the first column"
    shown = " or ".join(f"`{key}`" for key in homes[:3])
    section = homes[0].rpartition(".")[0]
    return f"did you mean {shown}?" + (f" It belongs in section `{section}`" if len(homes) == 1 else "")


def _foreign(name: str, tools: str, target: str | None, note: str | None) -> Suggestion:
    if target is None:
        return Suggestion("FT202", f"`{name}` ({tools}) has no counterpart here", note or "remove it")
    message = f"`{name}` ({tools}) is `{target}` here"
    not_yet = _not_yet(target)
    if not_yet is not None:
        return Suggestion("FT202", f"{message}, which this version does not have yet", not_yet)
    section, _, rest = target.partition(".")
    key, value = rest.partition(":")[::2]
    if not rest:
        help = f"write a section `{section}`"
    else:
        written = f"{key.rpartition('.')[2]}:{value or ' ...'}"
        inner = ".".join((section, *key.split(".")[:-1]))
        help = f"write `{written}` in section `{inner}`"
    return Suggestion("FT202", message, f"{help}; {note}" if note else help)


def _not_yet(target: str) -> str | None:
    """Help in place of a suggestion that would be refused; None if it would not be."""
    key, _, value = target.partition(": ")
    usable = usable_values(key)
    if usable is None or (value.strip("[]") in usable if value else len(usable) > 1):
        return None
    return f"remove it; `{key}` may be {' or '.join(usable)}"


def _section(path: Path) -> str:
    """The path without list positions."""
    return ".".join(part for part in path if not part.isdecimal())


def _list_of(siblings: list[str], section: str) -> str:
    if not siblings:
        return "see docs/recipes.md"
    return f"keys of {section or 'a recipe'}: {', '.join(siblings)}"
