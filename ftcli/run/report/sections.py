"""What report.html shows besides its curves, from plain maps read from JSON. What is not in them is left out.

Each function gives the texts of one part of the page; page.html.jinja has their markup.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config import Recipe
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.metrics import MetricsLine
from ftcli.run.report.charts import number, short
from ftcli.run.status import Status
from ftcli.tables import methods
from ftcli.units import size

#: Characters of one sample's text that are shown.
SHOWN_CHARACTERS = 4000

#: Key in eval.json, label, and whether more is better (1) or worse (-1).
_SCORES = (
    ("loss", "Loss, nats per token", -1),
    ("perplexity", "Perplexity", -1),
    ("token_accuracy", "Token accuracy", 1),
)
#: Columns of the token counts after the name, by their keys in tokens.json.
_COUNTS = {
    "rows": "Rows",
    "rows_kept": "kept",
    "rows_dropped": "dropped",
    "rows_truncated": "truncated",
    "tokens_kept": "Tokens kept",
    "tokens_masked": "masked",
    "tokens_cut": "cut",
    "longest": "Longest row",
}
#: Of the manifest, what is shown in a table of its own or not at all.
_ELSEWHERE = ("kernels", "processes", "format", "data", "libraries")

Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows. ``numeric`` are the columns set to the right, ``code`` those set in a fixed width."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    code: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """One measure of the base model and of the run. ``verdict`` is ``better``, ``worse`` or empty."""

    label: str
    before: str
    after: str
    change: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Quote:
    """The beginning of a text, and how many characters are left out; ``same`` says whether it equals the reference."""

    label: str
    text: str
    left_out: int
    same: bool | None
    wide: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One held-out row as it was asked and answered."""

    task: str
    quotes: Sequence[Quote]


