"""A model's tensors under the names and in the order of rows that llama.cpp reads, and back again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.tables.families import Family
from ftcli.tables.gguf import INSTEAD, Architecture

#: A stack of experts that llama.cpp has as two, and what the halves are called here; a shared expert's gate.
STACK, GATE, UP = ".mlp.experts.gate_up_proj", ":gate", ":up"
SHARED_GATE = ".mlp.shared_expert_gate.weight"
_EXPERTS = re.compile(r".*?layers\.(\d+)\.mlp\.experts\.(gate_up_proj:gate|gate_up_proj:up|down_proj)")
_STACKS = {
    "gate_up_proj:gate": "ffn_gate_exps",
    "gate_up_proj:up": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_NORMS = {
    "pre": {"post_attention_layernorm": "ffn_norm"},
    "sandwich": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_BACKBONE = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
#: What a multimodal model has beside its language model; llama.cpp reads that from a file of its own.
_OTHER_PARTS = re.compile(r"(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision)\.")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of one model's language model.

    Attributes:
        stored: The name in the file of each tensor of the model.
        left_out: Tensors of the model's other parts.
    """

    stored: Mapping[str, str]
    left_out: Sequence[str]

    @property
    def in_model(self) -> dict[str, str]:
        """The name in the model of each tensor of the file."""
        return {stored: name for name, stored in self.stored.items()}


def names_of(names: Sequence[str], family: Family | None, architecture: Architecture) -> TensorNames:
    """How the tensors of a model are called in a file.

    Args:
        family: How its layers are built; None: as Llama's are.

    Raises:
        FtcliError: FT756 for a tensor that llama.cpp has no place for.
    """
    stored: dict[str, str] = {}
    left_out = [name for name in names if _OTHER_PARTS.search(name)]
    for name in names:
        if name in left_out:
            continue
        found = _stored_name(name, family, architecture)
        if found is None:
            raise no_place(f"llama.cpp's {architecture.name} has no place for {name}")
        stored[name] = found
    return TensorNames(stored, left_out)


def _stored_name(name: str, family: Family | None, architecture: Architecture) -> str | None:
    if name.endswith("lm_head.weight"):
        return None if architecture.tied else "output.weight"
    stack = _EXPERTS.fullmatch(name)
    if stack is not None:
        return f"blk.{stack[1]}.{_STACKS[stack[2]]}.weight"
    match = _BACKBONE.fullmatch(name)
    if match is None:
        return None
    layer, module, leaf = match.groups()
    if leaf == "bias" and module.rpartition(".")[2] not in architecture.biases:
        return None
    if layer is None:
        outer = _OUTER.get(module)
        return outer and f"{outer}.{leaf}"
    inner = {**_LAYER, **_NORMS["pre" if family is None else family.block]}.get(module)
    return inner and f"blk.{layer}.{inner}.{leaf}"


def to_file(stored: str, tensor: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor in float32 as a file has it.

    Args:
        heads: How many heads ``attn_q`` and ``attn_k`` have.
    """
    part = stored.split(".")[-2]
    value = tensor.float()
    if architecture.shifted and part.endswith("norm"):
        return value + 1.0
    if architecture.permuted and part in heads:
        # (heads, halves, half, ...) to (heads, half, halves, ...): features half a head apart become neighbours.
        split = value.reshape(heads[part], 2, -1, *value.shape[1:])
        return split.transpose(1, 2).flatten(0, 2).contiguous()
    return value


def from_file(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor of a file in float32 as transformers computes with it. Written apart from :func:`to_file`."""
    part = stored.split(".")[-2]
    if part == "ffn_gate_inp_shexp":
        return value[None]
    if architecture.shifted and part.endswith("norm"):
        return value - 1.0
    if architecture.permuted and part in heads:
        dim = value.shape[0] // heads[part]
        # Row 2 i of a head in the file is feature i, row 2 i + 1 is feature i + dim / 2.
        feature = torch.arange(dim)
        within = torch.where(feature < dim // 2, 2 * feature, 2 * (feature - dim // 2) + 1)
        rows = (torch.arange(heads[part])[:, None] * dim + within).flatten()
        return value[rows]
    return value


def no_place(reason: str) -> FtcliError:
    """FT756: a model that llama.cpp would not compute, or not as it was trained."""
    return FtcliError.single(
        "FT756",
        f"this model cannot be written as GGUF: {reason}",
        exit_code=ExitCode.PREFLIGHT,
        help=INSTEAD,
    )
