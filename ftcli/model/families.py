"""Which kernels serve which model family: one row a ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ftkernels.limits import NormForm


@dataclass(frozen=True, slots=True)
class FamilyKernels:
    """How a family's decoder layer is built.

    ``norm`` is the RMSNorm's form. ``block`` is ``pre`` (two norms, each before its half), ``sandwich`` (four: one
    before and one after each half), or ``parts``: the layer stays, its two norms and its attention run on the kernels.
    ``head_norm``: queries and keys are normalised by head before the rotation.
    """

    norm: NormForm
    block: Literal["pre", "sandwich", "parts"] = "pre"
    head_norm: bool = False


FAMILIES: Mapping[str, FamilyKernels] = MappingProxyType(
    {
        "llama": FamilyKernels("llama"),
        "mistral": FamilyKernels("llama"),
        "qwen2": FamilyKernels("llama"),
        "qwen3": FamilyKernels("llama", head_norm=True),
        "gemma": FamilyKernels("gemma"),
        "gemma2": FamilyKernels("gemma", "sandwich"),
        "gemma3_text": FamilyKernels("gemma", "sandwich", head_norm=True),
        # One weight and one adapter for q, k and v, and one for gate and up: not the fused functions' shapes.
        "phi3": FamilyKernels("llama", "parts"),
    }
)

#: transformers' names of the activations that the GLU kernels have, and the kernels' own.
ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh", "gelu"]] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
)
