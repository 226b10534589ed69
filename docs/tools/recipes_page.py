"""Writes docs/recipes.md from the configuration models: ``python docs/tools/recipes_page.py [FILE]``.

Every key, its type, default and description are those of the models; a test holds that the page is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftcli.config.findings import usable_values
from ftcli.config.schema import Node, RecipeSchema
from ftcli.plan.trained import TrainedMatrices, bytes_of
from ftcli.tables import optimizers, schedules

_INTRO = """\
<!-- Generated from ftcli/config by `make docs` (python docs/tools/recipes_page.py). Edit the models, not this page. -->

# Recipes

One YAML file describes one experiment; training, evaluation and export share it. The smallest one that trains:

```yaml
version: 1
model:
  name_or_path: google/gemma-2-2b-it
lora:
  r: 16
data:
  train: [my-data.jsonl]
```

For editors, `ftcli recipes schema > recipe.schema.json` writes the JSON Schema; the recipe then begins with:

```yaml
# yaml-language-server: $schema=recipe.schema.json
```

## How a file is read

- Unknown keys, duplicate keys and wrong types are errors; for other tools' key names the error gives ours. A value that
  this version does not support is refused ([FT250](errors.md)).
- YAML 1.2: `true` and `false` are the only booleans; `1e-4` and `.5e-3` are numbers; `yes`, `1:30`, `010`, `1_000` and
  dates are text. Anchors and aliases work; tags, merge keys (`<<`), tabs and several documents are errors.
- Paths are relative to the directory in which the command runs; `bundled:NAME` ships with ftcli.
- Secrets are refused, since recipes are copied into run directories. Use `hf auth login` or `wandb login`.

## `extends`

`extends: base.yaml` builds on another recipe, whose path is relative to the file that names it. Maps merge key by key;
lists and single values replace those of the base; `lora: null` removes a section.

## `--set`

`--set section.key=value` changes one value for one command; the value is YAML, validated like the file:
`--set train.learning_rate=1e-4`, `--set lora=null`, `--set data.train=[a.jsonl,b.jsonl]`,
`--set data.train.0.max_rows=100` (list positions count from 0). `--output-dir`, `--resume` and `--max-steps` set
`run.output_dir`, `run.resume` and `train.max_steps`, and win over `--set`.

## Keys

Defaults are bold; a key without one is absent, or an empty list or map.
"""

#: An upper bound that only keeps out numbers that nobody means.
_UNBOUNDED = 10**9
#: Keys whose values have a table of their own on the page.
_TABLES = {
    "train.lr_scheduler_type": "[schedules](#learning-rate-schedules)",
    "train.optim": "[optimizers](#optimizers)",
}
#: Lists of at least so many words stand on the page once.
_LONG = 6


class Row(NamedTuple):
    """The cells of a key's row."""

    key: str
    value: str
    about: str


class Shown(NamedTuple):
    """What the page has said already: the section that explains a row, and the key that lists certain words."""

    rows: dict[Row, str]
    words: dict[tuple[str, ...], str]


