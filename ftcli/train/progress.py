"""Shows a run: what it trains on what, before its first step; then progress, held-out results, the time left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.preflight.checks.crossfield import long_warm_ups
from ftcli.reporting import Progress, Reporter
from ftcli.run.metrics import MetricsLine
from ftcli.run.report import LiveProgress, LiveReport
from ftcli.tables import quantizations
from ftcli.train.context import RunContext, Unwritten
from ftcli.units import Pace, duration, gib, score

if TYPE_CHECKING:
    from ftcli.job import Job

#: Steps after which the time that is left is told once.
_MEASURED_STEPS = 3
#: Below this nobody waits for an estimate.
_WORTH_TELLING_SECONDS = 10.0
#: How the names of held-out numbers end that are no shares: log-probabilities, what is made of them.
_NUMBERS = ("margin", "reward", "logp", "kl", "stop_change")
#: Held-out numbers that are no results.
_COUNTS = ("eval_tokens", "eval_rows", "eval_perplexity")
#: Those that are none of a task, in words.
_OF_LOSS = {
    name: name.replace("_", " ")
    for name in (
        *("token_accuracy", "accuracy_of_like_length", "accuracy_length_controlled", "stop_logp", "stop_change"),
        *("chosen_fell", "chosen_rose", "rejected_fell"),
        *("chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"),
    )
}


class StepProgress:
    """Progress over optimizer steps. The line is made when training begins and its length is known."""

    def __init__(
        self,
        reporter: Reporter,
        description: str,
        live: LiveReport | Unwritten,
        clock: Callable[[], float] = time.monotonic,
        known: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``known`` is told the number of steps, once."""
        self._reporter = reporter
        self._description = description
        self._live = live
        self._known = known
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._pace = Pace(clock)
        self._step = 0
        self._total = 0
        self._held_out: dict[str, float | str] = {}
        self._told = False

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def begin(self, step: int, total: int) -> None:
        """Starts at ``step`` (0, or the checkpoint's) of ``total``."""
        self._reporter.info(f"steps       {total:,}" + (f", {step:,} of them done" if step else ""))
        self._known(total)
        self._progress = self._stack.enter_context(self._reporter.progress(total, self._description))
        self._step, self._total = step, total
        self._progress.advance(step)
        self._live.update(self._now(), urgent=True)

    def show(self, step: int, line: MetricsLine) -> None:
        """Moves to ``step`` and shows a metrics line when it is of this step."""
        if self._progress is None:
            return
        self._progress.advance(step - self._step)
        self._step = step
        self._pace.note(step)
        self._tell_time()
        if line.get("step") == step:
            self._progress.update(**fields(line, self._held_out))
        self._live.update(self._now())

    def evaluated(self, step: int, metrics: MetricsLine) -> None:
        """Tells held-out results, and keeps showing the first of them."""
        results = held_out(metrics)
        if results:
            self._reporter.info(f"held-out after step {step}: {held_out_line(metrics)}")
            name, value = next(iter(results.items()))
            self._held_out = {f"held-out {name}" if name != "loss" else "held-out": value}
        self._live.update(self._now(), urgent=True)

    def _now(self) -> LiveProgress:
        return LiveProgress(self._step, self._total, self._pace.seconds_left(self._total))

    def _tell_time(self) -> None:
        left = self._pace.seconds_left(self._total)
        if self._told or left is None or self._pace.counted < _MEASURED_STEPS:
            return
        self._told = True
        if left >= _WORTH_TELLING_SECONDS:
            each, steps = self._pace.seconds_each, self._pace.counted
            self._reporter.info(
                f"time: about {duration(left)} for the {self._total - self._step:,} steps that are left "
                f"({each:.2g} s each, measured over {steps})"
            )


def fields(line: MetricsLine, held_out: Mapping[str, float | str]) -> dict[str, float | int | str]:
    """A line of metrics as people read it, what matters most first. A run with rewards has no loss to look at."""
    found: dict[str, float | int | str] = {}
    if _is_number(line.get("reward")):
        found |= _rewarded(line)
    elif _is_number(line.get("loss")):
        found["loss"] = float(line["loss"])
        if _is_number(line.get("teacher_agreement")):
            found["agreement"] = f"{line['teacher_agreement']:.1%}"
    found |= held_out
    if _is_number(line.get("learning_rate")):
        found["lr"] = float(line["learning_rate"])
    if _is_number(line.get("tokens_per_second")):
        found["tok/s"] = round(line["tokens_per_second"])
    for part in ("rollout", "training"):
        seconds, rate = (line.get(f"{what}/{part}") for what in ("seconds", "throughput"))
        if _is_number(seconds):
            found[part] = f"{seconds:.3g} s" + (f" ({rate:,.0f} tok/s)" if _is_number(rate) else "")
    if _is_number(line.get("peak_memory_bytes")):
        found["memory"] = f"{gib(line['peak_memory_bytes'])} GiB"
    if _is_number(line.get("epoch")):
        found["epoch"] = f"{line['epoch']:.2f}"
    return found


