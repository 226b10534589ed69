"""Reads another tool's recipe: YAML, JSON, or the words of a command line in a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ftcli.config import scalars
from ftcli.config.conversion.code import is_code, settings_of_code
from ftcli.config.recipe_file import lines_of, read_text
from ftcli.config.secrets import is_secret_key, is_secret_value, mask_lines
from ftcli.config.tree import Leaf, ListNode, MapEntry, MapNode, Tree, plain_tree
from ftcli.config.yaml import parse_file
from ftcli.errors import ExitCode, Finding, FtcliError, Origin

#: Maps that are one setting.
_WHOLE = (
    "optim_args", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "fsdp_config", "model_init_kwargs",
    "chat_template_kwargs", "dataset_kwargs", "dataset_mixer",
)  # fmt: skip
#: Notebooks hold pictures.
_MAX_CODE_BYTES = 4 * 2**20
#: ``trl dpo``, or its script in a folder of TRL.
_COMMAND = re.compile(r"(?:\S*/)?trl (\w+)|.* \S*trl/\S*?(\w+)\.py")
_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ForeignSetting:
    """One setting of the file: its dotted name, what it says, and where."""

    name: str
    tree: Tree
    origin: Origin

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def outermost(self) -> str:
        """The first part of the name."""
        return self.name.partition(".")[0]

    @property
    def section(self) -> str:
        """The name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def value(self) -> object:
        """The value as Python has it."""
        return plain_tree(self.tree)

    @property
    def is_blank(self) -> bool:
        """True if the key has no value."""
        return self.value in (None, "", [], {})


@dataclass(frozen=True, slots=True)
class ForeignRecipe:
    """A recipe of another tool, and the faults in it that did not stop the reading.

    ``computed`` names what only running a script would tell: it is not the tool's default.
    """

    path: Path
    tree: MapNode
    findings: tuple[Finding, ...]
    dialect: str | None = None
    computed: frozenset[str] = frozenset()


def read(path: Path) -> ForeignRecipe:
    """Reads YAML, JSON, a command line, a notebook or a script, without its secrets.

    ``dialect`` is known of notebooks and scripts alone. Raises FtcliError FT101 to FT119 for files that cannot be read,
    as for recipes of ours, and FT163.
    """
    found = _read(path)
    secrets: list[Finding] = []
    tree = _without_secrets(found.tree, secrets)
    assert isinstance(tree, MapNode)  # a map stays one
    return replace(found, tree=tree, findings=(*found.findings, *secrets))


def _read(path: Path) -> ForeignRecipe:
    if is_code(path):
        tree, dialect, computed = settings_of_code(read_text(path, most=_MAX_CODE_BYTES), path)
        return ForeignRecipe(path, tree, tuple(computed.values()), dialect, frozenset(computed))
    text = read_text(path)
    words = _words(text)
    if words is not None:
        return ForeignRecipe(path, _of_words(words, text, path), ())
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        text = text.expandtabs()  # JSON indented by tabs, which YAML refuses; inside its texts there are none
    parsed = parse_file(text, str(path))
    assert isinstance(parsed.tree, MapNode)  # parse_file promises it
    return ForeignRecipe(path, parsed.tree, parsed.findings)


def _without_secrets(tree: Tree, found: list[Finding]) -> Tree | None:
    """The tree without keys that name secrets and values that are some; None for such a value."""
    if isinstance(tree, Leaf):
        return None if is_secret_value(str(tree.value)) else tree
    if isinstance(tree, ListNode):
        items = [_without_secrets(item, found) for item in tree.items]
        return ListNode(tree.origin, tuple(item for item in items if item is not None))
    kept: dict[str, MapEntry] = {}
    for name, entry in tree.entries.items():
        value = None if is_secret_key(name) or is_secret_value(name) else _without_secrets(entry.value, found)
        if value is not None:
            kept[name] = MapEntry(entry.key, value)
        elif not (isinstance(entry.value, Leaf) and entry.value.value is None):
            help = "secrets do not belong in recipes: use `hf auth login`, `wandb login` or the environment"
            found.append(Finding("FT160", "a secret is not copied", entry.key, help, "note"))
    return MapNode(tree.origin, kept)


def foreign_settings(tree: MapNode, prefix: str = "") -> Iterator[ForeignSetting]:
    """Every setting by its dotted name; maps are entered."""
    for name, entry in tree.entries.items():
        dotted = f"{prefix}{name}"
        if isinstance(entry.value, MapNode) and entry.value.entries and name not in _WHOLE:
            yield from foreign_settings(entry.value, f"{dotted}.")
            continue
        yield ForeignSetting(dotted, entry.value, entry.key)


def _words(text: str) -> list[str] | None:
    """The words of a command line such as ``trl sft --lora_r 16 \\``; None for a file that is none."""
    joined = re.sub(r"\\\r?\n", " ", text)
    first = next((line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")), "")
    if not re.search(r"(^|\s)--[A-Za-z]", first) or re.match(r"[A-Za-z_][\w.]*:(\s|$)", first):
        return None
    try:
        return shlex.split(joined, comments=True)
    except ValueError as error:
        help = "quotes of a command line come in pairs; or write the settings as YAML"
        origin = Origin("command line in the file")
        raise FtcliError([Finding("FT163", f"not a command line: {error}", origin, help)], ExitCode.RECIPE) from None


def _of_words(words: list[str], text: str, path: Path) -> MapNode:
    """The flags and their values, and under ``command`` what `trl` is to do."""
    lines = mask_lines(lines_of(text))
    found: dict[str, tuple[Origin, list[Leaf]]] = {}
    current: list[Leaf] = []
    origin = Origin(str(path))
    for before, word in pairwise(["", *words]):
        flag, command = _FLAG.fullmatch(word), _COMMAND.fullmatch(f"{before} {word}")
        if command is not None and "command" not in found:
            found["command"] = (_place(word, lines, path), [Leaf(origin, command[1] or command[2], word)])
        if flag is None:
            current.append(Leaf(origin, scalars.resolve(word), word))
            continue
        origin, current = _place(f"--{flag[1]}", lines, path), []
        found[flag[1].replace("-", "_")] = (origin, current)
        if flag[2] is not None:
            current.append(Leaf(origin, scalars.resolve(flag[2]), flag[2]))
    entries = {name: MapEntry(where, _tree(where, leaves)) for name, (where, leaves) in found.items()}
    return MapNode(Origin(str(path)), entries)


def _tree(origin: Origin, leaves: list[Leaf]) -> Tree:
    if not leaves:
        return Leaf(origin, True, "true")
    return leaves[0] if len(leaves) == 1 else ListNode(origin, tuple(leaves))


def _place(word: str, lines: list[str], path: Path) -> Origin:
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
    for number, line in enumerate(lines, 1):
        found = pattern.search(line)
        if found is not None:
            return Origin(str(path), number, found.start() + 1, line, len(found.group()))
    return Origin(str(path))
