"""`ftcli schema`: JSON Schemas of what `--json` prints, made from the dataclasses that commands return.

A class that gives a JSON form of its own is any object here, and so is what only its own module could name.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any

import typer

from ftcli.cli import options
from ftcli.errors import FtcliError, Origin
from ftcli.plain import FLATTENED, LEFT_OUT, Documented, JsonObject
from ftcli.reporting import Session
from ftcli.tables import code_of

#: The results of each command.
RESULTS: Mapping[str, tuple[str, ...]] = {
    "train": ("ftcli.train.on_rows:RowsResult", "ftcli.train.lifecycle:CompleteRun"),
    "grpo": (
        "ftcli.train.on_prompts:PromptsResult",
        "ftcli.methods.grpo.train:DryRewards",
        "ftcli.train.lifecycle:CompleteRun",
    ),
    "eval": ("ftcli.pipeline.evaluation:EvaluationResult",),
    "export": ("ftcli.pipeline.exporting:Exported",),
    "chat": ("ftcli.pipeline.chatting:ChatAnswer",),
    "serve-check": ("ftcli.pipeline.serving:ServeCheck",),
    "sample": ("ftcli.pipeline.sample_rows:SampleResult",),
    "check": ("ftcli.pipeline.checking:CheckResult", "ftcli.pipeline.checking:EveryGpu"),
    "bench": ("ftcli.pipeline.bench_result:BenchResult",),
    "runs": ("ftcli.cli.commands.runs:FoundRuns",),
    "compare": ("ftcli.cli.commands.runs:ComparedRuns",),
    "sweep": ("ftcli.pipeline.sweep:SweepResult",),
    "doctor": ("ftcli.cli.commands.doctor:Examination",),
    "recipes list": (),
    "recipes show": (),
    "recipes copy": (),
    "recipes new": (),
    "recipes convert": (),
}
#: Texts that commands without a class of their own return, all there; `recipes list` has those of each recipe.
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "recipes list": ("name", "about", "path"),
    "recipes show": ("name", "path", "text"),
    "recipes copy": ("name", "path"),
    "recipes new": ("path", "recipe"),
    "recipes convert": ("dialect", "recipe"),
}
_SIMPLE: Mapping[Any, JsonObject] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},  # NaN and infinity are null
    type(None): {"type": "null"},
    Any: {},
    object: {},
}
_FINDING: JsonObject = {
    "type": "object",
    "required": ["severity", "code", "message"],
    "properties": {
        "severity": {"enum": ["error", "warning", "note"]},
        "code": {"type": "string", "pattern": "^FT[0-9]{3}$"},
        "message": {"type": "string"},
        "help": {"type": ["string", "null"]},
    },
}


def published(command: str | None = None) -> JsonObject:
    """The schema of one command's document; of all commands, by name, with None."""
    if command is None:
        return {"$schema": _DIALECT, "commands": {name: published(name) for name in RESULTS}}
    results = [schema_of(code_of(reference)) for reference in RESULTS[command]] or [_of_texts(command)]
    return {
        "$schema": _DIALECT,
        "title": f"ftcli {command} --json",
        "type": "object",
        "required": ["ok", "exit_code", "command", "findings"],
        "properties": {
            "ok": {"type": "boolean"},
            "exit_code": {"type": "integer"},
            "command": {"type": ["string", "null"]},
            "findings": {"type": "array", "items": _FINDING},
            "result": results[0] if len(results) == 1 else {"anyOf": results},
        },
    }


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _of_texts(command: str) -> JsonObject:
    names = _TEXTS[command]
    texts = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}
    if command != "recipes list":
        return texts
    recipes = {"recipes": {"type": "array", "items": texts}}
    return {"type": "object", "properties": recipes, "required": ["recipes"]}


def schema_of(kind: Any) -> JsonObject:
    """The schema of values of a type, as :func:`ftcli.plain.plain` makes JSON of them."""
    if isinstance(kind, type | type(Any)) and kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is typing.Annotated:
        return schema_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in arguments]}
    base = origin or kind
    if isinstance(base, type):
        return _of_class(base, arguments)
    return {}


def _of_class(base: type, arguments: Sequence[Any]) -> JsonObject:
    if dataclasses.is_dataclass(base):
        return {"type": "object"} if issubclass(base, Documented) else _of_fields(base)
    if issubclass(base, enum.Enum):
        return {"enum": [each.value for each in base]}
    if issubclass(base, PurePath | str):
        return {"type": "string"}
    if issubclass(base, Mapping):
        return {"type": "object", **({"additionalProperties": schema_of(arguments[1])} if len(arguments) == 2 else {})}
    if issubclass(base, Sequence | set | frozenset):
        same = len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is ...)
        return {"type": "array", **({"items": schema_of(arguments[0])} if same else {})}
    return {}


@cache
def _of_fields(kind: type) -> JsonObject:
    """A dataclass, field by field; keys that may be left out are not required."""
    hints = typing.get_type_hints(kind, globalns=dict(_names_of(inspect.getmodule(kind))))
    properties: JsonObject = {}
    required: list[str] = []
    for each in dataclasses.fields(kind):
        found = schema_of(hints[each.name])
        if each.metadata == FLATTENED:
            properties |= found.get("properties", {})
            required += found.get("required", ())
            continue
        properties[each.name] = found
        required += [] if each.metadata == LEFT_OUT else [each.name]
    return {"type": "object", "properties": properties, "required": required}


@cache
def _names_of(module: types.ModuleType | None) -> Mapping[str, Any]:
    """Names for the annotations of a module: its own, and those that it imports for types alone."""
    if module is None:
        return {}
    found = dict(vars(module))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in (line for line in node.body if isinstance(line, ast.ImportFrom) and line.module):
                for alias in line.names:
                    with contextlib.suppress(ImportError):  # what type checkers alone have
                        found[alias.asname or alias.name] = code_of(f"{line.module}:{alias.name}")
    return found


@options.command("schema", lambda result: json.dumps(result, indent=2), takes=("json", "debug"), raw=True)
def schema(
    session: Session,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A command, such as `check` or `recipes list`.")
    ] = None,
) -> JsonObject:
    """Print the JSON Schema of what a command prints with --json; of all commands without one.

    That of recipes is `ftcli recipes schema`.

    \b
    Examples:
      ftcli schema check
      ftcli schema recipes list
    """
    name = " ".join(command or ())
    if name and name not in RESULTS:
        help = f"choose from: {', '.join(RESULTS)}"
        message = f"no command `{name}` prints a document"
        raise FtcliError.single("FT151", message, origin=Origin("command line"), help=help)
    return published(name or None)
