"""Bytes that a decoder layer on ftcli's kernels keeps for backward. Legend and element sizes as in ``activations``.

P is the packed rank: the next power of two, 16 at least; 0 where the weights are trained themselves, whose gradients
need nothing else: what norms give is formed again.

================  ==================================================================================================
residual stream   For each half pH, its input, and 4 for its rsqrt where it begins with an RMSNorm, which the products'
                  kernels apply. What others give is a tensor of its own: LayerNorm keeps 8 and its output cH, and so
                  do RMSNorms that an output gate or an MLP without a gate reads, 4 + cH. Parallel halves read the same.
                  A norm that closes a half keeps cH + 4.
adapters          cP for each linear of a group with adapters: the products x·A
attention         c(Q + 2K) for query, key and value in one buffer, cQ for the output, which is the input of o as well,
                  and 4n for log-sum-exp. Norms of queries and keys keep what they give besides: c(Q + K). Where the
                  products' kernels neither norm nor rotate (float32, large ranks) each of the two keeps c(Q + K) if
                  the next reads it, and norms 4 for each head, or 8. An output gate keeps 2cQ.
                  Where scores are capped or have sinks and no kernel runs (CPU): 4cQ and the scores of ``activations``.
                  Of a q projection that gives the gate as well (Qwen3.5) neither happens in the products' kernel.
gated delta net   Of N value heads of V features, V' = N V, and F features of all queries, keys and values:
                  c(F + V' + 2N) for what enters it in one buffer, 8N for decays and write strengths, cV' for the delta
                  rule's output, and cV' for that normalised if the output projection keeps its input
latent attention  c(4Q + L) and 4n for query, key, value and output of heads of one size, and for the latents and the
                  shared key in one buffer of L features (without a latent of queries, keys' and values' alone); 4 for
                  each latent's norm, and c for what values are if they are narrower than keys, the input of o
experts           Of F features, m of them a token, as a half whose norm is a tensor of its own: c · 2Fm for gate and
                  up, cPm for each stack's products x·A, for the routing at most 12m + 4, and 4 for each expert; of a
                  router that is trained its input, if it casts that. Of an expert that every token goes to, as of an
                  MLP, and its output cH and gate c
MLP               c · 2I: gate and up without their adapters' share; all else is formed again. Without a gate what the
                  activation reads and gives
================  ==================================================================================================

Backward writes the gradients of gate and up over them, and h over its gradient: it needs cI for that one, cH for each
of the gradients of output, input and what is behind the norm, and 64P for the adapters' products.

Under ``gradient_checkpointing: offload`` each half of a layer is run again by itself, attention up to the output
projection, the MLP from gate and up on. The host holds the input of each half, with four norms the input of the last,
whose half would run whole else, and attention's output where our kernel made it, which then is not run again. Parallel
halves run again together, from one input.

The delta net's backward pass makes what is behind its filter and its chunks again (``ftkernels.delta_net``,
``delta_rule``), beside the gradients of its output twice, of queries, keys and values, and of what enters.

The plain torch form of the kernels (``kernels: reference``) rotates outside the fused product, c(Q + K), and norms that
are tensors of their own are transformers'. Delta nets in plain torch run again in backward, from what enters them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ftkernels.limits import LARGEST_FUSED_RANK, packed_rank

from ftcli.facts.layers import Attention, DeltaNet, LatentAttention, Linear
from ftcli.facts.shape import ModelShape
from ftcli.plan.memory import activations
from ftcli.plan.memory.activations import ActivationSettings, LayerMemory, Term
from ftcli.plan.memory.checkpointing import fetched_ahead

#: Bytes per token and column of the rank in the MLP's backward: products with A and their gradients, in float32 and
#: in half precision. 11 MiB at 8192 tokens and rank 16, with the products that are kept.
_RANK_BYTES = 64

#: Tokens of a chunk of a delta net, and bytes per token and feature of its values that plain torch keeps of its chunks,
#: from the filter to the norm: 84 to 100, counted by torch's hooks at heads of 64 and 128.
_CHUNK, _DELTA_IN_TORCH = 64, 100


def fused_layers(*, all_scores: bool, reference: bool, attention_by_kernel: bool = False) -> LayerMemory:
    """Layers on the kernels. ``all_scores``: scores are capped or have sinks, and no kernel runs;
    ``attention_by_kernel``: it is our kernel's, whose output ``offload`` sends to the host as well.
    """

    mixer = partial(_mixer, all_scores=all_scores, reference=reference)

    def forward(shape: ModelShape, setting: ActivationSettings) -> float:
        scores = activations.scores_at_work(shape, setting) if all_scores else 0
        wide = 3 * shape.intermediate_size + 2 * shape.hidden_size
        if (pairs := _pairs(shape)) is not None:
            wide += pairs.used * (pairs.out_features // 2 + shape.hidden_size)
        if shape.latents:
            wide = max(wide, _latent_heads(shape.latents[0]) + sum(shape.latents[0].entering))
        return max(setting.bytes_compute * wide, scores)

    def backward(shape: ModelShape, setting: ActivationSettings) -> float:
        scores = activations.scores_at_work(shape, setting) if all_scores else 0
        mlp = _backward_in_torch(shape, setting) if reference else _backward(shape, setting)
        own = _own_mixer(shape, setting, reference=reference)
        # What the MLP has kept is gone by then.
        return max(mlp, scores, 0 if own is None else own.backward - _mlp(shape, setting))

    def in_front(shape: ModelShape, setting: ActivationSettings) -> float:
        own = _own_mixer(shape, setting, reference=reference)
        return 0.0 if own is None else own.kept + own.backward

    kept: dict[str, Term] = {
        "residual stream": partial(_residual_stream, reference=reference),
        "adapters": _adapters,
        "mixer": mixer,
        "MLP": _mlp,
        "own input": partial(_layer_input, reference=reference),
    }
    sent = partial(_sent, attention_by_kernel=attention_by_kernel)
    # Whoever makes attention's output fetches ahead.
    return LayerMemory(kept, forward, backward, "MLP", in_front, sent, lambda shape: fetched_ahead(shape.most_sent))


def _mixer(shape: ModelShape, setting: ActivationSettings, *, all_scores: bool, reference: bool) -> float:
    """Bytes of what mixes tokens, from what enters it to what the output projection reads."""
    c = setting.bytes_compute
    if (own := _own_mixer(shape, setting, reference=reference)) is not None:
        return own.kept
    if all_scores:
        return 2 * c * (shape.q_width + shape.kv_width) + activations.eager_scores(shape, setting)
    attention = shape.layers[0].attention
    if attention is not None and shape.family.value_norm is not None:
        return _heads_apart(shape, attention, setting, reference=reference)
    kept: float = c * (2 * shape.q_width + 2 * shape.kv_width) + 4 * shape.num_heads
    kept += _head_norms(shape, setting, reference=reference)
    kept += c * (_copies(shape, setting, reference=reference) + (shape.q_width if setting.exchanges else 0))
    return kept + (_output_gate(shape, setting, reference=reference) if shape.family.gates_output else 0)


class _MixerBytes(NamedTuple):
    """Bytes that a mixer keeps, and that its backward pass allocates."""

    kept: float
    backward: float


def _own_mixer(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> _MixerBytes | None:
    """Those of a mixer that is no plain attention; None where it is."""
    if shape.delta_nets:
        back = _delta_backward(shape.delta_nets[0], setting, reference=reference)
        return _MixerBytes(_delta_net(shape, setting, reference=reference), back)
    if shape.latents:
        latent = shape.latents[0]
        # Gradients between the output projection and the latents, its own input's among them.
        back = setting.bytes_compute * (_latent_heads(latent) + latent.output_width)
        return _MixerBytes(_latent_attention(latent, setting), back)
    return None


def _residual_stream(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes of what both halves read, and of their norms where these are not part of a product."""
    family, norms, c = shape.family, shape.norms, setting.bytes_compute
    stream = setting.bytes_residual * shape.hidden_size

    def opening(norm: str | None, *, apart: bool) -> float:
        if norm is None or (family.norm != "layer" and not apart):
            return stream + (0 if norm is None else 4)
        given = c * shape.hidden_size
        if family.norm == "layer":
            return stream + 8 + given
        return (activations.norm_bytes(shape.hidden_size, shape, setting, c) if reference else stream + 4) + given

    kept = opening(norms.before_attention, apart=shape.parallel or family.output_gate is not None)
    if not shape.parallel:
        kept += opening(norms.before_mlp, apart=len(family.mlp) == 2 or _pairs(shape) is not None)
    closing = sum(norm is not None for norm in (norms.after_attention, norms.after_mlp))
    each = activations.norm_bytes(shape.hidden_size, shape, setting, c) if reference else c * shape.hidden_size + 4
    if setting.drops_residual:  # its mask
        kept += 2 * (c if reference else 1) * shape.hidden_size
    return kept + closing * each + _beside_mlp(shape, setting, each, reference=reference)


