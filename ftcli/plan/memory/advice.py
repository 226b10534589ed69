"""Does a recipe fit a device, what is the cheapest change that makes it fit, and what do single changes save?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ftcli.config.load import Settings
from ftcli.config.model import LoraConfig
from ftcli.facts.device import GPUS
from ftcli.plain import JsonObject, plain_fields
from ftcli.plan.checkpointing import choose_engine
from ftcli.plan.memory import candidates
from ftcli.plan.memory.candidates import Candidate, candidate
from ftcli.plan.memory.terms import EVALUATION, Phase
from ftcli.plan.quantization import weight_bytes
from ftcli.plan.run import RunPlan
from ftcli.tables import engines, quantizations

#: What a pass costs however few tokens it has, in tokens: launches, weights read and dequantized, half-filled tiles.
#: An assumption, not a measurement: half the batch costs 3% at 8192 tokens, 11% at 2048 and 33% at 512.
_FIXED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """Settings that make a recipe fit, as ``--set`` would take them, and the bytes it needs then."""

    settings: Settings
    total_bytes: int

    def __str__(self) -> str:
        return candidates.as_options(self.settings)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An estimate compared with a device's memory.

    Attributes:
        change: The cheapest change that fits or, where none does, only just; None when the recipe fits as it is, or
            nothing helps.
        gpus: How many GPUs of this kind fit the recipe, where no change does on as many as it has; else None.
    """

    level: candidates.Level
    needed_bytes: int
    available_bytes: int | None
    change: RecipeChange | None = None
    fitting_gpus: tuple[str, ...] = ()
    gpus: int | None = None

    def as_dict(self) -> JsonObject:
        """The JSON form; the change's settings as ``--set`` would take them."""
        change = self.change
        said = None if change is None else {"settings": str(change), "total_bytes": change.total_bytes}
        return {**plain_fields(self), "change": said}


def verdict_on(found: Candidate) -> Verdict:
    """The verdict on an estimate; looks for a change only when it is not a clear fit.

    Where the recipe says `gradient_checkpointing: auto`, the policy that was chosen for the device stands in its
    place. A change is then looked for under the leanest policy; with the change made, `auto` may choose a faster one.
    """
    needed, available = found.estimate.total_bytes, found.plan.device.available_bytes
    if found.level in ("fits", "unknown"):
        return Verdict(found.level, needed, available)
    change = _cheapest(found.plan, even_tight=found.level == "does not fit")
    gpus = _how_many_fit(found.plan) if change is None else None
    return Verdict(found.level, needed, available, change, _gpus_that_fit(found.plan), gpus)


def savings(plan: RunPlan, phases: Collection[Phase] = ()) -> list[tuple[Settings, int]]:
    """Single changes to a recipe with the bytes by which its estimate falls, cheapest for the user first; none where
    the memory is not known. ``phases``: those in one of which memory ran out; of other runs the one that needs most.
    """
    before = candidate(plan)
    if before is None:
        return []
    saved = []
    for settings in _single_changes(plan, phases):
        after = candidate(plan, settings)
        if after is None:
            continue
        count = before.estimate.most_of(phases) - after.estimate.most_of(phases)
        if count > 0:
            saved.append((settings, count))
    return saved


def relative_time(plan: RunPlan) -> float:
    """Training time per token, relative to large batches without checkpointing."""
    policy = plan.policy.time if plan.execution.on_kernels else plan.policy.time_off_kernels
    return policy * (1 + _FIXED_TOKENS / plan.tokens)


def _by_time(plan: RunPlan, changes: Iterable[Settings]) -> list[Settings]:
    """Settings that only change how long a token takes, the fastest first."""
    return sorted(changes, key=lambda settings: relative_time(plan.changed(settings)))


def _cheapest(plan: RunPlan, *, even_tight: bool) -> RecipeChange | None:
    always: Settings = {}
    if plan.recipe.model.dtype == "bfloat16" and not plan.device.has_bfloat16:
        always = {"model.dtype": "auto"}
        plan = plan.changed(always)
    tight = None
    for settings in _changes_that_may_fit(plan):
        found = _with_fewer_evaluated(plan, settings)
        if found is None or not found.settings:
            continue
        change = RecipeChange({**always, **found.settings}, found.estimate.total_bytes)
        if found.level == "fits":
            return change
        if even_tight and tight is None and found.level == "tight":
            tight = change
    return tight


