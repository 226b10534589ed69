"""Bytes that autograd keeps for the backward pass of one decoder layer, term by term.

Legend, all per token unless said otherwise: H hidden_size, I intermediate_size, Q = heads · head_dim,
K = kv_heads · head_dim, n heads, S sequence length, r LoRA rank. Bytes of an element: p in the residual stream (the
parameters' dtype), c in matrix products (the compute dtype), 4 in float32.

What plain transformers with PEFT keeps:

===============  ===================================================================================================
norm of width W  4W + 4: the float32 input and its rsqrt. When its weight is trained also the normalised value:
                 pW before the weight (Llama style), 4W in float32 (Gemma and OLMo style). torch's LayerNorm pW + 8,
                 under autocast on a GPU 4W + 8; Cohere's 8W + 4, and 4W more when its weight is trained.
linear input     Kept once for each linear that needs its input for a gradient: all under full fine-tuning, the adapted
                 ones under LoRA. Under autocast each linear casts (PEFT: to float32 and back), so each keeps its own
                 c·W; without autocast one 4W is shared by the linears that read the same tensor, which parallel halves
                 do.
LoRA             c·r for each adapted linear (the output of A); dropout adds W bytes of mask and a float32 copy's cast.
DoRA             2·cW besides for each adapted linear of W output features: what base and adapter give, which the rows'
                 lengths are multiplied by.
attention, sdpa  c(2Q + 2Q) + 4n: query, repeated key and value, output, log-sum-exp; and the mask, turned into c·S of
                 bias in every layer. Without padding (one row) no mask, and key and value stay K wide: c(2Q + 2K) + 4n.
                 The output is the input of o as well and counted once, unless PEFT's cast made a copy, or o one
                 because queries were put together of parts, whose memory order the output takes over. An output gate
                 keeps its sigmoid cQ, and the output before it.
attention, eager c(Q + 2Q) for query and repeated key and value; scores n·S·(4 + c) for the softmax in float32 and its
                 cast (4 alone when c = 4), and n·S·c more for the tanh of capped scores.
gated MLP        c·3I: gate, activation, up; the input of down is counted with the linear inputs. Autocast on a GPU
                 squares in float32: c·2I + 8I for a squared ReLU. BitNet's is one kernel there: c·2I. Without a gate
                 c·I, xIELU (3c + 1)·I, and 4I more when its two numbers are trained.
===============  ===================================================================================================

Rotary embeddings and residual additions keep nothing. :mod:`~.checkpointing` says what checkpointing leaves of all
this. tests/unit/plan/test_activations.py compares the table with torch's saved-tensor hooks: LoRA and full
fine-tuning, float32 and bfloat16, every family.

Layers on ftcli's kernels keep less: :mod:`~.fused_activations`. :mod:`ftcli.plan.execution` says which of the two
forms a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ftcli.facts.layers import SHARED_INPUTS, Linear
from ftcli.facts.shape import ModelShape
from ftcli.plan.memory.checkpointing import LayerBytes


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """Arguments of the terms besides the model's shape.

    Attributes:
        bytes_residual, bytes_compute: p and c of the legend.
        adapted: The linear layers with adapters, of rank ``rank``; empty under full fine-tuning.
        drops_residual: Dropout of what each half of a layer adds.
        rounds: Linear layers keep their input in int8 (``quantization.method: bitnet``), once for those that share it;
            ``in norms``: norms hand it over like that and keep their own input alone.
        squares_widened: The MLP's activation is squared by torch under autocast on a GPU.
        widens: Autocast has torch's norms compute in float32, as it does on a GPU.
        exchanges: Ranks share rows: attention's output is kept as it was made, and as ranks have exchanged it.
    """

    seq_len: int
    bytes_residual: int
    bytes_compute: int
    autocast: bool
    adapted: tuple[Linear, ...]
    rank: int
    dropout: bool
    full: bool
    softcap: bool
    padded: bool
    dora: bool = False
    drops_residual: bool = False
    rounds: Literal["no", "apart", "in norms"] = "no"
    own_norms: bool = False
    squares_widened: bool = False
    widens: bool = False
    exchanges: bool = False


Term = Callable[[ModelShape, ActivationSettings], float]


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes that one decoder layer holds, by the code that computes it. Each term answers in bytes per token.

    Attributes:
        kept: What the layer keeps for backward, by part.
        forward: The most that it holds at once when nothing is kept (evaluation).
        backward: What its backward pass allocates on top of what is kept.
        gate_and_up: The part of ``kept`` that can be computed again by itself; None where layers run again whole.
        mixer: What the half in front of the MLP keeps and allocates, where that may be more than the MLP's.
        halves: How many tensors of the residual stream's size its halves are run again from. A whole layer needs one.
        ahead: How many of these are fetched from the host before they are needed.
        passing: What its forward pass allocates on top of what is kept, where that has to be counted.
    """

    kept: Mapping[str, Term]
    forward: Term
    backward: Term
    gate_and_up: str | None = None
    mixer: Term = lambda shape, setting: 0.0
    halves: Callable[[ModelShape], int] = lambda shape: 1
    ahead: Callable[[ModelShape], int] = lambda shape: 1
    passing: Term = lambda shape, setting: 0.0

    def layer_bytes(self, shape: ModelShape, setting: ActivationSettings) -> float:
        """Bytes per token that one layer keeps: where layers are of several kinds, their mean."""
        kinds = _by_kind(shape, setting)
        return _mean(shape, kinds, [self._kept(kind, own) for kind, own in kinds])

    def _kept(self, kind: ModelShape, setting: ActivationSettings) -> float:
        return sum(term(kind, setting) for term in self.kept.values())

    def forward_peak(self, shape: ModelShape, setting: ActivationSettings) -> float:
        """Bytes per token that a layer holds at most when nothing is kept."""
        return max(self.forward(kind, own) for kind, own in _by_kind(shape, setting))

    def passing_peak(self, shape: ModelShape, setting: ActivationSettings) -> float:
        """Bytes per token that a layer's forward pass has at most beyond what is kept."""
        return max(self.passing(kind, own) for kind, own in _by_kind(shape, setting))

    def layer(self, shape: ModelShape, setting: ActivationSettings) -> LayerBytes:
        """A layer's bytes per token, as checkpointing policies take them."""
        kinds = _by_kind(shape, setting)
        again = None
        if self.gate_and_up is not None:
            again = _mean(shape, kinds, [self.kept[self.gate_and_up](*kind) for kind in kinds])
        return LayerBytes(
            kept=self.layer_bytes(shape, setting),
            backward=max(self.backward(kind, own) for kind, own in kinds),
            stream=shape.hidden_size * setting.bytes_residual,
            gate_and_up=again,
            halves=_mean(shape, kinds, [self.halves(kind) for kind, _ in kinds]),
            ahead=self.ahead(shape),
            whole=max(self._kept(kind, own) + self.backward(kind, own) for kind, own in kinds),
            mixer=max(self.mixer(kind, own) for kind, own in kinds),
        )


