"""Reads what notebooks and scripts say in Python: the arguments of the calls that make model, adapters and trainer.

Nothing is run. The code is parsed, and of each call only arguments that are written out are taken: numbers, texts,
switches, lists and maps of these, and names that are set to such a value once.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.secrets import mask_lines
from ftcli.config.tree import Leaf, ListNode, MapEntry, MapNode, Scalar, Tree, plain_tree
from ftcli.errors import ExitCode, Finding, FtcliError, Origin

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
        "quantization_config", "dtype", "data_collator", "formatting_func", "callbacks", "dataset", "dataset_num_proc",
        "fp16", "bf16",
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
    only running the code would tell (FT162).

    Of an argument that is given twice the last one counts; of several datasets none.

    Raises:
        FtcliError: FT163 for a notebook that is none, or a script that cannot be parsed.
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
    if name.endswith("Trainer") and name not in _CALLS:
        return {"trainer": MapEntry(origin, Leaf(origin, name, name))}
    if name == "train_on_responses_only":
        return {"train_on_completions": MapEntry(origin, Leaf(origin, True, "true"))}
    if name not in _CALLS or _is_tokenizer(call):
        return {}
    entries = {key: MapEntry(origin, Leaf(origin, value, str(value))) for key, value in _IMPLIED.get(name, {}).items()}
    if name.endswith("Trainer"):
        entries["trainer"] = MapEntry(origin, Leaf(origin, name, name))
    for key, node in _by_name(call, name).items():
        tree = _tree(node, piece.origin(node), names)
        if tree is not None:
            entries["dataset" if key == "data_files" else key] = MapEntry(tree.origin, tree)
        elif key == "ref_model":
            entries[key] = MapEntry(piece.origin(node), Leaf(piece.origin(node), "another model", "another model"))
        elif key not in _OBJECTS and not key.startswith("argument "):
            help = "nothing is run: write its value into the new recipe"
            what = f"`{key}` is computed by the code"
            findings[key] = Finding("FT162", what, piece.origin(node), help, "warning")
    return entries


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


def _tree(node: ast.expr, origin: Origin, names: Mapping[str, ast.expr], depth: int = 0) -> Tree | None:
    """A value that is written out; None for one that only running the code would give."""
    if depth > 8:
        return None
    if isinstance(node, ast.Name) and node.id in names:
        return _tree(names[node.id], origin, names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        items = [_tree(item, origin, names, depth + 1) for item in node.elts]
        return ListNode(origin, tuple(item for item in items if item is not None)) if None not in items else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _product([_tree(side, origin, names, depth + 1) for side in (node.left, node.right)], origin)
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
    return FtcliError([Finding("FT163", message, origin, help)], ExitCode.RECIPE)
