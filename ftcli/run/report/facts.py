"""The figures at the top of the report, and the base model against the run. What was not measured is left out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.plain import JsonMap
from ftcli.run.metrics import MetricsLine
from ftcli.run.report.scales import short
from ftcli.run.report.values import Show, count, is_number, map_in, maps, numbers_of, percent
from ftcli.run.status import Status
from ftcli.tables import code_of, quantizations
from ftcli.tables.methods import Method
from ftcli.units import duration, gib, number

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
    if rewards:
        facts.append(Fact("Last reward", number(rewards[-1]), f"first {number(rewards[0])}"))
    losses = [] if rewards else numbers_of(metrics, "loss")
    if losses:
        facts.append(Fact("Last training loss", number(losses[-1]), f"first {number(losses[0])}"))
    if is_number(tuned.get("loss")):
        facts.append(Fact("Held-out loss", number(tuned["loss"]), _of_base(base.get("loss"), number)))
    for task in maps(tuned.get("tasks")):
        before = next((t.get("value") for t in maps(base.get("tasks")) if t.get("name") == task.get("name")), None)
        if is_number(task.get("value")):
            facts.append(Fact(str(task.get("name")), percent(task["value"]), _of_base(before, percent)))
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
    found = [_score(label, base.get(key), tuned.get(key), sign, show) for key, label, sign, show in _SCORES]
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
        found.append(_score(label, before.get("value"), after.get("value"), 1, percent))
    found += _harness(map_in(base, "lm_eval"), map_in(tuned, "lm_eval"))
    return [score for score in found if score is not None]


def _harness(base: JsonMap, tuned: JsonMap) -> list[Score | None]:
    """Of lm-evaluation-harness; whether more is better differs between its metrics, so there is no verdict."""
    pairs = dict.fromkeys((task, key) for side in (base, tuned) for task in side for key in map_in(side, task))
    return [
        _score(f"{task}, {key}", map_in(base, task).get(key), map_in(tuned, task).get(key), 0, number)
        for task, key in pairs
        if "stderr" not in key
    ]


def _score(label: str, before: Any, after: Any, sign: int, show: Show) -> Score | None:
    shown, shown_after = (show(value) if is_number(value) else "–" for value in (before, after))
    if not (is_number(before) and is_number(after)):
        return Score(label, shown, shown_after, "–", "") if is_number(before) or is_number(after) else None
    difference = after - before
    verdict = "better" if difference * sign > 0 else "worse" if difference * sign < 0 else ""
    prefix = "+" if difference > 0 else "−" if difference < 0 else ""
    change = f"{100 * abs(difference):.1f} points" if show is percent else show(abs(difference))
    return Score(label, shown, shown_after, f"{prefix}{change}", verdict)
