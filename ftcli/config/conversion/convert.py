"""From another tool's file to the text of a recipe of ours, which passes our schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.conversion.draft import Draft, DraftValue
from ftcli.config.conversion.rules import OF_TRANSFORMERS, Rules, apply
from ftcli.config.conversion.source import ForeignRecipe, ForeignSetting, foreign_settings, read
from ftcli.config.conversion.write import recipe_text
from ftcli.config.dialects import FOREIGN, foreign
from ftcli.config.findings import validate
from ftcli.config.origins import Origins
from ftcli.config.tree import Leaf, ListNode, MapEntry, MapNode, Tree
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.tables import code_of, dialects

#: Each round leaves out what the schema refuses; what depends on what was left out may be refused next.
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Conversion:
    """A recipe of ours, the tool whose recipe it was, and what has to be said about it."""

    text: str
    dialect: str
    findings: tuple[Finding, ...]


def convert(path: Path, dialect: str | None = None) -> Conversion:
    """Reads ``path`` as a recipe of ``dialect``, a name of :mod:`ftcli.tables.dialects`; None finds out which.

    Raises:
        FtcliError: FT101 to FT119 for files that cannot be read, FT164 where it is not clear whose recipe it is, FT163
            for one that cannot become one of ours.
    """
    source = read(path)
    name = dialect or source.dialect or _detected(source)
    row = dialects.row(name)
    rules: Rules = code_of(row.code)
    settings = _settings(source, flatten=rules.flatten)
    draft = Draft(
        row.title,
        path,
        given={name: given for name, given in settings.items() if not given.is_blank},
        blank={name: given for name, given in settings.items() if given.is_blank},
    )
    draft.findings += source.findings
    draft.left_out |= {key for name in source.computed for key in _ours(draft, name)}
    apply(rules, draft)
    _require_model(draft)
    _settle(draft)
    _leave_out_what_is_refused(draft)
    return Conversion(
        recipe_text(draft.values, row.title, path.name, draft.keys), name, tuple(dict.fromkeys(draft.findings))
    )


def _detected(source: ForeignRecipe) -> str:
    if "version" in source.tree.entries and isinstance(_section(source.tree, "model"), MapNode):
        raise _unclear(source, "this is a recipe of ftcli already", "`ftcli check` says whether it is right")
    vocabularies = {name: _vocabulary(dialects.row(name)) for name in dialects.names()}
    scores = dict.fromkeys(vocabularies, 0.0)
    for given in foreign_settings(source.tree):
        knowing = [
            name for name, words in vocabularies.items() if {given.name, given.leaf, f"{given.outermost}.*"} & words
        ]
        for name in knowing:
            scores[name] += 1 / len(knowing)
    best = max(scores.values())
    found = [name for name, score in scores.items() if score == best]
    known = ", ".join(dialects.names())
    if best == 0:
        raise _unclear(source, "not a recipe of a tool that ftcli knows", f"say whose it is with --from: {known}")
    if len(found) > 1:
        raise _unclear(source, f"it may be a recipe of {' or '.join(found)}", f"say which with --from {found[0]}")
    return found[0]


def _vocabulary(row: dialects.Dialect) -> set[str]:
    """Names of the tool's settings that are not transformers', dotted where a section decides."""
    rules: Rules = code_of(row.code)
    shared = {name for names, _ in OF_TRANSFORMERS for name in names.split()}
    own = {name for names, rule in rules.rows if (names, rule) not in OF_TRANSFORMERS for name in names.split()}
    return own | ({name for name, known in FOREIGN.items() if row.title in known.tools} - shared)


def _section(tree: MapNode, name: str) -> Tree | None:
    entry = tree.entries.get(name)
    return None if entry is None else entry.value


def _unclear(source: ForeignRecipe, message: str, help: str) -> FtcliError:
    origin = Origin(str(source.path))
    return FtcliError([*source.findings, Finding("FT164", message, origin, help)], ExitCode.RECIPE)


def _settings(source: ForeignRecipe, *, flatten: bool) -> dict[str, ForeignSetting]:
    """What the file says, by name."""
    found = {}
    for given in foreign_settings(source.tree):
        name = given.leaf if flatten else given.name
        found[name] = ForeignSetting(name, given.tree, given.origin)
    return found


def _ours(draft: Draft, name: str) -> set[str]:
    """Our keys that a setting of this name may be."""
    known = foreign("", name)
    return {f"train.{name}", str(known and known.key)} & set(draft.keys)


def _require_model(draft: Draft) -> None:
    if draft.get("model.name_or_path") is None:
        raise draft.refuse(None, f"no model is named in this recipe of {draft.tool}", "name the base model in it")


def _settle(draft: Draft) -> None:
    """What our keys need of one another."""
    _require_other_rows(draft)
    if "data.eval" in draft.values:
        return
    for key in ("eval.every_steps", "train.early_stopping", "checkpoint.keep_best"):
        drafted = draft.values.pop(key, None)
        if drafted is not None:
            help = "name held-out rows in data.eval, and set it again"
            draft.findings.append(Finding("FT160", f"`{key}` needs held-out rows", drafted.origin, help, "warning"))


def _require_other_rows(draft: Draft) -> None:
    """Held-out rows that are trained on measure nothing: parts of one split cannot be told apart here."""
    held_out = draft.get("data.eval")
    train = draft.get("data.train") or []
    if held_out and any(item in train for item in held_out):
        drafted = draft.values.pop("data.eval")
        help = "write held-out rows into a file of their own, and name it in data.eval"
        message = "the held-out rows would be those that are trained on: they are left out"
        draft.findings.append(Finding("FT161", message, drafted.origin, help, "warning"))


def _leave_out_what_is_refused(draft: Draft) -> None:
    for _ in range(_ROUNDS):
        tree = _tree(draft.values)
        _, findings = validate(tree, Origins(tree))
        refused = [key for key in draft.values if any(f"{key} " in f"{f.message} " for f in findings)]
        if not findings:
            return
        if not refused:
            raise FtcliError([*draft.findings, *findings], ExitCode.RECIPE)
        for key in refused:
            finding = next(f for f in findings if f"{key} " in f"{f.message} ")
            left_out = f"{finding.message}; it is left out"
            draft.findings.append(Finding("FT162", left_out, draft.values[key].origin, finding.help, "warning"))
            del draft.values[key]


def _tree(values: Mapping[str, DraftValue]) -> MapNode:
    """The draft as the loader would have read it."""
    top: dict[str, dict[str, MapEntry]] = {}
    nowhere = Origin("recipe")
    for key, drafted in values.items():
        section, _, name = key.partition(".")
        origin = drafted.origin or nowhere
        top.setdefault(section, {})[name] = MapEntry(origin, _as_tree(drafted.value, origin))
    entries = {section: MapEntry(nowhere, MapNode(nowhere, inner)) for section, inner in top.items()}
    return MapNode(nowhere, {"version": MapEntry(nowhere, Leaf(nowhere, 1, "1")), **entries})


def _as_tree(value: object, origin: Origin) -> Tree:
    if isinstance(value, Mapping):
        return MapNode(origin, {str(key): MapEntry(origin, _as_tree(item, origin)) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return ListNode(origin, tuple(_as_tree(item, origin) for item in value))
    assert value is None or isinstance(value, str | int | float | bool)  # what YAML holds
    return Leaf(origin, value, str(value), quoted=isinstance(value, str))