def page() -> str:
    """The text of docs/recipes.md."""
    return "\n".join([_INTRO, *_keys(RecipeSchema()), *_schedules(), *_optimizers()]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page to the file that is named, docs/recipes.md when none is."""
    words = list(sys.argv[1:] if argv is None else argv)
    target = Path(words[0]) if words else Path("docs/recipes.md")
    target.write_text(page(), encoding="utf-8")
    return 0


def _keys(schema: RecipeSchema) -> Iterator[str]:
    root = schema.root
    required = set(root["required"])
    shown = Shown({}, {})
    for name, node in root["properties"].items():
        if not schema.properties(node):
            yield from _single(schema, name, node)
        else:
            yield from _section(schema, name, node, shown, required=name in required)


def _single(schema: RecipeSchema, name: str, node: Node) -> Iterator[str]:
    yield f"### `{name}`\n"
    about = str(schema.resolve(node).get("description", ""))
    yield f"{about} Must be {schema.describe(node)}. Required, here or in the recipe that this one extends.\n"


def _section(schema: RecipeSchema, name: str, node: Node, shown: Shown, *, required: bool) -> Iterator[str]:
    variant = next(part for part in schema.variants(node) if "properties" in part or part.get("type") == "array")
    yield f"### `{name}`\n"
    yield str(variant.get("description", "")) + (" Required." if required else "") + "\n"
    yield "| key | value | |"
    yield "|---|---|---|"
    yield from _rows(schema, variant, "", name, shown)
    yield ""


def _rows(schema: RecipeSchema, node: Node, prefix: str, section: str, shown: Shown) -> Iterator[str]:
    """A row for each key; keys that read as those of an earlier section share one that points there."""
    required = set(node.get("required", ()))
    alike: dict[str, list[str]] = {}
    for key, child in node["properties"].items():
        resolved = schema.resolve(child)
        dotted = f"{section}.{prefix}{key}"
        said = _with_default(_value(schema, child, dotted, shown), _default(resolved))
        value = said + (", required" if key in required else "") + _not_yet(schema, child, dotted)
        row = Row(key, _escape(value), _escape(_about(resolved)))
        earlier = shown.rows.setdefault(row, f"{section}.{prefix}") if prefix.endswith("].") else f"{section}.{prefix}"
        if earlier != f"{section}.{prefix}":
            inner = (f"`{prefix}{key}.{name}`" for name in schema.properties(child) or ())
            alike.setdefault(earlier, []).extend((f"`{prefix}{key}`", *inner))
            continue
        yield f"| `{prefix}{key}` | {row.value} | {row.about} |"
        yield from _nested(schema, child, f"{prefix}{key}", section, shown)
    for earlier, keys in alike.items():
        yield f"| {', '.join(keys)} | | As in `{earlier.removesuffix('.')}`. |"


def _with_default(value: str, default: str) -> str:
    """The values with the default in bold, in its place among words: ``**auto**, eager``, ``integer ≥ 1, **8**``."""
    word = re.compile(rf"(?<![\w-]){re.escape(default)}(?![\w-])")
    if re.match(r"[a-z]", default) and word.search(value):
        return word.sub(f"**{default}**", value, count=1)
    return f"{value}, **{default}**" if default else value


def _value(schema: RecipeSchema, node: Node, key: str, shown: Shown) -> str:
    """What a key takes: ``integer ≥ 1``, ``auto, eager``, ``list of text``."""
    said = (_TABLES.get(key) or _kind(schema, variant, key, shown) for variant in schema.variants(node))
    return " or ".join(dict.fromkeys(said)) or "any value"


def _kind(schema: RecipeSchema, node: Node, key: str, shown: Shown) -> str:
    kind = node.get("type")
    if "enum" in node:
        words = tuple(map(str, node["enum"]))
        first = shown.words.setdefault(words, key)
        usable = usable_values(key) or words
        return f"as `{first}`" if first != key and len(words) >= _LONG else ", ".join(w for w in words if w in usable)
    if "const" in node:
        return json.dumps(node["const"]).strip('"')
    if kind in ("integer", "number"):
        return f"{kind}{_range(node)}"
    if kind == "array":
        return f"list of {_value(schema, node['items'], key, shown)}"
    if kind == "object":
        return "section" if "properties" in node else "map"
    return {"boolean": "boolean", "string": "text"}.get(str(kind), schema.describe(node))


def _range(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    high = None if high == _UNBOUNDED else high
    if low is not None and high is not None:
        return f" {low:g}–{high:.10g}" if low >= 0 else f" from {low:g} to {high:.10g}"
    lower = f" ≥ {low:g}" if low is not None else f" > {above:g}" if above is not None else ""
    upper = f", ≤ {high:.10g}" if high is not None else f", < {below:.10g}" if below is not None else ""
    return lower + upper


def _not_yet(schema: RecipeSchema, node: Node, key: str) -> str:
    """Which of the words of a key this version refuses."""
    usable = usable_values(key)
    resolved = schema.resolve(node)
    words = schema.choices(resolved) or schema.choices(resolved.get("items", {}))
    missing = [word for word in words if word not in usable] if usable is not None else []
    return f" (not yet: {', '.join(missing)})" if missing else ""


def _nested(schema: RecipeSchema, node: Node, path: str, section: str, shown: Shown) -> Iterator[str]:
    """Rows for the keys of a section inside a section, or of the sections in a list."""
    for variant in schema.variants(node):
        if "properties" in variant:
            yield from _rows(schema, variant, f"{path}.", section, shown)
        elif variant.get("type") == "array":
            yield from _nested(schema, variant["items"], f"{path}[]", section, shown)


def _schedules() -> Iterator[str]:
    """The table of schedules."""
    yield "## Learning-rate schedules\n"
    yield (
        "Values of `train.lr_scheduler_type`, and their `train.lr_scheduler_kwargs`; all are transformers'. *rate* is "
        "`train.learning_rate`; steps below 1 are a fraction "
        "of all. What has no lower bound here is at least 0.\n"
    )
    yield "| schedule | | arguments |"
    yield "|---|---|---|"
    for schedule in schedules.names():
        row = schedules.row(schedule)
        needed = dict.fromkeys(row.required, " (needed)")
        needed |= {
            argument: f" (this or {other})" for argument in row.one_of for other in row.one_of if other != argument
        }
        said = (f"`{name}`{needed.get(name, '')} {_argument(kind)}" for name, kind in row.arguments.items())
        needs = " Needs `eval.every_steps`." if row.by_evaluations else ""
        yield f"| `{schedule}` | {row.about}{needs} | {'; '.join(said)} |"
    yield ""


def _argument(argument: schedules.ScheduleArgument) -> str:
    """What an argument takes: ``integer ≥ 1``, ``steps > 0``, ``number, < rate``."""
    if argument.kind == "word":
        return ", ".join(argument.words)
    said = {"whole": "integer"}.get(argument.kind, str(argument.kind))
    said += f" {'>' if argument.above else '≥'} {argument.least:g}" if argument.above or argument.least else ""
    said += f", ≤ {argument.most:g}" if argument.most is not None else ""
    return said + (", < rate" if argument.below_peak else ", ≥ rate" if argument.above_peak else "")


def _optimizers() -> Iterator[str]:
    """The table of optimizers."""
    yield "## Optimizers\n"
    yield (
        "Values of `train.optim`. The state, which the memory estimate counts, is in bytes for each trained parameter "
        "of large matrices.\n"
    )
    yield "| optimizer | | state in bytes | rounds (`train.pure_bf16`) | needs |"
    yield "|---|---|---|---|---|"
    for name in optimizers.names():
        row = optimizers.row(name)
        state = "a sum for each row and column" if row.state == "factored" else f"{_state_bytes(row):.3g}"
        needs = f"`{row.package.install}`" if row.package else ""
        yield f"| `{name}` | {row.about} | {state} | {', '.join(row.rounds)} | {needs} |"


def _state_bytes(row: optimizers.Optimizer) -> float:
    matrix = TrainedMatrices(4096, 4096, 1)
    return bytes_of(row, matrix) / matrix.elements


def _about(node: Node) -> str:
    return str(node.get("description", "")).partition("\n\n")[0].replace("\n", " ")


def _default(node: Node) -> str:
    value: Any = node.get("default")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if value is None or value == {}:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
