"""The code that computes the decoder layers and the attention of a run, and why; CUDA graphs, and what ranks share.

Preflight asks before anything is built; :mod:`ftcli.model.patch` and :mod:`ftcli.model.attention` ask once there is a
model. They add what only a built model shows, such as an adapter of a kind that cannot be fused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ftkernels.limits import (
    FILTER_WIDTHS,
    LARGEST_FUSED_RANK,
    Activation,
    Gpu,
    packed_rank,
    why_no_delta_rule,
    why_no_elementwise,
    why_no_products,
)

from ftcli.config.model import Kernels, ModelConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.device import DeviceFacts
from ftcli.facts.flops import step_flops
from ftcli.facts.generation import batch_dependent_rope, why_no_engine
from ftcli.facts.model import ModelFacts
from ftcli.facts.shape import ModelShape, windows_of
from ftcli.plan.attention import AttentionCall, AttentionChoice, choose_attention
from ftcli.plan.batches import Batches, choose_batches
from ftcli.plan.precision import DtypePlan
from ftcli.plan.quantization import why_dequantized
from ftcli.tables import methods, optimizers, policies, quantizations
from ftcli.tables.images import LANGUAGE

#: Why a layer with DoRA is left as it is.
DORA = "DoRA scales the merged weight, which is never formed on the kernels"

#: Why a layer is left as it is of which ``lora.modules_to_save`` names a linear layer.
TRAINED_WHOLE = "a linear layer that lora.modules_to_save names is trained whole, beside the frozen one"

#: transformers' names of the activations that the gated unit's kernels have, and the kernels' own.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}

#: Time of a training step on transformers' own layers with PEFT, relative to the kernels': Llama-3.1-8B, LoRA of rank
#: 16, 2 x 4096 tokens on an H200 (docs/performance.md). Other dense families are near it; it is no bound for others.
TIMES_SLOWER = 1.5

#: What computes the layers: Triton kernels, their plain torch form, or transformers' own code.
LayerCode = Literal["fused", "reference", "transformers"]
#: What a command does with a model. Benchmarks count as training or evaluation.
Work = Literal["train", "eval", "export"]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The code that computes the decoder layers, and why. ``activation``: the kernels' name of the MLP's activation;
    None where they compute nothing.
    """

    code: LayerCode
    reason: str
    activation: Activation | None = None


def choose_layers(
    model_type: str,
    shape: ModelShape | None,
    activation: str | None,
    kernels: Kernels,
    *,
    device: str,
    gpu: Gpu | None,
) -> LayerChoice:
    """Chooses the code that computes the layers of a model. ``shape`` and ``activation`` (transformers' name) are None
    where they are not known, ``gpu`` where there is no CUDA GPU; ``device`` is named in the reason. ``kernels: triton``
    allows no exception; enforcing that is left to the caller.
    """
    if kernels == "off":
        return LayerChoice("transformers", "model.kernels: off")
    refusal = _why_no_triton(gpu)
    if kernels != "reference" and refusal is not None:
        return LayerChoice("transformers", f"{device} is not a CUDA GPU" if gpu is None else refusal)
    if shape is None or shape.family.kernels == "none":
        return LayerChoice("transformers", f"model_type {model_type} is not in the family table of the kernels")
    gated = len(shape.family.mlp) == 3
    if gated and (activation is None or activation not in ACTIVATIONS):
        return LayerChoice("transformers", f"the gated unit's kernel has no activation {activation}")
    if (reason := why_no_delta_nets(shape, activation) or why_no_latents(shape)) is not None:
        return LayerChoice("transformers", reason)
    unit = ACTIVATIONS[activation] if gated and activation is not None else None
    if kernels == "reference":
        return LayerChoice("reference", "model.kernels: reference", unit)
    return LayerChoice("fused", f"{device} runs Triton kernels", unit)


def why_no_delta_nets(shape: ModelShape, activation: str | None) -> str | None:
    """The reason why the kernels do not stand in for a model's delta nets, as one clause; None if they do."""
    for net in shape.delta_nets[:1]:
        if activation is None or ACTIVATIONS.get(activation) != "silu":  # the filter's, too
            return f"the delta nets' filter is activated by {activation}, not by silu"
        if net.filter_width not in FILTER_WIDTHS:
            first, last = FILTER_WIDTHS[0], FILTER_WIDTHS[-1]
            return f"the delta nets' filter is {net.filter_width} wide, not from {first} to {last}"
    return None


