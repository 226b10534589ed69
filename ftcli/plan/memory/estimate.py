"""Adds up the memory of a run: the terms of :mod:`~.terms`, by phase. Pure arithmetic.

``kernels/bench/memory.py`` compares the estimate with what a GPU needs for whole models and for every shipped recipe;
the results are in docs/performance.md. tests/gpu/test_memory_estimate.py compares single phases with fewer layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ftcli.plain import JsonObject
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.memory.generation import Generator, generation
from ftcli.plan.memory.measured_terms import measured_terms, sent_by_layers
from ftcli.plan.memory.pinned import pinnable_bytes, pinned_bytes, pinned_whole
from ftcli.plan.memory.terms import (
    GENERATION,
    MemoryDecisions,
    Phase,
    Term,
    graph_pool,
    held_by_layers,
    phases_of,
    terms,
)
from ftcli.plan.quantization import layers_with_room
from ftcli.plan.run import RunPlan
from ftcli.plan.trained import optimizer_state
from ftcli.tables import quantizations

#: CUDA context and loaded kernels; on a CPU the interpreter with torch and transformers.
_RUNTIME_BYTES = {"cuda": 600 * 2**20, "cpu": 850 * 2**20}
#: Share of the short-lived memory that torch's allocator holds beyond what is asked of it.
_FRAGMENTATION = 0.05
#: What is kept though a run could do without takes no more than this share of the memory.
ROOMY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by term and by phase.

    Attributes:
        parts: The bytes of each term, by its name.
        phases: For each phase the names of the terms that are there at once.
        pinned_host_bytes: Pinned memory on the host, which is part of no term.
        offloaded: What of the layers is pinned there; None where nothing is.
        paged_bytes: Optimizer state that lies on the GPU while it has room and on the host else, which is part of no
            term either.
        dequantized_layers: Decoder layers that keep their quantized weights dequantized.
        graph_pool_bytes: What of the terms lies in the pool of the CUDA graphs; 0 without graphs.
        generator: How long what completes a method's prompts is held.
    """

    parts: Mapping[str, int]
    phases: Mapping[Phase, tuple[str, ...]]
    pinned_host_bytes: int = 0
    offloaded: Offloaded | None = None
    dequantized_layers: int = 0
    paged_bytes: int = 0
    graph_pool_bytes: int = 0
    generator: Generator = "each step"

    def phase_bytes(self, phase: Phase) -> int:
        """Bytes that are needed at once in a phase."""
        return sum(self.parts[name] for name in self.phases[phase])

    def most_of(self, phases: Collection[Phase]) -> int:
        """Bytes that are needed at once in the largest of ``phases``; where the run has none of them, at its peak."""
        return max((self.phase_bytes(phase) for phase in phases if phase in self.phases), default=self.total_bytes)

    @property
    def peak(self) -> Phase:
        """Name of the phase that needs most."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that the run needs at its peak."""
        return self.phase_bytes(self.peak)

    @property
    def allocated_bytes(self) -> int:
        """The peak of torch's allocator: the total without what CUDA itself takes, and NCCL."""
        return self.total_bytes - self.parts["runtime"] - self.parts.get("NCCL", 0)

    def as_dict(self) -> JsonObject:
        """The JSON form; all sizes in bytes."""
        return {
            "total_bytes": self.total_bytes,
            "allocated_bytes": self.allocated_bytes,
            "peak": self.peak,
            "parts": dict(self.parts),
            "phases": {phase: self.phase_bytes(phase) for phase in self.phases},
            "peak_parts": list(self.phases[self.peak]),
            "pinned_host_bytes": self.pinned_host_bytes,
            "paged_bytes": self.paged_bytes,
            "offloaded": self.offloaded,
        }


def estimate_memory(plan: RunPlan) -> MemoryEstimate | None:
    """The estimate of one setup; None for a family without a description whose layers do not run without memory.

    What depends on how much memory there is is settled first: what ``offload`` sends to the host, how many layers
    ``quantization.keep_dequantized: auto`` dequantizes for good, and whether what generates is kept.

    Raises:
        ValueError: Training under ``gradient_checkpointing: auto``; :mod:`~.policy` must choose a policy before.
    """
    if plan.described is None:
        return _of_measured(plan)
    return _with_generator(plan, MemoryDecisions(offloaded_of(plan), _dequantized_layers(plan)))


