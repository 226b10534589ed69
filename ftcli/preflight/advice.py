"""Does it fit, and if not: the cheapest change that makes it fit, found by estimating each candidate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from ftcli.config import LoraConfig, Recipe
from ftcli.config.training import Checkpointing
from ftcli.preflight.device import GPUS, DeviceFacts
from ftcli.preflight.facts import ModelFacts
from ftcli.preflight.memory import MemoryEstimate, estimate_memory
from ftcli.preflight.policies import Work, execution_of
from ftcli.preflight.precision import plan_dtypes

_M = TypeVar("_M", bound=BaseModel)

Level = Literal["fits", "tight", "does not fit", "unknown"]

#: Above this share of the memory a run may still fail on fragmentation or on another process.
TIGHT_SHARE = 0.9
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
    """The verdict on an estimate of ``recipe`` for ``device``; looks for a change only when it is not a clear fit."""
    level = _level(estimate.total_bytes, device)
    if level in ("fits", "unknown"):
        return Verdict(level, estimate.total_bytes, device.available_bytes)
    return Verdict(
        level=level,
        needed_bytes=estimate.total_bytes,
        available_bytes=device.available_bytes,
        change=_cheapest(recipe, facts, device, work),
        fitting_gpus=_gpus_that_fit(recipe, facts, work),
    )


def _level(needed: int, device: DeviceFacts) -> Level:
    available = device.available_bytes
    if available is None:
        return "unknown"
    if needed > available:
        return "does not fit"
    return "tight" if needed > TIGHT_SHARE * available else "fits"


def _cheapest(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work) -> Change | None:
    if recipe.model.dtype == "bfloat16" and not device.has_bfloat16:
        recipe, always = _with(recipe, {"model.dtype": "auto"}), {"model.dtype": "auto"}
    else:
        always = {}
    for settings in _candidates(recipe, work, _leaner(recipe, facts, device, work)):
        found = _fitting(recipe, facts, device, work, settings)
        if found is not None:
            return replace(found, settings=(*always.items(), *found.settings))
    return None


def _fitting(
    recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work, settings: dict[str, Any]
) -> Change | None:
    """The candidate when it fits; where only evaluation is too large, with a smaller evaluation batch."""
    settings = dict(settings)
    while True:
        changed = _with(recipe, settings)
        estimate = estimate_memory(changed, facts, plan_dtypes(changed, device), device, work=work)
        if estimate is None:
            return None
        if _level(estimate.total_bytes, device) == "fits":
            return Change(tuple(settings.items()), estimate.total_bytes) if settings else None
        rows = changed.eval.per_device_eval_batch_size
        if estimate.peak != "evaluation" or rows == 1:
            return None
        settings["eval.per_device_eval_batch_size"] = rows // 2


def _leaner(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work) -> tuple[Checkpointing, ...]:
    """Settings of ``train.gradient_checkpointing`` that keep less than the recipe's, the fastest first.

    On the kernels ``offload`` runs less of a layer again than ``true`` and is the faster of the two.
    """
    now = recipe.train.gradient_checkpointing
    if work != "train" or device.kind == "cpu":
        return () if now else (True,)
    fused = execution_of(recipe, facts, plan_dtypes(recipe, device), device, work=work).kernels != "transformers"
    order: tuple[Checkpointing, ...] = (False, "selective", "offload") if fused else (False, True, "offload")
    return order[order.index(now) + 1 :] if now in order else ("offload",)


def _candidates(recipe: Recipe, work: Work, leaner: tuple[Checkpointing, ...]) -> Iterator[dict[str, Any]]:
    """Settings to try, cheapest for the user first: what only costs time, then length, then the kind of training."""
    yield {}
    if work in ("eval", "export"):
        yield from _shorter(recipe, work) if work == "eval" else ()
        return
    smaller = list(_smaller_batches(recipe))
    yield from smaller
    policies = [{"train.gradient_checkpointing": policy} for policy in leaner]
    yield from policies
    yield from (policy | batch for policy in policies for batch in smaller)
    checkpointing = policies[-1] if policies else {}
    least = checkpointing | (smaller[-1] if smaller else {})
    yield from (least | shorter for shorter in _shorter(recipe, work))
    if recipe.lora is None:
        lora = {"lora": LoraConfig()}
        yield lora
        yield from (lora | batch for batch in smaller)
        yield lora | least
        yield from (lora | least | shorter for shorter in _shorter(recipe, work))


def _smaller_batches(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Smaller batches with as much more accumulation, so that an optimizer step sees the same rows."""
    rows, accumulation = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    for smaller in range(rows - 1, 0, -1):
        if rows % smaller == 0:
            yield {
                "train.per_device_train_batch_size": smaller,
                "train.gradient_accumulation_steps": accumulation * (rows // smaller),
            }


def _shorter(recipe: Recipe, work: Work) -> Iterator[dict[str, Any]]:
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
        if suits and estimate is not None and _level(estimate.total_bytes, gpu) == "fits":
            names.append(gpu.name)
    return tuple(names)


def _with(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
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