def why_no_latents(shape: ModelShape) -> str | None:
    """The reason why the kernels do not stand in for a model's latent attention, as one clause; None if they do."""
    for each in shape.latents[:1]:
        if each.value_dim > each.head_dim:
            return f"values of {each.value_dim} features are wider than keys of {each.head_dim}"
    return None


def wants_kernels(kernels: Kernels) -> bool:
    """True if ``model.kernels`` allows Triton kernels."""
    return kernels in ("auto", "triton")


def why_no_kernels(device: DeviceFacts) -> str | None:
    """The reason why ftcli's Triton kernels cannot run on a device at all, as one clause, or None."""
    return _why_no_triton(_cuda_gpu(device))


def _cuda_gpu(device: DeviceFacts) -> Gpu | None:
    return device.gpu if device.kind == "cuda" else None


def _why_no_triton(gpu: Gpu | None) -> str | None:
    return "the kernels need a CUDA GPU" if gpu is None else why_no_elementwise(gpu)


def own_attention(model: ModelConfig, *, beyond_sdpa: bool) -> str:
    """transformers' name of the attention that its own layers take. SDPA neither caps scores nor has sinks, so a model
    that does or has gets the exact eager form under ``auto``.
    """
    if model.attention != "auto":
        return model.attention
    return "eager" if beyond_sdpa else "sdpa"


@dataclass(frozen=True, slots=True)
class Execution:
    """The way in which the layers of a run are computed.

    Attributes:
        dense: The backend of causal calls over whole sequences.
        masked: The backend of calls with a window in force or with packed documents.
        sends_attention: Some calls of this run take our attention kernel, whose output ``offload`` sends to the host.
        drops: Training drops probabilities of attention, which our attention kernel cannot.
    """

    layers: LayerChoice
    attention: str
    dense: str
    masked: str
    sends_attention: bool
    batches: Batches
    drops: bool = False

    @property
    def on_kernels(self) -> bool:
        """True if ftcli's kernels, or their torch form, compute the layers."""
        return self.layers.code != "transformers"


@dataclass(frozen=True, slots=True)
class ExecutionPart:
    """One line of `ftcli check`'s table: the ``part`` of the model, what ``runs`` there (an attention backend,
    ``triton``, ``torch``, a layout of batches …), and the ``reason``.
    """

    part: str
    runs: str
    reason: str


def execution_of(recipe: Recipe, facts: ModelFacts, dtypes: DtypePlan, device: DeviceFacts, *, work: Work) -> Execution:
    """Chooses how the layers of a run are computed."""
    layers = _layers(recipe, facts, device, work=work)
    drops = work == "train" and facts.drops_attention
    masked_choice = _attention(facts, dtypes, device, masked=True, drops=drops)
    batches = _batches(recipe, facts, masked_choice, layers, work=work)
    if layers.code == "transformers":
        own = own_attention(recipe.model, beyond_sdpa=facts.beyond_sdpa)
        return Execution(layers, own, own, own, sends_attention=False, batches=batches, drops=drops)
    dense = _attention(facts, dtypes, device, drops=drops).backend
    masked = masked_choice.backend
    windowed = _window_in_force(recipe, facts)
    by_kernel = masked == "triton"
    if dense in ("triton", "eager"):
        shown: str = dense
    else:
        shown = "sdpa, triton where a window is in force" if windowed and by_kernel else "sdpa"
    sends = by_kernel and (dense == "triton" or windowed or recipe.data.packing or _joins_rows(recipe, batches))
    return Execution(layers, shown, dense, masked, sends, batches, drops)


#: Why documents are not laid out in one row where transformers' own attention computes.
OWN_ATTENTION = "transformers' own attention can only keep documents apart by a mask over all pairs of tokens"


