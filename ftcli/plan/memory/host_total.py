"""Memory of a host: what all ranks on it need at once while the model is loaded, trained and saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ftcli.plain import JsonObject
from ftcli.plan.memory.estimate import Estimate, MemoryEstimate
from ftcli.plan.memory.shards import shards_trained
from ftcli.plan.memory.terms import STEP
from ftcli.plan.run import RunPlan
from ftcli.plan.trained import optimizer_state
from ftcli.units import GIB

HostPhase: TypeAlias = Literal["loading", "training", "saving"]
LOADING: Final = "loading"
TRAINING: Final = "training"
SAVING: Final = "saving"

#: What is allowed for a process on a GPU: the interpreter, torch with CUDA's libraries, transformers.
_PROCESS_BYTES = 3 * GIB
#: Bytes of an element in weight files.
_STORED_BYTES = 2


@dataclass(frozen=True, slots=True)
class HostEstimate(Estimate[HostPhase]):
    """Memory of a host with so many ranks. Rows in the cache are not in it: they are mapped from disk, and memory that
    files take is given back on demand.
    """

    processes: int

    def as_dict(self) -> JsonObject:
        """The JSON form; all sizes in bytes."""
        return {
            "processes": self.processes,
            "total_bytes": self.total_bytes,
            "peak": self.peak,
            "parts": dict(self.parts),
            "phases": {phase: self.phase_bytes(phase) for phase in self.phases},
        }


def host_estimate(plan: RunPlan, memory: MemoryEstimate, processes: int) -> HostEstimate:
    """The estimate for a host with so many ranks, rank 0 among them; ``memory`` is that of each device, a CPU's the
    host's own.
    """
    saved = {"gathered checkpoint": _saved(plan)}
    if plan.device.kind == "cpu":
        held = memory.phase_bytes(STEP) - memory.parts.get("gradients", 0)  # these are gone after the step
        parts = {
            "training": memory.total_bytes * processes,
            "weights and optimizer": held * processes,
        }
        phases: dict[HostPhase, tuple[str, ...]] = {
            TRAINING: ("training",),
            SAVING: ("weights and optimizer", *saved),
        }
        return HostEstimate({**parts, **saved}, phases, processes)
    each = {
        "processes": _PROCESS_BYTES,
        "tensors being loaded": _loaded(plan),
        "pinned memory": memory.pinned_host_bytes,
        "paged optimizer": memory.paged_bytes,
    }
    parts = {name: size * processes for name, size in each.items()}
    lasting = ("processes", "pinned memory", "paged optimizer")
    on_gpu: dict[HostPhase, tuple[str, ...]] = {
        LOADING: ("processes", "tensors being loaded"),
        TRAINING: lasting,
        SAVING: (*lasting, *saved),
    }
    return HostEstimate({**parts, **saved}, on_gpu, processes)


def _loaded(plan: RunPlan) -> int:
    """The largest tensor, as it is stored and in the dtype that it is held in; none is stored of random weights."""
    if plan.recipe.model.init == "random":
        return 0
    shape = plan.described
    if shape is None:
        largest = plan.measured.largest_tensor
    else:
        largest = max(shape.vocab_size * shape.hidden_size, *(linear.parameters for linear in shape.linears))
    return largest * (_STORED_BYTES + plan.dtypes.parameter_bytes)


def _saved(plan: RunPlan) -> int:
    """Bytes that rank 0 holds on the host while it writes: weights as they are (on the GPU if each has all of them) and
    as bytes for the file; then the optimizer's state if it is gathered of all ranks.
    """
    if not plan.trains:
        return 0
    trained, sharded = plan.trained, shards_trained(plan)
    whole = plan.recipe.lora is None
    weights = plan.dtypes.trained_bytes * (plan.sizes.parameters if whole else trained.elements)
    state = optimizer_state(plan.recipe.train.optim, trained).total
    return max(2 * weights, state) if sharded else weights
