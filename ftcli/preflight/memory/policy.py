"""``train.gradient_checkpointing: auto``: the fastest policy whose estimate fits the device.

Preflight asks once, and everything after it sees a recipe with the policy that was chosen. What changes with the
machine alone (a larger GPU, a host with less memory) changes the answer and not one number of the training.

Where a policy is needed at all, as many layers as memory has room for keep everything all the same
(``train.uncheckpointed_layers``): the estimate is linear in them, and so is the time of a step.

Decided on the training step alone: no policy changes what evaluation and generation need.
``quantization.keep_dequantized: auto`` comes second and takes what is left: dequantising NF4 weights takes less of a
step than running layers again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftcli.config import Recipe
from ftcli.config.training import Checkpointing, CheckpointingSetting
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan, plan_dtypes
from ftcli.preflight.execution import Work, execution_of
from ftcli.preflight.memory.activations import Offloaded, pinnable_bytes
from ftcli.preflight.memory.estimate import estimate_memory
from ftcli.preflight.memory.levels import TIGHT_SHARE, Level, level_of
from ftcli.preflight.memory.result import MemoryEstimate
from ftcli.preflight.memory.slowdown import ON_KERNELS
from ftcli.units import GIB, gib

#: Phases of the estimate in which nothing is kept for backward.
_WITHOUT_BACKWARD = ("evaluation", "generation")

# Fastest first (docs/performance.md). On the kernels `offload` can keep more than `true`, and runs less again.
_ON_KERNELS: tuple[Checkpointing, ...] = (False, "selective", "offload", True)
# Where the host has room for the layers' inputs alone, layers run again whole, and one more product.
_ON_KERNELS_SHORT_HOST: tuple[Checkpointing, ...] = (False, "selective", True, "offload")
_PLAIN: tuple[Checkpointing, ...] = (False, True, "offload")  # `selective` is `true` there
#: Those that are set on each layer by itself.
_FOR_SOME_LAYERS: tuple[Checkpointing, ...] = ("selective", "offload")
#: Relative times that differ by less decide nothing; what needs no host memory is preferred then.
_CLOSE = 0.01
_WHOLE: tuple[Checkpointing, ...] = (False, True)  # GRPO, and a CPU, whose memory is the host's


@dataclass(frozen=True, slots=True)
class Tried:
    """A policy and what training needs under it, in bytes; ``level`` holds that against the device.

    ``host_has_room`` is None where nothing is pinned, and where the host is not known. ``offloaded``: what is pinned of
    each layer.
    """

    policy: Checkpointing
    needed_bytes: int
    pinned_host_bytes: int
    level: Level
    host_has_room: bool | None
    offloaded: Offloaded | None

    def __str__(self) -> str:
        text = f"{policy_name(self.policy)} {gib(self.needed_bytes)}"
        if self.host_has_room is False:
            text += f" but {gib(self.pinned_host_bytes)} on the host, which lacks it"
        return text


@dataclass(frozen=True, slots=True)
class CheckpointingChoice:
    """The policy that a run uses, and how many layers are left out of it. ``tried`` is empty where nothing had to be
    weighed; ``reason`` is one line.
    """

    requested: CheckpointingSetting
    policy: Checkpointing
    reason: str
    tried: tuple[Tried, ...] = ()
    uncheckpointed_layers: int = 0

    def __str__(self) -> str:
        all_but = f" but in the last {self.uncheckpointed_layers} layers" if self.uncheckpointed_layers else ""
        return f"{policy_name(self.policy)}{all_but}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        return asdict(self)


def choose_checkpointing(
    recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, *, work: Work
) -> CheckpointingChoice:
    """What the recipe's setting comes to on ``device``.

    The fastest policy that fits; where none does, the leanest. Where there is no estimate, or nothing to hold it
    against: `true` on a GPU, `false` on a CPU.
    """
    requested = recipe.train.gradient_checkpointing
    if requested != "auto":
        layers = recipe.train.uncheckpointed_layers if requested in _FOR_SOME_LAYERS else 0
        return CheckpointingChoice(requested, requested, "as the recipe says", (), layers)
    if work not in ("train", "grpo"):
        return CheckpointingChoice(requested, False, "nothing is trained")
    unknown = _unknown(facts, device)
    if unknown is not None:
        return CheckpointingChoice(requested, device.kind == "cuda", f"what would fit is not known: {unknown}")
    recipe = with_layers(recipe, 0)
    tried: list[Tried] = []
    for policy in policies_by_speed(recipe, facts, plan, device, work):
        tried.append(_try(recipe, policy, facts, plan, device, work))
        if tried[-1].level == "fits" and tried[-1].host_has_room is not False:
            break
    usable = [each for each in tried if each.host_has_room is not False]
    chosen = usable[-1] if usable[-1].level == "fits" else min(usable, key=lambda each: each.needed_bytes)
    reason = _reason(tried, chosen, device)
    best = CheckpointingChoice(requested, chosen.policy, reason, tuple(tried))
    by_layer = device.kind == "cuda" and on_kernels(recipe, facts, plan, device, work)
    if chosen.level != "fits" or chosen.policy is False or not by_layer:
        return best
    return _with_room_used(best, recipe, facts, plan, device, work)


def _with_room_used(
    best: CheckpointingChoice, recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, work: Work
) -> CheckpointingChoice:
    """The fastest of: the uniform policy, and each policy with as many layers left out of it as fit."""
    assert facts.shape is not None  # it has an estimate
    layers, fastest = facts.shape.num_layers, _relative_time(best.policy, 0.0)
    for policy in _FOR_SOME_LAYERS:

        def fits(count: int, policy: Checkpointing = policy) -> bool:
            found = _try(with_layers(recipe, count), policy, facts, plan, device, work)
            # With the layers' inputs alone on the host `offload` is the slowest there is.
            return found.level == "fits" and found.host_has_room is not False and found.offloaded != "layers"

        count = bisect_left(range(layers), True, key=lambda n: not fits(n)) - 1  # the most that fit; -1: not even none
        margin = 0.0 if policy == best.policy else _CLOSE
        if count > 0 and _relative_time(policy, count / layers) < fastest - margin:
            fastest = _relative_time(policy, count / layers)
            best = replace(best, policy=policy, uncheckpointed_layers=count)
    return best


def _relative_time(policy: Checkpointing, share: float) -> float:
    """Of a step in which a ``share`` of the layers keep everything."""
    return share + (1.0 - share) * ON_KERNELS[policy]


def within_budget(device: DeviceFacts, recipe: Recipe) -> DeviceFacts:
    """The device with no more memory than ``train.memory_budget_gib``, where `auto` is to plan with that."""
    budget = recipe.train.memory_budget_gib
    if budget is None or device.available_bytes is None or recipe.train.gradient_checkpointing != "auto":
        return device
    return replace(device, free_bytes=min(device.available_bytes, int(budget * GIB)))


def with_policy(recipe: Recipe, policy: Checkpointing) -> Recipe:
    """The recipe with a policy in place of its setting."""
    return _with_train(recipe, gradient_checkpointing=policy)


def with_layers(recipe: Recipe, uncheckpointed: int) -> Recipe:
    """The recipe with so many layers left out of its policy."""
    return _with_train(recipe, uncheckpointed_layers=uncheckpointed)


def with_choice(recipe: Recipe, choice: CheckpointingChoice) -> Recipe:
    """The recipe as it runs under ``choice``."""
    return with_layers(with_policy(recipe, choice.policy), choice.uncheckpointed_layers)


def _with_train(recipe: Recipe, **settings: Any) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)})


def policies_by_speed(
    recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, work: Work
) -> tuple[Checkpointing, ...]:
    """The policies that differ for this run, fastest first."""
    if work == "grpo" or device.kind == "cpu":
        return _WHOLE
    if not on_kernels(recipe, facts, plan, device, work):
        return _PLAIN
    offload = estimate_memory(_lean(with_policy(recipe, "offload")), facts, plan, device, work=work)
    return _ON_KERNELS if offload is None or offload.offloaded != "layers" else _ON_KERNELS_SHORT_HOST


def leaner_policies(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, work: Work) -> tuple[Checkpointing, ...]:
    """Policies that keep less than the recipe's and that the host has room for, the fastest first.

    On the kernels ``offload`` is both faster and leaner than ``true``, which is for a host without the room for what
    the halves of layers are run again from.
    """
    if work not in ("train", "grpo"):
        return ()
    now, plan = recipe.train.checkpointing, plan_dtypes(recipe, device)

    def has_room(policy: Checkpointing) -> bool:
        if policy != "offload":
            return True
        estimate = estimate_memory(with_policy(recipe, policy), facts, plan, device, work=work)
        return estimate is None or host_has_room(estimate, device) is not False

    order = [policy for policy in policies_by_speed(recipe, facts, plan, device, work) if has_room(policy)]
    if order[-1] is True and "offload" in order:
        order.remove(True)
    if now in order:
        return tuple(order[order.index(now) + 1 :])
    return tuple(policy for policy in order if policy == "offload")


def on_kernels(recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, work: Work) -> bool:
    """Whether ftcli's kernels, or their reference, compute the layers."""
    return execution_of(recipe, facts, plan, device, work=work).kernels != "transformers"


