"""Checkpointing policies: what of a layer's activations is kept for backward. All give the same bits.

``train.gradient_checkpointing`` names a row, or says `auto`, which preflight replaces by the fastest row that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: A policy as a recipe writes it: ``false``, ``true`` or a word.
PolicyName = bool | str


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to keep fewer activations.

    Attributes:
        time: Time of a training step on the kernels, relative to ``false``: the means of Llama-3.1-8B and Gemma-2-9B on
            an H200, 2026-11-21. Later runs in docs/performance.md are within 0.02 of these.
        time_off_kernels: The same on transformers' own layers. 1.42 was measured with two other tools; what copying to
            the host adds to it was not measured.
        held: Code: ``(LayerBytes, Offloaded) -> HeldBytes``: the bytes that a layer keeps, works with and sends to
            the host.
        apply: Code: ``(layers, Offloaded) -> object``, sets the policy on a model's decoder layers; None where
            transformers' own setting does, or where there is nothing to set.
        recomputes: Which part of a layer's forward pass backward computes again.
        by_layer: Single layers may be left out of it (``train.uncheckpointed_layers``).
        on_host: It keeps tensors in pinned host memory, which gains nothing on a CPU.
        off_kernels: The policy that it is the same as where layers are not on the kernels; None: there it is itself.
        embedding_on_host: A frozen embedding that is not the head's weight as well lies in pinned host memory, from
            where the device reads rows.
    """

    time: float
    time_off_kernels: float
    held: str
    apply: str | None = None
    by_transformers: bool = False
    recomputes: Literal["nothing", "gate and up", "layer"] = "layer"
    by_layer: bool = False
    on_host: bool = False
    off_kernels: PolicyName | None = None
    embedding_on_host: bool = False


_HELD = "ftcli.plan.memory.checkpointing"
_APPLY = "ftcli.model.gradient_checkpointing"

TABLE: Mapping[PolicyName, Policy] = {
    False: Policy(1.0, 1.0, f"{_HELD}:everything", recomputes="nothing"),
    "selective": Policy(
        1.19,
        1.42,
        f"{_HELD}:all_but_gate_and_up",
        f"{_APPLY}:use_selective",
        recomputes="gate and up",
        by_layer=True,
        off_kernels=True,
    ),
    "offload": Policy(1.31, 1.45, f"{_HELD}:inputs_on_host", f"{_APPLY}:use_offload", by_layer=True, on_host=True),
    True: Policy(1.36, 1.42, f"{_HELD}:input_alone", by_transformers=True),
    "lean": Policy(1.37, 1.42, f"{_HELD}:input_alone", f"{_APPLY}:use_lean", off_kernels=True, embedding_on_host=True),
}


def row(name: PolicyName) -> Policy:
    """The row of a policy. Raises KeyError for a name without one."""
    return TABLE[name]


def names() -> tuple[str, ...]:
    """The words that a recipe may write besides ``true`` and ``false``."""
    return ("auto", *(name for name in TABLE if isinstance(name, str)))


def as_recipe(name: PolicyName) -> str:
    """A policy as a recipe writes it."""
    return str(name).lower()
