"""Adds up the memory of a run: the terms of :mod:`~.terms`, by phase. Pure arithmetic.

``kernels/bench/memory.py`` compares the estimate with what a GPU needs for whole models and for every shipped recipe;
the results are in docs/performance.md. tests/gpu/test_memory_estimate.py compares single phases with fewer layers.

The terms of a family without a description (:func:`measured_terms`) come from what was measured of its model. Layers
are transformers' own, so nothing of the kernels' is there. Of each kind of layer the largest counts where one layer is
at work, and each by its number where all are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ftcli.plain import JsonObject
from ftcli.plan.measured import Activations, LayerKind, MeasuredModel
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.plan.memory.generation import Generator, generation
from ftcli.plan.memory.shards import LAYERS_AT_ONCE, SUMMED_BYTES, shard_bytes
from ftcli.plan.memory.terms import (
    BACKWARD,
    END,
    EVALUATION,
    FORWARD,
    GENERATION,
    STEP,
    TRAINING,
    MemoryDecisions,
    Phase,
    Term,
    beside_gradients,
    cross_entropy,
    embedding_gradient,
    gradient_bytes,
    graph_pool,
    held_by_layers,
    images,
    phases_of,
    table_gradient_bytes,
    terms,
)
from ftcli.plan.memory.workspaces import cublas_bytes, pinnable_bytes, pinned_bytes, pinned_whole
from ftcli.plan.quantization import layers_with_room, why_dequantized
from ftcli.plan.run import Generation, RunPlan
from ftcli.plan.trained import optimizer_state, optimizer_workspace
from ftcli.tables import exports, quantizations


def measured_terms(plan: RunPlan, model: MeasuredModel, activations: Activations) -> Iterator[Term]:
    always = phases_of(plan)
    weights = _weights(plan, model)
    yield Term("weights", shard_bytes(plan, weights) if plan.shard_size > 1 else weights, always, lasting=True)
    if plan.shard_size > 1:
        yield from _gathered(plan, model, always)
    if plan.recipe.lora is not None:
        yield Term("adapters", plan.dtypes.trained_bytes * plan.trained.elements, always, lasting=True)
    workspaces = cublas_bytes(plan.device, plan.execution, backward=plan.trains, graphs=False)
    if plan.work != "export" and workspaces:
        yield Term("cuBLAS workspaces", workspaces, always, lasting=True)
    dense = dequantized_bytes(plan, model)
    if plan.trains:
        accumulates = plan.recipe.train.gradient_accumulation_steps > 1
        yield Term("gradients", gradient_bytes(plan), TRAINING if accumulates else (END, STEP), lasting=True)
        yield from beside_gradients(plan, always)
        yield from _what_a_step_allocates(plan, model, activations, dense)
    if GENERATION in always and (batch := plan.method_memory.generation) is not None:
        passes, cache = generation_bytes(plan, model, activations, batch)
        yield Term("generation", passes + dense, (GENERATION,))
        yield Term("key-value cache", cache, (GENERATION,), lasting=True)
    if EVALUATION in always:
        yield Term("evaluation", _evaluation(plan, model, activations) + dense, (EVALUATION,))


def _weights(plan: RunPlan, model: MeasuredModel) -> int:
    settings, element = plan.recipe.quantization, plan.dtypes.parameter_bytes
    if plan.work == "export":  # the model for formats that hold it; else a table, or a layer and what is merged into it
        if any(exports.row(name).whole for name in plan.recipe.export.formats):
            return model.parameters * element
        return max(14 * model.largest_tensor, 4 * model.largest_layer)
    trained = plan.recipe.lora is None and quantizations.row(settings.method).training is None
    return model.weight_bytes(settings, element, dequantized=trained or settings.keep_dequantized is True)


def _gathered(plan: RunPlan, model: MeasuredModel, always: tuple[Phase, ...]) -> Iterator[Term]:
    """Whole weights of the layers at work, and where they are trained, gradients in their reduce-scatter."""
    trained = plan.recipe.lora is None
    element = plan.dtypes.compute_bytes if trained else plan.dtypes.parameter_bytes
    whole = element * (model.outer_elements + LAYERS_AT_ONCE * model.largest_layer)
    without = (END, STEP) if trained else (STEP,)
    yield Term("gathered weights", whole, tuple(phase for phase in always if phase not in without))
    if trained:
        each = element + SUMMED_BYTES + SUMMED_BYTES // plan.shard_size
        yield Term("gradients added up", 2 * model.largest_layer * each, (BACKWARD,))
        together = max(model.outer_elements, model.largest_layer + model.outer_elements)
        yield Term("gradients added up last", together * (element + SUMMED_BYTES), (END,))


def _what_a_step_allocates(plan: RunPlan, model: MeasuredModel, activations: Activations, dense: int) -> Iterator[Term]:
    rows, length = plan.largest
    tokens, states = rows * length, rows * length * model.hidden_size * plan.stream_bytes
    last = activations.last(rows, length)
    workspace = max(last, *(layer_workspace(plan, kind, rows, length) for kind in activations.kinds))
    yield from images(plan)
    yield Term("before the layers", activations.entry(rows, length), (FORWARD, BACKWARD))
    for phase, kept in kept_by_layers(plan, activations, rows, length).items():
        yield Term("activations" if phase == BACKWARD else "activations in forward", kept, (phase,))
    # The loss computes their gradient in its forward pass; the layers' backward has that alone.
    yield Term("hidden states", last, (FORWARD,))
    yield Term("their gradient", states, (FORWARD, BACKWARD))
    loss = plan.method_memory.loss_bytes
    yield Term("loss workspace", cross_entropy(plan, tokens, training=True) if loss is None else loss, (FORWARD,))
    yield Term("backward workspace", workspace, (BACKWARD,))
    first = activations.kinds[0]
    kept = first.kept(rows, length) if plan.policy.recomputes == "nothing" else 0  # else in its workspace
    last = kept + layer_workspace(plan, first, rows, length)
    yield Term("last workspace", max(last, embedding_gradient(plan)), (END,))
    if not plan.own_optimizer:
        cuda = plan.device.kind == "cuda"
        yield Term("optimizer workspace", optimizer_workspace(plan.optim, plan.trained, cuda=cuda), (STEP,))
    if plan.head_is_trained:
        element = table_gradient_bytes(plan) if plan.shard_size == 1 else plan.dtypes.compute_bytes
        yield Term("head gradient", element * model.hidden_size * model.vocab_size, (BACKWARD,))
    if dense:
        yield Term("dequantized weights", dense, (BACKWARD, END))


def kept_by_layers(plan: RunPlan, activations: Activations, rows: int, length: int) -> Mapping[Phase, int]:
    """Bytes that all layers keep together, at the end of the forward pass and while backward runs.

    Layers that run again keep what they hand on, and what autocast made of their weights until the forward pass ends.
    What the last one hands on is gone when its backward begins.
    """
    counted = [(kind.count, kind) for kind in activations.kinds]
    if plan.policy.recomputes == "nothing":
        kept = sum(count * kind.kept(rows, length) for count, kind in counted)
        return {FORWARD: kept, BACKWARD: kept}
    handed = sum(count * kind.handed(rows, length) for count, kind in counted)
    cast = sum(count * max(0, round(kind.handed.fixed)) for count, kind in counted)
    sent = handed - cast if plan.policy.on_host and plan.device.kind == "cuda" else 0
    least = 0 if sent else min(streams(kind, rows, length) for kind in activations.kinds)
    return {FORWARD: handed - sent, BACKWARD: handed - cast - sent - least}


def streams(kind: LayerKind, rows: int, length: int) -> int:
    """Bytes of what a layer hands on, without what autocast made of its weights."""
    return kind.handed(rows, length) - max(0, round(kind.handed.fixed))


def sent_by_layers(plan: RunPlan, activations: Activations) -> int:
    """Bytes of the tensors that ``offload`` sends to the host: what each layer reads."""
    rows, length = plan.largest
    return sum(kind.count * streams(kind, rows, length) for kind in activations.kinds)


def layer_workspace(plan: RunPlan, kind: LayerKind, rows: int, length: int) -> int:
    """Bytes that one layer's backward pass allocates, with what it keeps where it runs again."""
    again = 0 if plan.policy.recomputes == "nothing" else kind.kept(rows, length)
    return kind.backward(rows, length) + again