def _batches(recipe: Recipe, facts: ModelFacts, masked: AttentionChoice, layers: LayerChoice, *, work: Work) -> Batches:
    """Chooses the layout of micro-batches, of training or, if nothing is trained, of evaluation. ``masked``: the
    attention backend of calls with several documents.
    """
    densely: str | None = OWN_ATTENTION
    if layers.code != "transformers":
        densely = None if masked.backend == "triton" else f"attention runs on {masked.backend}: {masked.reason}"
    refusal, of_pairs = takes_rows(recipe, work), methods.row(recipe.train.method).unit == 2
    apart = why_prompts_apart(recipe, facts, work) if of_pairs else None
    shares = of_pairs and apart is None
    found = choose_batches(recipe.data.padding_free, takes_rows=refusal, masked_densely=densely, shares_prompts=shares)
    if work == "train":  # whatever is checkpointed: the same batches, and so the same bits
        graphed = most_graph_tokens(recipe, facts, checkpointed=False)
        found = replace(found, few_up_to=max(found.few_up_to, graphed or 0))
    if not of_pairs:
        return found
    told = "once" if found.shares_prompts else "with each answer" if apart is None else f"with each answer ({apart})"
    return replace(found, reason=f"{found.reason}; a pair's prompt is computed {told}")


def why_prompts_apart(recipe: Recipe, facts: ModelFacts, work: Work) -> str | None:
    """The reason why the answers of a pair do not share their prompt although attention could skip what lies between;
    or None.
    """
    if facts.shape is not None and facts.shape.delta_nets:
        return "a layer's state at the prompt's end would go on into one answer alone"
    settings = recipe.preference
    if settings is not None and settings.share_prompts == "off":
        return "preference.share_prompts: off"
    if work == "train" and recipe.launch.context_parallel_size > 1:
        return "ranks share rows"
    return None


def takes_rows(recipe: Recipe, work: Work) -> str | None:
    """The reason why batches are padded whatever attention can do, or None."""
    if work != "train" or recipe.train.neftune_noise_alpha is None:
        return None
    return "the noise of train.neftune_noise_alpha is scaled by the length of padded rows"


def _joins_rows(recipe: Recipe, batches: Batches) -> bool:
    """True if rows of a micro-batch may share one that is computed; a single row never does."""
    return batches.layout == "unpadded" and recipe.train.per_device_train_batch_size > 1


def execution_parts(
    recipe: Recipe, facts: ModelFacts, dtypes: DtypePlan, device: DeviceFacts, execution: Execution
) -> tuple[ExecutionPart, ...]:
    """The code that runs on each part of a training step, in the order of the model."""
    layers = execution.layers
    batches = ExecutionPart("batches", execution.batches.layout, execution.batches.reason)
    if layers.code == "transformers":
        first = ExecutionPart("layers", "transformers", _told(facts, device, layers))
        own = "eager" if execution.attention == "eager" else "sdpa"
        attention = ExecutionPart("attention", own, "transformers' own")
        if quantizations.row(recipe.quantization.method).training is not None:
            return (first, _rounded_products(recipe, dtypes, device), attention, batches)
        return (first, attention, *_generation(facts), batches)
    elementwise = "torch" if layers.code == "reference" else "triton"
    return (
        ExecutionPart("norms, rotary embedding, gated unit", elementwise, layers.reason),
        *_frozen_products(recipe, dtypes, device),
        _trained_products(recipe, dtypes, device, elementwise),
        *_attention_parts(recipe, facts, dtypes, device, execution),
        *_delta_parts(facts, device, elementwise),
        *_expert_parts(recipe, facts, elementwise),
        _head(recipe, elementwise, layers.reason),
        batches,
    )


def _told(facts: ModelFacts, device: DeviceFacts, layers: LayerChoice) -> str:
    """The reason for transformers' own layers, and for a family that has no others what that costs on a GPU."""
    if facts.family is not None or device.kind != "cuda":
        return layers.reason
    return f"{layers.reason}: a step takes about {TIMES_SLOWER:g} times as long as that of a dense model on the kernels"


def _generation(facts: ModelFacts) -> tuple[ExecutionPart, ...]:
    """A row where what generates is not the engine."""
    refusal = why_no_engine(facts.language, facts.family, on_kernels=False)
    return () if refusal is None else (ExecutionPart("generation", "transformers", refusal),)


def _head(recipe: Recipe, elementwise: str, reason: str) -> ExecutionPart:
    if methods.row(recipe.train.method).classifier:
        return ExecutionPart(
            "score and loss", "torch", "one number a row, in float32; the model's head is not computed"
        )
    return ExecutionPart("head and loss", elementwise, f"{reason}; logits in chunks, never all at once")


