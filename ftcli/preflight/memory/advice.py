"""Does a recipe fit a device, what is the cheapest change that makes it fit, and what do single changes save?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ftcli.config import LoraConfig
from ftcli.config.overrides import Settings
from ftcli.facts.device import GPUS
from ftcli.facts.quantization import weight_bytes
from ftcli.plain import JsonObject, plain_fields
from ftcli.preflight.memory.candidates import (
    Candidate,
    Level,
    as_options,
    candidate,
    checkpointed,
    narrower_gradients,
    shorter,
    smaller_batches,
)
from ftcli.preflight.memory.engine import choose_engine
from ftcli.preflight.memory.setup import Setup
from ftcli.preflight.memory.terms import EVALUATION, Phase
from ftcli.tables import engines, quantizations

#: What a pass costs however few tokens it has, in tokens: launches, weights read and dequantised, half-filled tiles.
#: An assumption, not a measurement: half the batch costs 3% at 8192 tokens, 11% at 2048 and 33% at 512.
_FIXED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """Settings that make a recipe fit, as ``--set`` would take them, and the bytes it needs then."""

    settings: Settings
    total_bytes: int

    def __str__(self) -> str:
        return as_options(self.settings)


@dataclass(frozen=True, slots=True)
class Saving:
    """Settings, as ``--set`` would take them, and by how many bytes the estimate falls with them."""

    settings: Settings
    saved_bytes: int

    def __str__(self) -> str:
        return as_options(self.settings)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An estimate compared with a device's memory.

    Attributes:
        available_bytes: None, with ``level`` unknown, where the device does not say how much it has.
        change: The cheapest change that fits or, where none does, only just; None when the recipe fits as it is, or
            nothing helps.
        gpus: How many GPUs of this kind fit the recipe, where no change does on as many as it has; else None.
        fitting_gpus: GPUs of the device table that fit the recipe as it is, smallest first.
    """

    level: Level
    needed_bytes: int
    available_bytes: int | None
    change: RecipeChange | None = None
    fitting_gpus: tuple[str, ...] = ()
    gpus: int | None = None

    def as_dict(self) -> JsonObject:
        """What JSON says of it; the change's settings as ``--set`` would take them."""
        change = self.change
        said = None if change is None else {"settings": str(change), "total_bytes": change.total_bytes}
        return {**plain_fields(self), "change": said}


def verdict_on(found: Candidate) -> Verdict:
    """The verdict on an estimate; looks for a change only when it is not a clear fit.

    Where the recipe says `gradient_checkpointing: auto`, the policy that was chosen for the device stands in its
    place. A change is then looked for under the leanest policy; with the change made, `auto` may choose a faster one.
    """
    needed, available = found.estimate.total_bytes, found.setup.device.available_bytes
    if found.level in ("fits", "unknown"):
        return Verdict(found.level, needed, available)
    change = _cheapest(found.setup, even_tight=found.level == "does not fit")
    gpus = _how_many_fit(found.setup) if change is None else None
    return Verdict(found.level, needed, available, change, _gpus_that_fit(found.setup), gpus)


def savings(setup: Setup, phases: Collection[Phase] = ()) -> tuple[Saving, ...]:
    """What each single change to a recipe is predicted to save, cheapest for the user first.

    Args:
        phases: Those in one of which memory ran out; where the run has none of them, the one that needs most.

    Empty for a model family whose sizes are not known, and where nothing helps.
    """
    before = candidate(setup)
    if before is None:
        return ()
    saved = []
    for settings in _single_changes(setup, phases):
        after = candidate(setup, settings)
        if after is None:
            continue
        count = before.estimate.most_of(phases) - after.estimate.most_of(phases)
        if count > 0:
            saved.append(Saving(settings, count))
    return tuple(saved)


def relative_time(setup: Setup) -> float:
    """Training time per token, relative to large batches without checkpointing."""
    policy = setup.policy.time if setup.execution.on_kernels else setup.policy.time_off_kernels
    return policy * (1 + _FIXED_TOKENS / setup.tokens)


def _by_time(setup: Setup, changes: Iterable[Settings]) -> list[Settings]:
    """Settings that only change how long a token takes, the fastest first."""
    return sorted(changes, key=lambda settings: relative_time(setup.changed(settings)))


def _cheapest(setup: Setup, *, even_tight: bool) -> RecipeChange | None:
    always: Settings = {}
    if setup.recipe.model.dtype == "bfloat16" and not setup.device.has_bfloat16:
        always = {"model.dtype": "auto"}
        setup = setup.changed(always)
    tight = None
    for settings in _changes_that_may_fit(setup):
        found = _with_fewer_evaluated(setup, settings)
        if found is None or not found.settings:
            continue
        change = RecipeChange({**always, **found.settings}, found.estimate.total_bytes)
        if found.level == "fits":
            return change
        if even_tight and tight is None and found.level == "tight":
            tight = change
    return tight