def _by_kind(shape: ModelShape, setting: ActivationSettings) -> list[tuple[ModelShape, ActivationSettings]]:
    """:attr:`ModelShape.by_kind`, each with the adapters that its layers have."""
    kinds = shape.by_kind
    if len(kinds) == 1:
        return [(shape, setting)]
    owned = [kind.layers[0].linears for kind in kinds]
    adapted = [tuple(each for each in setting.adapted if each in linears) for linears in owned]
    return [(kind, replace(setting, adapted=own)) for kind, own in zip(kinds, adapted, strict=True)]


def _mean(shape: ModelShape, kinds: Sequence[tuple[ModelShape, ActivationSettings]], values: Sequence[float]) -> float:
    """The mean over all layers of a value of each kind."""
    if len(values) == 1:
        return values[0]
    return sum(kind.num_layers * value for (kind, _), value in zip(kinds, values, strict=True)) / shape.num_layers


def norm_bytes(width: int, shape: ModelShape, setting: ActivationSettings, element: int) -> float:
    """Bytes that transformers' norm of this width keeps; ``element`` is the size of one of its inputs."""
    family = shape.family
    if family.norm == "layer" and family.norm_bias:
        return (4 if setting.widens else element) * width + 8
    if family.norm == "layer":
        return (12 if setting.full else 8) * width + 4
    kept = 4 * width + 4
    if setting.full:
        kept += (element if family.norm == "llama" else 4) * width
    return kept


def _norms(shape: ModelShape, setting: ActivationSettings) -> float:
    if setting.rounds == "in norms" and not setting.own_norms:
        total = float(len(shape.norms.names) * (setting.bytes_residual * shape.hidden_size + 4))
        inner = shape.hidden_size + shape.intermediate_size
        return total + (setting.bytes_compute * inner + 8 if shape.family.sub_norms else 0)
    norms, total = shape.norms, 0.0
    for name in norms.names:  # what closes a half reads what a product gives
        closes = name in (norms.after_attention, norms.after_mlp)
        element = setting.bytes_compute if closes else setting.bytes_residual
        total += norm_bytes(shape.hidden_size, shape, setting, element)
    total += _head_norms(shape, setting)
    if setting.drops_residual:  # its mask, in the dtype of what is dropped off the GPU
        total += 2 * setting.bytes_compute * shape.hidden_size
    if shape.family.sub_norms:
        total += norm_bytes(shape.hidden_size, shape, setting, setting.bytes_compute)
        total += norm_bytes(shape.intermediate_size, shape, setting, setting.bytes_compute)
    return total


