"""The figures and tables of the report: results of base model and run, settings, data in tokens, provenance.

Settings that were changed come first; what was not measured is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config.grid import PLACES
from ftcli.config.recipe import Recipe
from ftcli.plain import JsonMap, JsonObject, is_number, map_in, maps, number_or_none, numbers_of
from ftcli.run.metrics import MetricsLine
from ftcli.run.recipe_changes import leaves
from ftcli.run.report.charts import Show, as_text, count, or_dash, short
from ftcli.run.status import Status
from ftcli.tables import code_of, methods, quantizations
from ftcli.tables.methods import Method
from ftcli.units import duration, gib, is_share, number, percent

#: Key in eval.json, label, whether more is better (1) or worse (-1), and how it is written.
_SCORES: tuple[tuple[str, str, int, Show], ...] = (
    ("loss", "Loss, nats per token", -1, number),
    ("perplexity", "Perplexity", -1, number),
    ("token_accuracy", "Token accuracy", 1, percent),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure with its label; ``note`` is smaller, below it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """One measure of the base model and of the run. ``verdict`` is ``better``, ``worse`` or empty."""

    label: str
    before: str
    after: str
    change: str
    verdict: str


def summary_line(recipe: JsonMap, manifest: JsonMap) -> str:
    """One line that says what was trained on what."""
    model, lora = map_in(recipe, "model"), recipe.get("lora")
    parts = [str(model["name_or_path"])] if "name_or_path" in model else []
    method = map_in(recipe, "quantization").get("method")
    kind = f"LoRA r={lora['r']}" if isinstance(lora, dict) and "r" in lora else "full fine-tuning"
    parts.append(f"{kind} on {method}" if quantizations.is_stored(method) else kind)
    device, plan = map_in(manifest, "device"), map_in(manifest, "dtype_plan")
    known = (manifest.get("command"), device.get("name"), plan.get("compute"))
    return " · ".join([*parts, *(str(value) for value in known if value)])


def key_facts(metrics: Sequence[MetricsLine], evaluation: JsonMap, status: Status | None) -> list[Fact]:
    """The figures that people look for first."""
    base, tuned = map_in(evaluation, "base"), map_in(evaluation, "run")
    rewards = numbers_of(metrics, "reward")
    facts = []
    title, values = ("Last reward", rewards) if rewards else ("Last training loss", numbers_of(metrics, "loss"))
    if values:
        facts.append(Fact(title, number(values[-1]), f"first {number(values[0])}"))
    if is_number(tuned.get("loss")):
        facts.append(Fact("Held-out loss", number(tuned["loss"]), _of_base(base.get("loss"), number)))
    for task in maps(tuned.get("tasks")):
        before = next((t.get("value") for t in maps(base.get("tasks")) if t.get("name") == task.get("name")), None)
        if is_number(task.get("value")):
            show = _show_of(before, task["value"])
            facts.append(Fact(str(task.get("name")), show(task["value"]), _of_base(before, show)))
    return [*facts, *_work_facts(metrics, status)]


def _of_base(value: Any, show: Show) -> str:
    return f"base model {show(value)}" if is_number(value) else ""


def _work_facts(metrics: Sequence[MetricsLine], status: Status | None) -> list[Fact]:
    facts = []
    steps = [int(row["step"]) for row in metrics]
    tokens, rates, memory, epochs = (
        numbers_of(metrics, key) for key in ("tokens", "tokens_per_second", "peak_memory_bytes", "epoch")
    )
    if steps:
        facts.append(Fact("Steps", f"{max(steps):,}", f"epoch {epochs[-1]:.2f}" if epochs else ""))
    if tokens:
        facts.append(Fact("Tokens trained", short(tokens[-1])))
    if rates:
        facts.append(Fact("Median tokens/s", f"{statistics.median(rates):,.0f}"))
    if memory:
        facts.append(Fact("Peak memory", f"{gib(max(memory))} GiB"))
    seconds = None if status is None else status.seconds
    return facts if seconds is None else [*facts, Fact("Wall time", duration(seconds))]


def score_rows(evaluation: JsonMap, method: Method | None = None) -> list[Score]:
    """Base model against the run, and whether a change is an improvement.

    ``method``: what the run trained by, where that measures something beside the loss.
    """
    base, tuned = map_in(evaluation, "base"), map_in(evaluation, "run")
    of_units = method is not None and method.scores is not None  # its loss is no mean over tokens
    labels = {key: "Loss" if of_units and key == "loss" else label for key, label, _, _ in _SCORES}
    found = [_score(labels[key], base.get(key), tuned.get(key), sign, show) for key, _, sign, show in _SCORES]
    of_base, of_run = map_in(base, "measures"), map_in(tuned, "measures")
    for key, label, more, share in () if method is None or method.scores is None else code_of(method.scores):
        show: Show = percent if share else number
        found.append(_score(label, of_base.get(key), of_run.get(key), 1 if more else -1, show))
    names = dict.fromkeys(str(t.get("name")) for side in (base, tuned) for t in maps(side.get("tasks")))
    for name in names:
        before, after = (
            next((t for t in maps(side.get("tasks")) if t.get("name") == name), {}) for side in (base, tuned)
        )
        rows = after.get("count", before.get("count"))
        label = f"{name}, {count(rows)} rows" if isinstance(rows, int) else name
        cut = [side["cut"] for side in (before, after) if isinstance(side.get("cut"), int)]
        if any(cut):
            label += f"; answers cut off: {', then '.join(count(each) for each in cut)}"
        values = before.get("value"), after.get("value")
        found.append(_score(label, *values, 1, _show_of(*values)))
    found += _harness(map_in(base, "lm_eval"), map_in(tuned, "lm_eval"))
    return [score for score in found if score is not None]


def _show_of(*scores: Any) -> Show:
    return percent if is_share(*filter(is_number, scores)) else number


def _harness(base: JsonMap, tuned: JsonMap) -> list[Score | None]:
    """Scores of lm-evaluation-harness, without a verdict: its metrics differ in whether more is better."""
    pairs = dict.fromkeys((task, key) for side in (base, tuned) for task in side for key in map_in(side, task))
    return [
        _score(f"{task}, {key}", map_in(base, task).get(key), map_in(tuned, task).get(key), 0, number)
        for task, key in pairs
        if "stderr" not in key
    ]


def _score(label: str, before: Any, after: Any, sign: int, show: Show) -> Score | None:
    if not (is_number(before) or is_number(after)):
        return None
    texts = or_dash(before, show), or_dash(after, show)
    if not (is_number(before) and is_number(after)):
        return Score(label, *texts, "–", "")
    difference = after - before
    verdict = "better" if difference * sign > 0 else "worse" if difference * sign < 0 else ""
    prefix = "+" if difference > 0 else "−" if difference < 0 else ""
    change = f"{100 * abs(difference):.1f} points" if show is percent else show(abs(difference))
    return Score(label, *texts, f"{prefix}{change}", verdict)


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
_ELSEWHERE = ("kernels", "processes", "format", "data", "libraries", "inputs")
#: Of the inputs' identity; the digests of its blocks are for programs.
_SHOWN_INPUTS = ("tokens_sha256", "commit")


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows. ``numeric`` are the columns set to the right, ``code`` those set in a fixed width."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    code: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A dataset's tokens as a bar: class, width in percent and number of each part."""

    name: str
    trained: str
    parts: Sequence[tuple[str, str, str]]

    @property
    def label(self) -> str:
        """The bar in words."""
        names = {"s0": "trained"}
        return f"{self.name}: {', '.join(f'{number} {names.get(kind, kind)}' for kind, _, number in self.parts)}"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of the data: a bar for each dataset, and the counts."""

    bars: Sequence[Bar]
    table: Table


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the recipe with its value, and the default's."""

    key: str
    value: str
    default: str

    @property
    def changed(self) -> bool:
        return self.value != self.default


