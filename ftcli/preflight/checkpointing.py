"""``train.gradient_checkpointing: auto``: the fastest policy whose estimate fits the device.

Preflight asks once, and everything after it sees a recipe with the policy that was chosen. What changes with the
machine alone (a larger GPU, a host with less memory) changes the answer and not one number of the training.

Decided on the training step alone: no policy changes what evaluation and generation need.
``quantization.keep_dequantized: auto`` comes second and takes what is left: dequantising NF4 weights takes less of a
step than running layers again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ftcli.config import Recipe
from ftcli.config.training import Checkpointing, CheckpointingSetting
from ftcli.preflight.activations import pinnable_bytes
from ftcli.preflight.device import DeviceFacts
from ftcli.preflight.facts import ModelFacts
from ftcli.preflight.levels import TIGHT_SHARE, Level, level_of
from ftcli.preflight.memory import MemoryEstimate, estimate_memory
from ftcli.preflight.policies import Work, execution_of
from ftcli.preflight.precision import DtypePlan, plan_dtypes

#: Phases of the estimate in which nothing is kept for backward.
_WITHOUT_BACKWARD = ("evaluation", "generation")

# Fastest first (docs/performance.md). On the kernels `offload` can keep more than `true`, and runs less again.
_ON_KERNELS: tuple[Checkpointing, ...] = (False, "selective", "offload", True)
# Where the host has room for the layers' inputs alone, layers run again whole, and one more product.
_ON_KERNELS_SHORT_HOST: tuple[Checkpointing, ...] = (False, "selective", True, "offload")
_PLAIN: tuple[Checkpointing, ...] = (False, True, "offload")  # `selective` is `true` there
_WHOLE: tuple[Checkpointing, ...] = (False, True)  # GRPO, and a CPU, whose memory is the host's


@dataclass(frozen=True, slots=True)
class Tried:
    """A policy and what training needs under it, in bytes; ``level`` holds that against the device.

    ``host_has_room`` is None where nothing is pinned, and where the host is not known.
    """

    policy: Checkpointing
    needed_bytes: int
    pinned_host_bytes: int
    level: Level
    host_has_room: bool | None

    def __str__(self) -> str:
        text = f"{policy_name(self.policy)} {_gib(self.needed_bytes)}"
        if self.host_has_room is False:
            text += f" but {_gib(self.pinned_host_bytes)} on the host, which lacks it"
        return text


@dataclass(frozen=True, slots=True)
class CheckpointingChoice:
    """The policy that a run uses. ``tried`` is empty where nothing had to be weighed; ``reason`` is one line."""

    requested: CheckpointingSetting
    policy: Checkpointing
    reason: str
    tried: tuple[Tried, ...] = ()

    def __str__(self) -> str:
        return f"{policy_name(self.policy)}: {self.reason}"

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
        return CheckpointingChoice(requested, requested, "as the recipe says")
    if work not in ("train", "grpo"):
        return CheckpointingChoice(requested, False, "nothing is trained")
    unknown = _unknown(facts, device)
    if unknown is not None:
        return CheckpointingChoice(requested, device.kind == "cuda", f"what would fit is not known: {unknown}")
    tried: list[Tried] = []
    for policy in policies_by_speed(recipe, facts, plan, device, work):
        tried.append(_try(recipe, policy, facts, plan, device, work))
        if tried[-1].level == "fits" and tried[-1].host_has_room is not False:
            break
    usable = [each for each in tried if each.host_has_room is not False]
    chosen = usable[-1] if usable[-1].level == "fits" else min(usable, key=lambda each: each.needed_bytes)
    return CheckpointingChoice(requested, chosen.policy, _reason(tried, chosen, device), tuple(tried))


def with_policy(recipe: Recipe, policy: Checkpointing) -> Recipe:
    """The recipe with a policy in place of its setting."""
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"gradient_checkpointing": policy})},
    )


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
    return Tried(policy, needed, pinned, level_of(needed, device), host_has_room(estimate, device))


def _lean(recipe: Recipe) -> Recipe:
    """The recipe without the dequantised copies that `auto` makes where there is room."""
    if recipe.quantization.keep_dequantized != "auto":
        return recipe
    lean = recipe.quantization.model_copy(update={"keep_dequantized": False})
    return recipe.model_copy(update={"quantization": lean})


def _reason(tried: list[Tried], chosen: Tried, device: DeviceFacts) -> str:
    assert device.available_bytes is not None
    why = "the fastest that fits" if chosen.level == "fits" else "the leanest; none fits"
    memory = f"{TIGHT_SHARE:.0%} of {_gib(device.available_bytes)} GiB"
    return f"{why} in {memory} (needed: {', '.join(map(str, tried))})"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}" if count >= 2**30 else f"{count / 2**30:.2f}"
