"""Does it fit, and if not: the cheapest change that makes it fit, found by estimating each candidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from ftcli.config import LoraConfig, Recipe
from ftcli.config.training import Checkpointing
from ftcli.facts.device import GPUS, DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import plan_dtypes
from ftcli.preflight.execution import Work
from ftcli.preflight.memory.estimate import estimate_memory
from ftcli.preflight.memory.levels import Level, level_of
from ftcli.preflight.memory.policy import leaner_policies, on_kernels
from ftcli.preflight.memory.result import MemoryEstimate
from ftcli.preflight.memory.slowdown import relative_time

_M = TypeVar("_M", bound=BaseModel)

#: Dotted keys of a recipe and their values.
Settings = dict[str, Any]

_SHORTEST_SEQ_LEN = 256


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that make a recipe fit, as ``--set`` would take them, and the bytes it needs then."""

    settings: tuple[tuple[str, Any], ...]
    total_bytes: int

    def __str__(self) -> str:
        return " ".join(f"--set {key}={_yaml(value)}" for key, value in self.settings)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An estimate held against a device.

    ``available_bytes`` is None (and ``level`` unknown) where the device does not say. ``change`` is the cheapest
    change that fits, None when it fits already or nothing does; ``fitting_gpus`` names table devices that fit the
    recipe as it is, smallest first.
    """

    level: Level
    needed_bytes: int
    available_bytes: int | None
    change: Change | None = None
    fitting_gpus: tuple[str, ...] = ()


def judge(estimate: MemoryEstimate, recipe: Recipe, facts: ModelFacts, device: DeviceFacts, *, work: Work) -> Verdict:
    """The verdict on an estimate of ``recipe`` for ``device``; looks for a change only when it is not a clear fit.

    ``recipe`` names its policy: where it says `auto`, the one that was chosen for ``device``. A change is then sought
    for the leanest, and `auto` may take a faster one with it.
    """
    level = level_of(estimate.total_bytes, device)
    if level in ("fits", "unknown"):
        return Verdict(level, estimate.total_bytes, device.available_bytes)
    return Verdict(
        level=level,
        needed_bytes=estimate.total_bytes,
        available_bytes=device.available_bytes,
        change=_cheapest(recipe, facts, device, work),
        fitting_gpus=_gpus_that_fit(recipe, facts, work),
    )


def _cheapest(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work) -> Change | None:
    if recipe.model.dtype == "bfloat16" and not device.has_bfloat16:
        recipe, always = with_settings(recipe, {"model.dtype": "auto"}), {"model.dtype": "auto"}
    else:
        always = {}
    kernels = on_kernels(recipe, facts, plan_dtypes(recipe, device), device, work)
    leaner = leaner_policies(recipe, facts, device, work)
    for settings in _candidates(recipe, work, leaner, kernels=kernels):
        found = _fitting(recipe, facts, device, work, settings)
        if found is not None:
            return replace(found, settings=(*always.items(), *found.settings))
    return None


def _fitting(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work, settings: Settings) -> Change | None:
    """The candidate when it fits; where only evaluation is too large, with a smaller evaluation batch."""
    settings = dict(settings)
    while True:
        changed = with_settings(recipe, settings)
        estimate = estimate_memory(changed, facts, plan_dtypes(changed, device), device, work=work)
        if estimate is None:
            return None
        if level_of(estimate.total_bytes, device) == "fits":
            return Change(tuple(settings.items()), estimate.total_bytes) if settings else None
        rows = changed.eval.per_device_eval_batch_size
        if estimate.peak != "evaluation" or rows == 1:
            return None
        settings["eval.per_device_eval_batch_size"] = rows // 2


def by_time(recipe: Recipe, work: Work, settings: Iterable[Settings], *, kernels: bool) -> list[Settings]:
    """Settings that change nothing but the time a token takes, the cheapest first."""
    return sorted(settings, key=lambda each: relative_time(with_settings(recipe, each), work=work, on_kernels=kernels))


def checkpointed(recipe: Recipe, leaner: Iterable[Checkpointing]) -> list[Settings]:
    """The policies as settings, of all layers; before them the recipe's own, where it leaves layers out."""
    if not recipe.train.uncheckpointed_layers:
        return [{"train.gradient_checkpointing": policy} for policy in leaner]
    none = {"train.uncheckpointed_layers": 0}
    return [none, *({"train.gradient_checkpointing": policy} | none for policy in leaner)]


def _candidates(recipe: Recipe, work: Work, leaner: tuple[Checkpointing, ...], *, kernels: bool) -> Iterator[Settings]:
    """Settings to try, cheapest for the user first: what only costs time, then length, then the kind of training."""
    yield {}
    if work in ("eval", "export"):
        yield from shorter(recipe, work) if work == "eval" else ()
        return
    smaller = list(smaller_batches(recipe))
    policies = checkpointed(recipe, leaner)
    both = [policy | batch for policy in policies for batch in smaller]
    yield from by_time(recipe, work, [*smaller, *policies, *both], kernels=kernels)
    checkpointing = policies[-1] if policies else {}
    least = checkpointing | (smaller[-1] if smaller else {})
    yield from (least | length for length in shorter(recipe, work))
    if recipe.lora is None:
        lora = {"lora": LoraConfig()}
        yield lora
        yield from (lora | batch for batch in smaller)
        yield lora | least
        yield from (lora | least | length for length in shorter(recipe, work))


def smaller_batches(recipe: Recipe) -> Iterator[Settings]:
    """Smaller batches with as much more accumulation, so that an optimizer step sees the same rows."""
    rows, accumulation = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    for smaller in range(rows - 1, 0, -1):
        if rows % smaller == 0:
            yield {
                "train.per_device_train_batch_size": smaller,
                "train.gradient_accumulation_steps": accumulation * (rows // smaller),
            }


def shorter(recipe: Recipe, work: Work) -> Iterator[Settings]:
    """Half the length, and half of that; never less than 256 tokens."""
    if work == "grpo" and recipe.grpo is not None:
        key, length = "grpo.max_completion_length", recipe.grpo.max_completion_length
    else:
        key, length = "data.max_seq_len", recipe.data.max_seq_len
    while length // 2 >= _SHORTEST_SEQ_LEN:
        length //= 2
        yield {key: length}


def _gpus_that_fit(recipe: Recipe, facts: ModelFacts, work: Work) -> tuple[str, ...]:
    names = []
    for gpu in sorted(GPUS.values(), key=lambda g: (g.memory_bytes or 0, g.bandwidth_gb_per_s or 0)):
        estimate = estimate_memory(recipe, facts, plan_dtypes(recipe, gpu), gpu, work=work)
        suits = recipe.model.dtype != "bfloat16" or gpu.has_bfloat16
        if suits and estimate is not None and level_of(estimate.total_bytes, gpu) == "fits":
            names.append(gpu.name)
    return tuple(names)


def with_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """A copy of the recipe with dotted keys set; the values are taken as valid."""
    for key, value in settings.items():
        recipe = _set(recipe, key.split("."), value)
    return recipe


def _set(model: _M, parts: list[str], value: Any) -> _M:
    head, *rest = parts
    return model.model_copy(update={head: _set(getattr(model, head), rest, value) if rest else value})


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{{r: {value.r}}}'" if isinstance(value, LoraConfig) else str(value)
