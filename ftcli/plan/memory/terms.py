"""The terms of the memory estimate, one after another: what each is, when it is there, how many bytes it has.

A run passes through phases. The memory of a phase is the sum of the terms that are there in it.

==============  ======================================================================================================
forward         of a training step: the kept activations grow to their full size, then the loss
backward        one layer's backward after the other. The kernels' layers begin when the hidden states are gone
end of backward what the first layer's backward allocates, or that of the embeddings; no activations any more
optimizer step  the optimizer's temporaries
generation      of methods that generate: the key-value cache of a whole batch of completions
evaluation      one layer at a time, no gradients; the key-value cache where answers are generated
export          weights and adapters
==============  ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ftkernels.limits import LOSS_VOCABULARY_SLAB, loss_bytes, packed_rank

from ftcli.plain import JsonMap
from ftcli.plan.memory.activations import ActivationSettings, norm_bytes
from ftcli.plan.memory.checkpointing import HeldBytes, Offloaded
from ftcli.plan.memory.fused_activations import layer_input_bytes
from ftcli.plan.memory.generation import Generator, generation, made_once
from ftcli.plan.memory.shards import (
    gathered_bytes,
    last_bytes,
    reduced_bytes,
    shard_bytes,
    shards_trained,
)
from ftcli.plan.memory.workspaces import cublas_bytes
from ftcli.plan.quantization import dequantized_bytes, weight_bytes
from ftcli.plan.run import Generation, RunPlan
from ftcli.plan.trained import EMBEDDING, optimizer_state, optimizer_workspace
from ftcli.tables import code_of, exports, optimizers, policies
from ftcli.tables.policies import Policy

#: A part of a run with a peak of its own. What a trainer is doing goes by the same names.
Phase: TypeAlias = Literal[
    "forward", "backward", "end of backward", "optimizer step", "generation", "evaluation", "export"
]
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
END: Final = "end of backward"
STEP: Final = "optimizer step"
GENERATION: Final = "generation"
EVALUATION: Final = "evaluation"
EXPORT: Final = "export"
#: What connections between GPUs take, outside of torch's allocator: 770 MiB between two H200 (NCCL of torch 2.11).
NCCL_BYTES = 800 * 2**20
#: What CUDA graphs hold beside the piece that is taken for their layers: of streams of their own, in small pieces. 0.2
#: to 0.4 GiB on an H200, in four runs without quantized weights (docs/performance.md).
_GRAPH_STREAMS_BYTES = 250 * 2**20
#: Share of the activations by which the graphs' pool grows where dequantized weights come and go between tensors that
#: stay: the gaps are filled with smaller ones. Best fit in one piece, in a layer's order, leaves 4 to 8% (Gemma-2-9B,
#: Llama-3.1-8B and Qwen3-8B, 1024 to 4096 tokens) and nothing where the weights lie there.
_GRAPH_GAPS = 0.07
TRAINING: tuple[Phase, ...] = (FORWARD, BACKWARD, END, STEP)


@dataclass(frozen=True, slots=True)
class Term:
    """``bytes`` that are there in ``phases``. ``lasting`` ones stay from one micro-batch to the next."""

    name: str
    bytes: int
    phases: tuple[Phase, ...]
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class MemoryDecisions:
    """Settings that a recipe leaves open and the memory decides: what ``offload`` sends to the host, how many layers
    stay dequantized, and how long what completes a method's prompts is held.
    """

    offloaded: Offloaded = "halves"
    dequantized_layers: int = 0
    generator: Generator = "each step"


def phases_of(plan: RunPlan) -> tuple[Phase, ...]:
    """The phases of a run, in order."""
    recipe = plan.recipe
    if plan.work == "export":
        return (EXPORT,)
    if plan.work == "eval":
        return (EVALUATION,)
    generation = (GENERATION,) if plan.method_memory.generation is not None else ()
    evaluation = (EVALUATION,) if recipe.data.eval or recipe.eval.tasks else ()
    return (*TRAINING, *generation, *evaluation)


def terms(plan: RunPlan, settled: MemoryDecisions) -> Iterator[Term]:
    always = phases_of(plan)
    sharded, weights = plan.shard_size > 1, _weights(plan, settled)
    yield Term("weights", shard_bytes(plan, weights) if sharded else weights, always, lasting=True)
    if sharded:
        yield from _gathered(plan, settled, always)
    if plan.recipe.lora is not None:
        yield Term("adapters", plan.dtypes.trained_bytes * plan.trained.elements, always, lasting=True)
    workspaces = cublas_bytes(plan.device, plan.execution, backward=plan.trains, graphs=plan.graphed)
    if plan.work != "export" and workspaces:
        yield Term("cuBLAS workspaces", workspaces, always, lasting=True)
    if plan.trains:
        yield from _what_training_holds(plan, always)
        yield from _what_a_step_allocates(plan, settled)
    if plan.work != "export" and (norms := _weight_norms(plan)):
        again = plan.trains and plan.policy.recomputes == "nothing"
        phases = tuple(phase for phase in always if phase not in (END, STEP) and not (again and phase == BACKWARD))
        yield Term("DoRA workspace", norms, phases)
    if GENERATION in always and (batch := plan.method_memory.generation) is not None:
        needed = generation(plan, batch)
        phases = always if settled.generator in ("kept", "merged") else (GENERATION,)
        yield Term("generation", needed.pass_bytes + _dequantized(plan, settled), (GENERATION,))
        yield Term("key-value cache", needed.cache_bytes, phases, lasting=True)
        if settled.generator == "merged":
            yield Term("merged weights", needed.copy_bytes, phases, lasting=True)
    if EVALUATION in always:
        yield Term("evaluation", _evaluation(plan, settled), (EVALUATION,))


def _gathered(plan: RunPlan, settled: MemoryDecisions, always: tuple[Phase, ...]) -> Iterator[Term]:
    """Weights that come from the other ranks: of the layers at work, or of the whole model where it generates so."""
    without = (END, STEP) if shards_trained(plan) else (STEP,)  # counted with what is reduce-scattered last
    once: tuple[Phase, ...] = (GENERATION, EVALUATION) if settled.generator == "whole" else ()
    by_layer = tuple(phase for phase in always if phase not in (*without, *once))
    yield Term("gathered weights", gathered_bytes(plan, settled.dequantized_layers), by_layer)
    if once:
        whole = gathered_bytes(plan, settled.dequantized_layers, whole=True)
        yield Term("whole weights", whole, tuple(phase for phase in always if phase in once), lasting=True)
    if shards_trained(plan):
        yield Term("gradients added up", reduced_bytes(plan), (BACKWARD,))


def _what_training_holds(plan: RunPlan, always: tuple[Phase, ...]) -> Iterator[Term]:
    """Terms that outlive a micro-batch: copies in the compute dtype, gradients, optimizer state, a reference model.

    Gradients are there from the end of a backward pass to the optimizer's step; where micro-batches are accumulated, in
    the other phases of training too. Autocast casts each trained matrix once in a forward pass and holds the copies
    until its context ends. Backward keeps those that it needs, or makes them again where layers run again. On the
    kernels copies are made once a step, into memory that stays.

    CUDA graphs write gradients into memory that is there all the time, from where they are moved to be accumulated.
    """
    if plan.dtypes.autocast:
        phases: tuple[Phase, ...] = (FORWARD,) if _copies_run_again(plan) else (FORWARD, BACKWARD)
        # Layers as transformers wrote them are cast in evaluation as well, where their weights may be trained.
        later: tuple[Phase, ...] = (GENERATION,) if plan.execution.on_kernels else (GENERATION, EVALUATION)
        phases = tuple(phase for phase in (*phases, *later) if phase in always)
        if plan.execution.on_kernels:  # for all layers at once
            phases = always
        yield Term("autocast copies", _autocast_copies(plan), phases, lasting=True)
    accumulates = plan.recipe.train.gradient_accumulation_steps > 1
    if plan.graphed:
        yield Term("gradients", gradient_bytes(plan) * (2 if accumulates else 1), always, lasting=True)
        yield Term("graph buffers", _graph_buffers(plan), always, lasting=True)
    else:
        yield Term("gradients", gradient_bytes(plan), TRAINING if accumulates else (END, STEP), lasting=True)
    yield from beside_gradients(plan, always)


def gradient_bytes(plan: RunPlan) -> int:
    share = plan.shard_size if plan.recipe.lora is None else 1  # adapters are not sharded
    return plan.dtypes.gradient_bytes * plan.trained.elements // share


def beside_gradients(plan: RunPlan, always: tuple[Phase, ...]) -> Iterator[Term]:
    """Terms that outlive a micro-batch whoever wrote the layers: of several ranks, the optimizer, a reference model."""
    recipe, trained = plan.recipe, plan.trained
    share = plan.shard_size if recipe.lora is None else 1
    if plan.ranks > 1:
        if share == 1:
            yield Term("gradients of all ranks", gradient_bytes(plan), always, lasting=True)
        if plan.device.kind == "cuda":
            yield Term("NCCL", NCCL_BYTES, always, lasting=True)
    state = optimizer_state(recipe.train.optim, trained)
    held = state.device if plan.device.kind == "cuda" else state.total  # a CPU's memory is the host's
    yield Term("optimizer", held // share, always, lasting=True)
    if optimizers.row(recipe.train.optim).schedule_free and EVALUATION in always:
        yield Term("weights in training", plan.dtypes.trained_bytes * trained.elements, (EVALUATION,))
    if reference := plan.method_memory.reference_bytes:
        yield Term("reference model", reference, always, lasting=True)


def _what_a_step_allocates(plan: RunPlan, settled: MemoryDecisions) -> Iterator[Term]:
    tokens, on_kernels = plan.tokens, plan.execution.on_kernels
    setting = plan.setting(plan.largest[1], padded=_masked_densely(plan))
    layer, whole = held_by_layers(plan, setting, settled.offloaded)
    states = _hidden_states(plan, tokens, setting)
    # What backward begins with is there before any of the kernels' layers.
    workspace = max(int(tokens * max(layer.workspace, whole.workspace)), 0 if on_kernels else states)
    dense = _dequantized(plan, settled)
    # What layers allocate inside CUDA graphs is in nobody else's hands again.
    backward: tuple[Phase, ...] = phases_of(plan) if plan.wholly_graphed else (BACKWARD,)
    phases: tuple[Phase, ...] = phases_of(plan) if plan.wholly_graphed else (FORWARD, BACKWARD)
    activations = _kept(plan, layer, whole) + _shared(plan)
    yield Term("activations", activations, phases)
    if plan.graphed and not plan.wholly_graphed:
        yield Term("graph pool", graph_pool(plan, settled), phases_of(plan), lasting=True)
    if plan.graphed:
        yield Term("graph gaps", _graph_gaps(plan, activations, dense), phases_of(plan), lasting=True)
    yield from images(plan)
    yield Term("hidden states", states, (FORWARD,) if on_kernels else (FORWARD, BACKWARD))
    loss_of_method = plan.method_memory.loss_bytes
    loss = cross_entropy(plan, tokens, training=True) if loss_of_method is None else loss_of_method
    if plan.shares > 1:  # what is sent and what comes, of queries, keys and values
        heads = plan.shape.q_width + 2 * plan.shape.kv_width
        yield Term("exchanged heads", 2 * tokens * heads * plan.dtypes.compute_bytes, (FORWARD, BACKWARD))
    yield Term("loss workspace", loss, (FORWARD,))
    yield Term("layer at work", max(0, _at_work(plan, setting) - states - loss), (FORWARD,))
    yield Term("backward workspace", workspace, backward)
    last = 0 if plan.wholly_graphed else workspace + int(tokens * layer.kept)
    if shards_trained(plan):
        yield Term("gradients added up last", last_bytes(plan, last), (END,))
    else:
        yield Term("last workspace", max(last, embedding_gradient(plan)), (END,))
    optim, cuda = plan.optim, plan.device.kind == "cuda"
    if not plan.own_optimizer:  # which works on one parameter after the other
        yield Term("optimizer workspace", optimizer_workspace(optim, plan.trained, cuda=cuda), (STEP,))
    if plan.head_is_trained:
        element = table_gradient_bytes(plan) if plan.shard_size == 1 else plan.dtypes.compute_bytes
        if plan.shard_size > 1 and loss_of_method is not None:
            element += 4  # log-probabilities sum it in float32 first
        yield Term("head gradient", element * plan.sizes.hidden_size * plan.sizes.vocab_size, (BACKWARD,))
    if _copies_run_again(plan):
        # Of the layer that runs again, and of those that are left out.
        layers = min(1 + plan.uncheckpointed, plan.shape.num_layers)
        again = plan.dtypes.compute_bytes * _cast_elements(plan) * layers // plan.shape.num_layers
        yield Term("copies run again", again, (BACKWARD,))
    if dense:
        yield Term("dequantized weights", dense, backward if plan.wholly_graphed else (BACKWARD, END))


def images(plan: RunPlan) -> Iterator[Term]:
    """Bytes of a micro-batch's images, all of whose tokens may be theirs: pixels, several patches a token, and
    what the tower saw, for the embeddings and for each layer that it is added to, there also as it is added. A tower
    that is trained keeps what its backward pass needs until the language model's is over.
    """
    if not plan.sees:
        return
    config, element = plan.facts.raw, plan.dtypes.parameter_bytes
    vision = config.get("vision_config") or {}
    merged = _patches_a_token(config)
    pixels = 3 * int(vision.get("temporal_patch_size") or 1) * int(vision.get("patch_size") or 14) ** 2
    seen = 1 + 2 * len(vision.get("deepstack_visual_indexes") or ())
    a_token = merged * pixels * element + seen * plan.sizes.hidden_size * plan.dtypes.compute_bytes
    yield Term("images", plan.tokens * a_token, (FORWARD,))
    if plan.tower is not None:
        patches = plan.tokens * merged
        held = plan.tower.whole if plan.policy.recomputes == "nothing" else plan.tower.again
        yield Term("tower activations", int(patches * held.kept), (FORWARD, BACKWARD, END))
        yield Term("tower workspace", int(patches * held.workspace), (END,))


def _patches_a_token(config: JsonMap) -> int:
    """Patches of an image that become one token."""
    vision = config.get("vision_config") or {}
    if tokens := config.get("mm_tokens_per_image"):
        return (int(vision.get("image_size") or 224) // int(vision.get("patch_size") or 14)) ** 2 // int(tokens)
    merged = vision.get("pooling_kernel_size") or vision.get("spatial_merge_size") or config.get("spatial_merge_size")
    return int(merged or 1) ** 2


def _at_work(plan: RunPlan, setting: ActivationSettings) -> int:
    """Bytes that a layer off the kernels has in its forward pass beyond what is kept, before there is a loss."""
    if plan.execution.on_kernels:
        return 0
    peak = plan.layers.passing_peak if plan.policy.recomputes == "nothing" else plan.layers.forward_peak
    return int(plan.tokens * peak(plan.shape, setting))


def graph_pool(plan: RunPlan, settled: MemoryDecisions) -> int:
    """Bytes that CUDA graphs of up to ``graph_tokens`` tokens allocate, in a pool that they share; 0 without graphs."""
    if not plan.graphed:
        return 0
    setting = plan.setting(plan.largest[1], padded=_masked_densely(plan))
    layer, whole = held_by_layers(plan, setting, settled.offloaded)
    a_token = max(layer.workspace, whole.workspace) + (_kept(plan, layer, whole) + _shared(plan)) / plan.tokens
    return int(plan.graph_tokens * a_token) + _dequantized(plan, settled)


def _graph_gaps(plan: RunPlan, activations: int, dense: int) -> int:
    """Bytes that CUDA graphs hold beyond their layers' allocations: on other streams; and in their pool, if weights are
    dequantized, a matrix of them at least.
    """
    gaps = max(dense, int(_GRAPH_GAPS * activations * plan.graph_tokens / plan.tokens)) if dense else 0
    return gaps + _GRAPH_STREAMS_BYTES


def held_by_layers(plan: RunPlan, setting: ActivationSettings, offloaded: Offloaded) -> tuple[HeldBytes, HeldBytes]:
    """(bytes held by a checkpointed layer, by an uncheckpointed one); the second twice if no layer is checkpointed."""
    layer = plan.layers.layer(plan.shape, setting)

    def held(by: Policy) -> HeldBytes:
        found: HeldBytes = code_of(by.held)(layer, offloaded)
        return found

    mine = held(plan.policy)
    whole = held(policies.row(False)) if plan.uncheckpointed else mine
    return (whole if plan.uncheckpointed == plan.shape.num_layers else mine), whole


def _kept(plan: RunPlan, layer: HeldBytes, whole: HeldBytes) -> int:
    tokens, run_again = plan.tokens, plan.shape.num_layers - plan.uncheckpointed
    kept = tokens * (run_again * layer.kept + plan.uncheckpointed * whole.kept)
    if plan.device.kind == "cpu":  # here what others send to the host stays in the same memory
        kept += tokens * run_again * layer.host
    return int(kept)


def _weights(plan: RunPlan, settled: MemoryDecisions) -> int:
    """The base model; of what export merges, or reads again, there is only one weight or layer at a time."""
    if plan.work == "export":
        return _exported(plan)
    stored, element = plan.recipe.quantization, plan.dtypes.parameter_bytes
    layers, trained = settled.dequantized_layers, plan.recipe.lora is None
    found = weight_bytes(stored, plan.shape, element, dequantized_layers=layers, trained=trained)
    return found - plan.host_table_bytes


def _exported(plan: RunPlan) -> int:
    """The whole model for a format that holds it; else the largest table as it is stored and in float32, or a weight
    that is merged (as it is stored, s B A, that times s, the sum rounded), or a layer in float32.
    """
    shape = plan.shape
    if any(exports.row(name).whole for name in plan.recipe.export.formats):
        return shape.parameters * plan.dtypes.parameter_bytes
    table, sizes = shape.vocab_size * shape.hidden_size, [linear.parameters for linear in shape.linears]
    return max(6 * table, 14 * max(sizes), 4 * sum(sizes))


def _dequantized(plan: RunPlan, settled: MemoryDecisions) -> int:
    """The one matrix that a product of quantized weights needs in the compute dtype."""
    if settled.dequantized_layers == plan.shape.num_layers:
        return 0
    quantization, on_kernels = plan.recipe.quantization, plan.execution.on_kernels
    return dequantized_bytes(quantization, plan.shape, plan.dtypes, plan.device, on_kernels=on_kernels)


def _weight_norms(plan: RunPlan) -> int:
    """Bytes that PEFT's DoRA makes of one linear layer to know the lengths of its rows.

    A matrix of ones on the diagonal (in, in), which goes through the adapter: B A (out, in) in float32, and three of
    that size in the compute dtype: its cast, its product with the scale, and the sum with the base weight.
    """
    lora, element = plan.recipe.lora, plan.dtypes.compute_bytes
    if lora is None or not lora.use_dora:
        return 0
    linears = [each.linear for each in plan.adapters]
    return max((4 * x.in_features**2 + (4 + 3 * element) * x.in_features * x.out_features for x in linears), default=0)


def _graph_buffers(plan: RunPlan) -> int:
    """Bytes of the buffers in and out of CUDA graphs: hidden states and layers' own inputs, and their gradients.
    Besides, the gradients of the trained weights as autograd makes them: memory that has crossed streams is not used
    again within a graph.
    """
    passed = 4 if plan.policy.by_transformers else 3  # its layers' inputs need gradients, the first one's too
    states = plan.graph_tokens * plan.shape.hidden_size * plan.dtypes.parameter_bytes * passed
    own = plan.graph_tokens * plan.shape.layer_input_features * plan.dtypes.compute_bytes
    return states + (2 if plan.policy.by_transformers else 1) * own + 4 * plan.trained.elements


def _copies_run_again(plan: RunPlan) -> bool:
    """True if transformers' layers run again under autocast, which casts their weights again."""
    runs_again = plan.policy.recomputes != "nothing" and not plan.execution.on_kernels
    return plan.dtypes.autocast and runs_again


