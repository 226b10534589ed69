"""Bytes that a decoder layer on ftcli's kernels keeps for backward. Legend and element sizes as in ``activations``.

P is the packed rank: the next power of two, 16 at least; 0 where the weights are trained themselves, whose gradients
need nothing else: what norms give is formed again.

================  ==================================================================================================
residual stream   2 · (pH + 4): the input of each half and its rsqrt. Layers with four norms keep the inputs of the
                  two closing ones as well: 2 · (cH + 4).
adapters          7 · cP: the products x·A of q, k, v, o, gate, up and down
attention         c(Q + 2K) for query, key and value in one buffer, cQ for the output, which is the input of o as well,
                  and 4n for log-sum-exp. Norms by head keep the rotated query and key besides: c(Q + K) + 4(n + n_kv).
                  Where scores are capped and no kernel runs (CPU, float32): 4cQ and the scores of ``activations``.
gated MLP         c · 2I: gate and up without their adapters' share; all else is formed again
================  ==================================================================================================

Backward writes the gradients of gate and up over them, and h over its gradient: it needs cI for that one, cH for each
of the gradients of output, input and what is behind the norm, and 64P for the adapters' products.

Under ``gradient_checkpointing: offload`` each half of a layer is run again by itself, attention up to the output
projection, the MLP from gate and up on. The host holds the input of each half, with four norms the input of the last,
whose half would run whole else, and attention's output where our kernel made it, which then is not run again.

The plain torch form of the kernels (``kernels: reference``) rotates outside the fused product, c(Q + K), and its
closing norms are transformers' own.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from ftkernels.limits import packed_rank

from ftcli.facts.shape import ModelShape
from ftcli.plan.memory.activations import ActivationSettings, LayerMemory, eager_scores, norm_bytes, scores_at_work
from ftcli.plan.memory.checkpointing import fetched_ahead

_PRODUCTS = 7
#: Bytes per token and column of the rank in the MLP's backward: products with A and their gradients, in float32 and
#: in half precision. 11 MiB at 8192 tokens and rank 16, with what ``_PRODUCTS`` counts.
_RANK_BYTES = 64


def fused_layers(*, capped_without_kernel: bool, reference: bool, attention_by_kernel: bool = False) -> LayerMemory:
    """Layers on the kernels. ``capped_without_kernel``: scores are capped, and attention runs eagerly all the same;
    ``attention_by_kernel``: it is our kernel's, whose output ``offload`` sends to the host as well.
    """

    def residual_stream(shape: ModelShape, setting: ActivationSettings) -> float:
        kept: float = 2 * (setting.bytes_residual * shape.hidden_size + 4)
        if shape.family.closes:
            closing = setting.bytes_compute * shape.hidden_size + 4
            kept += 2 * (norm_bytes(shape.hidden_size, shape, setting, 4) if reference else closing)
        return kept

    def attention(shape: ModelShape, setting: ActivationSettings) -> float:
        c = setting.bytes_compute
        if capped_without_kernel:
            return 2 * c * (shape.q_width + shape.kv_width) + eager_scores(shape, setting)
        rotated = c * (shape.q_width + shape.kv_width)
        kept = c * (2 * shape.q_width + 2 * shape.kv_width) + 4 * shape.num_heads
        if shape.family.head_norm:
            return kept + rotated + _head_norms(shape, setting, reference=reference)
        return kept + (rotated if reference else 0)

    def forward(shape: ModelShape, setting: ActivationSettings) -> float:
        scores = scores_at_work(shape, setting) if capped_without_kernel else 0
        return max(setting.bytes_compute * (3 * shape.intermediate_size + 2 * shape.hidden_size), scores)

    def backward(shape: ModelShape, setting: ActivationSettings) -> float:
        scores = scores_at_work(shape, setting) if capped_without_kernel else 0
        return max(_backward_in_torch(shape, setting) if reference else _backward(shape, setting), scores)

    kept = {
        "residual stream": residual_stream,
        "adapters": _adapters,
        "attention": attention,
        "gated MLP": _gate_and_up,
    }
    sent = partial(_sent, attention_by_kernel=attention_by_kernel)
    return LayerMemory(MappingProxyType(kept), forward, backward, "gated MLP", sent, _ahead)


def _head_norms(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes that the norms of queries and keys keep beside their outputs."""
    c, width = setting.bytes_compute, shape.q_width + shape.kv_width
    kept = 4.0 * (shape.num_heads + shape.num_kv_heads)
    if reference and c != 4:
        kept += 4 * width
    if reference and setting.full:  # torch keeps what a trained weight multiplies
        kept += (4 if shape.family.norm == "gemma" else c) * width
    return kept


def _adapters(shape: ModelShape, setting: ActivationSettings) -> float:
    return setting.bytes_compute * packed_rank(setting.rank) * _PRODUCTS


def _gate_and_up(shape: ModelShape, setting: ActivationSettings) -> float:
    return setting.bytes_compute * 2 * shape.intermediate_size


def _backward(shape: ModelShape, setting: ActivationSettings) -> float:
    of_rank = _RANK_BYTES * packed_rank(setting.rank)
    return setting.bytes_compute * (shape.intermediate_size + 3 * shape.hidden_size) + of_rank


def _backward_in_torch(shape: ModelShape, setting: ActivationSettings) -> float:
    """Plain torch writes nothing over anything."""
    return setting.bytes_compute * 4 * shape.intermediate_size


def _sent(shape: ModelShape, *, attention_by_kernel: bool) -> int:
    return shape.half_inputs + attention_by_kernel


def _ahead(shape: ModelShape) -> int:
    """Whoever makes attention's output."""
    return fetched_ahead(shape.most_sent)