def _beside_mlp(shape: ModelShape, setting: ActivationSettings, norm: float, *, reference: bool) -> float:
    """Bytes of a mixture beside the MLP: what two more norms read, of ``norm`` bytes each, the router's own norm in
    float32 and its scores; and in plain torch the stream, which the MLP's norm has widened.
    """
    experts, pairs = shape.family.experts, _pairs(shape)
    if pairs is None or experts is None or experts.beside_mlp is None:
        return 0.0
    wide = setting.bytes_compute != 4
    kept = 2 * norm + 8 + 4 * pairs.experts + (4 * shape.hidden_size if wide else 0)
    if setting.full:  # what the router's scales multiply, and what they give
        kept += 2 * setting.bytes_compute * shape.hidden_size + 4
    return kept + (setting.bytes_residual * shape.hidden_size if reference and wide else 0)


def _layer_input(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes of what a layer does with its own input of P features, which lies beside: what its gate reads, what that
    gives, activated, and multiplied; and what its norm reads.
    """
    if shape.layer_input is None:
        return 0.0
    c, hidden = setting.bytes_compute, shape.hidden_size
    norm = activations.norm_bytes(hidden, shape, setting, c) if reference else c * hidden + 4
    wide = setting.full and c != 4  # the inputs of all layers, which then stay where these are run again alone
    return setting.bytes_residual * hidden + (2 if wide else 3) * c * shape.layer_input.width + norm


def layer_input_bytes(shape: ModelShape, setting: ActivationSettings, *, gradient: bool) -> float:
    """Bytes of the inputs of all layers, which are made before the first one, in float32 where the tables are; with a
    gradient, of the norm that made them.
    """
    features = shape.layer_input_features
    kept: float = (4 if setting.full else setting.bytes_compute) * features
    if gradient and features:
        kept += (4 + (4 if setting.full else 0)) * features + 8 * shape.num_layers
    return kept


def _heads_apart(shape: ModelShape, attention: Attention, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes of attention where values are normalised, too: what the norms read (in float32 in plain torch), queries,
    keys and values behind them, and the output. Of layers that share keys, queries and the output alone.
    """
    c, q = setting.bytes_compute, shape.q_width
    k = 0 if attention.keys == "shared" else shape.kv_width
    twice = attention.keys == "own" or (reference and c != 4)  # what one linear gives is widened for either norm
    read = q + (2 if twice else 1) * k
    heads = shape.num_heads + (0 if not k else 2 * shape.num_kv_heads)
    kept: float = c * (2 * (q + k) + (q if setting.exchanges else 0))
    kept += (4 if reference else c) * read + 4 * (shape.num_heads + heads)
    if reference and setting.full:  # what trained weights multiply
        kept += 4 * (q + k)
    return kept


def _head_norms(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes that the norms of queries and keys keep beside their inputs and outputs."""
    norms = shape.family.head_norm
    if norms is None or (_in_one_kernel(shape, setting) and not reference):
        return 0.0
    c, width = setting.bytes_compute, shape.q_width + shape.kv_width
    kept = 8.0 if norms.span == "width" else 4.0 * (shape.num_heads + shape.num_kv_heads)
    if reference and c != 4:
        kept += 4 * width
    if reference and setting.full and norms.weights:  # torch keeps what a trained weight multiplies
        kept += (c if shape.family.norm in ("llama", "layer") else 4) * width
    return kept


def _copies(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Elements of queries and keys, and of attention's output, beside one buffer of queries, keys and values and one
    output.
    """
    family, width, attending = shape.family, shape.q_width + shape.kv_width, shape.attending
    turned = sum(each.rotary_dim > 0 for each in attending) / max(len(attending), 1)
    norms = family.head_norm
    made: float = 0 if norms is None else width
    if reference or not _in_one_kernel(shape, setting):
        if norms is None:
            made = turned * width
        elif norms.after_rotation and not (reference and setting.bytes_compute != 4):
            made += turned * width
    if family.scaled_by_position and not made:
        made = shape.q_width
    by_head = shape.rotates_in_part or (norms is None and family.rotary == "pairs")
    widened = family.gates_output and setting.bytes_compute != 4  # and the copy is let go
    if reference and by_head and not widened:
        made += turned * shape.q_width  # attention writes as it is given queries, which torch has put by head
    return made


def _in_one_kernel(shape: ModelShape, setting: ActivationSettings) -> bool:
    """True if the kernel behind the products of q, k and v rotates, and applies the heads' norms: as ``lora_qkv``
    decides it, and ``lora_gated_qkv`` never does.
    """
    norms = shape.family.head_norm
    if norms is not None and norms.span == "width" and norms.after_rotation:
        return False
    if "q_gate" in shape.family.joined:
        return False
    return setting.bytes_compute != 4 and packed_rank(setting.rank) <= LARGEST_FUSED_RANK


def _output_gate(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes of the gate and of the gated output; plain torch keeps its sigmoid, and both in float32."""
    c, width = setting.bytes_compute, shape.q_width
    if not reference:
        return 2 * c * width
    among_queries = c if "q_gate" in shape.family.joined else 0  # the gate, in the buffer that norms keep
    return (c + 4 + (4 if c != 4 else 0) + among_queries) * width


def _adapters(shape: ModelShape, setting: ActivationSettings) -> float:
    names = {linear.name for linear in setting.adapted}
    products = sum(len(group) for group in shape.layers[0].groups if names.intersection(group))
    products += sum(stack.used for stack in shape.layers[0].stacks[1:] if stack.name in names)
    kept: float = setting.bytes_compute * packed_rank(setting.rank) * products
    if (pairs := _pairs(shape)) is not None:
        kept += 12 * pairs.used + 4 * pairs.experts + 4
        experts, wide = shape.family.experts, setting.bytes_compute != 4
        if experts is not None and experts.shared_gate is not None:
            kept += setting.bytes_compute * (shape.hidden_size + 1)
        if experts is not None and setting.full and wide:
            kept += experts.cast_bytes * shape.hidden_size
    return kept


def _pairs(shape: ModelShape) -> Linear | None:
    """The first stack of a layer's experts; None where it has none."""
    return next(iter(shape.layers[0].stacks), None)


def _mlp(shape: ModelShape, setting: ActivationSettings) -> float:
    inner = setting.bytes_compute * shape.intermediate_size
    if (pairs := _pairs(shape)) is not None:
        adapted = any(each.name == pairs.name for each in setting.adapted)
        entering = packed_rank(setting.rank) if adapted else 0
        return 2 * inner + setting.bytes_compute * pairs.used * (pairs.out_features + entering)
    return 2 * inner if len(shape.family.mlp) == 3 else inner + activations.activation_bytes(shape, setting)


def _backward(shape: ModelShape, setting: ActivationSettings) -> float:
    of_rank = _RANK_BYTES * packed_rank(setting.rank)
    wide = (1 if len(shape.family.mlp) == 3 else 2) * shape.intermediate_size + 3 * shape.hidden_size
    if (pairs := _pairs(shape)) is not None:  # dh, d[g | u], and the rows of dx, of each pair
        wide += pairs.used * (3 * pairs.out_features // 2 + shape.hidden_size)
    return setting.bytes_compute * wide + of_rank


def _backward_in_torch(shape: ModelShape, setting: ActivationSettings) -> float:
    """Plain torch writes nothing over anything."""
    wide = 4 * shape.intermediate_size
    if (pairs := _pairs(shape)) is not None:
        wide += pairs.used * (3 * pairs.out_features + shape.hidden_size)
    return setting.bytes_compute * wide


def _delta_net(shape: ModelShape, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes from what enters a delta net to what the output projection reads."""
    c, net = setting.bytes_compute, shape.delta_nets[0]
    read = setting.full or any(each.name in shape.layers[0].groups.o for each in setting.adapted)
    kept = c * (net.joined_width + (net.width if read else 0))
    return kept if reference else kept + c * net.width + 8 * net.value_heads


def _delta_backward(net: DeltaNet, setting: ActivationSettings, *, reference: bool) -> float:
    """Bytes that the backward pass of a delta net allocates: chunks, and gradients of what is around them."""
    if reference:
        return _DELTA_IN_TORCH * net.width
    c, group = setting.bytes_compute, net.value_heads // net.key_heads
    squares = 2 * c * (_CHUNK + net.key_dim * net.value_dim / _CHUNK)
    each = squares + c * net.value_dim + 4 * net.key_dim / group + 32
    around = c * (2 * net.width + 2 * net.channels + net.joined_width) + 8 * net.value_heads
    return net.value_heads * each + around


def _latent_attention(latent: LatentAttention, setting: ActivationSettings) -> float:
    """Bytes from the latents to what the output projection reads."""
    compressed = latent.q_rank is not None
    entered = sum(latent.entering) if compressed else latent.kv_rank
    read = latent.output_width if latent.value_dim != latent.head_dim else 0
    return setting.bytes_compute * (4 * latent.width + entered + read) + 4 * latent.heads + 4 * (1 + compressed)


def _latent_heads(latent: LatentAttention) -> int:
    """Features of what the latents are expanded to, and of the heads that are put together of it."""
    return latent.width + latent.expanded + 3 * latent.width


def _sent(shape: ModelShape, *, attention_by_kernel: bool) -> int:
    attended = attention_by_kernel and not shape.delta_nets
    return 1 if shape.parallel else shape.half_inputs + attended
