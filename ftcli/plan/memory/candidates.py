"""Changes to a recipe, each with what it would need. The one place that asks for estimates.

Choosing a policy, proposing a change where a recipe does not fit, and telling what saves memory all weigh candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ftcli.config.load import Settings
from ftcli.config.model import LoraConfig
from ftcli.facts.device import DeviceFacts
from ftcli.plan.memory.estimate import TIGHT_SHARE, MemoryEstimate, estimate_memory, offloaded_of, pinned_by
from ftcli.plan.memory.workspaces import pinnable_bytes, pinned_whole
from ftcli.plan.run import RunPlan
from ftcli.tables import policies, quantizations
from ftcli.tables.policies import PolicyName

Level = Literal["fits", "tight", "does not fit", "unknown"]
#: Batches that are tried one by one.
_MOST_BATCHES = 32
_SHORTEST_SEQ_LEN = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recipe with ``settings`` changed, and its estimate."""

    settings: Settings
    plan: RunPlan
    estimate: MemoryEstimate

    @property
    def level(self) -> Level:
        """The level of its peak against the device's memory."""
        return level_of(self.estimate.total_bytes, self.plan.device)


def candidate(plan: RunPlan, settings: Settings | None = None) -> Candidate | None:
    """``plan`` with ``settings`` changed; None for a family without arithmetic."""
    changed = plan.changed(settings) if settings else plan
    estimate = estimate_memory(changed)
    return None if estimate is None else Candidate(settings or {}, changed, estimate)


def level_of(needed: int, device: DeviceFacts) -> Level:
    """``unknown`` where the device does not say what it has, ``tight`` above ``TIGHT_SHARE`` of it."""
    available = device.available_bytes
    if available is None:
        return "unknown"
    if needed > available:
        return "does not fit"
    return "tight" if needed > TIGHT_SHARE * available else "fits"


def host_has_room(estimate: MemoryEstimate, device: DeviceFacts) -> bool | None:
    """True if the host has room for the run's pinned memory; None if it pins nothing, or the host is not known."""
    if not estimate.pinned_host_bytes or device.host_free_bytes is None:
        return None
    return estimate.pinned_host_bytes <= pinnable_bytes(device.host_free_bytes)


def policies_by_speed(plan: RunPlan) -> tuple[PolicyName, ...]:
    """The policies that make a difference in this run, the fastest first.

    Where the host only has room for the layers' inputs, ``offload`` runs whole layers again, with one product more than
    ``true``. It is the slowest policy then; and so it is where micro-batches are so small that the others run as CUDA
    graphs. There ``lean`` comes before it; elsewhere ``offload`` is faster, and leaner as a rule.
    """
    usable = plan.method.supports.get("train.gradient_checkpointing")
    on_kernels, graphed = plan.execution.on_kernels, runs_as_graphs(plan)
    found = [
        name
        for name, row in policies.TABLE.items()
        if (usable is None or name in usable)
        and (on_kernels or row.off_kernels is None)
        and (plan.device.kind != "cpu" or not row.by_layer)
        and (not row.embedding_on_host or (graphed and plan.under(name).host_table_bytes))
    ]

    def time(name: PolicyName) -> tuple[bool, float]:
        row = policies.row(name)
        short_host = on_kernels and row.on_host and (graphed or offloaded_of(plan.under(name)) == "layers")
        return short_host, row.time if on_kernels else row.time_off_kernels

    return tuple(sorted(found, key=time))


def runs_as_graphs(plan: RunPlan) -> bool:
    """True if a run is bound by the host, and runs as CUDA graphs under a policy that allows it."""
    return plan.trains and plan.under(False).wholly_graphed


def leaner_policies(plan: RunPlan) -> tuple[PolicyName, ...]:
    """Policies that keep less than the recipe's and that the host has room for, the fastest first. On the kernels
    ``offload`` is both faster and leaner than ``true``, which is only proposed where the host has no room for it.
    """
    if not plan.trains:
        return ()
    order = [name for name in policies_by_speed(plan) if _host_has_room_for(plan.under(name))]
    last = policies.row(order[-1])
    if last.by_transformers and any(policies.row(name).on_host for name in order):
        order.pop()
    now = plan.recipe.train.checkpointing
    if now in order:
        return tuple(order[order.index(now) + 1 :])
    return tuple(name for name in order if policies.row(name).on_host)


def _host_has_room_for(plan: RunPlan) -> bool:
    free = plan.device.host_free_bytes
    if free is None:
        return True
    sent = pinned_by(plan, offloaded_of(plan)) if plan.policy.on_host else 0
    return sent + pinned_whole(plan.host_table_bytes) <= pinnable_bytes(free)


def smaller_batches(plan: RunPlan) -> Iterator[Settings]:
    """Smaller batches, with more accumulation in return: an optimizer step sees the same rows."""
    rows, accumulation = plan.rows, plan.recipe.train.gradient_accumulation_steps
    counted = {key: plan.recipe.value_of(key) for key in plan.method.counts_micro_batches}
    for smaller in _divisors_below(rows):
        changes: Settings = {
            "train.per_device_train_batch_size": smaller,
            "train.gradient_accumulation_steps": accumulation * (rows // smaller),
        }
        more = {key: value * (rows // smaller) for key, value in counted.items() if value is not None}
        yield {**changes, **more}


def _divisors_below(number: int) -> list[int]:
    """Divisors of ``number`` below it, the largest first; of very many (a batch of a billion rows) those at most half
    of the last one.
    """
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    found = sorted({*low, *(number // each for each in low)} - {number}, reverse=True)
    if len(found) <= _MOST_BATCHES:
        return found
    kept, last = [], number
    for each in found:
        if 2 * each <= last:
            kept.append(each)
            last = each
    return kept


def shorter(plan: RunPlan) -> Iterator[Settings]:
    """Half the length, and half of that; never less than 256 tokens."""
    key = plan.method.length if plan.trains else "data.max_seq_len"
    length = plan.recipe.value_of(key)
    while length // 2 >= _SHORTEST_SEQ_LEN:
        length //= 2
        yield {key: length}


def checkpointed(plan: RunPlan) -> list[Settings]:
    """The leaner policies as settings, applied to all layers; first the recipe's own, where it leaves layers out."""
    leaner = [{"train.gradient_checkpointing": name} for name in leaner_policies(plan)]
    if not plan.recipe.train.uncheckpointed_layers:
        return [*leaner]
    none = {"train.uncheckpointed_layers": 0}
    return [none, *(each | none for each in leaner)]


def narrower_gradients(plan: RunPlan) -> list[Settings]:
    """Gradients in bfloat16, where the recipe may have them so and has not."""
    dtypes, plain = plan.dtypes, quantizations.row(plan.recipe.quantization.method).quantize is None
    whole = plan.trains and plan.recipe.lora is None and plan.shard_size == 1
    usable = whole and plain and plan.own_optimizer and dtypes.compute == "bfloat16" != dtypes.gradient
    return [{"train.bf16_gradients": True}] if usable else []


def as_options(settings: Settings) -> str:
    """Settings as the command line takes them."""
    return " ".join(f"--set {key}={_yaml(value)}" for key, value in settings.items())


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{{r: {value.r}}}'" if isinstance(value, LoraConfig) else str(value)