def _layers(recipe: Recipe, facts: ModelFacts, device: DeviceFacts, *, work: Work) -> LayerChoice:
    if work == "export":
        return LayerChoice("transformers", "nothing is trained or evaluated")
    kernels, gpu = recipe.model.kernels, _cuda_gpu(device)
    if quantizations.row(recipe.quantization.method).training is not None:
        return LayerChoice("transformers", f"{recipe.quantization.method} rounds the input of each linear layer")
    choice = choose_layers(facts.text_type, facts.shape, facts.activation, kernels, device=device.name, gpu=gpu)
    if choice.code == "transformers":
        return choice
    if recipe.lora is None:
        return choice
    if recipe.lora.use_dora:
        return LayerChoice("transformers", f"{DORA}: adapted layers run on PEFT's own code")
    linears = () if facts.shape is None else facts.shape.linears
    if any(linear.leaf in recipe.lora.modules_to_save for linear in linears):
        return LayerChoice("transformers", TRAINED_WHOLE)
    return choice


def _window_in_force(recipe: Recipe, facts: ModelFacts) -> bool:
    return facts.sliding_window is not None and facts.sliding_window < recipe.data.max_seq_len


def _attention(
    facts: ModelFacts,
    dtypes: DtypePlan,
    device: DeviceFacts,
    *,
    windowed: bool = False,
    masked: bool = False,
    drops: bool = False,
) -> AttentionChoice:
    head_dim = 0 if facts.shape is None else widest_head(facts.shape, windowed=windowed)
    softcap = facts.attn_logit_softcapping or 0.0
    mask: Literal["plain", "intervals"] = "intervals" if masked else "plain"
    sinks = facts.family is not None and facts.family.sinks
    call = AttentionCall(dtypes.compute, head_dim, softcap, windowed, mask, dropout=drops, sinks=sinks)
    return choose_attention(device.gpu, call)


def widest_head(shape: ModelShape, *, windowed: bool = False) -> int:
    """Features of the widest head of the layers that have a window (``windowed``), or of those that have none."""
    found = [each.head_dim for each in shape.attending if (each.window is not None) == windowed]
    return max(found, default=shape.head_dim)


def _attention_parts(
    recipe: Recipe, facts: ModelFacts, dtypes: DtypePlan, device: DeviceFacts, execution: Execution
) -> list[ExecutionPart]:
    """One row; more where some layers have a window in force, or where several documents go to another backend."""

    def row(part: str, choice: AttentionChoice) -> ExecutionPart:
        return ExecutionPart(part, choice.backend, choice.reason)

    drops = execution.drops
    everywhere = _attention(facts, dtypes, device, masked=recipe.data.packing, drops=drops)
    together = _attention(facts, dtypes, device, masked=True, drops=drops)
    apart = [row("attention, rows of different lengths", together)]
    if together.backend == everywhere.backend or not _joins_rows(recipe, execution.batches):
        apart = []
    if not _window_in_force(recipe, facts):
        return [row("attention", everywhere), *apart]
    rows = [
        row(f"attention, window {facts.sliding_window}", _attention(facts, dtypes, device, windowed=True, drops=drops))
    ]
    layers = 0 if facts.shape is None else facts.shape.num_layers
    if None in windows_of(facts.language, facts.family, layers):
        rows += [row("attention, global", everywhere), *apart]
    return rows


def _delta_parts(facts: ModelFacts, device: DeviceFacts, elementwise: str) -> list[ExecutionPart]:
    """A row where layers are gated delta nets."""
    nets = () if facts.shape is None else facts.shape.delta_nets
    if not nets:
        return []
    part = f"gated delta nets ({len(nets)} layers)"
    if elementwise == "torch":
        return [ExecutionPart(part, "torch", "model.kernels: reference")]
    refusal = why_no_delta_rule(device.gpu, nets[0].key_dim, nets[0].value_dim)
    if refusal is not None:
        return [ExecutionPart(part, "torch", f"{refusal}: in chunks of plain torch")]
    return [ExecutionPart(part, "triton", "in chunks; filter and state begin anew with each document")]


#: Operations of a training step in the time in which a GPU reads a byte: 690 TFLOP/s at 4 TB/s, measured on an H200.
#: Others, of both less, are near it.
_OPERATIONS_A_BYTE = 172.5