@dataclass(frozen=True, slots=True)
class Bar:
    """A data set's tokens as a bar: class, width in percent and number of each part."""

    name: str
    trained: str
    parts: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What became of the data: a bar for each data set, and the counts."""

    bars: Sequence[Bar]
    table: Table


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the recipe; ``changed``: it is not the default."""

    key: str
    value: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the run was made of; ``folded`` are tables by title that open on a click."""

    cards: Mapping[str, Table]
    folded: Mapping[str, Table]


def summary(recipe: JsonMap, manifest: JsonMap) -> str:
    """One line that says what was trained on what."""
    model, lora = _map(recipe, "model"), recipe.get("lora")
    parts = [str(model["name_or_path"])] if "name_or_path" in model else []
    method = _map(recipe, "quantization").get("method")
    kind = f"LoRA r={lora['r']}" if isinstance(lora, dict) and "r" in lora else "full fine-tuning"
    parts.append(f"{kind} on {method}" if method not in (None, "none") else kind)
    known = (manifest.get("command"), _map(manifest, "device").get("name"), _map(manifest, "dtype_plan").get("compute"))
    return " · ".join([*parts, *(str(value) for value in known if value)])


def key_facts(metrics: Sequence[MetricsLine], evaluation: JsonMap, status: Status | None) -> list[tuple[str, str]]:
    """The figures that people look for first, with their labels."""
    base, tuned = _map(evaluation, "base"), _map(evaluation, "run")
    facts: list[tuple[str, str]] = []
    steps = [int(row["step"]) for row in metrics]
    if steps:
        facts.append(("Steps", f"{max(steps):,}"))
    for key, label in (("reward", "Last reward"), ("loss", "Last training loss")):
        values = _values(metrics, key)
        facts += [(label, number(values[-1]))] if values else []
    if _is_number(tuned.get("loss")):
        facts.append(("Held-out loss", _before_after(base.get("loss"), tuned["loss"], number)))
    for task in _maps(tuned.get("tasks")):
        before = next((t.get("value") for t in _maps(base.get("tasks")) if t.get("name") == task.get("name")), None)
        facts.append((_words(str(task.get("name"))), _before_after(before, task.get("value"), _percent)))
    return [*facts, *_work_facts(metrics, status)]


def _work_facts(metrics: Sequence[MetricsLine], status: Status | None) -> list[tuple[str, str]]:
    facts = []
    tokens, rates, memory = (_values(metrics, key) for key in ("tokens", "tokens_per_second", "peak_memory_bytes"))
    if tokens:
        facts.append(("Tokens", short(tokens[-1])))
    if rates:
        facts.append(("Median tokens/s", f"{statistics.median(rates):,.0f}"))
    if memory:
        facts.append(("Peak memory", size(max(memory))))
    duration = _duration(status)
    return [*facts, ("Wall time", duration)] if duration else facts


def _duration(status: Status | None) -> str | None:
    """Time of all processes of the run."""
    if status is None or status.seconds is None:
        return None
    minutes, seconds = divmod(int(status.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def scores(evaluation: JsonMap) -> list[Score]:
    """Base model against the run, and whether a change is an improvement."""
    base, tuned = _map(evaluation, "base"), _map(evaluation, "run")
    found = [_score(label, base.get(key), tuned.get(key), sign, number) for key, label, sign in _SCORES]
    names = dict.fromkeys(str(t.get("name")) for side in (base, tuned) for t in _maps(side.get("tasks")))
    for name in names:
        before, after = (
            next((t for t in _maps(side.get("tasks")) if t.get("name") == name), {}) for side in (base, tuned)
        )
        count = after.get("count", before.get("count"))
        label = f"{_words(name)}, {count:,} rows" if isinstance(count, int) else _words(name)
        found.append(_score(label, before.get("value"), after.get("value"), 1, _percent))
    return [score for score in found if score is not None]


def _score(label: str, before: Any, after: Any, sign: int, show: Show) -> Score | None:
    shown, shown_after = (show(value) if _is_number(value) else "–" for value in (before, after))
    if not (_is_number(before) and _is_number(after)):
        return Score(label, shown, shown_after, "–", "") if _is_number(before) or _is_number(after) else None
    difference = after - before
    verdict = "better" if difference * sign > 0 else "worse" if difference * sign < 0 else ""
    prefix = "+" if difference > 0 else "−" if difference < 0 else ""
    change = f"{100 * abs(difference):.1f} points" if show is _percent else show(abs(difference))
    return Score(label, shown, shown_after, f"{prefix}{change}", verdict)


def samples(rows: object) -> list[ShownRow]:
    """What was asked, expected and answered before and after."""
    return [_sample(row) for row in _maps(rows)]


def _sample(row: JsonMap) -> ShownRow:
    labels = {"prompt": "Prompt", "reference": "Reference", "before": "Before training", "after": "After training"}
    reference = row.get("reference")
    quotes = []
    for key, label in labels.items():
        if row.get(key) is None:
            continue
        text, same = str(row[key]), None
        if key in ("before", "after") and isinstance(reference, str):
            same = text.strip() == reference.strip()
        left_out = max(0, len(text) - SHOWN_CHARACTERS)
        quotes.append(Quote(label, text[:SHOWN_CHARACTERS], left_out, same, wide=key == "prompt"))
    return ShownRow(_words(str(row["task"])) if row.get("task") else "", quotes)


def tokens(counts: JsonMap) -> Tokens | None:
    """Tokens trained, masked and cut of each data set."""
    datasets = _maps(counts.get("datasets"))
    if not datasets:
        return None
    rows = [[f"{d.get('name')} ({d.get('split')})", *(_count(d.get(c)) for c in _COUNTS)] for d in datasets]
    table = Table(["Data set", *_COUNTS.values()], rows, numeric=range(1, 1 + len(_COUNTS)))
    return Tokens([_bar(dataset) for dataset in datasets], table)


def _bar(dataset: JsonMap) -> Bar:
    kept, masked, cut = (float(dataset.get(f"tokens_{k}") or 0) for k in ("kept", "masked", "cut"))
    total = max(1.0, kept + cut)
    shares = (("s0", kept - masked), ("masked", masked), ("cut", cut))
    parts = [(kind, f"{100 * value / total:.2f}", f"{value:,.0f}") for kind, value in shares if value > 0]
    return Bar(str(dataset.get("name", "")), f"{(kept - masked) / total:.1%}", parts)


def settings(recipe: JsonMap) -> dict[str, list[Setting]]:
    """Every setting by section."""
    defaults = _defaults()
    return {
        str(section): [
            Setting(str(key), _plain(value), _plain(value) != _plain(_map(defaults, section).get(key)))
            for key, value in values.items()
        ]
        for section, values in recipe.items()
        if isinstance(values, dict)
    }


def _defaults() -> JsonObject:
    """The recipe that says nothing, as plain values: the defaults of every section."""
    sections: dict[str, JsonObject] = {row.section: {} for row in methods.TABLE.values() if row.section is not None}
    nothing = {"version": 1, "model": {"name_or_path": "-"}, "lora": {}, **sections}
    return Recipe.model_validate(nothing).model_dump(mode="json")


def provenance(manifest: JsonMap) -> Provenance | None:
    """Device, versions, plan, seeds, data; the layers' kernels folded away."""
    if not manifest:
        return None
    shown = {key: value for key, value in manifest.items() if key not in _ELSEWHERE}
    cards = {"run": Table([], [(key, _plain(value)) for key, value in _flat(shown)])}
    libraries = _map(manifest, "libraries")
    if libraries:
        cards["libraries"] = Table([], [(key, str(value)) for key, value in libraries.items()])
    folded = {}
    data, kernels, processes = (_maps(manifest.get(key)) for key in ("data", "kernels", "processes"))
    if data:
        rows = [(str(d.get("name")), _count(d.get("bytes")), str(d.get("sha256"))) for d in data]
        folded["Data fingerprints"] = Table(["File", "Bytes", "SHA-256"], rows, numeric=(1,), code=(2,))
    if kernels:
        columns = list(dict.fromkeys(str(key) for layer in kernels for key in layer))
        body = [[_plain(layer.get(column)) for column in columns] for layer in kernels]
        folded[f"Kernels, {len(kernels):,} layers"] = Table(columns, body)
    if len(processes) > 1:
        folded["Processes of this run"] = _processes(processes)
    return Provenance(cards, folded)


def _processes(processes: Sequence[JsonMap]) -> Table:
    facts = ((p.get("started"), p.get("from_step"), _map(p, "device").get("name"), p.get("ftcli")) for p in processes)
    return Table(["Started", "From step", "Device", "ftcli"], [[str(fact) for fact in row] for row in facts])


def _flat(value: JsonMap, prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        pairs += _flat(item, name) if isinstance(item, dict) and item else [(name, item)]
    return pairs


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value) or "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items() if item not in (None, {})) or "–"
    return str(value)


def _map(value: JsonMap, key: str) -> JsonObject:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _maps(value: object) -> list[JsonObject]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _values(metrics: Sequence[MetricsLine], key: str) -> list[float]:
    return [float(row[key]) for row in metrics if _is_number(row.get(key))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _before_after(before: Any, after: Any, show: Show) -> str:
    return " → ".join(show(value) for value in (before, after) if _is_number(value)) or "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _words(name: str) -> str:
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]