def dequantized_bytes(plan: RunPlan, model: MeasuredModel) -> int:
    """Bytes of the largest quantized weight as it is multiplied; 0 where none is dequantized for a product."""
    settings = plan.recipe.quantization
    if settings.keep_dequantized is True or why_dequantized(settings, plan.dtypes, plan.device) is None:
        return 0
    sizes = [linear.in_features * linear.out_features for linear, _ in model.packed]
    return plan.dtypes.compute_bytes * max(sizes, default=0)


def generation_bytes(
    plan: RunPlan, model: MeasuredModel, activations: Activations, batch: Generation
) -> tuple[int, int]:
    """(bytes of a pass, bytes of the cache) of generation through transformers.

    The cache is counted as if every layer kept keys and values of all tokens: more than layers with a state do.
    """
    text, rows = plan.facts.language, batch.rows
    heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 0)
    asked = int(text.get("num_attention_heads") or 1)
    width = heads * int(text.get("head_dim") or model.hidden_size // asked)
    cache = 2 * rows * batch.seq_len * width * model.num_layers * plan.dtypes.parameter_bytes
    prefill = max(kind.forward(rows, batch.prompt) for kind in activations.kinds)
    logits = rows * model.vocab_size * (4 + plan.dtypes.compute_bytes)
    return prefill + activations.entry(rows, batch.prompt) + logits, cache


def _evaluation(plan: RunPlan, model: MeasuredModel, activations: Activations) -> int:
    """The larger of a forward pass with loss and of generating, for one evaluation batch."""
    recipe = plan.recipe
    rows, length = plan.largest_shape(recipe.eval.per_device_eval_batch_size, recipe.data.max_seq_len)
    layer = max(kind.forward(rows, length) for kind in activations.kinds)
    cast = sum(kind.count * max(0, round(kind.handed.fixed)) for kind in activations.kinds)
    behind = activations.last(rows, length) + cross_entropy(plan, rows * length, training=False)
    scoring = activations.entry(rows, length) + cast + max(layer, behind)
    if not recipe.eval.tasks:
        return scoring
    passes, cache = generation_bytes(
        plan, model, activations, Generation(recipe.eval.per_device_eval_batch_size, recipe.data.max_seq_len, length)
    )
    return max(scoring, passes + cache)


P = TypeVar("P", bound=str)
#: CUDA context and loaded kernels; on a CPU the interpreter with torch and transformers.
_RUNTIME_BYTES = {"cuda": 600 * 2**20, "cpu": 850 * 2**20}
#: Share of the short-lived memory that torch's allocator holds beyond what is asked of it.
_FRAGMENTATION = 0.05
#: Above this share of the memory a run may still fail on fragmentation or on another process.
TIGHT_SHARE = 0.9
#: What is kept though a run could do without takes no more than this share of the memory.
ROOMY_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class Estimate(Generic[P]):
    """Bytes of each term by its name (``parts``), and by phase the names of the terms that are there at once."""

    parts: Mapping[str, int]
    phases: Mapping[P, tuple[str, ...]]

    def phase_bytes(self, phase: P) -> int:
        """Bytes that are needed at once in a phase."""
        return sum(self.parts[name] for name in self.phases[phase])

    @property
    def peak(self) -> P:
        return max(self.phases, key=self.phase_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that are needed at the peak."""
        return self.phase_bytes(self.peak)


@dataclass(frozen=True, slots=True)
class MemoryEstimate(Estimate[Phase]):
    """Memory of a device.

    Attributes:
        pinned_host_bytes: Pinned memory on the host, which is part of no term.
        offloaded: What of the layers is pinned there; None where nothing is.
        paged_bytes: Optimizer state that lies on the GPU while it has room and on the host else, which is part of no
            term either.
        generator: How long what completes a method's prompts is held.
    """

    pinned_host_bytes: int = 0
    offloaded: Offloaded | None = None
    dequantized_layers: int = 0
    paged_bytes: int = 0
    graph_pool_bytes: int = 0
    generator: Generator = "each step"

    def most_of(self, phases: Collection[Phase]) -> int:
        """Bytes that are needed at once in the largest of ``phases``; where the run has none of them, at its peak."""
        return max((self.phase_bytes(phase) for phase in phases if phase in self.phases), default=self.total_bytes)

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
    ``quantization.keep_dequantized: auto`` dequantizes for good, and whether what generates is kept. Raises ValueError
    under ``gradient_checkpointing: auto``, for which a policy must be chosen before.
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

    On a CPU it is always kept, and nothing is merged. Of sharded weights nothing is kept: all of them are gathered for
    a step's completions if they fit.
    """
    alone, batch, free = _added_up(plan, settled), plan.method_memory.generation, plan.device.available_bytes
    if GENERATION not in alone.phases or batch is None:
        return alone
    if plan.shard_size > 1:
        whole = _added_up(plan, replace(settled, generator="whole"))
        return whole if free is None or whole.most_of((GENERATION, EVALUATION)) <= TIGHT_SHARE * free else alone
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
    return parts, names