def _head_norms(shape: ModelShape, setting: ActivationSettings) -> float:
    norms = shape.family.head_norm
    if norms is None:
        return 0.0
    # A rotation gives the dtype of its angles, which is that of the residual stream.
    element = setting.bytes_residual if norms.after_rotation else setting.bytes_compute
    element = max(element, setting.bytes_compute)
    without = setting if norms.weights else replace(setting, full=False)
    if norms.span == "width":
        return sum(norm_bytes(width, shape, without, element) for width in (shape.q_width, shape.kv_width))
    return (shape.num_heads + shape.num_kv_heads) * norm_bytes(shape.head_dim, shape, without, element)


def _linear_inputs(shape: ModelShape, setting: ActivationSettings) -> float:
    linears = shape.linears if setting.full else setting.adapted
    if setting.own_norms:
        return _normed_inputs(shape, setting)
    if setting.rounds != "no":
        return float(sum(width + 4 for width in _shared_inputs(linears).values()))
    if setting.autocast:
        return float(sum(setting.bytes_compute * linear.in_features for linear in linears))
    return float(setting.bytes_compute * sum(_read(shape, linears)))


def _normed_inputs(shape: ModelShape, setting: ActivationSettings) -> float:
    """Bytes kept by layers that norm and round their input by themselves: a byte an element and two numbers a row each,
    and the input once if they share it. In plain torch a norm keeps its input in float32 and the normalised one.
    """
    inputs = _shared_inputs(shape.linears)
    before = {group: setting.bytes_residual if group in SHARED_INPUTS else setting.bytes_compute for group in inputs}
    if shape.family.sub_norms:
        before = dict.fromkeys(inputs, 4)  # norms with float32 weights give float32
    if setting.rounds == "in norms":
        own = sum(linear.in_features + 8 for linear in shape.linears)
        return float(own + sum(before[group] * width for group, width in inputs.items()))
    kept = 0.0
    for linear in shape.linears:
        group = next((names for names in SHARED_INPUTS if linear.name in names), (linear.name,))
        element = before[group]
        kept += (1 + element) * linear.in_features + 8 + (4 * linear.in_features if element != 4 else 0)
    return kept + sum(width * element for group, width in inputs.items() if (element := before[group]) == 4)


def _read(shape: ModelShape, linears: tuple[Linear, ...]) -> list[int]:
    """The width of each tensor that these linears read."""
    groups, names = shape.family.groups, {linear.name for linear in linears}
    first = [groups.qkv + groups.gate, groups.gate_up]
    entered = [sum(first, ())] if shape.parallel else first
    read = [(group, shape.hidden_size) for group in entered]
    read += [(groups.o, shape.q_width), (groups.down, shape.intermediate_size)]
    return [width for group, width in read if names.intersection(group)]


def _shared_inputs(linears: tuple[Linear, ...]) -> dict[tuple[str, ...], int]:
    """The width of each tensor that linear layers read, by the layers that share it."""
    groups = {name: group for group in SHARED_INPUTS for name in group}
    return {groups.get(linear.name, (linear.name,)): linear.in_features for linear in linears}


def _lora(shape: ModelShape, setting: ActivationSettings) -> float:
    kept = float(setting.bytes_compute * setting.rank * len(setting.adapted))
    if setting.dora:
        kept += 2 * setting.bytes_compute * sum(linear.out_features for linear in setting.adapted)
    if setting.dropout:
        kept += sum(linear.in_features for linear in setting.adapted)
        if not setting.autocast:  # without a cast the dropped-out input is a tensor of its own for each linear
            kept += 4 * sum(linear.in_features for linear in setting.adapted) - _linear_inputs(shape, setting)
    return kept


def _attention_sdpa(shape: ModelShape, setting: ActivationSettings) -> float:
    key_value = shape.q_width + setting.seq_len // 2 if setting.padded else shape.kv_width
    output = 0 if _output_is_counted(shape, setting) else shape.q_width
    if shape.family.output_gate is not None:
        output += shape.q_width  # the gate's sigmoid
    return setting.bytes_compute * (shape.q_width + 2 * key_value + output) + 4 * shape.num_heads


