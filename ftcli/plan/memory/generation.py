"""Memory of generation: the engine's cache and passes, or those of transformers if that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ftkernels.limits import CACHE_PAGE, packed_rank, why_no_decode_attention

from ftcli.facts.generation import (
    LOGIT_COPIES,
    PREFILL_TOKENS,
    cache_bytes,
    cache_shape,
    why_no_engine,
)
from ftcli.plan.memory.activations import plain_layers
from ftcli.plan.memory.fused_activations import layer_input_bytes
from ftcli.plan.memory.workspaces import mask_bytes
from ftcli.plan.run import Generation, RunPlan
from ftcli.tables import quantizations

#: How long what completes a method's prompts is held: made anew for each step's completions; from step to step; or from
#: step to step with a copy of the weights that has the adapters in it. Of sharded weights it is made anew: layers are
#: gathered for each token, or all of them, the whole model, for each step's completions.
Generator: TypeAlias = Literal["each step", "kept", "merged", "whole"]


@dataclass(frozen=True, slots=True)
class GenerationBytes:
    """Bytes of a batch's generation.

    Attributes:
        pass_bytes: What a forward pass and the choice of tokens take besides.
        copy_bytes: Of weights with adapters in them, copied where memory has room; 0 where none would be.
        by_engine: Whether it is the engine that generates, which can be kept.
    """

    cache_bytes: int
    pass_bytes: int
    copy_bytes: int = 0
    by_engine: bool = True


def generation(plan: RunPlan, batch: Generation) -> GenerationBytes:
    """Bytes to generate ``batch.rows`` sequences, without the one matrix that a product of quantized weights needs."""
    gpu, on_kernels = plan.device.gpu, plan.execution.on_kernels
    head_dim = cache_shape(plan.shape, plan.dtypes.compute_bytes).widest_head
    refusal = why_no_engine(plan.facts.language, plan.shape.family, on_kernels=on_kernels)
    refusal = refusal or why_no_decode_attention(gpu, plan.dtypes.compute, head_dim)
    return _by_engine(plan, batch) if refusal is None else _by_transformers(plan, batch)


def _by_engine(plan: RunPlan, batch: Generation) -> GenerationBytes:
    """The pages and states of the rows that are decoded together, a pass over prompts, and what choosing their tokens
    takes.
    """
    shape, element, together = plan.shape, plan.dtypes.compute_bytes, batch.rows
    each = cache_shape(shape, element)
    at_once = PREFILL_TOKENS["cuda" if plan.device.kind == "cuda" else "cpu"]
    tokens = max(batch.prompt, min(together * batch.prompt, at_once))
    densely = plan.execution.masked != "triton"
    prefill = tokens * plan.layers.forward_peak(shape, plan.setting(tokens, padded=densely))
    prefill += 3 * tokens * shape.hidden_size * plan.stream_bytes
    prefill += made_once(plan, 1, tokens, padded=densely)
    logits = together * shape.vocab_size * (4 * LOGIT_COPIES + element)
    states = together * each.state_bytes // max(each.nets, 1)  # of a layer, on their way to their places
    passing = int(prefill) + logits + states + _packed_experts(plan)
    held = together + (0 if each.nets else batch.waiting)
    return GenerationBytes(cache_bytes(each, held, batch.seq_len), passing, _copied(plan))


def _packed_experts(plan: RunPlan) -> int:
    """Bytes of the adapters of experts as products take them: these stay beside the experts, merged copy or not."""
    stacks = [each for each in plan.adapters if each.linear.experts > 1]
    return plan.dtypes.compute_bytes * sum(packed_rank(x.rank) * x.elements // x.rank for x in stacks)


def _copied(plan: RunPlan) -> int:
    """Bytes of the weights that :mod:`ftcli.generation.generator` would copy: experts stay as they are."""
    recipe, shape, dtypes = plan.recipe, plan.shape, plan.dtypes
    stored = quantizations.row(recipe.quantization.method)
    if stored.products is not None:
        return 0
    every = stored.quantize is not None or dtypes.parameter_bytes != dtypes.compute_bytes
    if recipe.lora is None and not every:
        return 0
    experts = sum(stack.parameters for layer in shape.layers for stack in layer.stacks)
    return dtypes.compute_bytes * (shape.linear_parameters - experts)


def _by_transformers(plan: RunPlan, batch: Generation) -> GenerationBytes:
    """The key-value cache of all rows, and the larger of two forward passes: over the prompts, or over one token of
    each row when the cache is full. Where rows are padded, each layer repeats keys and values for all heads.
    """
    shape, element, rows = plan.shape, plan.dtypes.parameter_bytes, batch.rows
    widest = max((each.key_width for each in shape.attending), default=0)
    each = cache_shape(shape, element)
    kept, states = rows * each.page_bytes // CACHE_PAGE, rows * each.state_bytes  # of a position of all layers
    token = rows * (sum(shape.latents[0].kept) if shape.latents else 2 * widest) * element  # of one layer's cache
    # Through transformers' own layers, for the cache, with the attention of the others.
    plain = plain_layers("eager" if plan.execution.attention == "eager" else "sdpa")
    prefill = rows * batch.prompt * plain.forward_peak(shape, plan.setting(batch.prompt, padded=rows > 1))
    prefill += kept * batch.prompt + states + masks(plan, rows, batch.prompt, padded=rows > 1)
    repeated = 2 * rows * max((each.width for each in shape.attending), default=0) * element * batch.seq_len
    cache = kept * batch.seq_len + states
    decoding = cache + max(repeated, token * batch.seq_len // 2)
    logits = rows * shape.vocab_size * (4 + plan.dtypes.compute_bytes)
    return GenerationBytes(cache, max(int(prefill), decoding) - cache + logits, by_engine=False)


def made_once(plan: RunPlan, rows: int, seq_len: int, *, padded: bool) -> int:
    """Masks, the cosines and sines of the positions, and layers' own inputs."""
    tables = 2 * seq_len * sum({each.head_dim for each in plan.shape.attending}) * plan.stream_bytes
    own = layer_input_bytes(plan.shape, plan.setting(seq_len, padded=padded), gradient=False)
    return tables + int(rows * seq_len * own) + masks(plan, rows, seq_len, padded=padded)


def masks(plan: RunPlan, rows: int, tokens: int, *, padded: bool) -> int:
    """Bytes of the mask that attention of a call over whole rows reads."""
    element, window = plan.dtypes.parameter_bytes, plan.facts.sliding_window
    return mask_bytes(plan.execution, rows, tokens, tokens, window, element, padded=padded)
