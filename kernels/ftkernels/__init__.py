"""Triton kernels of ftcli, each beside a plain-torch reference. Imports torch and triton only."""

from ftkernels.device import Choice, choose_backend
from ftkernels.glu import geglu, glu, glu_reference, swiglu
from ftkernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from ftkernels.lora_linear import lora_linear, lora_linear_reference
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import QKV, lora_qkv, lora_qkv_reference
from ftkernels.projection import FrozenWeight, Norm, Projection, join_weights
from ftkernels.rms_norm import add_rms_norm, rms_norm, rms_norm_add, rms_norm_reference
from ftkernels.rope import apply_rope, apply_rope_reference

__all__ = [
    "QKV",
    "Choice",
    "FrozenWeight",
    "Norm",
    "Projection",
    "add_rms_norm",
    "apply_rope",
    "apply_rope_reference",
    "choose_backend",
    "geglu",
    "glu",
    "glu_reference",
    "join_weights",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "lora_linear",
    "lora_linear_reference",
    "lora_mlp",
    "lora_mlp_reference",
    "lora_qkv",
    "lora_qkv_reference",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_reference",
    "swiglu",
]