def _expert_parts(recipe: Recipe, facts: ModelFacts, elementwise: str) -> list[ExecutionPart]:
    """A row where layers have experts: with the tokens of a micro-batch below which reading all experts takes longer
    than computing those of its tokens. Weights of two bytes are read in both passes, 4 operations an element and token.
    """
    stack = next((x for layer in facts.shape.layers for x in layer.stacks), None) if facts.shape is not None else None
    if stack is None:
        return []
    tokens = recipe.train.per_device_train_batch_size * recipe.data.max_seq_len
    least = round(_OPERATIONS_A_BYTE * stack.experts / stack.used, -2)
    told = f"{stack.experts} a layer, {stack.used} of them a token; sorted on the device"
    if recipe.lora is not None and tokens < least:
        told += (
            f"; a micro-batch of {tokens:,} tokens takes as long as one of about {least:,.0f}, since all experts are "
            "read: more rows at a time, or longer ones, cost little"
        )
    return [ExecutionPart("experts", elementwise, told)]


def _rounded_products(recipe: Recipe, dtypes: DtypePlan, device: DeviceFacts) -> ExecutionPart:
    """Products of a method that rounds weights and activations in each of them."""
    part, method = "linear layers", recipe.quantization.method
    refusal = why_dequantized(recipe.quantization, dtypes, device)
    if not wants_kernels(recipe.model.kernels):
        refusal = f"model.kernels: {recipe.model.kernels}"
    if refusal is not None:
        return ExecutionPart(part, "torch", f"{refusal}; the same integers, in float32")
    return ExecutionPart(part, "triton", f"{method}: int8 products on tensor cores, rounded in the norms")


def _frozen_products(recipe: Recipe, dtypes: DtypePlan, device: DeviceFacts) -> list[ExecutionPart]:
    """Products of quantized weights, for methods that can multiply them as they are stored."""
    method = recipe.quantization.method
    if quantizations.row(method).products is None:
        return []
    part, refusal = "products of the frozen weights", why_dequantized(recipe.quantization, dtypes, device)
    if refusal is not None:
        return [ExecutionPart(part, "torch", f"{refusal}: dequantized to {dtypes.compute}")]
    return [ExecutionPart(part, method, "as they are stored, on tensor cores")]


def _trained_products(recipe: Recipe, dtypes: DtypePlan, device: DeviceFacts, elementwise: str) -> ExecutionPart:
    """Products of what is trained: of adapters, or of the weights themselves."""
    if recipe.lora is None:
        copied = "" if dtypes.parameter == dtypes.compute else f", of copies in {dtypes.compute} that each step makes"
        return ExecutionPart("products of the weights", "torch", f"their gradients are {dtypes.gradient}{copied}")
    part, rank = "LoRA products", recipe.lora.r
    if elementwise == "torch":
        return ExecutionPart(part, "torch", "model.kernels: reference")
    if packed_rank(rank) > LARGEST_FUSED_RANK:
        return ExecutionPart(part, "torch", f"rank {rank} is above {LARGEST_FUSED_RANK}: products of their own")
    refusal = why_no_products(device.gpu, dtypes.compute)
    if refusal is not None:
        return ExecutionPart(part, "torch", f"{refusal}: products of their own")
    return ExecutionPart(part, "triton", "half precision on tensor cores: they ride in the elementwise kernels")


#: Operations of one layer in a micro-batch above which the GPU takes longer than the host needs to launch its kernels:
#: graphs would save no time, and keep memory to themselves. The host takes some 6 ms for a layer's step; at 700
#: TFLOP/s, an H200's rate, that is 4e12 operations. The rest is room for slower hosts.
MOST_OPERATIONS = 6e12


def most_graph_tokens(recipe: Recipe, facts: ModelFacts, *, checkpointed: bool = True) -> int | None:
    """Tokens of the largest micro-batch whose launches the host is too slow for; None where the shape is not known.
    ``checkpointed``: under the recipe's policy; without any they are the most.
    """
    train = recipe.train
    flops = step_flops(
        facts,
        recipe.lora,
        seq_len=recipe.data.max_seq_len,
        gradient_checkpointing=checkpointed and train.checkpointing,
        uncheckpointed_layers=train.uncheckpointed_layers,
    )
    if flops is None or facts.shape is None:
        return None
    return int(MOST_OPERATIONS * facts.shape.num_layers / flops.layers)


