"""Floating-point operations of a training step, counted from the model's shape: the arithmetic bound.

One multiply-add is two operations. Per token of a sequence of S tokens, causal, for a linear of weight (out, in):
forward 2·in·out, gradient of the input 2·in·out, gradient of the weight 2·in·out (full fine-tuning only). Adapters
of rank r add 2·r·(in+out) forward and twice that backward. Attention has two products forward (QKᵀ, PV) and five
backward (QKᵀ again, dP, dV, dQ, dK), each 2·width·k for k the mean number of keys a query sees: (S+1)/2, or less
with a sliding window. Of experts those are counted that a token goes through. A gated delta net is counted in chunks,
its step as 3.7 forward passes. The head has a forward and an input gradient for every supervised position; synthetic
benchmarks supervise all. Norms, activations and the optimizer are bandwidth, not arithmetic, and are left out.
Gradient checkpointing adds one more forward pass of the layers (not of the head); ``selective`` adds only that of
gate and up. Layers on the kernels skip what they need not run again; that saving is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ftcli.config.model import LoraConfig
from ftcli.facts.adapters import LinearAdapter, adapters
from ftcli.facts.layers import Attention, DeltaNet, LatentAttention, Linear, is_gate_and_up
from ftcli.facts.model import ModelFacts
from ftcli.tables import policies
from ftcli.tables.policies import PolicyName

#: Tokens of a chunk of a gated delta net, and its operations in a training step over those of its forward pass.
_CHUNK, _DELTA_STEP = 64, 3.7


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Operations per token, by part."""

    linear: float
    adapters: float
    attention: float
    head: float
    recompute: float

    @property
    def layers(self) -> float:
        """Operations per token of one training step, without the head."""
        return self.linear + self.adapters + self.attention + self.recompute

    @property
    def total(self) -> float:
        """Operations per token of one training step."""
        return self.layers + self.head


def step_flops(
    facts: ModelFacts,
    lora: LoraConfig | None,
    *,
    seq_len: int,
    num_layers: int | None = None,
    gradient_checkpointing: PolicyName = False,
    uncheckpointed_layers: int = 0,
) -> StepFlops | None:
    """Operations per token of a training step; None for a family whose shape is not known. ``num_layers``: count only
    so many; ``uncheckpointed_layers`` are not run again.
    """
    shape = facts.shape
    if shape is None:
        return None
    layers = num_layers if num_layers is not None else shape.num_layers
    counted = replace(shape, layers=shape.layers[:layers])
    adapted = () if lora is None else adapters(counted, lora)
    linear_forward = sum(_linear(layer.linears) for layer in counted.layers)
    adapters_forward = _adapters(adapted)
    product = 2.0 * sum(_product_width(each) * _mean_keys(each.window, seq_len) for each in counted.attending)
    nets_forward = sum(map(_delta_net, counted.delta_nets))
    head_forward = 2.0 * shape.vocab_size * shape.hidden_size
    recompute = 0.0
    again = policies.row(gradient_checkpointing).recomputes
    if again == "gate and up":
        recompute = sum(_linear(tuple(x for x in layer.linears if is_gate_and_up(x))) for layer in counted.layers)
        recompute += _adapters(each for each in adapted if is_gate_and_up(each.linear))
    elif again == "layer":
        recompute = linear_forward + adapters_forward + product * 2.0 + nets_forward
    recompute *= max(layers - uncheckpointed_layers, 0) / layers
    weight_gradient = 1.0 if lora is None else 0.0
    # Of layers' own inputs: with adapters nothing before it is trained, and it has no backward pass.
    own_inputs = 2.0 * shape.hidden_size * counted.layer_input_features * (1.0 if lora is not None else 3.0)
    return StepFlops(
        linear=linear_forward * (2.0 + weight_gradient) + own_inputs,
        adapters=adapters_forward * 3.0,
        attention=product * 7.0 + nets_forward * _DELTA_STEP,
        head=head_forward * (2.0 + weight_gradient),
        recompute=recompute,
    )


def _product_width(attention: Attention) -> float:
    """Features of all heads in attention's products: their mean over the seven of a step, of which four are of queries
    and keys and three of values, where these are narrower.
    """
    if not isinstance(attention, LatentAttention):
        return attention.width
    return attention.heads * (4 * attention.head_dim + 3 * attention.value_dim) / 7


def _delta_net(net: DeltaNet) -> float:
    """Operations per token of a gated delta net's forward pass, in chunks of C tokens (arXiv 2412.06464, §3.3): three
    products of C x C scores with keys (q k, k k, and the inverse with k), two with values, three with the state, and
    the inverse by substitution.
    """
    c, k, v = _CHUNK, net.key_dim, net.value_dim
    return net.value_heads * (2.0 * (3 * c * k + 2 * c * v + 3 * k * v) + 2.0 * c * c / 3)


def _linear(linears: Iterable[Linear]) -> float:
    return 2.0 * sum(x.in_features * x.out_features * x.used for x in linears)


def _adapters(adapted: Iterable[LinearAdapter]) -> float:
    return 2.0 * sum(each.elements * each.linear.used / each.linear.experts for each in adapted)


def _mean_keys(window: int | None, seq_len: int) -> float:
    """Mean number of keys that a query attends to."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
