"""From another tool's file to the text of a recipe of ours, which passes our schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftcli.config.conversion.draft import Draft, recipe_text
from ftcli.config.conversion.rules import Rules, apply, our_keys, vocabulary
from ftcli.config.conversion.source import ForeignRecipe, ForeignSetting, foreign_settings, read
from ftcli.config.conversion.sources import listed
from ftcli.config.findings import validate
from ftcli.config.yaml import MapNode, Origins, parse_file
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

    Raises FtcliError FT101 to FT119 for files that cannot be read, FT164 where it is not clear whose recipe it is,
    FT163 for one that cannot become one of ours.
    """
    source = read(path)
    name = dialect or source.dialect or _detected(source)
    row = dialects.row(name)
    rules: Rules = code_of(row.code)
    settings: dict[str, ForeignSetting] = {}
    twice: list[Finding] = []
    for given in foreign_settings(source.tree):
        called = given.leaf if rules.flatten else given.name
        if called in settings and settings[called].value != given.value:
            help = "keep one of them"
            what = f"`{called}` stands in two sections: the second one counts"
            twice.append(Finding("FT162", what, given.origin, help, "warning"))
        settings[called] = ForeignSetting(called, given.tree, given.origin)
    draft = Draft(
        row.title,
        path,
        given={name: given for name, given in settings.items() if not given.is_blank},
        blank={name: given for name, given in settings.items() if given.is_blank},
    )
    draft.findings += [*source.findings, *twice]
    draft.left_out |= {key for name in source.computed for key in our_keys(rules, draft, name)}
    apply(rules, draft)
    if draft.get("model.name_or_path") is None:
        raise draft.refuse(None, f"no model is named in this recipe of {draft.tool}", "name the base model in it")
    _require_held_out_rows(draft)
    return Conversion(_valid_text(draft), name, tuple(dict.fromkeys(draft.findings)))


def _detected(source: ForeignRecipe) -> str:
    model = source.tree.entries.get("model")
    if "version" in source.tree.entries and model is not None and isinstance(model.value, MapNode):
        raise _unclear(source, "this is a recipe of ftcli already", "`ftcli check` says whether it is right")
    vocabularies = {name: vocabulary(code_of(row.code), row.title) for name, row in dialects.TABLE.items()}
    scores = dict.fromkeys(vocabularies, 0.0)
    for given in foreign_settings(source.tree):
        names = {given.name, given.leaf, f"{given.outermost}.*"}
        knowing = [name for name, words in vocabularies.items() if names & words]
        for name in knowing:
            scores[name] += 1 / len(knowing)
    best = max(scores.values())
    found = [name for name, score in scores.items() if score == best]
    if best == 0:
        help = f"say whose it is with --from: {', '.join(dialects.names())}"
        raise _unclear(source, "not a recipe of a tool that ftcli knows", help)
    if len(found) > 1:
        raise _unclear(source, f"it may be a recipe of {' or '.join(found)}", f"say which with --from {found[0]}")
    return found[0]


def _unclear(source: ForeignRecipe, message: str, help: str) -> FtcliError:
    origin = Origin(str(source.path))
    return FtcliError([*source.findings, Finding("FT164", message, origin, help)], ExitCode.RECIPE)


def _require_held_out_rows(draft: Draft) -> None:
    """Rows that are trained on measure nothing, and parts of one split cannot be told apart here."""
    train = listed(draft.get("data.train"))
    if any(item in train for item in listed(draft.get("data.eval"))):
        help = "write held-out rows into a file of their own, and name it in data.eval"
        message = "the held-out rows would be those that are trained on: they are left out"
        draft.leave_out("data.eval", "FT161", message, help)
    if "data.eval" in draft.values:
        return
    for key in ("eval.every_steps", "train.early_stopping", "checkpoint.keep_best"):
        if key in draft.values:
            help = "name held-out rows in data.eval, and set it again"
            draft.leave_out(key, "FT160", f"`{key}` needs held-out rows", help)


def _valid_text(draft: Draft) -> str:
    """The text of the recipe. What the schema refuses is left out, and told."""
    for _ in range(_ROUNDS):
        text = recipe_text(draft.values, draft.tool, draft.file.name, draft.keys)
        tree = parse_file(text, "recipe").tree
        _, findings = validate(tree, Origins(tree))
        if not findings:
            break
        refused = [  # what names our key, or an item in it
            (key, finding)
            for finding in findings
            for key in draft.values
            if f"{key} " in f"{finding.message} " or f"{key}." in finding.message
        ]
        if not refused:
            raise FtcliError([*draft.findings, *findings], ExitCode.RECIPE)
        for key, finding in refused:
            if key in draft.values:
                draft.leave_out(key, "FT162", f"{finding.message}; it is left out", finding.help)
    return text
