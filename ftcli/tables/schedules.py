"""Learning-rate schedules: what ``train.lr_scheduler_type`` may name, and what ``train.lr_scheduler_kwargs`` may say.

Names, arguments and their defaults are those of transformers, which computes every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: No schedule: the rate is what the recipe says, in every step ...
CONSTANT = "constant"
#: ... or after a warm-up.
CONSTANT_AFTER_WARMUP = "constant_with_warmup"


@dataclass(frozen=True, slots=True)
class ScheduleArgument:
    """One argument of a schedule.

    Attributes:
        kind: ``steps`` is a number of optimizer steps; below 1 a fraction of all steps, as for ``train.warmup_steps``.
        least, most: The smallest and the largest value. ``above``: it must be greater than ``least``.
        below_peak: It is a learning rate, and must be less than ``train.learning_rate``.
        above_peak: Likewise, and must not be less.
        default: transformers' own value where the recipe gives none and it may be out of range.
    """

    kind: Literal["whole", "number", "steps", "word"]
    least: float = 0.0
    most: float | None = None
    above: bool = False
    below_peak: bool = False
    above_peak: bool = False
    words: tuple[str, ...] = ()
    example: float = 0.1
    default: float | None = None

    @property
    def expected(self) -> str:
        """The allowed values, for people."""
        if self.kind == "word":
            return f"one of {', '.join(self.words)}"
        kind = {"whole": "a whole number", "number": "a number", "steps": "a number of steps (below 1 a fraction)"}
        text = f"{kind[self.kind]} {'above' if self.above else 'of at least'} {self.least:g}"
        if self.most is not None:
            text += f" and at most {self.most:g}"
        if self.below_peak:
            text += ", and less than train.learning_rate"
        return f"{text}, and no less than train.learning_rate" if self.above_peak else text

    def takes(self, value: object, peak: float) -> bool:
        """True if ``value`` is allowed under a peak learning rate."""
        if self.kind == "word":
            return value in self.words
        if isinstance(value, bool) or not isinstance(value, int if self.kind == "whole" else int | float):
            return False
        if self.kind == "steps" and value >= 1 and value != int(value):
            return False
        if value < self.least or (self.above and value == self.least) or (self.most is not None and value > self.most):
            return False
        return not (self.below_peak and value >= peak) and not (self.above_peak and value < peak)


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """One learning-rate schedule.

    Attributes:
        one_of: Arguments of which exactly one must be given.
        by_evaluations: It changes the rate after evaluations during training, and needs them.
    """

    about: str
    arguments: Mapping[str, ScheduleArgument] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    warms_up: bool = True
    by_evaluations: bool = False


_WAVES = ScheduleArgument("number", above=True)
_FRACTION = ScheduleArgument("number", most=1)
_COUNT = ScheduleArgument("whole")
_RATE = ScheduleArgument("number", below_peak=True, example=1e-6)
_SHAPES = ScheduleArgument("word", words=("linear", "cosine", "1-sqrt"))
_TO_A_LOWEST = {"num_cycles": _WAVES, "min_lr": _RATE, "min_lr_rate": _FRACTION}
_FACTOR = ScheduleArgument("number", above=True, most=0.999999)
_LIKE_PLATEAU = {
    "factor": _FACTOR,
    "patience": _COUNT,
    "threshold": ScheduleArgument("number"),
    "threshold_mode": ScheduleArgument("word", words=("rel", "abs")),
    "cooldown": _COUNT,
    "eps": ScheduleArgument("number"),
    "min_lr": _RATE,
}

TABLE: Mapping[str, LearningRateSchedule] = {
    "linear": LearningRateSchedule("Falls in a straight line to 0."),
    "cosine": LearningRateSchedule("Falls along a half cosine to 0.", {"num_cycles": _WAVES}),
    "cosine_with_restarts": LearningRateSchedule(
        "Falls along a half cosine to 0, `num_cycles` times over (1).",
        {"num_cycles": ScheduleArgument("whole", least=1)},
    ),
    "cosine_with_min_lr": LearningRateSchedule(
        "Falls along a half cosine to `min_lr`, or to `min_lr_rate` times the peak.",
        _TO_A_LOWEST,
        one_of=("min_lr", "min_lr_rate"),
    ),
    "cosine_warmup_with_min_lr": LearningRateSchedule(
        "The same, and the warm-up begins at `warmup_lr_rate` times the peak.",
        {**_TO_A_LOWEST, "warmup_lr_rate": _FRACTION},
        one_of=("min_lr", "min_lr_rate"),
    ),
    "polynomial": LearningRateSchedule(
        "Falls to `lr_end` (1e-7) with the `power` (1) of what is left.",
        {
            "lr_end": ScheduleArgument("number", below_peak=True, default=1e-7),
            "power": ScheduleArgument("number", above=True),
        },
    ),
    "warmup_stable_decay": LearningRateSchedule(
        "Stays at the peak and falls in the last `num_decay_steps` to `min_lr_ratio` (0) times the peak.",
        {
            "num_decay_steps": ScheduleArgument("steps", above=True),
            "num_stable_steps": ScheduleArgument("steps"),
            "min_lr_ratio": _FRACTION,
            "warmup_type": _SHAPES,
            "decay_type": _SHAPES,
            "num_cycles": _WAVES,
        },
        required=("num_decay_steps",),
    ),
    "inverse_sqrt": LearningRateSchedule(
        "Falls with one over the square root of the steps.", {"timescale": ScheduleArgument("whole", least=1)}
    ),
    CONSTANT: LearningRateSchedule("Stays.", warms_up=False),
    CONSTANT_AFTER_WARMUP: LearningRateSchedule("Stays after the warm-up."),
    "reduce_lr_on_plateau": LearningRateSchedule(
        "Is multiplied by `factor` (0.1) after more than `patience` (10) evaluations without improvement.",
        _LIKE_PLATEAU,
        warms_up=False,
        by_evaluations=True,
    ),
    "greedy": LearningRateSchedule(
        "Is divided by `factor` (0.95) while evaluations get better and multiplied by it while they do not, "
        "between `min_lr` and `max_lr`.",
        {
            **_LIKE_PLATEAU,
            "warmup": _COUNT,
            "max_lr": ScheduleArgument("number", above_peak=True, example=1e-3),
            "reset_start": _COUNT,
        },
        required=("min_lr", "max_lr"),
        warms_up=False,
        by_evaluations=True,
    ),
}


def names() -> tuple[str, ...]:
    return tuple(TABLE)


def row(name: str) -> LearningRateSchedule:
    return TABLE[name]


def steps_of(value: float, all_steps: int) -> int:
    """A number of steps; below 1 it is a fraction of all steps, rounded up, as transformers reads `warmup_steps`."""
    return int(value) if value >= 1 else math.ceil(all_steps * value)


def stages(
    name: str, arguments: Mapping[str, float | int | str], warmup_steps: float, all_steps: int
) -> dict[str, int]:
    """The lengths of a schedule's stages in steps, the warm-up among them; empty for a schedule without stages."""
    kinds = row(name).arguments
    found = {key: steps_of(float(value), all_steps) for key, value in arguments.items() if kinds[key].kind == "steps"}
    return {"warmup_steps": steps_of(warmup_steps, all_steps), **found} if found else {}


#: What helps where stages are too long.
SHORTER = "use less, or fractions such as num_decay_steps: 0.1"


def stages_too_long(name: str, lengths: Mapping[str, int], all_steps: int) -> str | None:
    """The reason why the stages do not fit into training, or None."""
    if sum(lengths.values()) <= all_steps:
        return None
    said = ", ".join(f"{stage} {steps}" for stage, steps in lengths.items())
    return f"the stages of {name} are longer than training: {said}, of {all_steps} steps"