def _with_fewer_evaluated(setup: Setup, settings: Settings) -> Candidate | None:
    """The change; where evaluation is what is too large, with an evaluation batch that fits, or the smallest one."""
    settings = dict(settings)
    while True:
        found = candidate(setup, settings)
        if found is None or found.level == "fits":
            return found
        rows = found.setup.recipe.eval.per_device_eval_batch_size
        if found.estimate.peak != EVALUATION or rows == 1:
            return found
        settings = {**settings, "eval.per_device_eval_batch_size": rows // 2}


def _how_many_fit(setup: Setup) -> int | None:
    """Of 2, 4 or 8 GPUs, which spread the weights where the method and the recipe allow it."""
    if not setup.trains or setup.device.kind != "cuda":
        return None
    for count in (2, 4, 8):
        if count > setup.ranks:
            on_all = setup.changed({"launch.num_processes": count, "launch.engine": engines.AUTO})
            found = candidate(choose_engine(on_all))
            if found is not None and found.level in ("fits", "tight"):
                return count
    return None


def _changes_that_may_fit(setup: Setup) -> Iterator[Settings]:
    """Settings to try, cheapest for the user first: what only costs time, then shorter rows, then adapters."""
    yield {}
    if not setup.trains:
        yield from shorter(setup) if setup.work == "eval" else ()
        return
    smaller = list(smaller_batches(setup))
    policies = checkpointed(setup)
    both = [{**policy, **batch} for policy in policies for batch in smaller]
    yield from _by_time(setup, [*smaller, *policies, *both])
    least = {**(policies[-1] if policies else {}), **(smaller[-1] if smaller else {})}
    for narrower in narrower_gradients(setup):
        yield from ({**policy, **narrower} for policy in ({}, *policies))
        least |= narrower
        yield least
    yield from ({**least, **length} for length in shorter(setup))
    if setup.recipe.lora is None:
        lora = {"lora": LoraConfig()}
        yield lora
        yield from ({**lora, **batch} for batch in smaller)
        yield {**lora, **least}
        yield from ({**lora, **least, **length} for length in shorter(setup))
    quantised = _smallest_base(setup)
    if quantised:
        yield quantised
        yield {**quantised, **least}
        yield from ({**quantised, **least, **length} for length in shorter(setup))


def _smallest_base(setup: Setup) -> Settings:
    """Adapters on the quantised base that takes least; in float16 where the GPU has no bfloat16. Empty where the base
    is quantised already.
    """
    now = quantizations.row(setup.recipe.quantization.method)
    if setup.device.kind != "cuda" or now.freezes_base:
        return {}
    sizes = {}
    for name in quantizations.supported(freezes_base=True):
        section = setup.recipe.quantization.model_copy(update={"method": name})
        sizes[name] = weight_bytes(section, setup.shape, setup.plan.parameter_bytes)
    settings: dict[str, object] = {"quantization.method": min(sizes, key=lambda name: sizes[name])}
    if setup.recipe.lora is None:
        settings["lora"] = LoraConfig()
    if not setup.device.has_bfloat16:
        settings["model.dtype"] = "float16"
    return settings


def _single_changes(setup: Setup, phases: Collection[Phase]) -> Iterator[Settings]:
    """One step in each direction that saves memory, those that only cost time first."""
    recipe = setup.recipe
    if set(phases) == {EVALUATION}:
        rows = recipe.eval.per_device_eval_batch_size
        if rows > 1:
            yield {"eval.per_device_eval_batch_size": rows // 2}
        return
    yield from _by_time(setup, [*islice(smaller_batches(setup), 1), *checkpointed(setup)])
    yield from narrower_gradients(setup)
    yield from islice(shorter(setup), 1)
    if recipe.lora is None and setup.trains and setup.method.section is None:
        yield {"lora": LoraConfig()}


def _gpus_that_fit(setup: Setup) -> tuple[str, ...]:
    names = []
    for gpu in sorted(GPUS.values(), key=lambda g: (g.memory_bytes or 0, g.bandwidth_gb_per_s or 0)):
        suits = setup.recipe.model.dtype != "bfloat16" or gpu.has_bfloat16
        found = candidate(setup.on(gpu)) if suits else None
        if found is not None and found.level == "fits":
            names.append(gpu.name)
    return tuple(names)