def _with_fewer_evaluated(plan: RunPlan, settings: Settings) -> Candidate | None:
    """The change; where evaluation is what is too large, with an evaluation batch that fits, or the smallest one."""
    settings = dict(settings)
    while True:
        found = candidate(plan, settings)
        if found is None or found.level == "fits":
            return found
        rows = found.plan.recipe.eval.per_device_eval_batch_size
        if found.estimate.peak != EVALUATION or rows == 1:
            return found
        settings = {**settings, "eval.per_device_eval_batch_size": rows // 2}


def _how_many_fit(plan: RunPlan) -> int | None:
    """The smallest of 2, 4 and 8 GPUs to fit the run; they shard the weights if the method and the recipe allow it."""
    if not plan.trains or plan.device.kind != "cuda":
        return None
    for count in (2, 4, 8):
        if count > plan.ranks:
            on_all = plan.changed({"launch.num_processes": count, "launch.engine": engines.AUTO})
            found = candidate(choose_engine(on_all))
            if found is not None and found.level in ("fits", "tight"):
                return count
    return None


def _changes_that_may_fit(plan: RunPlan) -> Iterator[Settings]:
    """Settings to try, cheapest for the user first: what only costs time, then shorter rows, then adapters."""
    yield {}
    if not plan.trains:
        yield from candidates.shorter(plan) if plan.work == "eval" else ()
        return
    smaller = list(candidates.smaller_batches(plan))
    policies = candidates.checkpointed(plan)
    both = [{**policy, **batch} for policy in policies for batch in smaller]
    yield from _by_time(plan, [*smaller, *policies, *both])
    least = {**(policies[-1] if policies else {}), **(smaller[-1] if smaller else {})}
    for narrower in candidates.narrower_gradients(plan):
        yield from ({**policy, **narrower} for policy in ({}, *policies))
        least |= narrower
        yield least
    yield from ({**least, **length} for length in candidates.shorter(plan))
    if plan.recipe.lora is None:
        lora = {"lora": LoraConfig()}
        yield lora
        yield from ({**lora, **batch} for batch in smaller)
        yield {**lora, **least}
        yield from ({**lora, **least, **length} for length in candidates.shorter(plan))
    quantized = _smallest_base(plan)
    if quantized:
        yield quantized
        yield {**quantized, **least}
        yield from ({**quantized, **least, **length} for length in candidates.shorter(plan))
    if plan.described is not None and any(each.linear.experts > 1 for each in plan.adapters):
        fewer = {**quantized, "lora.experts": False}
        yield fewer
        yield {**fewer, **least}
        yield from ({**fewer, **least, **length} for length in candidates.shorter(plan))


def _smallest_base(plan: RunPlan) -> Settings:
    """Adapters on the quantized base that takes least, in float16 where the GPU has no bfloat16; empty if it is
    quantized.
    """
    now = quantizations.row(plan.recipe.quantization.method)
    if plan.device.kind != "cuda" or now.freezes_base:
        return {}
    sizes = {}
    for name in quantizations.names(freezes_base=True):
        section = plan.recipe.quantization.model_copy(update={"method": name})
        element = plan.dtypes.parameter_bytes
        described = plan.facts.shape
        if described is not None:
            sizes[name] = weight_bytes(section, described, element)
        elif plan.measured.packed:
            sizes[name] = plan.measured.weight_bytes(section, element)
    if not sizes:
        return {}
    settings: dict[str, object] = {"quantization.method": min(sizes, key=lambda name: sizes[name])}
    if plan.recipe.lora is None:
        settings["lora"] = LoraConfig()
    if not plan.device.has_bfloat16:
        settings["model.dtype"] = "float16"
    return settings


def _single_changes(plan: RunPlan, phases: Collection[Phase]) -> Iterator[Settings]:
    """One step in each direction that saves memory, those that only cost time first."""
    recipe = plan.recipe
    if set(phases) == {EVALUATION}:
        rows = recipe.eval.per_device_eval_batch_size
        if rows > 1:
            yield {"eval.per_device_eval_batch_size": rows // 2}
        return
    yield from _by_time(plan, [*islice(candidates.smaller_batches(plan), 1), *candidates.checkpointed(plan)])
    yield from candidates.narrower_gradients(plan)
    yield from islice(candidates.shorter(plan), 1)
    if recipe.lora is None and plan.trains and plan.method.section is None:
        yield {"lora": LoraConfig()}


def _gpus_that_fit(plan: RunPlan) -> tuple[str, ...]:
    names = []
    for gpu in sorted(GPUS.values(), key=lambda g: (g.memory_bytes or 0, g.bandwidth_gb_per_s or 0)):
        suits = plan.recipe.model.dtype != "bfloat16" or gpu.has_bfloat16
        found = candidate(plan.on(gpu)) if suits else None
        if found is not None and found.level == "fits":
            names.append(gpu.name)
    return tuple(names)
