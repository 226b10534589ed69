"""Bytes per token that one decoder layer holds under each checkpointing policy.

One function for each row of :mod:`ftcli.tables.policies`. Layers on the kernels can be run again by halves (attention,
MLP); other layers are run again whole, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What goes to host memory: the tensors from which each half of a layer can be run again, or only each layer's input.
Offloaded = Literal["halves", "layers"]


def fetched_ahead(sent: int) -> int:
    """Number of tensors fetched from the host before they are needed, if each layer sends so many at most: those that
    one half is run again from while the other computes.
    """
    return max(2, sent) - 1


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """A layer's activations, in bytes per token.

    Attributes:
        gate_and_up: The share of gate and up in ``kept``, where these two can be computed again by themselves. None for
            layers that cannot be run again by halves.
        halves: How many tensors like ``stream`` the halves are run again from; 1: both at once. The mean, as ``kept``
            is, where layers are of several kinds.
        ahead: How many of these are fetched from the host before they are needed.
        whole: All that the largest layer keeps, and what its backward pass allocates.
        mixer: What the half in front of the MLP keeps and allocates, where that may be more than the MLP's; else 0.
    """

    kept: float
    backward: float
    stream: float
    gate_and_up: float | None
    halves: float
    ahead: int
    whole: float
    mixer: float


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes per token that layers hold: ``kept`` by each on the device, ``workspace`` by the one whose backward pass is
    running, and ``host`` by each in pinned host memory.
    """

    kept: float
    workspace: float
    host: float


def everything(layer: LayerBytes, offloaded: Offloaded) -> HeldBytes:
    """``false``."""
    return HeldBytes(layer.kept, layer.backward, 0.0)


def all_but_gate_and_up(layer: LayerBytes, offloaded: Offloaded) -> HeldBytes:
    """``selective``; for layers that cannot be run again by halves the same as ``true``."""
    if layer.gate_and_up is None:
        return input_alone(layer, offloaded)
    return HeldBytes(layer.kept - layer.gate_and_up, layer.backward + layer.gate_and_up, 0.0)


def input_alone(layer: LayerBytes, offloaded: Offloaded) -> HeldBytes:
    """``true``. On the kernels the layer's input is part of what it keeps, so it is not counted twice."""
    again = layer.whole if layer.gate_and_up is None else layer.whole - layer.stream
    return HeldBytes(layer.stream, again, 0.0)


def inputs_on_host(layer: LayerBytes, offloaded: Offloaded) -> HeldBytes:
    """``offload``: the device holds the part that is being run again, and what was fetched for the next one."""
    if layer.gate_and_up is None or offloaded == "layers" or layer.halves == 1:
        return HeldBytes(0.0, layer.whole + layer.stream, layer.stream)
    at_work = max(layer.gate_and_up + layer.backward, layer.mixer) + (1 + layer.ahead) * layer.stream
    return HeldBytes(0.0, at_work, layer.halves * layer.stream)