def tokens(counts: JsonMap) -> TokenCounts | None:
    """Tokens trained, masked and cut of each dataset."""
    datasets = maps(counts.get("datasets"))
    if not datasets:
        return None
    rows = [[f"{d.get('name')} ({d.get('split')})", *(count(d.get(c)) for c in _COUNTS)] for d in datasets]
    table = Table(["Dataset", *_COUNTS.values()], rows, numeric=range(1, 1 + len(_COUNTS)))
    return TokenCounts([_bar(dataset) for dataset in datasets], table)


def _bar(dataset: JsonMap) -> Bar:
    kept, masked, cut = (number_or_none(dataset.get(f"tokens_{k}")) or 0.0 for k in ("kept", "masked", "cut"))
    total = max(1.0, kept + cut)
    shares = (("s0", kept - masked), ("masked", masked), ("cut", cut))
    parts = [(kind, f"{100 * value / total:.2f}", f"{value:,.0f}") for kind, value in shares if value > 0]
    return Bar(str(dataset.get("name", "")), f"{(kept - masked) / total:.1%}", parts)


def settings_by_section(recipe: JsonMap) -> dict[str, list[Setting]]:
    # The recipe that says nothing has the defaults of every section.
    sections: dict[str, JsonObject] = {row.section: {} for row in methods.TABLE.values() if row.section is not None}
    nothing = {"version": 1, "model": {"name_or_path": "-"}, "lora": {}, **sections}
    defaults = Recipe.model_validate(nothing).model_dump(mode="json")
    return {
        str(section): [
            Setting(key, as_text(value), as_text(known.get(key)))
            for known in [leaves(map_in(defaults, section))]
            for key, value in leaves(values).items()
        ]
        for section, values in recipe.items()
        if isinstance(values, dict)
    }