#: What a run with rewards shows besides them: metric, name, whether it is a share.
_OF_REWARDS = (
    ("reward_std", "spread", False),
    ("kl", "kl", False),
    ("teacher_kl", "from teacher", False),
    ("entropy", "entropy", False),
    ("clip_ratio/region_mean", "clipped", True),
    ("cispo_clip_ratio", "clipped", True),
    ("completions/mean_length", "length", False),
    ("completions/clipped_ratio", "cut off", True),
    ("frac_reward_zero_std", "groups alike", True),
)


def _rewarded(line: MetricsLine) -> dict[str, float | int | str]:
    means = {key.split("/")[1]: value for key, value in line.items() if re.fullmatch(r"rewards/.+/mean", key)}
    several = means if len(means) > 1 else {}  # of one alone, the reward is its own
    found: dict[str, float | int | str] = {"reward": float(line["reward"])}
    found |= {name: float(value) for name, value in several.items() if _is_number(value)}
    for key, name, share in _OF_REWARDS:
        if _is_number(line.get(key)):
            found[name] = f"{line[key]:.1%}" if share else float(line[key])
    return found


def held_out(metrics: MetricsLine) -> dict[str, str]:
    """Held-out results by name, as text: losses as they are, accuracies and scores in percent."""
    shown = {}
    for key, value in metrics.items():
        if not key.startswith("eval_") or key in _COUNTS or not _is_number(value):
            continue
        name = key.removeprefix("eval_")
        is_score = name != "loss" and not name.endswith(_NUMBERS)
        # That of a task is its own.
        shown[_OF_LOSS.get(name, name)] = score(value) if is_score else f"{value:.4f}"
    return shown


def held_out_line(metrics: MetricsLine) -> str:
    """:func:`held_out` in a line: ``loss 0.4561, token accuracy 80.1%``."""
    return ", ".join(f"{name} {value}" for name, value in held_out(metrics).items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The training data: ``count`` ``rows``, ``prompts`` or ``pairs``, how many tokens they have, if that is known, and
    what a step takes of them.

    Attributes:
        batch: What a step of the optimizer learns from, ``packed rows`` or ``completions``; None: ``unit``.
        more: What else is to be said of the batch, after it.
    """

    count: int
    unit: str
    tokens: int | None = None
    batch: str | None = None
    more: str = ""


def tell_start(context: RunContext, job: Job, model: Any, rows: TrainingRows) -> None:
    """Tells what is trained on what, where it goes, and how to stop it."""
    tokens = "" if rows.tokens is None else f" of {rows.tokens:,} tokens"
    path = context.directory.path
    lines = (
        ("parameters", trained_share(job, model)),
        ("data", f"{rows.count:,} {rows.unit}{tokens}"),
        ("batch", effective_batch(context.recipe, rows)),
        ("run", f"{path}; {context.directory.report_path.name} in it shows how it goes"),
        ("Ctrl-C", "once finishes the step and writes a checkpoint, twice stops at once"),
    )
    width = max(len(name) for name, _ in lines)
    context.session.reporter.info("\n".join(f"{name:<{width}}  {text}" for name, text in lines))


def tell_warm_ups(context: RunContext, steps: int) -> None:
    """Warns of warm-ups that last as long as training, whose length follows from the data. Where the recipe says it
    (``train.max_steps``), preflight has told already.
    """
    if context.recipe.train.max_steps is not None or not context.leads:
        return
    for _, problem, remedy in long_warm_ups(context.recipe, steps, f"the {steps:,} steps of this run"):
        context.session.reporter.finding(Finding("FT268", problem, help=remedy, severity="warning"))


def trained_share(job: Job, model: Any) -> str:
    """Text on the number of trained parameters, of all. A quantized layer holds several in one element."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if quantizations.row(job.recipe.quantization.method).quantize is None:
        total: int | None = sum(p.numel() for p in model.parameters())
    else:
        base = job.facts.parameters
        total = None if base is None else base + (count if job.recipe.lora is not None else 0)
    share = "" if not total else f" of {total:,} ({count / total:.2%})"
    return f"{count:,}{share} are trained"


def effective_batch(recipe: Recipe, rows: TrainingRows) -> str:
    """The effective batch: what one step of the optimizer learns from."""
    size, accumulated = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    ranks, shared = recipe.launch.row_shares, recipe.launch.context_parallel_size
    parts = f"{size} at a time x {accumulated} accumulated"
    if ranks > 1:
        parts += f" x {ranks} {'processes' if shared == 1 else 'teams'}"
    if shared > 1:
        parts += f", each row on {shared} processes"
    return f"{size * accumulated * ranks:,} {rows.batch or rows.unit} a step ({parts}){rows.more}"