def why_no_graphs(recipe: Recipe, facts: ModelFacts, execution: Execution, *, tokens: int) -> str | None:
    """The reason why a training run does without graphs, as one clause; None if its small micro-batches have them.
    ``tokens``: those of a micro-batch at its largest.
    """
    train, lora = recipe.train, recipe.lora
    if execution.layers.code != "fused":
        return "the layers are not on Triton kernels"
    if recipe.launch.is_sharded:
        return "the weights are sharded over ranks, which all-gather them layer by layer"
    if not train.cuda_graphs:
        return "train.cuda_graphs: false"
    if policies.row(train.checkpointing).on_host:
        return f"gradient_checkpointing: {train.checkpointing} waits for copies to the host"
    if recipe.launch.context_parallel_size > 1:
        return "ranks share rows, and exchange heads in each layer"
    if lora is None:
        return "the gradients of all weights would be held three times"
    if lora.dropout > 0 or facts.drops_attention or facts.drops_residual:
        return "dropout draws different numbers in each step"
    most = most_graph_tokens(recipe, facts)
    if most is None:
        return "the size of the layers is not known"
    # Rows that are neither packed nor padded make micro-batches of all sizes, in few shapes.
    if tokens > most and (recipe.data.packing or execution.batches.layout == "padded"):
        return f"a micro-batch of {tokens:,} tokens keeps the GPU busy"
    return None


def graphs_part(reason: str | None, tokens: int) -> ExecutionPart:
    """The line of `ftcli check` about how kernels are launched: why one by one, or up to how many tokens as graphs."""
    if reason is None:
        return ExecutionPart(
            "launches", "cuda graphs", f"the host is slower than the GPU with up to {tokens:,} tokens at a time"
        )
    return ExecutionPart("launches", "one by one", reason)


def why_not_sharded(recipe: Recipe, facts: ModelFacts, execution: Execution) -> str | None:
    """The part of a recipe that does not go with sharded weights, as one clause that begins with its key; or None."""
    lora = recipe.lora
    if quantizations.row(recipe.quantization.method).training is not None:
        return f"quantization.method: {recipe.quantization.method} rounds whole matrices"
    if not execution.on_kernels and recipe.model.kernels == "triton":
        return f"model.kernels: triton, and the layers are not on it ({execution.layers.reason})"
    if lora is None:
        return _trained_whole(recipe)
    if lora.use_dora:
        return "lora.use_dora: the lengths of its rows are taken from whole weights"
    if lora.changes_base:
        return f"lora.init_lora_weights: {lora.init_lora_weights} takes whole weights apart"
    if lora.modules_to_save:
        return f"lora.modules_to_save: {lora.modules_to_save[0]}, of which a copy would be made before it is sharded"
    return None


def _trained_whole(recipe: Recipe) -> str | None:
    train, grpo = recipe.train, recipe.grpo
    row = optimizers.row(train.optim)
    if row.build_own is None or row.state != "whole":
        return f"train.optim: {train.optim} works on whole matrices, or keeps state of its own kind"
    if recipe.model.dtype == "float16":
        return "model.dtype: float16, whose losses are scaled"
    if train.bf16_gradients:
        return "train.bf16_gradients: each GPU keeps its part of the sum in float32"
    if recipe.model.train != LANGUAGE:
        return "model.train: a tower has no gradient on ranks whose rows have no image, and shards need all ranks'"
    if grpo is not None and grpo.beta and grpo.sync_ref_model:
        return "grpo.sync_ref_model: a reference that follows is written by one process, and no GPU has all of it"
    return None


def exchanged_key_heads(query_heads: int, key_heads: int, parts: int) -> int | None:
    """Number of key heads to exchange, so that each part gets as many, and with them all that its query heads read:
    ``key_heads`` or a multiple of them. None if ``parts`` does not divide the query heads.
    """
    if query_heads % parts:
        return None
    repeated = math.lcm(key_heads, parts)
    return repeated if query_heads % repeated == 0 else query_heads


def why_rows_stay_whole(facts: ModelFacts, execution: Execution, parts: int) -> str | None:
    """The reason why ranks cannot share rows of this model, as one clause; None if they can."""
    if not execution.on_kernels:
        return f"the layers are transformers' own: {execution.layers.reason}"
    if facts.shape is None:
        return "the model's shape is not known"
    if facts.shape.delta_nets:
        return "its delta nets carry a state from token to token through whole rows"
    if any(exchanged_key_heads(each.heads, each.kv_heads, parts) is None for each in facts.shape.attending):
        return f"its {facts.shape.num_heads} attention heads cannot be shared by {parts}"
    kind = batch_dependent_rope(facts.language)
    return None if kind is None else f"its rotary embeddings of kind {kind} depend on the longest row of a batch"
