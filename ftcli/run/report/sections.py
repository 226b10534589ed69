"""The parts of report.html besides its curves, from plain maps read from JSON; what is not there is left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ftcli.config import Recipe
from ftcli.run.report.charts import number, short
from ftcli.run.report.html import Html, join, table, tag
from ftcli.run.status import Status
from ftcli.units import size

#: Characters of one sample's text that are shown.
SHOWN_CHARACTERS = 4000

#: Key in eval.json, label, and whether more is better (1) or worse (-1).
_SCORES = (
    ("loss", "Loss, nats per token", -1),
    ("perplexity", "Perplexity", -1),
    ("token_accuracy", "Token accuracy", 1),
)
#: Columns of the token ledger after the name, by their keys in tokens.json.
_LEDGER = {
    "rows": "Rows",
    "rows_kept": "kept",
    "rows_dropped": "dropped",
    "rows_truncated": "truncated",
    "tokens_kept": "Tokens kept",
    "tokens_masked": "masked",
    "tokens_cut": "cut",
    "longest": "Longest row",
}


def heading(name: str, recipe: Mapping[str, Any], status: Status | None, manifest: Mapping[str, Any]) -> Html:
    """Name, state, and one line that says what was trained on what."""
    state = "unknown" if status is None else status.state
    title = tag("h1", name, " ", tag("span", state, class_=f"badge {state}"))
    return tag("header", title, tag("p", " · ".join(_summary(recipe, manifest)), class_="soft"))


def _summary(recipe: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    model, lora = _map(recipe, "model"), recipe.get("lora")
    parts = [str(model["name_or_path"])] if "name_or_path" in model else []
    method = _map(recipe, "quantization").get("method")
    kind = f"LoRA r={lora['r']}" if isinstance(lora, dict) and "r" in lora else "full fine-tuning"
    parts.append(f"{kind} on {method}" if method not in (None, "none") else kind)
    if manifest.get("command"):
        parts.append(str(manifest["command"]))
    device = _map(manifest, "device")
    if device.get("name"):
        parts.append(str(device["name"]))
    compute = _map(manifest, "dtype_plan").get("compute")
    return [*parts, str(compute)] if compute else parts


def key_facts(metrics: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any], status: Status | None) -> Html:
    """The figures people look for first."""
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
    facts += _work_facts(metrics, status)
    return tag("div", *(tag("div", tag("span", k), tag("b", v), class_="fact") for k, v in facts), class_="facts")


def _work_facts(metrics: Sequence[Mapping[str, Any]], status: Status | None) -> list[tuple[str, str]]:
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
    """Time of the last process: earlier ones of a resumed run have their own lines in the manifest."""
    if status is None or status.ended is None:
        return None
    try:
        elapsed = datetime.fromisoformat(status.ended) - datetime.fromisoformat(status.started)
    except ValueError:
        return None
    minutes, seconds = divmod(max(0, int(elapsed.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def evaluation_table(evaluation: Mapping[str, Any]) -> Html | None:
    """Base model against the run, with the change coloured by whether it is an improvement."""
    base, tuned = _map(evaluation, "base"), _map(evaluation, "run")
    rows = [(label, base.get(key), tuned.get(key), sign, number) for key, label, sign in _SCORES]
    names = dict.fromkeys(str(t.get("name")) for side in (base, tuned) for t in _maps(side.get("tasks")))
    for name in names:
        before, after = (
            next((t for t in _maps(side.get("tasks")) if t.get("name") == name), {}) for side in (base, tuned)
        )
        count = after.get("count", before.get("count"))
        label = f"{_words(name)}, {count:,} rows" if isinstance(count, int) else _words(name)
        rows.append((label, before.get("value"), after.get("value"), 1, _percent))
    shown = [row for row in rows if _is_number(row[1]) or _is_number(row[2])]
    if not shown:
        return None
    body = []
    for label, before_value, after_value, sign, show in shown:
        texts = [_shown(value, show) for value in (before_value, after_value)]
        body.append([label, *texts, _change(before_value, after_value, sign, show)])
    return tag("div", table(["", "Base model", "This run", "Change"], body, numeric=(1, 2, 3)), class_="card")


def _change(before: Any, after: Any, sign: int, show: Any) -> Html:
    if not (_is_number(before) and _is_number(after)):
        return tag("span", "–")
    difference = after - before
    kind = "better" if difference * sign > 0 else "worse" if difference * sign < 0 else None
    prefix = "+" if difference > 0 else "−" if difference < 0 else ""
    size = f"{100 * abs(difference):.1f} points" if show is _percent else show(abs(difference))
    return tag("span", f"{prefix}{size}", class_=kind)


def samples(rows: object) -> Html | None:
    """What was asked, expected and answered before and after."""
    cards = [_sample(row) for row in _maps(rows)]
    return join(cards) if cards else None


def _sample(row: Mapping[str, Any]) -> Html:
    columns = [("prompt", "Prompt", "wide"), ("reference", "Reference", None)]
    columns += [("before", "Before training", None), ("after", "After training", None)]
    parts = []
    for key, label, class_ in columns:
        if row.get(key) is None:
            continue
        text, verdict = str(row[key]), ""
        if key in ("before", "after") and isinstance(row.get("reference"), str):
            same = text.strip() == row["reference"].strip()
            verdict = tag("span", " ✓ as the reference" if same else " ✗ differs", class_="better" if same else "soft")
        parts.append(tag("div", tag("h3", label, verdict), _quoted(text), class_=class_))
    task = tag("p", _words(str(row["task"])), class_="soft") if row.get("task") else ""
    return tag("article", task, tag("div", *parts, class_="sample"), class_="card")


def _quoted(text: str) -> Html:
    if not text:
        return tag("p", "(empty)", class_="empty")
    cut = len(text) - SHOWN_CHARACTERS
    more = tag("p", f"… and {cut:,} more characters", class_="soft") if cut > 0 else ""
    return join([tag("pre", text[:SHOWN_CHARACTERS]), more])


def token_ledger(ledger: Mapping[str, Any]) -> Html | None:
    """A bar for each data set: tokens trained, masked and cut; then the counts."""
    datasets = _maps(ledger.get("datasets"))
    if not datasets:
        return None
    colours = (("trained", "s0"), ("masked", "masked"), ("cut", "cut"))
    key = tag("p", *(tag("span", tag("i", class_=c), text) for text, c in colours), class_="legend soft")
    rows = [[f"{d.get('name')} ({d.get('split')})", *(_count(d.get(c)) for c in _LEDGER)] for d in datasets]
    head = ["Data set", *_LEDGER.values()]
    body = [key, *(_ledger_bar(d) for d in datasets), table(head, rows, numeric=range(1, 9))]
    return tag("div", *body, class_="card")


def _ledger_bar(dataset: Mapping[str, Any]) -> Html:
    kept, masked, cut = (float(dataset.get(f"tokens_{k}") or 0) for k in ("kept", "masked", "cut"))
    total = max(1.0, kept + cut)
    shares = (("s0", kept - masked), ("masked", masked), ("cut", cut))
    bar = [tag("span", class_=c, style=f"width:{100 * v / total:.2f}%", title=f"{v:,.0f}") for c, v in shares if v > 0]
    caption = [
        tag("span", dataset.get("name", "")),
        tag("span", f"{(kept - masked) / total:.1%} of all tokens trained", class_="soft"),
    ]
    return tag("div", tag("p", *caption), tag("div", *bar, class_="bar"), class_="ledger")


def settings(recipe: Mapping[str, Any]) -> Html | None:
    """Every setting by section; what differs from its default is bold."""
    if not recipe:
        return None
    cards, all_defaults = [], _defaults()
    for section, values in recipe.items():
        if not isinstance(values, dict):
            continue
        defaults = _map(all_defaults, section)
        rows = [
            [key, tag("span", _plain(value), class_="set" if _plain(value) != _plain(defaults.get(key)) else None)]
            for key, value in values.items()
        ]
        cards.append(tag("div", tag("h3", section), table([], rows, class_="mono"), class_="card"))
    note = tag("p", "Bold: set to something else than the default.", class_="soft")
    return join([note, tag("div", *cards, class_="columns")])


def _defaults() -> dict[str, Any]:
    """The recipe that says nothing, as plain values: the defaults of every section."""
    nothing = {"version": 1, "model": {"name_or_path": "-"}, "lora": {}, "grpo": {}}
    return Recipe.model_validate(nothing).model_dump(mode="json")


def provenance(manifest: Mapping[str, Any]) -> Html | None:
    """Device, versions, plan, seeds, data; the layers' kernels folded away."""
    if not manifest:
        return None
    kernels = _maps(manifest.get("kernels"))
    shown = {k: v for k, v in manifest.items() if k not in ("kernels", "processes", "format", "data", "libraries")}
    rows = [[key, _plain(value)] for key, value in _flat(shown)]
    cards = [tag("div", tag("h3", "run"), table([], rows, class_="mono"), class_="card")]
    libraries = _map(manifest, "libraries")
    if libraries:
        body = table([], [[k, v] for k, v in libraries.items()], class_="mono")
        cards.append(tag("div", tag("h3", "libraries"), body, class_="card"))
    parts = [tag("div", *cards, class_="columns")]
    data = _maps(manifest.get("data"))
    if data:
        files = [(d.get("name"), _count(d.get("bytes")), tag("code", d.get("sha256"))) for d in data]
        parts.append(_fold("Data fingerprints", table(["File", "Bytes", "SHA-256"], files, numeric=(1,))))
    if kernels:
        columns = list(dict.fromkeys(key for layer in kernels for key in layer))
        body = table(columns, [[_plain(layer.get(c)) for c in columns] for layer in kernels])
        parts.append(_fold(f"Kernels, {len(kernels):,} layers", body))
    processes = _maps(manifest.get("processes"))
    if len(processes) > 1:
        parts.append(_fold("Processes of this run", _processes(processes)))
    return join(parts)


def _processes(processes: Sequence[Mapping[str, Any]]) -> Html:
    rows: list[tuple[object, ...]] = [
        (p.get("started"), p.get("from_step"), _map(p, "device").get("name"), p.get("ftcli")) for p in processes
    ]
    return table(["Started", "From step", "Device", "ftcli"], rows)


def _fold(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content, class_="card", style="margin-top:14px")


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
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


def _map(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _maps(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _values(metrics: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in metrics if _is_number(row.get(key))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any, show: Any) -> str:
    return str(show(value)) if _is_number(value) else "–"


def _before_after(before: Any, after: Any, show: Any) -> str:
    texts = [show(value) for value in (before, after) if _is_number(value)]
    return " → ".join(texts) or "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _words(name: str) -> str:
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]