def _of_measured(plan: RunPlan) -> MemoryEstimate | None:
    model = plan.measured
    if model.activations is None:
        return None
    found = tuple(measured_terms(plan, model, model.activations))
    settings = plan.recipe.quantization
    holds = quantizations.row(settings.method).holds_dequantized and settings.keep_dequantized is True
    pinned = pinned_by(plan, "layers") if plan.policy.on_host else 0
    parts, names = _summed(plan, found)
    return MemoryEstimate(
        parts,
        names,
        pinned_host_bytes=pinned,
        offloaded="layers" if pinned else None,
        dequantized_layers=model.num_layers if holds else 0,
        paged_bytes=paged_by(plan),
    )


def _dequantized_layers(plan: RunPlan) -> int:
    quantization, shape = plan.recipe.quantization, plan.shape
    possible = quantizations.row(quantization.method).holds_dequantized
    if not possible or not quantization.keep_dequantized or plan.work == "export":
        return 0
    if plan.shard_size > 1 and quantization.keep_dequantized == "auto":
        return 0  # four times as much would have to be sent
    if quantization.keep_dequantized is True:
        return shape.num_layers
    needed, element = _added_up(plan, MemoryDecisions(offloaded_of(plan))).total_bytes, plan.dtypes.parameter_bytes
    return layers_with_room(quantization, shape, element, needed, plan.device.available_bytes)


def _with_generator(plan: RunPlan, settled: MemoryDecisions) -> MemoryEstimate:
    """Adds the generation engine and its merged weights, kept between steps if they fit in free memory.

    On a CPU it is always kept, and nothing is merged.
    """
    alone, batch, free = _added_up(plan, settled), plan.method_memory.generation, plan.device.available_bytes
    if GENERATION not in alone.phases or batch is None:
        return alone
    needed = generation(plan, batch)
    if not needed.by_engine:
        return alone
    if plan.device.kind == "cpu":
        return _added_up(plan, replace(settled, generator="kept"))
    if free is None:
        return alone
    ways: tuple[Generator, ...] = ("merged", "kept") if needed.copy_bytes else ("kept",)
    for way in ways:
        found = _added_up(plan, replace(settled, generator=way))
        if found.total_bytes <= ROOMY_SHARE * free:
            return found
    return alone


def offloaded_of(plan: RunPlan) -> Offloaded:
    """The tensors that ``offload`` sends to the host: those that halves of layers are run again from, or only the
    layers' inputs if the host has no room for them.
    """
    free = plan.device.host_free_bytes
    has_room = free is None or pinned_by(plan, "halves") <= pinnable_bytes(free)
    return "halves" if has_room else "layers"


def pinned_by(plan: RunPlan, offloaded: Offloaded) -> int:
    """Bytes of activations that training sends to the host. On a CPU nothing is sent: its memory is the host's."""
    if not plan.trains or plan.device.kind == "cpu":
        return 0
    if plan.described is None:
        activations = plan.measured.activations
        return 0 if activations is None else sent_by_layers(plan, activations)
    setting = plan.setting(plan.largest[1], padded=False)
    stream = plan.shape.hidden_size * setting.bytes_residual
    held, _ = held_by_layers(plan, setting, offloaded)
    layers = plan.shape.num_layers - plan.uncheckpointed
    return pinned_bytes(round(layers * held.host / stream), plan.tokens * stream)


def paged_by(plan: RunPlan) -> int:
    """Bytes of optimizer state in managed memory."""
    if not plan.trains or plan.device.kind != "cuda":
        return 0
    return optimizer_state(plan.recipe.train.optim, plan.trained).paged


def _added_up(plan: RunPlan, settled: MemoryDecisions) -> MemoryEstimate:
    parts, names = _summed(plan, tuple(terms(plan, settled)))
    pinned, table = pinned_by(plan, settled.offloaded), pinned_whole(plan.host_table_bytes)
    whole = plan.layers.gate_and_up is None  # layers that know no halves send their input
    sent: Offloaded = "layers" if whole else settled.offloaded
    return MemoryEstimate(
        parts,
        names,
        pinned + table,
        sent if pinned else None,
        settled.dequantized_layers,
        paged_by(plan),
        graph_pool(plan, settled),
        settled.generator,
    )


def _summed(plan: RunPlan, found: Sequence[Term]) -> tuple[Mapping[str, int], Mapping[Phase, tuple[str, ...]]]:
    """(bytes of each term, the terms of each phase), with what torch itself takes."""
    phases = phases_of(plan)
    short_lived = max(
        sum(term.bytes for term in found if phase in term.phases and not term.lasting) for phase in phases
    )
    parts = {term.name: term.bytes for term in found}
    parts["runtime"] = _RUNTIME_BYTES[plan.device.kind] + int(_FRAGMENTATION * short_lived)
    names = {phase: (*(term.name for term in found if phase in term.phases), "runtime") for phase in phases}
    return MappingProxyType(parts), MappingProxyType(names)