def _cast_elements(plan: RunPlan) -> int:
    if plan.rounds != "no":
        return 0  # products take what the masters are rounded to
    if plan.recipe.lora is None:
        # Sharded weights are cast where they are gathered.
        cast = plan.dtypes.parameter != plan.dtypes.compute and plan.shard_size == 1
        return plan.shape.linear_parameters if cast else 0
    return sum(m.elements * m.count for m in plan.trained.matrices if m.part == "hidden")  # all else is not cast


def _autocast_copies(plan: RunPlan) -> int:
    """A copy of each trained matrix: cast by autocast or, on the kernels, packed to a padded rank."""
    cast = _cast_elements(plan)
    if plan.execution.on_kernels and plan.adapters:
        rank, held = packed_rank(max(each.rank for each in plan.adapters)), plan.adapters
        cast = cast * sum(rank * each.elements // each.rank for each in held) // sum(x.elements for x in held)
    return plan.dtypes.compute_bytes * cast


def embedding_gradient(plan: RunPlan) -> int:
    """The gradient of the embedding, the last of a backward pass. With a tied head, the head's waits for it."""
    lora, shape = plan.recipe.lora, plan.sizes
    if lora is not None and EMBEDDING not in lora.modules_to_save:
        return 0
    waiting = shape.tied and plan.recipe.train.gradient_accumulation_steps > 1
    return table_gradient_bytes(plan) * shape.hidden_size * shape.vocab_size * (2 if waiting else 1)


def table_gradient_bytes(plan: RunPlan) -> int:
    """Bytes of an element of the embedding's or the head's gradient as it is made, before it is rounded."""
    return max(plan.dtypes.gradient_bytes, plan.dtypes.parameter_bytes)


def _hidden_states(plan: RunPlan, tokens: int, setting: ActivationSettings) -> int:
    """The backbone's output, its gradient that the loss computes in forward, and what the last norm keeps."""
    hidden = plan.shape.hidden_size
    norm = norm_bytes(hidden, plan.shape, setting, setting.bytes_residual)
    return int(tokens * (2 * hidden * plan.stream_bytes + norm))


def _masked_densely(plan: RunPlan) -> bool:
    """True if documents of one row are kept apart by a mask over all pairs of its tokens."""
    documents = plan.recipe.data.packing or plan.execution.batches.layout == "unpadded"
    return documents and plan.execution.masked != "triton"


def _shared(plan: RunPlan) -> int:
    """Bytes that training makes once for all layers, with keys and values that some layers take from others which are
    run again.
    """
    setting, shape = plan.setting(plan.largest[1], padded=False), plan.shape
    trains = plan.recipe.lora is None or plan.policy.by_transformers
    beside = layer_input_bytes(shape, setting, gradient=trains) - layer_input_bytes(shape, setting, gradient=False)
    if plan.policy.recomputes == "layer":
        # Keys that layers take from earlier ones, each counted once, and as many values.
        shared = {(each.window, each.key_width) for each in shape.attending if each.keys == "shared"}
        beside += 2 * setting.bytes_compute * sum(width for _, width in shared)
    return made_once(plan, *plan.largest, padded=_masked_densely(plan)) + int(plan.tokens * beside)


def cross_entropy(plan: RunPlan, tokens: int, *, training: bool) -> int:
    """The loss takes rows in chunks, in one buffer: in place on a GPU, with float32 copies on a CPU."""
    shape, element = plan.sizes, plan.dtypes.compute_bytes
    on_gpu, alone = plan.device.kind == "cuda", training and plan.head_is_trained and plan.shard_size == 1
    width = shape.hidden_size if alone else 0
    needed = loss_bytes(tokens, shape.vocab_size, element, on_gpu=on_gpu, trained_width=width)
    held_apart = plan.recipe.lora is not None and plan.head_is_trained  # in float32
    cast = plan.dtypes.parameter_bytes != element and plan.shard_size == 1
    if cast or (plan.dtypes.autocast and held_apart):
        needed += shape.vocab_size * shape.hidden_size * element  # the head, cast
    if training and plan.head_is_trained:
        slab = 0 if on_gpu else min(shape.vocab_size, LOSS_VOCABULARY_SLAB)
        needed += 4 * shape.hidden_size * (shape.vocab_size + slab)
    return needed


def _evaluation(plan: RunPlan, settled: MemoryDecisions) -> int:
    """The larger of a forward pass with loss and of generating, for one evaluation batch."""
    recipe, shape = plan.recipe, plan.shape
    rows, seq_len = recipe.eval.per_device_eval_batch_size, recipe.data.max_seq_len
    together, width = plan.largest_shape(rows, seq_len)
    tokens, setting = together * width, plan.setting(width, padded=_masked_densely(plan))
    hidden = 3 * tokens * shape.hidden_size * plan.stream_bytes
    hidden += made_once(plan, together, width, padded=_masked_densely(plan))
    layer = int(tokens * plan.layers.forward_peak(shape, setting)) + _dequantized(plan, settled)
    scoring = hidden + max(layer, cross_entropy(plan, tokens, training=False))
    if not recipe.eval.tasks:
        return scoring
    needed = generation(plan, Generation(rows, seq_len, seq_len))
    return max(scoring, needed.pass_bytes + needed.cache_bytes + _dequantized(plan, settled))
