"""``train.gradient_checkpointing: auto``: the fastest policy whose estimate fits the device.

Preflight asks once; everything after it sees a recipe with the policy that was chosen. Another machine (a larger GPU, a
host with less memory) may get another policy, and trains to the same bits.

Where a policy is needed, as many layers as fit are left out of it and keep everything, which the recipe calls
``train.uncheckpointed_layers``. The estimate is linear in their number, and so is the time of a step.

Only the training step decides: no policy changes what evaluation and generation need. What memory is left then goes to
``quantization.keep_dequantized: auto``, because dequantizing NF4 weights costs less time than running layers again.

:func:`choose_engine` means ``launch.engine: auto`` on several GPUs: each has the whole model where it fits one, else a
part of it. And ``launch.dp_replicate_size: auto``: each of several hosts has a copy of what is sharded, where it fits.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ftcli.config.recipe import Recipe
from ftcli.config.training import CheckpointingSetting
from ftcli.facts.device import DeviceFacts
from ftcli.plan.execution import why_not_sharded
from ftcli.plan.memory.candidates import (
    Level,
    candidate,
    host_has_room,
    level_of,
    policies_by_speed,
    runs_as_graphs,
)
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.memory.estimate import TIGHT_SHARE
from ftcli.plan.memory.terms import EVALUATION, GENERATION
from ftcli.plan.run import RunPlan
from ftcli.tables import engines, policies
from ftcli.tables.policies import PolicyName
from ftcli.units import GIB, gib

#: Relative times that differ by less count as equal; the policy that needs no host memory is preferred then.
_CLOSE = 0.01


@dataclass(frozen=True, slots=True)
class TriedPolicy:
    """A policy that was tried, what training needs under it, and whether that fits. ``host_has_room`` is None where
    nothing is pinned, and where the host is not known; ``offloaded``: what of each layer is pinned there.
    """

    policy: PolicyName
    needed_bytes: int
    pinned_host_bytes: int
    level: Level
    host_has_room: bool | None
    offloaded: Offloaded | None

    def __str__(self) -> str:
        text = f"{policies.as_recipe(self.policy)} {gib(self.needed_bytes)}"
        if self.host_has_room is False:
            text += f" but {gib(self.pinned_host_bytes)} on the host, which lacks it"
        return text


@dataclass(frozen=True, slots=True)
class CheckpointingChoice:
    """The policy that a run uses, how many layers are left out of it, and the reason in one line; ``tried`` is empty
    where there was nothing to choose.
    """

    requested: CheckpointingSetting
    policy: PolicyName
    reason: str
    tried: tuple[TriedPolicy, ...] = ()
    uncheckpointed_layers: int = 0

    def __str__(self) -> str:
        all_but = f" but in the last {self.uncheckpointed_layers} layers" if self.uncheckpointed_layers else ""
        return f"{policies.as_recipe(self.policy)}{all_but}: {self.reason}"

    def applied_to(self, plan: RunPlan) -> RunPlan:
        """The setup as it runs under this choice."""
        return plan.under(self.policy, self.uncheckpointed_layers)


def choose_checkpointing(plan: RunPlan) -> CheckpointingChoice:
    """The policy that the recipe's setting means on the device.

    For `auto` the fastest policy that fits or, where none does, the leanest. Without an estimate, or where the device
    does not say how much memory it has, `true` on a GPU and `false` on a CPU.
    """
    train = plan.recipe.train
    requested = train.gradient_checkpointing
    if requested != "auto":
        layers = train.uncheckpointed_layers if policies.row(requested).by_layer else 0
        return CheckpointingChoice(requested, requested, "as the recipe says", (), layers)
    if not plan.trains:
        return CheckpointingChoice(requested, False, "nothing is trained")
    if not plan.under(False).wholly_graphed:
        plan = plan.changed(_WITHOUT)  # graphs of some micro-batches decide nothing
    unknown = _unknown(plan)
    if unknown is not None:
        return CheckpointingChoice(requested, plan.device.kind == "cuda", f"it is not known what fits: {unknown}")
    tried = _tried(plan)
    usable = [each for each in tried if each.host_has_room is not False]
    chosen = usable[-1] if usable[-1].level == "fits" else min(usable, key=lambda each: each.needed_bytes)
    best = CheckpointingChoice(requested, chosen.policy, _reason(tried, chosen, plan.device), tuple(tried))
    by_layer = plan.device.kind == "cuda" and plan.execution.on_kernels
    if chosen.level != "fits" or chosen.policy is False or not by_layer:
        return best
    return _with_room_used(best, plan)


#: A run without graphs.
_WITHOUT = {"train.cuda_graphs": False}


def with_graphs_that_fit(plan: RunPlan) -> RunPlan:
    """The setup; without CUDA graphs where their memory, and nothing else, is what makes a run tight or too large."""
    if not plan.trains or not plan.graphed:
        return plan
    without = replace(plan, graphs_fit=False)
    found, other = candidate(plan), candidate(without)
    worse = found is not None and other is not None and found.level != other.level
    return without if worse else plan


def _tried(plan: RunPlan) -> list[TriedPolicy]:
    """The policies, the fastest first, up to the first that fits."""
    tried: list[TriedPolicy] = []
    for name in policies_by_speed(plan.under(False)):
        tried.append(_try(plan, name, 0))
        if tried[-1].level == "fits" and tried[-1].host_has_room is not False:
            break
    return tried


def _with_room_used(best: CheckpointingChoice, plan: RunPlan) -> CheckpointingChoice:
    """The fastest choice: the same policy for all layers, or a policy with as many layers left out of it as fit."""
    layers, fastest = plan.shape.num_layers, _relative_time(best.policy, 0.0)
    graphed = runs_as_graphs(plan)
    for name, row in policies.TABLE.items():
        if not row.by_layer or (row.on_host and graphed):
            continue

        def fits(count: int, name: PolicyName = name) -> bool:
            found = _try(plan, name, count)
            # With the layers' inputs alone on the host `offload` is the slowest there is.
            return found.level == "fits" and found.host_has_room is not False and found.offloaded != "layers"

        count = bisect_left(range(layers), True, key=lambda n: not fits(n)) - 1  # most; -1: none fits
        margin = 0.0 if name == best.policy else _CLOSE
        if count > 0 and _relative_time(name, count / layers) < fastest - margin:
            fastest = _relative_time(name, count / layers)
            best = replace(best, policy=name, uncheckpointed_layers=count)
    return best


def _relative_time(name: PolicyName, share: float) -> float:
    """Relative time of a step in which a ``share`` of the layers is left out of the policy."""
    return share + (1.0 - share) * policies.row(name).time


def within_budget(device: DeviceFacts, recipe: Recipe) -> DeviceFacts:
    """The device, with its memory limited to ``train.memory_budget_gib`` where `auto` plans with that."""
    budget = recipe.train.memory_budget_gib
    if budget is None or device.available_bytes is None or recipe.train.gradient_checkpointing != "auto":
        return device
    return replace(device, free_bytes=min(device.available_bytes, int(budget * GIB)))


def _unknown(plan: RunPlan) -> str | None:
    if plan.described is None and plan.measured.activations is None:
        return plan.measured.unknown
    return f"{plan.device.name} does not say how much memory it has" if plan.device.available_bytes is None else None


def _try(plan: RunPlan, name: PolicyName, uncheckpointed: int) -> TriedPolicy:
    """One policy, without the dequantized copies that `auto` makes where there is room."""
    lean = {} if plan.recipe.quantization.keep_dequantized != "auto" else {"quantization.keep_dequantized": False}
    found = candidate(plan.under(name, uncheckpointed), lean)
    assert found is not None  # the family is known
    estimate = found.estimate
    needed = max(estimate.phase_bytes(phase) for phase in estimate.phases if phase not in (EVALUATION, GENERATION))
    level, room = level_of(needed, plan.device), host_has_room(estimate, plan.device)
    return TriedPolicy(name, needed, estimate.pinned_host_bytes, level, room, estimate.offloaded)


def _reason(tried: list[TriedPolicy], chosen: TriedPolicy, device: DeviceFacts) -> str:
    assert device.available_bytes is not None
    why = "the fastest that fits" if chosen.level == "fits" else "the leanest; none fits"
    memory = f"{TIGHT_SHARE:.0%} of {gib(device.available_bytes)} GiB"
    return f"{why} in {memory} (needed: {', '.join(map(str, tried))})"


def choose_engine(plan: RunPlan) -> RunPlan:
    """The setup with an engine, and a number of copies of what it shards, in place of `auto`. Weights that are
    trained are sharded, wherever they can be: nobody needs all of their gradients and optimizer state.
    """
    if not plan.trains or plan.recipe.launch.num_processes == 1:
        return plan
    return _with_copies(_with_engine(plan))


def _with_engine(plan: RunPlan) -> RunPlan:
    recipe = plan.recipe
    if recipe.launch.engine != engines.AUTO:
        return plan
    usable = plan.method.supports.get("launch.engine")
    whole, sharded = engines.by_auto(shards=False), engines.by_auto(shards=True)
    can_shard = (usable is None or sharded in usable) and why_not_sharded(recipe, plan.facts, plan.execution) is None
    copies = recipe.launch.copies > 1  # which only sharded weights have: what forbids them is said later
    fits_one = recipe.lora is not None and _fits(plan.changed({"launch.engine": whole}))
    return plan.changed({"launch.engine": sharded if copies or (can_shard and not fits_one) else whole})


def _with_copies(plan: RunPlan) -> RunPlan:
    launch, hosts = plan.recipe.launch, plan.hosts
    if launch.dp_replicate_size != "auto" or hosts == 1 or not plan.recipe.launch.is_sharded:
        return plan
    each = plan.changed({"launch.dp_replicate_size": hosts})
    possible = launch.num_processes % hosts == 0 and each.shard_size > 1
    return each if possible and _fits(each) else plan


def _fits(plan: RunPlan) -> bool:
    """True if a GPU has room for its part of the model under some policy, or if that is not known."""
    least = plan.changed({"train.cuda_graphs": False, "quantization.keep_dequantized": False})
    asked = least.recipe.train.gradient_checkpointing
    policies = policies_by_speed(least.under(False)) if asked == "auto" else (asked,)
    found = (candidate(least.under(name)) for name in policies)
    return any(each is None or each.level != "does not fit" for each in found)
