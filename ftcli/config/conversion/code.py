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
from ftcli.config.tree import Leaf, ListNode, MapEntry, MapNode, Tree
from ftcli.errors import ExitCode, Finding, FtcliError, Origin

#: Calls whose arguments are settings, by the last part of the name, with the name of the first positional one.
_CALLS: Mapping[str, str | None] = {
    "from_pretrained": "model_name",
    "get_peft_model": None,
    "LoraConfig": None,
    "BitsAndBytesConfig": None,
    "SFTConfig": None,
    "TrainingArguments": None,
    "UnslothTrainingArguments": None,
    "SFTTrainer": None,
    "UnslothTrainer": None,
    "load_dataset": "dataset",
}
#: What arguments are called in the recipes of each tool, where that is not their own name.
_UNSLOTH = {"dataset": "hub_dataset", "split": "hub_split"}
_TRL = {
    "model_name": "model_name_or_path",
    "dataset": "dataset_name",
    "split": "dataset_train_split",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
#: Calls of trainers that are not converted.
_OTHER_TRAINERS = (
    "DPOTrainer",
    "GRPOTrainer",
    "ORPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "CPOTrainer",
    "PPOTrainer",
)
#: What `load_dataset` and others say besides, which are no settings of training.
_NO_SETTINGS = frozenset(
    ("name", "token", "streaming", "task_type", "device_map", "torch_dtype", "bnb_4bit_compute_dtype")
)


#: Arguments that are objects: what they are is said by the calls that make them.
_OBJECTS = frozenset(
    (
        "model", "tokenizer", "processing_class", "train_dataset", "args", "peft_config", "quantization_config",
        "dtype", "data_collator", "formatting_func", "callbacks", "dataset", "dataset_num_proc", "fp16", "bf16",
    )
)  # fmt: skip
#: What a call has where a script does not say it: PEFT's adapters, and arguments of transformers' in place of TRL's.
_IMPLIED: Mapping[str, Mapping[str, bool | int | float | str]] = {
    "LoraConfig": {"use_peft": True, "r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "TrainingArguments": {
        "learning_rate": 5e-5, "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "weight_decay": 0.0,
        "gradient_accumulation_steps": 1, "warmup_steps": 0, "optim": "adamw_torch_fused", "seed": 42,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Piece:
    """A cell of a notebook, or a whole script."""

    where: str
    tree: ast.Module
    lines: list[str]


def is_code(path: Path) -> bool:
    """Whether the file is a notebook or a script."""
    return path.suffix.lower() in (".ipynb", ".py")


def settings_of_code(text: str, path: Path) -> tuple[MapNode, str, dict[str, Finding]]:
    """The arguments of all calls that are known, by the names of the tool's recipes; the tool, unsloth or trl; and what
    only running the code would tell (FT162).

    Of an argument that is given twice the last one counts; of several datasets none.

    Raises:
        FtcliError: FT163 for a notebook that is none, a script that cannot be parsed, or another method's trainer.
    """
    pieces = list(_pieces(text, path))
    names: dict[str, ast.expr] = {}
    for piece in pieces:
        for node in piece.tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
    made: list[dict[str, MapEntry]] = []
    findings: dict[str, Finding] = {}
    for piece in pieces:
        calls = [node for node in ast.walk(piece.tree) if isinstance(node, ast.Call)]
        made += [_arguments(call, piece, names, findings) for call in calls]
    entries = {name: entry for arguments in made for name, entry in arguments.items()}
    if len({str(arguments["dataset"].value) for arguments in made if "dataset" in arguments}) > 1:
        del entries["dataset"]
    unsloth = "unsloth" in text
    ours = _UNSLOTH if unsloth else _TRL
    tree = MapNode(Origin(str(path)), {ours.get(name, name): entry for name, entry in entries.items()})
    return tree, "unsloth" if unsloth else "trl", findings


def _pieces(text: str, path: Path) -> Iterator[_Piece]:
    if path.suffix.lower() == ".py":
        yield _Piece(str(path), _parsed(text, path), mask_lines(text.splitlines()))
        return
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _refused(path, "this is not a Jupyter notebook", "name a notebook, a script or a recipe") from None
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
        raise _refused(path, f"it cannot be parsed: {type(error).__name__}", "name a script of Python 3") from None


def _arguments(
    call: ast.Call, piece: _Piece, names: Mapping[str, ast.expr], findings: dict[str, Finding]
) -> dict[str, MapEntry]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    origin = _origin(call, piece)
    if name in _OTHER_TRAINERS:
        help = "supervised fine-tuning is converted; for rewards begin with `ftcli recipes copy smoke-grpo`"
        finding = Finding("FT163", f"`{name}` is not converted", origin, help)
        raise FtcliError([finding], ExitCode.RECIPE)
    if name == "train_on_responses_only":
        return {"train_on_completions": MapEntry(origin, Leaf(origin, True, "true"))}
    if name not in _CALLS or _is_tokenizer(call):
        return {}
    found = {word.arg: word.value for word in call.keywords if word.arg is not None and word.arg not in _NO_SETTINGS}
    if name != "load_dataset":
        found.pop("split", None)
    first = _CALLS[name]
    if first is not None and call.args:
        found = {first: call.args[0], **found}
    if "data_files" in found:
        found["dataset"] = found.pop("data_files")
    trees = {key: _tree(value, _origin(value, piece), names) for key, value in found.items()}
    for key, tree in trees.items():
        if tree is None and key not in _OBJECTS:
            findings[key] = _computed(key, _origin(found[key], piece))
    entries = {key: MapEntry(tree.origin, tree) for key, tree in trees.items() if tree is not None}
    said = _IMPLIED.get(name, {})
    return {key: MapEntry(origin, Leaf(origin, value, str(value))) for key, value in said.items()} | entries


def _computed(name: str, origin: Origin) -> Finding:
    help = "nothing is run: write its value into the new recipe"
    return Finding("FT162", f"`{name}` is computed by the code", origin, help, "warning")


def _is_tokenizer(call: ast.Call) -> bool:
    """Whether it is ``AutoTokenizer.from_pretrained`` or the like, which names the model a second time."""
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
        return _product(_tree(node.left, origin, names, depth + 1), _tree(node.right, origin, names, depth + 1), origin)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return Leaf(origin, value, str(value), quoted=isinstance(value, str))
    return None


def _product(left: Tree | None, right: Tree | None, origin: Origin) -> Tree | None:
    """``lora_rank * 2``: of two whole numbers of the size that settings have."""
    factors = [side.value for side in (left, right) if isinstance(side, Leaf) and type(side.value) is int]
    if len(factors) < 2 or any(abs(factor) > 10**6 for factor in factors):
        return None
    return Leaf(origin, factors[0] * factors[1], str(factors[0] * factors[1]))


def _origin(node: ast.expr, piece: _Piece) -> Origin:
    line = min(node.lineno, len(piece.lines))
    return Origin(piece.where, line, node.col_offset + 1, piece.lines[line - 1])


def _refused(path: Path, message: str, help: str) -> FtcliError:
    return FtcliError([Finding("FT163", message, Origin(str(path)), help)], ExitCode.RECIPE)
