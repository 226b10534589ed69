"""What one decoder layer holds under each checkpointing policy, in bytes per token.

One function a row of :mod:`ftcli.tables.policies`. Layers without halves are run again whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What goes to the host: what each half of a layer is run again from, or each layer's input alone.
Offloaded = Literal["halves", "layers"]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """A layer's activations, in bytes per token.

    Attributes:
        kept: All that it keeps for backward.
        backward: What its backward allocates on top of that.
        stream: One tensor of the residual stream.
        gate_and_up: What ``kept`` has of gate and up, where these can be formed again by themselves; else None, and
            the layer has no halves that could be run again.
        halves: Tensors like ``stream`` that the halves are run again from.
        ahead: How many of them are fetched from the host ahead.
    """

    kept: float
    backward: float
    stream: float
    gate_and_up: float | None
    halves: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Held:
    """``kept`` by each layer on the device, ``workspace`` of the one layer whose backward runs, and ``host``: by each
    layer in pinned host memory.
    """

    kept: float
    workspace: float
    host: float


def everything(layer: LayerBytes, offloaded: Offloaded) -> Held:
    """``false``."""
    return Held(layer.kept, layer.backward, 0.0)


def all_but_gate_and_up(layer: LayerBytes, offloaded: Offloaded) -> Held:
    """``selective``; without halves it is ``true``."""
    if layer.gate_and_up is None:
        return input_alone(layer, offloaded)
    return Held(layer.kept - layer.gate_and_up, layer.backward + layer.gate_and_up, 0.0)


def input_alone(layer: LayerBytes, offloaded: Offloaded) -> Held:
    """``true``. On the kernels the input is among what the layer keeps when it runs again."""
    again = layer.kept if layer.gate_and_up is None else layer.kept - layer.stream
    return Held(layer.stream, again + layer.backward, 0.0)


def inputs_on_host(layer: LayerBytes, offloaded: Offloaded) -> Held:
    """``offload``: what is at work is on the device, and so is what comes next."""
    if layer.gate_and_up is None or offloaded == "layers":
        return Held(0.0, layer.kept + layer.backward + layer.stream, layer.stream)
    at_work = layer.gate_and_up + layer.backward + (1 + layer.ahead) * layer.stream
    return Held(0.0, at_work, layer.halves * layer.stream)
