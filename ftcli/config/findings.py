"""Turns everything that pydantic refuses into findings, in the words of the recipe, all at once.

An unknown key or word gets a suggestion: the nearest one, the right section, or our name for another tool's key. Codes
FT201 to FT211; see docs/errors.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ftcli.config.base import UNSERVED
from ftcli.config.dialects import FOREIGN_IN, VALUES, foreign
from ftcli.config.model import SUPPORTED_ATTENTION
from ftcli.config.recipe import Recipe
from ftcli.config.schema import Node, RecipeSchema
from ftcli.config.secrets import is_secret_key, mask
from ftcli.config.yaml import Leaf, ListNode, MapNode, Origins, Path, Tree, describe_kind, number_hint, plain_tree
from ftcli.errors import Finding
from ftcli.paths import unserved
from ftcli.tables import methods

_RANGE = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
#: Larger numbers are no setting, so nobody is told to write one.
_MOST_WRITTEN = 10**12
_EMPTY = ("string_too_short", "too_short")
_SHAPE = ("string_pattern_mismatch", *_EMPTY, "string_too_long")


@dataclass(frozen=True, slots=True)
class _Problem:
    """One error of pydantic. ``path`` is its place in the recipe, without the tags that pydantic adds for unions."""

    path: Path
    kind: str
    tagged: bool
    message: str


def validate(tree: Tree, origins: Origins) -> tuple[Recipe | None, tuple[Finding, ...]]:
    """The recipe, or None, and the findings. There may be findings beside a recipe: empty sections are refused too."""
    blanks = _blank_sections(tree)
    try:
        recipe = Recipe.model_validate(plain_tree(tree))
    except ValidationError as error:
        problems = [_located(details, tree) for details in error.errors(include_url=False)]
        writer = _Writer(tree, origins, RecipeSchema())
        told = [writer.finding(problem) for problem in _merged(problems) if problem.path not in blanks]
        return None, (*_blank_findings(blanks, origins), *(finding for finding in told if finding is not None))
    return recipe, _blank_findings(blanks, origins)


def _blank_sections(tree: Tree) -> tuple[Path, ...]:
    """Known sections with nothing under them: ``lora:`` could mean default adapters, or none at all."""
    if not isinstance(tree, MapNode):
        return ()
    sections = {name for name in Recipe.model_fields if name != "version"}
    values = ((name, entry.value) for name, entry in tree.entries.items() if name in sections)
    return tuple((name,) for name, value in values if isinstance(value, Leaf) and value.blank)


def _blank_findings(blanks: Iterable[Path], origins: Origins) -> tuple[Finding, ...]:
    findings = []
    for (name,) in blanks:
        optional = " or `lora: null` for full fine-tuning" if name == "lora" else ""
        help = f"write `{name}: {{}}` for its defaults{optional}, or remove the line"
        findings.append(Finding("FT210", f"section `{name}` has nothing under it", origins.key((name,)), help))
    return tuple(findings)


def _located(details: ErrorDetails, tree: Tree) -> _Problem:
    """The error with its place in the recipe. Other parts of its location are names of union branches."""
    path: list[str] = []
    node: Tree | None = tree
    tagged = False
    for number, part in enumerate(details["loc"], start=1):
        last = number == len(details["loc"])
        if isinstance(node, MapNode) and str(part) in node.entries:
            node = node.entries[str(part)].value
            path.append(str(part))
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            path.append(str(part))
        elif last and details["type"] == "missing":
            path.append(str(part))
        else:
            tagged = True
    return _Problem(tuple(path), details["type"], tagged, details["msg"])


def _merged(problems: list[_Problem]) -> list[_Problem]:
    """One problem for each path. Of a union that failed, the branch that got furthest into the value is reported."""
    kept: dict[Path, _Problem] = {}
    for problem in problems:
        # What is wrong with a text says more than that it is none of the words that may stand in its place.
        if problem.path not in kept or problem.kind in (UNSERVED, "string_too_short"):
            kept[problem.path] = problem
    deeper = [problem.path for problem in kept.values() if problem.tagged]

    def outdone(problem: _Problem) -> bool:
        length = len(problem.path)
        return problem.tagged and any(len(path) > length and path[:length] == problem.path for path in deeper)

    return [problem for problem in kept.values() if not outdone(problem)]


class _Writer:
    """Problems to findings."""

    def __init__(self, tree: Tree, origins: Origins, schema: RecipeSchema) -> None:
        self._tree = tree
        self._origins = origins
        self._schema = schema

    def finding(self, problem: _Problem) -> Finding | None:
        """The finding; None where another one reports the same already (secrets)."""
        if problem.kind == "extra_forbidden":
            return self._unknown(problem.path)
        if problem.kind == "missing":
            return self._missing(problem.path)
        return self._refused(problem)

    def _unknown(self, path: Path) -> Finding | None:
        if is_secret_key(path[-1]):
            return None
        value = _value_at(self._tree, path)
        said = unknown_key(path, self._schema, value.value if isinstance(value, Leaf) else None)
        return replace(said, origin=self._origins.key(path))

    def _missing(self, path: Path) -> Finding:
        node = self._schema.at(path)
        help = None
        if node is not None:
            about = self._schema.resolve(node).get("description", "").partition("\n")[0]
            help = f"it is {self._schema.describe(node)}: {about}"
        if path == ("version",):
            help = "add the line `version: 1`"
        return Finding("FT203", f"{_dotted(path)} is missing", self._origins.key(path), help)

    def _refused(self, problem: _Problem) -> Finding:
        path = problem.path
        origin = self._origins.at(path)
        node = self._schema.at(path)
        value = _value_at(self._tree, path)
        if node is None or value is None:
            return Finding("FT204", f"{_dotted(path)}: {problem.message}", origin, "see docs/recipes.md")
        refusal = unserved(str(value.value)) if problem.kind == UNSERVED and isinstance(value, Leaf) else None
        if refusal is not None:
            return Finding("FT165", f"{_dotted(path)} {refusal[0]}", origin, refusal[1])
        shown = mask(describe_kind(value))
        if path == ("version",) and isinstance(value, Leaf) and isinstance(value.value, int):
            return Finding(
                "FT211", f"recipe format {shown} is not known to this ftcli", origin, "it reads `version: 1`"
            )
        code, help = self._judged(problem, node, value)
        if code == "FT208":
            what = "must not be empty" if problem.kind in _EMPTY else f"cannot be {shown}"
            return Finding(code, f"{_dotted(path)} {what}", origin, help)
        return Finding(code, f"{_dotted(path)} must be {self._expected(problem, node)}, not {shown}", origin, help)

    def _expected(self, problem: _Problem, node: Node) -> str:
        usable = usable_values(".".join(part for part in problem.path if not part.isdecimal()))
        is_word = usable is not None and self._schema.choices(node)
        expected = f"one of {', '.join(usable or ())}" if is_word else self._schema.describe(node)
        return f"{expected}, finite" if problem.kind == "finite_number" else expected

    def _judged(self, problem: _Problem, node: Node, value: Tree) -> tuple[str, str | None]:
        """The code and the help of a value that is not allowed."""
        choices = self._schema.choices(node)
        word = value.value if isinstance(value, Leaf) else None
        if problem.kind in _RANGE:
            default = self._schema.resolve(node).get("default")
            known = isinstance(default, int | float | str) and default != ""
            bound = f"use {_RANGE[problem.kind]} {problem.message.rpartition(' ')[2]}"
            return "FT206", f"{bound} (the default is {default})" if known else bound
        if problem.kind == "finite_number":
            return "FT207", "NaN and infinity are never settings; write the number that you mean"
        if problem.kind == "too_short":
            return "FT208", "write at least one into it, or remove the line for the default"
        if problem.kind in _SHAPE:
            return "FT208", _shape_help(problem.path, self._schema.variants(node))
        if choices and isinstance(word, str):
            return "FT205", suggested_word(problem.path, word, choices)
        return "FT204", _type_help(node, value, self._schema) or self._schema.resolve(node).get("description")


def _shape_help(path: Path, variants: Iterable[Node]) -> str:
    pattern = next((part["pattern"] for part in variants if "pattern" in part), None)
    if path == ("run", "name"):
        return "letters, digits, `.`, `_` and `-`, at most 100, beginning with a letter or digit"
    if path and path[-1] == "file":
        return "write path/to/rewards.py:function_name"
    return f"it must match {pattern}" if pattern else "write some text, or remove the line"


def _type_help(node: Node, value: Tree, schema: RecipeSchema) -> str | None:
    """Help that guesses the meaning from the value; None if it shows none."""
    kinds = {part.get("type") for part in schema.variants(node)}
    if not isinstance(value, Leaf):
        return "remove the brackets or dashes" if isinstance(value, ListNode) and "array" not in kinds else None
    if value.value is None:
        return "write a value, or remove the line for the default"
    if "array" in kinds:
        return f"write a list: [{value.text}]"
    if "object" in kinds:
        return "its keys go on lines of their own below it, indented"
    if "boolean" in kinds:
        return _boolean_help(value)
    if kinds & {"integer", "number"}:
        return _number_help(value, whole="number" not in kinds)
    if kinds == {"string"}:
        return f'in quotes it is text: "{value.text}"'
    return None


def _boolean_help(value: Leaf) -> str:
    word = str(value.value).lower()
    if word in ("yes", "on", "y", "1", "true"):
        return "write true (without quotes)"
    if word in ("no", "off", "n", "0", "false"):
        return "write false (without quotes)"
    return "write true or false"


def _number_help(value: Leaf, *, whole: bool) -> str | None:
    if isinstance(value.value, float) and whole:
        short = value.value.is_integer() and abs(value.value) < _MOST_WRITTEN
        return f"write {int(value.value)}" if short else "write a whole number within these bounds"
    if isinstance(value.value, str):
        return number_hint(value.value)
    return None


def _value_at(tree: Tree, path: Path) -> Tree | None:
    node: Tree = tree
    for part in path:
        if isinstance(node, MapNode) and part in node.entries:
            node = node.entries[part].value
        elif isinstance(node, ListNode) and part.isdecimal() and int(part) < len(node.items):
            node = node.items[int(part)]
        else:
            return None
    return node


def _dotted(path: Path) -> str:
    return ".".join(path)


def unknown_key(path: Path, schema: RecipeSchema, value: object = None) -> Finding:
    """The message about a key that does not exist: FT201, or FT202 for a key of another tool. ``value``: of the key,
    where it is a single one: it may decide what the other tool means.
    """

    def unknown(help: str) -> Finding:
        return Finding("FT201", f"unknown key `{name}`{where}", help=help)

    name, section = path[-1], _section(path[:-1])
    parent = schema.at(path[:-1])
    siblings = list(schema.properties(parent)) if parent is not None else []
    where = f" in {section}" if section else ""
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    missing = methods.not_offered(wanted) if not section else None
    if missing is not None:
        return unknown(missing)
    if wanted in siblings:
        return unknown(f"did you mean `{wanted}`?")
    everywhere = list(schema.keys())
    known = foreign(section, wanted, value)
    homes = [key for key in everywhere if key.rpartition(".")[2] == wanted]
    if homes and (section, wanted) not in FOREIGN_IN:
        return unknown(_homes(wanted, homes))
    if known is not None and known.only and isinstance(value, str) and value.lower() not in known.only:
        kind = "key" if known.target and "." in known.target else "section"
        help = f"`{name}: {known.only[0]}` has: the {kind} `{known.target}`"
        return _foreign(f"{name}: {value}", known.tools, None, help)
    if known is not None:
        return _foreign(name, known.tools, known.target, known.note)
    near = get_close_matches(wanted, siblings, n=1, cutoff=0.65)
    if near:
        return unknown(f"did you mean `{near[0]}`?")
    leaves = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    near = get_close_matches(wanted, leaves, n=1, cutoff=0.75)
    if near:
        return unknown(f"did you mean `{leaves[near[0]]}`?")
    return unknown(f"keys of {section or 'a recipe'}: {', '.join(siblings)}" if siblings else "see docs/recipes.md")


def suggested_word(path: Path, given: str, choices: tuple[str, ...]) -> str:
    """Help for a word that is not one of `choices`."""
    missing = methods.no_value(given) if _section(path) == "train.method" else None
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


def _foreign(name: str, tools: str, target: str | None, note: str | None) -> Finding:
    if target is None:
        return Finding("FT202", f"`{name}` ({tools}) has no counterpart here", help=note or "remove it")
    message = f"`{name}` ({tools}) is `{target}` here"
    usable, said = usable_values(target.partition(": ")[0]), target.partition(": ")[2].strip("[]")
    if usable is not None and (said not in usable if said else len(usable) < 2):
        help = f"remove it; `{target.partition(': ')[0]}` may be {' or '.join(usable)}"
        return Finding("FT202", f"{message}, which this version does not have yet", help=help)
    section, _, rest = target.partition(".")
    key, value = rest.partition(":")[::2]
    if not rest:
        help = f"write a section `{section}`"
    else:
        written = f"{key.rpartition('.')[2]}:{value or ' ...'}"
        inner = ".".join((section, *key.split(".")[:-1]))
        help = f"write `{written}` in section `{inner}`"
    return Finding("FT202", message, help=f"{help}; {note}" if note else help)


def _section(path: Path) -> str:
    """The path without list positions."""
    return ".".join(part for part in path if not part.isdecimal())