def changed(every: Mapping[str, Sequence[Setting]]) -> list[Setting]:
    """The settings that are not the default, by their full names; what the run is called is none of them."""
    found = [Setting(f"{section}.{one.key}", one.value, one.default) for section, rows in every.items() for one in rows]
    return [one for one in found if one.changed and one.key not in PLACES]


def provenance(manifest: JsonMap) -> dict[str, Table]:
    """Device, versions, plan, seeds, data, the layers' kernels: tables by title."""
    if not manifest:
        return {}
    shown = {key: value for key, value in manifest.items() if key not in _ELSEWHERE}
    shown |= {key: value for key, value in map_in(manifest, "inputs").items() if key in _SHOWN_INPUTS and value}
    tables = {"Device, dtypes and seeds": Table([], [(key, as_text(value)) for key, value in leaves(shown).items()])}
    libraries = map_in(manifest, "libraries")
    if libraries:
        tables["Libraries"] = Table([], [(key, str(value)) for key, value in libraries.items()])
    data, kernels, processes = (maps(manifest.get(key)) for key in ("data", "kernels", "processes"))
    if data:
        rows = [(str(d.get("name")), count(d.get("bytes")), str(d.get("sha256"))) for d in data]
        tables["Data fingerprints"] = Table(["File", "Bytes", "SHA-256"], rows, numeric=(1,), code=(2,))
    if kernels:
        columns = list(dict.fromkeys(str(key) for layer in kernels for key in layer))
        body = [[as_text(layer.get(column)) for column in columns] for layer in kernels]
        tables[f"Kernels, {len(kernels):,} layer{'s' * (len(kernels) > 1)}"] = Table(columns, body)
    if len(processes) > 1:
        tables["Processes of this run"] = _processes(processes)
    return tables


def _processes(processes: Sequence[JsonMap]) -> Table:
    facts = ((p.get("started"), p.get("from_step"), map_in(p, "device").get("name"), p.get("ftcli")) for p in processes)
    return Table(["Started", "From step", "Device", "ftcli"], [[str(fact) for fact in row] for row in facts])
