"""Recipes: such as the schema allows, at its edges and beyond them; and files that are no recipe any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

from ftcli.config.schema import RecipeSchema
from tests.fuzz import values

SCHEMA = RecipeSchema()
KEYS = tuple(SCHEMA.keys())

#: Recipes that `check` has no objection to.
TRAINS: dict[str, Any] = {
    "version": 1,
    "model": {"name_or_path": "bundled:tiny-gemma2", "dtype": "float32"},
    "lora": {"r": 4},
    "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 8}], "max_seq_len": 64},
    "train": {"max_steps": 2, "per_device_train_batch_size": 4},
}
SAMPLES: dict[str, Any] = {
    **TRAINS,
    "data": {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 8}], "max_seq_len": 64},
    "grpo": {
        "num_generations": 2,
        "max_prompt_length": 40,
        "max_completion_length": 3,
        "rewards": [{"use": "exact_match", "answer": "answer"}],
    },
}
_ON_PAIRS: dict[str, Any] = {
    method: {
        **TRAINS,
        "data": {"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 8}], "max_seq_len": 64},
        "train": {**TRAINS["train"], "method": method},
    }
    for method in ("dpo", "orpo", "simpo", "kto", "reward")
}
_TAUGHT: dict[str, Any] = {
    **TRAINS,
    "data": SAMPLES["data"],
    "train": {**TRAINS["train"], "method": "distill"},
    "distill": {"teacher": "bundled:tiny-gemma2", "max_prompt_length": 40, "max_completion_length": 3},
}
_STORED: dict[str, Any] = {
    **TRAINS,
    "train": {**TRAINS["train"], "method": "distill_offline"},
    "distill": {"teacher": "bundled:tiny-gemma2", "teacher_logprobs": "kept", "teacher_top_k": 4},
}
#: One of each way to train, by its method.
BASES: dict[str, dict[str, Any]] = {"sft": TRAINS, "grpo": SAMPLES, "distill": _TAUGHT, "distill_offline": _STORED}
BASES |= _ON_PAIRS
#: Of a model that sees.
SEES: dict[str, Any] = {
    **TRAINS,
    "model": {"name_or_path": "bundled:tiny-qwen3-vl", "init": "random", "dtype": "float32"},
    "data": {"train": [{"path": "bundled:smoke-vision-train", "max_rows": 8}], "max_seq_len": 128},
}

#: What YAML gives a meaning to.
_TOKENS = (
    ": ", ":", "- ", "-", "? ", "{", "}", "[", "]", ",", "&a ", "*a", "!!int ", "!!python/object:os.system ", "!x ", "|",
    "|-\n", ">", "'", '"', "\t", "\n", "\n\n", "\r\n", "\r", "  ", "\0", "\x07", "\x1b[2J", "\ufeff", "\u2028", "\x85", "<<: *a",
    "---\n", "...\n", "%YAML 1.1\n", "# ", " #", "\\", "\\ud800", '"\\ud800"', '"\\U00110000"', '"\\x00"', "1e999", ".nan",
    ".inf", "0x1F", "0o7", "017", "1:30", "~", "null", "yes", "2026-11-22", "1_000", "=", "9" * 30, "9" * 5000, "a" * 5000,
    "[" * 60, "{a: " * 60, "- " * 60, "a: &a [*a]\n", "extends: r.yaml\n", "extends: folder\n", "extends: missing.yaml\n",
    "password: hunter2\n", "lora:\n", "version: 2\n", "train:\n  lr: 1\n", "é", "𝔘", "\xa0",
)  # fmt: skip
_BYTES = (b"\xff", b"\xfe\xff", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00\x00", b"\x80", b"\xf4\x90\x80\x80")


def _of_schema(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows at a node, those at its edges first."""
    return st.one_of([_of_variant(variant) for variant in SCHEMA.variants(node)])


