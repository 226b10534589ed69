"""Reads another tool's recipe: YAML, JSON, the words of a command line in a file, or the code of a notebook or script.

No code is run. It is parsed, and of each call that makes model, adapters or trainer only arguments that are written out
are taken: numbers, texts, switches, lists and maps of these, and names that are set to such a value once.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ftcli.config.recipe_file import lines_of, read_text
from ftcli.config.secrets import is_secret_key, is_secret_value, mask_lines
from ftcli.config.yaml import (
    Leaf,
    ListNode,
    MapEntry,
    MapNode,
    Scalar,
    Tree,
    no_text,
    parse_file,
    plain_scalar,
    plain_tree,
)
from ftcli.errors import Finding, FtcliError, Origin

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
        return self.name.rpartition(".")[2]

    @property
    def outermost(self) -> str:
        return self.name.partition(".")[0]

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def value(self) -> object:
        return plain_tree(self.tree)

    @property
    def is_blank(self) -> bool:
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
    """Reads YAML, JSON, a command line, a notebook or a script, without its secrets and what is no text.

    ``dialect`` is known of notebooks and scripts alone. Raises FtcliError FT101 to FT119 for files that cannot be read,
    as for recipes of ours, and FT163.
    """
    found = _read(path)
    taken_out: list[Finding] = []
    tree = _usable(found.tree, taken_out)
    assert isinstance(tree, MapNode)  # a map stays one
    return replace(found, tree=tree, findings=tuple(dict.fromkeys((*found.findings, *taken_out))))


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
    parsed = parse_file(text, str(path), any_key=True)
    assert isinstance(parsed.tree, MapNode)  # parse_file promises it
    return ForeignRecipe(path, parsed.tree, parsed.findings)


def _usable(tree: Tree, found: list[Finding]) -> Tree | None:
    """The tree without keys that name secrets, and values that are some, in whose place is None. Texts that no recipe
    may hold become null, so that their keys are still told: FT120, which YAML's reader has said, and that of code not.
    """
    if isinstance(tree, Leaf):
        refused = no_text(str(tree.value), tree.origin)
        found += refused
        return replace(tree, value=None) if refused else None if is_secret_value(str(tree.value)) else tree
    if isinstance(tree, ListNode):
        items = [(item, _usable(item, found)) for item in tree.items]
        kept_items = (made for item, made in items if made is item or isinstance(made, ListNode | MapNode))
        return ListNode(tree.origin, tuple(kept_items))
    kept: dict[str, MapEntry] = {}
    for name, entry in tree.entries.items():
        told = len(found)
        found += no_text(name, entry.key)
        taken_out = len(found) > told or is_secret_key(name) or is_secret_value(name)
        value = None if taken_out else _usable(entry.value, found)
        if value is not None:
            kept[name] = MapEntry(entry.key, value)
        elif len(found) == told and not (isinstance(entry.value, Leaf) and entry.value.value is None):
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
        raise _refused(Origin("command line in the file"), f"not a command line: {error}", help) from None


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
            current.append(Leaf(origin, plain_scalar(word), word))
            continue
        origin, current = _place(f"--{flag[1]}", lines, path), []
        found[flag[1].replace("-", "_")] = (origin, current)
        if flag[2] is not None:
            current.append(Leaf(origin, plain_scalar(flag[2]), flag[2]))
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


#: Calls whose arguments are settings, by the last part of the name, with the names of those that may stand without.
_CALLS: Mapping[str, str] = {
    "from_pretrained": "model_name", "get_peft_model": "model peft_config", "LoraConfig": "", "BitsAndBytesConfig": "",
    "SFTConfig": "output_dir", "TrainingArguments": "output_dir", "UnslothTrainingArguments": "output_dir",
    "SFTTrainer": "model args", "UnslothTrainer": "model args", "load_dataset": "dataset name",
    "DPOConfig": "output_dir", "ORPOConfig": "output_dir", "CPOConfig": "output_dir", "KTOConfig": "output_dir",
    "RewardConfig": "output_dir", "DPOTrainer": "model ref_model args", "KTOTrainer": "model ref_model args",
    "ORPOTrainer": "model args", "CPOTrainer": "model args", "RewardTrainer": "model args",
}  # fmt: skip
#: What arguments are called in the recipes of each tool, where that is not their own name.
_UNSLOTH = {"dataset": "hub_dataset", "name": "hub_subset", "split": "hub_split"}
_TRL = {
    "model": "model_name_or_path", "model_name": "model_name_or_path", "dataset": "dataset_name",
    "name": "dataset_config", "split": "dataset_train_split",
}  # fmt: skip
#: What `load_dataset` and others say besides, which are no settings of training.
_NO_SETTINGS = frozenset(("token", "streaming", "task_type", "device_map", "torch_dtype", "bnb_4bit_compute_dtype"))
#: Arguments that are objects: what they are is said by the calls that make them.
_OBJECTS = frozenset(
    (
        "model", "auto_model", "tokenizer", "processing_class", "train_dataset", "args", "peft_config",
        "quantization_config", "dtype", "data_collator", "callbacks", "dataset", "dataset_num_proc",
        "fp16", "bf16",
    )
)  # fmt: skip
#: What makes other rows of a dataset; a shuffle alone does not.
_OF_ROWS = frozenset(
    (
        "map", "filter", "select", "train_test_split", "shard", "skip", "take", "cast", "rename_column",
        "rename_columns", "remove_columns", "add_column", "concatenate_datasets", "interleave_datasets",
    )
)  # fmt: skip
#: What a call has where a script does not say it: PEFT's adapters, and arguments of transformers' in place of TRL's.
_IMPLIED: Mapping[str, Mapping[str, Scalar]] = {
    "LoraConfig": {"use_peft": True, "r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "TrainingArguments": {
        "learning_rate": 5e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "weight_decay": 0.0,
        "gradient_accumulation_steps": 1, "warmup_steps": 0, "optim": "adamw_torch_fused", "seed": 42,
    },
}  # fmt: skip


def is_code(path: Path) -> bool:
    """True if the file is a notebook or a script."""
    return path.suffix.lower() in (".ipynb", ".py")


def settings_of_code(text: str, path: Path) -> tuple[MapNode, str, dict[str, Finding]]:
    """The arguments of all calls that are known, by the names of the tool's recipes; the tool, unsloth or trl; and what
    only running the code would tell (FT162). Of an argument that is given twice the last one counts; of several
    datasets none.

    Raises FtcliError FT163 for a notebook that is none, or a script that cannot be parsed.
    """
    pieces = list(_pieces(text, path))
    assigned = [node for piece in pieces for node in piece.tree.body if isinstance(node, ast.Assign)]
    names = {
        node.targets[0].id: node.value
        for node in assigned
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    findings: dict[str, Finding] = {}
    made = [
        _arguments(call, piece, names, findings)
        for piece in pieces
        for call in ast.walk(piece.tree)
        if isinstance(call, ast.Call)
    ]
    entries = {name: entry for arguments in made for name, entry in arguments.items()}
    _require_one_trainer([arguments["trainer"] for arguments in made if "trainer" in arguments])
    if len({str(arguments["dataset"].value) for arguments in made if "dataset" in arguments}) > 1:
        del entries["dataset"]
    tool, ours = ("unsloth", _UNSLOTH) if "unsloth" in text else ("trl", _TRL)
    return MapNode(Origin(str(path)), {ours.get(name, name): entry for name, entry in entries.items()}), tool, findings


def _require_one_trainer(trainers: list[MapEntry]) -> None:
    """Raises FtcliError FT163 for code that trains by several methods: whose a setting is cannot be told."""
    names = dict.fromkeys(str(plain_tree(trainer.value)) for trainer in trainers)
    known = [name for name in names if name in _CALLS]
    if len(known) > 1:
        help = "keep the calls of one of them in the file"
        raise _refused(trainers[-1].key, f"the code trains several times: {', '.join(known)}", help)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A cell of a notebook, or a whole script."""

    where: str
    tree: ast.Module
    lines: list[str]

    def origin(self, node: ast.expr) -> Origin:
        """The node's place in the file."""
        line = min(node.lineno, len(self.lines))
        return Origin(self.where, line, node.col_offset + 1, self.lines[line - 1])