def _output_is_counted(shape: ModelShape, setting: ActivationSettings) -> bool:
    """True if another term counts SDPA's output: BitNet's norm in float32, or o_proj, which reads it as it is.

    o_proj keeps a tensor of its own after PEFT's cast, or none without an adapter; behind a gate; and where queries are
    put together of parts: the output takes over their memory layout, which o_proj cannot read.
    """
    in_norms = setting.rounds == "in norms"
    if setting.exchanges:
        return False
    if shape.family.sub_norms:
        return setting.bytes_compute == 4 or (in_norms and not setting.own_norms)
    if setting.rounds != "no":
        return setting.own_norms and (setting.bytes_compute == 4 or in_norms)
    other = "qkv" in shape.family.joined or shape.rotates_in_part or shape.family.output_gate is not None
    if other or setting.full:
        return not other
    return not setting.autocast and any(linear.leaf == "o_proj" for linear in setting.adapted)


def eager_scores(shape: ModelShape, setting: ActivationSettings) -> float:
    """Bytes of scores: float32 softmax, its cast for the product with the values, and the capped scores' tanh."""
    c = setting.bytes_compute
    return shape.num_heads * setting.seq_len * (4 + (c if c != 4 else 0) + (c if setting.softcap else 0))


def _mlp(shape: ModelShape, setting: ActivationSettings) -> float:
    if setting.rounds == "in norms":
        return setting.bytes_compute * 2 * shape.intermediate_size
    if setting.squares_widened:
        return (setting.bytes_compute * 2 + 8) * shape.intermediate_size
    if len(shape.family.mlp) == 2:
        return activation_bytes(shape, setting)
    return setting.bytes_compute * 3 * shape.intermediate_size


def activation_bytes(shape: ModelShape, setting: ActivationSettings) -> int:
    """Bytes that an activation without a gate keeps beside its output: its input, and xIELU's branches."""
    c = setting.bytes_compute
    if shape.family.activation != "xielu":
        return c * shape.intermediate_size
    return (3 * c + 1 + (4 if setting.full else 0)) * shape.intermediate_size


def _mlp_forward(shape: ModelShape, setting: ActivationSettings) -> float:
    return setting.bytes_compute * (4 * shape.intermediate_size + 2 * shape.hidden_size)


def _mlp_passing(shape: ModelShape, setting: ActivationSettings) -> float:
    # The product of gate and up, which PEFT casts to float32 for down's adapter; and of the residual stream's width
    # the residual, what down and its adapter give, that scaled, and the sum.
    cast = setting.autocast and any(linear.leaf == "down_proj" for linear in setting.adapted)
    passing = setting.bytes_compute * (shape.intermediate_size + 5 * shape.hidden_size)
    return passing + (4 * shape.intermediate_size if cast else 0)


def _mlp_backward(shape: ModelShape, setting: ActivationSettings) -> float:
    # The gradient of down's input comes from the base, and by way of float32 from the adapter, whose input is gone
    # then; and gate's and up's are formed from it where there is no adapter.
    c = setting.bytes_compute
    if setting.autocast and not setting.full:
        return (c + 4) * shape.intermediate_size
    return shape.intermediate_size * (4 * c + (4 if setting.autocast else 0))


def scores_at_work(shape: ModelShape, setting: ActivationSettings) -> float:
    """Bytes that eager attention allocates: scores and their scaled or capped successor, then the float32 softmax with
    its float32 input.
    """
    return shape.num_heads * setting.seq_len * (2 * setting.bytes_compute + 8)


def _eager_backward(shape: ModelShape, setting: ActivationSettings) -> float:
    # Gradients of the probabilities (c), of the softmax (4) and of its input (4), when the MLP's tensors are gone.
    scores = shape.num_heads * setting.seq_len * (setting.bytes_compute + 8)
    return max(scores - _mlp(shape, setting), _mlp_backward(shape, setting))


def plain_layers(attention: Literal["eager", "sdpa"]) -> LayerMemory:
    """Layers as transformers and PEFT write them."""
    kept: dict[str, Term] = {
        "norms": _norms,
        "linear inputs": _linear_inputs,
        "adapters": _lora,
        "attention": _attention_sdpa,
        "gated MLP": _mlp,
    }
    if attention == "eager":
        scores = {"attention": lambda shape, by: 3 * by.bytes_compute * shape.q_width + eager_scores(shape, by)}
        return LayerMemory(
            {**kept, **scores},
            lambda shape, by: max(scores_at_work(shape, by), _mlp_forward(shape, by)),
            _eager_backward,
            passing=lambda shape, by: max(scores_at_work(shape, by) - eager_scores(shape, by), _mlp_passing(shape, by)),
        )
    return LayerMemory(
        kept,
        lambda shape, by: max(_attention_sdpa(shape, by), _mlp_forward(shape, by)),
        lambda shape, by: max(by.bytes_compute * 6 * shape.q_width, _mlp_backward(shape, by)),
        passing=_mlp_passing,
    )