def _of_variant(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "enum" in node or "const" in node:
        return st.sampled_from(list(node.get("enum", ())) or [node["const"]])
    kind = node.get("type")
    if kind in ("integer", "number"):
        return _number(node, whole=kind == "integer")
    if kind == "array":
        return st.lists(_of_schema(node["items"]), max_size=3)
    if kind == "boolean":
        return st.booleans()
    if kind == "string":
        return values.text
    if kind == "object" and "properties" in node:
        wanted = {name: _of_schema(inner) for name, inner in node["properties"].items()}
        required = {name: wanted[name] for name in node.get("required", ())}
        return st.fixed_dictionaries(required, optional={n: s for n, s in wanted.items() if n not in required})
    rest = node.get("additionalProperties")
    if isinstance(rest, Mapping):
        return st.dictionaries(values.text, _of_schema(rest), max_size=3)
    return values.scalars


def _number(node: Mapping[str, Any], *, whole: bool) -> st.SearchStrategy[Any]:
    edges: list[Any] = []
    for name, step in (("minimum", 0), ("maximum", 0), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        if name in node:
            edges += [node[name], node[name] + step, node[name] - 1, node[name] + 1]
    drawn: st.SearchStrategy[Any] = st.sampled_from(values.NUMBERS)
    if not whole:
        drawn = drawn | st.sampled_from(values.FLOATS)
    return st.sampled_from(edges) | drawn if edges else drawn


#: Sections that decide what a step computes, and their keys that name files.
_SECTIONS = (
    "lora",
    "train",
    "grpo",
    "distill",
    "preference",
    "reward",
    "eval",
    "checkpoint",
    "quantization",
    "data",
    "model",
)
_FILES = ("data.train", "data.eval", "eval.tasks", "grpo.rewards", "model.name", "model.tokenizer", "model.rev")


def _fitting(key: str) -> st.SearchStrategy[tuple[str, Any]]:
    node = SCHEMA.at(key.replace("[]", ".0").split("."))
    return st.tuples(st.just(key), values.scalars if node is None else _of_schema(node))


def _settings_of(*sections: str) -> st.SearchStrategy[list[tuple[str, Any]]]:
    keys = [key for key in KEYS if key.split(".")[0] in sections and not key.startswith(_FILES)]
    return st.lists(st.sampled_from(keys).flatmap(_fitting), min_size=1, max_size=3)


def _changes() -> st.SearchStrategy[tuple[str, Any]]:
    """A key of the recipe, and a value for it: one that the schema allows or nearly allows, or any other."""

    def valued(key: str) -> st.SearchStrategy[tuple[str, Any]]:
        node = SCHEMA.at(key.replace("[]", ".0").split("."))
        fitting = values.scalars if node is None else _of_schema(node)
        return st.tuples(st.just(key), st.one_of(fitting, fitting, fitting, values.nested(values.scalars)))

    return st.sampled_from(KEYS).flatmap(valued)


def changed(base: Mapping[str, Any], changes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """``base`` with values at dotted keys; what stands in the way is replaced."""
    result: Any = dict(base)
    for key, value in changes:
        result = _with(result, key.replace("[]", ".[]").split("."), value)
    return dict(result)


def _with(place: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    if path[0] == "[]":
        items = place if isinstance(place, list) and place else [{}]
        return [_with(items[0], path[1:], value), *items[1:]]
    section = place if isinstance(place, dict) else {}
    return {**section, path[0]: _with(section.get(path[0]), path[1:], value)}


_bases = st.sampled_from(list(BASES.values()))

#: A recipe as a value: one of :data:`BASES` with one to three keys changed.
recipes = st.builds(changed, _bases, st.lists(_changes(), min_size=1, max_size=3))


#: What a run is asked to compute: one to three settings as the schema allows them, or nearly does.
settings = _settings_of(*_SECTIONS)

#: The same, of what methods on pairs and labels have to themselves.
preferences = _settings_of("preference", "reward", "train", "data")


def written(recipe: Mapping[str, Any]) -> bytes:
    """A recipe as the bytes of a file."""
    return yaml.safe_dump(dict(recipe), allow_unicode=True, sort_keys=False, width=10**6).encode(
        "utf-8", "surrogatepass"
    )


_pieces = (st.sampled_from(_TOKENS) | st.text(max_size=10)).map(lambda text: text.encode("utf-8", "surrogatepass"))
_edits = st.lists(
    st.tuples(
        st.sampled_from(["insert", "replace", "delete", "double", "cut", "indent"]),
        st.floats(0, 1),
        st.integers(1, 40),
        _pieces | st.sampled_from(_BYTES),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    """A file's content with a few things done to it at relative positions."""
    for kind, where, length, piece in edits:
        at = int(where * len(content))
        head, body, tail = content[:at], content[at : at + length], content[at + length :]
        content = {
            "insert": head + piece + body + tail,
            "replace": head + piece + tail,
            "delete": head + tail,
            "double": head + body * 2 + tail,
            "cut": head,
            "indent": (head + body + tail).replace(b"\n", b"\n" + piece[:4], 2),
        }[kind]
    return content


#: Files that were recipes, and files that never were.
texts = (
    st.builds(edited, _bases.map(written), _edits)
    | st.builds(edited, recipes.map(written), _edits)
    | st.lists(_pieces, max_size=12).map(b"".join)
    | st.binary(max_size=60)
)
