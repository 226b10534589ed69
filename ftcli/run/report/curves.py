"""Curves of the report, and the metrics that they are drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from ftcli.plain import JsonMap, map_in, maps, number_or_none
from ftcli.run.metrics import MetricsLine
from ftcli.run.report.charts import ChartLook, Series, line_chart
from ftcli.tables import code_of
from ftcli.tables.methods import Method
from ftcli.units import GIB, is_share, percent

Lines = Sequence[MetricsLine]
#: Shares that stay below this are not drawn on an axis that goes up to 1.
_SMALL_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: the metric, its name on the page, and the metrics of its band.

    Attributes:
        spread: Metric of a standard deviation: the band is one of them on either side.
        ends: Metrics of the lowest and the highest value: the band lies between.
    """

    metric: str
    name: str
    smooth: bool = False
    dots: bool = False
    spread: str | None = None
    ends: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the report. Values are divided by ``unit``; ``base`` is the base model's held-out value; a ``share``
    is from 0 to 1.
    """

    title: str
    curves: Sequence[Curve]
    from_zero: bool = False
    log: bool = False
    unit: float = 1.0
    base: float | None = None
    note: str = ""
    share: bool = False


def _alone(title: str, metric: str, name: str, *, share: bool = False, log: bool = False) -> Chart:
    """A chart of one smoothed line: of a share, or from 0 on."""
    return Chart(title, (Curve(metric, name, smooth=True),), from_zero=not share, log=log, share=share)


_SUPERVISED = (
    Chart("Loss", (Curve("loss", "training", smooth=True), Curve("eval_loss", "held-out", dots=True)), log=True),
    Chart("Held-out token accuracy", (Curve("eval_token_accuracy", "token accuracy", dots=True),), share=True),
    _alone("Tokens whose likeliest is the teacher's", "teacher_agreement", "agreement", share=True),
)
_ENDS = ("completions/min_length", "completions/max_length")
_OF_REWARDS = (
    _alone("KL to the base model", "kl", "KL", log=True),
    _alone("KL to the teacher", "teacher_kl", "KL"),
    Chart(
        "Completion length, tokens",
        (Curve("completions/mean_length", "mean", smooth=True, ends=_ENDS),),
        from_zero=True,
        note="band: shortest to longest",
    ),
    _alone("Completions cut off", "completions/clipped_ratio", "cut off", share=True),
)
_CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")
_LESSER_OF_REWARDS = (
    _alone("Deviation of rewards", "reward_std", "standard deviation"),
    _alone("Groups of equal rewards", "frac_reward_zero_std", "nothing to learn from", share=True),
    _alone("Entropy of sampled tokens, nats", "entropy", "entropy"),
    Chart("Clipped ratios", tuple(Curve(each, "share of tokens", smooth=True) for each in _CLIPPED), share=True),
    *(
        Chart(title, tuple(Curve(f"{key}/{part}", name, smooth=True) for part, name in parts.items()), from_zero=True)
        for title, key, parts in (
            ("Seconds of a step", "seconds", {"rollout": "rollouts", "rewards": "rewards", "training": "training"}),
            ("Tokens/s of each part", "throughput", {"rollout": "rollouts", "training": "training"}),
        )
    ),
)
_LESSER = (
    Chart("Learning rate", (Curve("learning_rate", "learning rate"),), from_zero=True),
    _alone("Gradient norm", "grad_norm", "gradient norm before clipping", log=True),
    Chart("Throughput, tokens/s", (Curve("tokens_per_second", "tokens/s"),), from_zero=True),
    Chart("Peak memory, GiB", (Curve("peak_memory_bytes", "peak memory"),), from_zero=True, unit=float(GIB)),
)


def has_rewards(lines: Lines) -> bool:
    """True if the run learns from rewards; its loss is near 0 by construction then and says nothing."""
    return any("reward" in line for line in lines)


def curves(
    lines: Lines, evaluation: JsonMap, resumed: Sequence[int], method: Method | None = None
) -> tuple[list[Markup], list[Markup]]:
    """The charts that say whether the model learns, and the others; ``resumed`` are steps at which processes went on. A
    chart in which no curve has two points is left out: its value stands among the figures.
    """
    steps = [int(line["step"]) for line in lines]
    look = ChartLook(marks=[step for step in resumed if step], steps=(min(steps), max(steps)) if steps else None)
    main, lesser = (
        [drawn for chart in some if (drawn := _drawn(chart, lines, look))]
        for some in _charts(lines, evaluation, method)
    )
    pairs = len(main) + len(main) % 2  # two stand side by side
    return [*main, *lesser][:pairs], [*main, *lesser][pairs:]


def _charts(lines: Lines, evaluation: JsonMap, method: Method | None) -> tuple[Sequence[Chart], Sequence[Chart]]:
    base = map_in(evaluation, "base")
    scores = _held_out_scores(lines, base, method)
    if has_rewards(lines):
        return [*_rewards(lines), *scores, *_OF_REWARDS], [*_LESSER_OF_REWARDS, *_LESSER]
    if method is not None and method.charts is not None:
        own: Sequence[Chart] = code_of(method.charts)
        return [*own, *scores], _LESSER
    known = {"Loss": base.get("loss"), "Held-out token accuracy": base.get("token_accuracy")}
    first = [replace(chart, base=number_or_none(known.get(chart.title))) for chart in _SUPERVISED]
    return [*first, *scores], _LESSER


def _rewards(lines: Lines) -> list[Chart]:
    names = dict.fromkeys(
        key.split("/")[1] for line in lines for key in line if key.startswith("rewards/") and key.endswith("/mean")
    )
    curves = {"Reward": Curve("reward", "mean reward", smooth=True, spread="reward_std")}
    for name in names if len(names) > 1 else ():
        mean, std = (f"rewards/{name}/{each}" for each in ("mean", "std"))
        curves[f"Reward of {name}"] = Curve(mean, name, smooth=True, spread=std)
    return [Chart(title, (curve,), note="band: ± standard deviation") for title, curve in curves.items()]


def _held_out_scores(lines: Lines, base: JsonMap, method: Method | None) -> list[Chart]:
    """A chart for each task that is scored during training."""
    known = {"eval_loss", "eval_perplexity", "eval_token_accuracy", "eval_tokens", "eval_rows"}
    if method is not None and method.scores is not None:
        known |= {f"eval_{name}" for name, *_ in code_of(method.scores)}
        known |= {"eval_chosen_reward", "eval_rejected_reward"}
    found = dict.fromkeys(key for line in lines for key in line if key.startswith("eval_") and key not in known)
    of_base = {f"eval_{task.get('name')}": number_or_none(task.get("value")) for task in maps(base.get("tasks"))}
    titles = {key: f"Held-out {key.removeprefix('eval_')}" for key in found}
    return [
        Chart(title, (Curve(key, "score", dots=True),), base=of_base.get(key), share=True)
        for key, title in titles.items()
    ]


def _drawn(chart: Chart, lines: Lines, look: ChartLook) -> Markup:
    series = [_series(lines, curve, chart.unit) for curve in chart.curves]
    if all(len(one.finite) < 2 for one in series):
        return Markup()
    levels = {} if chart.base is None else {"base model": chart.base}
    how = replace(look, from_zero=chart.from_zero, log=chart.log, note=chart.note)
    values = [value for one in series for _, value in one.finite]
    if chart.share and is_share(*values, *levels.values()):  # what a function of the user's returns need not be one
        highest = max(values)
        how = replace(how, limits=None if 0 < highest <= _SMALL_SHARE else (0.0, 1.0), from_zero=True, show=percent)
    return line_chart(chart.title, series, how, levels)


def _series(lines: Lines, curve: Curve, unit: float) -> Series:
    rows = sorted((line for line in lines if curve.metric in line), key=lambda line: int(line["step"]))
    values = [(int(row["step"]), number_or_none(row[curve.metric])) for row in rows]
    points = [(step, None if value is None else value / unit) for step, value in values]
    band = [found for row in rows if (found := _band(row, curve, unit)) is not None]
    return Series(curve.name, points, curve.smooth, curve.dots, band)


def _band(row: JsonMap, curve: Curve, unit: float) -> tuple[int, float, float] | None:
    middle = number_or_none(row.get(curve.metric))
    if curve.spread is not None:
        width = number_or_none(row.get(curve.spread))
        low, high = (None, None) if width is None or middle is None else _around(middle, width)
    elif curve.ends is not None:
        low, high = (number_or_none(row.get(key)) for key in curve.ends)
    else:
        return None
    return None if low is None or high is None else (int(row["step"]), low / unit, high / unit)


def _around(mean: float, deviation: float) -> tuple[float, float]:
    """One standard deviation on either side, but not beyond 0 and 1 where no value can be: numbers between them with
    this mean deviate by sqrt(mean (1 - mean)) at most (a little more in a sample)."""
    low, high = mean - deviation, mean + deviation
    if 0 <= mean <= 1 and deviation <= 1.05 * math.sqrt(mean * (1 - mean)):
        return max(0.0, low), min(1.0, high)
    return low, high