def host_has_room(estimate: MemoryEstimate, device: DeviceFacts) -> bool | None:
    """Whether the host has what the run pins; None where it pins nothing, and where the host is not known."""
    if not estimate.pinned_host_bytes or device.host_free_bytes is None:
        return None
    return estimate.pinned_host_bytes <= pinnable_bytes(device.host_free_bytes)


def policy_name(policy: CheckpointingSetting) -> str:
    """A policy as a recipe writes it."""
    return str(policy).lower()


def _unknown(facts: ModelFacts, device: DeviceFacts) -> str | None:
    if facts.shape is None:
        return f"ftcli has no memory arithmetic for model_type {facts.model_type}"
    return f"{device.name} does not say how much memory it has" if device.available_bytes is None else None


def _try(
    recipe: Recipe, policy: Checkpointing, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, work: Work
) -> Tried:
    estimate = estimate_memory(_lean(with_policy(recipe, policy)), facts, plan, device, work=work)
    assert estimate is not None  # the family is known
    needed = max(estimate.phase_bytes(phase) for phase in estimate.phases if phase not in _WITHOUT_BACKWARD)
    pinned = estimate.pinned_host_bytes
    level, room = level_of(needed, device), host_has_room(estimate, device)
    return Tried(policy, needed, pinned, level, room, estimate.offloaded)


def _lean(recipe: Recipe) -> Recipe:
    """The recipe without the dequantised copies that `auto` makes where there is room."""
    if recipe.quantization.keep_dequantized != "auto":
        return recipe
    lean = recipe.quantization.model_copy(update={"keep_dequantized": False})
    return recipe.model_copy(update={"quantization": lean})


def _reason(tried: list[Tried], chosen: Tried, device: DeviceFacts) -> str:
    assert device.available_bytes is not None
    why = "the fastest that fits" if chosen.level == "fits" else "the leanest; none fits"
    memory = f"{TIGHT_SHARE:.0%} of {gib(device.available_bytes)} GiB"
    return f"{why} in {memory} (needed: {', '.join(map(str, tried))})"