def _pieces(text: str, path: Path) -> Iterator[_Piece]:
    if path.suffix.lower() == ".py":
        yield _Piece(str(path), _parsed(text, path), mask_lines(text.splitlines()))
        return
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refused(Origin(str(path)), "this is not a Jupyter notebook", "name a notebook or a script") from None
    for number, source in enumerate(sources, 1):
        code = "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in source.splitlines())
        try:
            yield _Piece(f"{path}:cell {number}", _parsed(code, path), mask_lines(code.splitlines()))
        except FtcliError:
            continue  # a cell in another language, or unfinished, says nothing


def _parsed(code: str, path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in its texts
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"it cannot be parsed: {type(error).__name__}"
        raise _refused(Origin(str(path)), what, "name a script of Python 3") from None


def _arguments(
    call: ast.Call, piece: _Piece, names: Mapping[str, ast.expr], findings: dict[str, Finding]
) -> dict[str, MapEntry]:
    """The arguments of a call that is known, by name; what has to be run goes into ``findings``.

    The class of a trainer is the setting ``trainer``.
    """
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    origin = piece.origin(call)
    if name not in _CALLS or _is_tokenizer(call):
        return _other_call(call, name, piece, names, findings)
    entries = {key: _entry(origin, value) for key, value in _IMPLIED.get(name, {}).items()}
    if name.endswith("Trainer"):
        entries["trainer"] = _entry(origin, name)
    for key, node in _by_name(call, name).items():
        tree = _written_out(node, piece.origin(node), names)
        if tree is not None:
            entries["dataset" if key == "data_files" else key] = MapEntry(tree.origin, tree)
        elif key == "ref_model":
            entries[key] = _entry(piece.origin(node), "another model")
        elif key == "formatting_func":
            _tell_of_rows(f"`{key}`", piece.origin(node), findings)
        elif key not in _OBJECTS and not key.startswith("argument "):
            findings[key] = _computed(key, piece.origin(node), "write its value into the new recipe")
    return entries


def _entry(origin: Origin, value: Scalar) -> MapEntry:
    return MapEntry(origin, Leaf(origin, value, str(value)))


def _computed(key: str, origin: Origin, remedy: str) -> Finding:
    return Finding("FT162", f"`{key}` is computed by the code", origin, f"nothing is run: {remedy}", "warning")


def _other_call(
    call: ast.Call, name: str, piece: _Piece, names: Mapping[str, ast.expr], findings: dict[str, Finding]
) -> dict[str, MapEntry]:
    """Reads other calls: a trainer's class, which turns are trained, the template, and that rows are made anew."""
    origin = piece.origin(call)
    if name.endswith("Trainer"):
        return {"trainer": _entry(origin, name)}
    if name == "train_on_responses_only":
        return {"train_on_completions": MapEntry(origin, Leaf(origin, True, "true"))}
    if name in _OF_ROWS:
        _tell_of_rows(f"`{name}`", origin, findings)
    named = [word.value for word in call.keywords if word.arg == "chat_template"] or call.args[1:]
    if name == "get_chat_template" and named:  # Unsloth's; all else that it is told, it finds in the rows
        tree = _written_out(named[0], piece.origin(named[0]), names)
        if tree is not None:
            return {"chat_template": MapEntry(tree.origin, tree)}
        remedy = "name a .jinja file in data.chat_template"
        findings["chat_template"] = _computed("chat_template", piece.origin(named[0]), remedy)
    return {}


def _tell_of_rows(what: str, origin: Origin, findings: dict[str, Finding]) -> None:
    help = "nothing is run: write the rows that it makes into a file, and name that in data.train"
    findings.setdefault(f".{what}", Finding("FT162", f"{what} makes other rows by code", origin, help, "warning"))


def _by_name(call: ast.Call, name: str) -> dict[str, ast.expr]:
    """The arguments of a call that are settings, by name. Those of no known place go by their number."""
    places = dict(enumerate(_CALLS[name].split()))
    found = {places.get(at, f"argument {at + 1} of {name}"): node for at, node in enumerate(call.args)}
    found |= {word.arg or f"**{getattr(word.value, 'id', '…')}": word.value for word in call.keywords}
    if name != "load_dataset":
        found.pop("split", None)
    if "data_files" in found:
        found.pop("dataset", None)  # then it says how the files are read
    return {key: node for key, node in found.items() if key not in _NO_SETTINGS}


def _is_tokenizer(call: ast.Call) -> bool:
    """True for ``AutoTokenizer.from_pretrained`` or the like, which names the model a second time."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id.endswith(("Tokenizer", "Processor", "Config"))


def _written_out(node: ast.expr, origin: Origin, names: Mapping[str, ast.expr], depth: int = 0) -> Tree | None:
    """A value that is written out; None for one that only running the code would give."""
    if depth > 8:
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return _written_out(names[node.id], origin, names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        items = [_written_out(item, origin, names, depth + 1) for item in node.elts]
        return ListNode(origin, tuple(item for item in items if item is not None)) if None not in items else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product([_written_out(side, origin, names, depth + 1) for side in (node.left, node.right)], origin)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return Leaf(origin, value, str(value), quoted=isinstance(value, str))
    return None


def _product(sides: list[Tree | None], origin: Origin) -> Tree | None:
    """``lora_rank * 2``: of two whole numbers of the size that settings have."""
    factors = [side.value for side in sides if isinstance(side, Leaf) and type(side.value) is int]
    if len(factors) < 2 or any(abs(factor) > 10**6 for factor in factors):
        return None
    return Leaf(origin, factors[0] * factors[1], str(factors[0] * factors[1]))


def _refused(origin: Origin, message: str, help: str) -> FtcliError:
    return FtcliError.single("FT163", message, origin=origin, help=help)
