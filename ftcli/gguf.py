"""GGUF files: what llama.cpp calls a model's tensors and in which order of rows it has them, and how files are read.

Writing them is export's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.llama_cpp import LLAMA_QUANTIZE, WITHOUT_QUANTIZER, quantizer
from ftcli.plain import JsonObject
from ftcli.tables.gguf import INSTEAD, TYPES, Architecture

if TYPE_CHECKING:
    from gguf import TensorNameMap


#: A value of a file: unsigned 32-bit for an int, 32-bit for a float.
Value: TypeAlias = bool | int | float | str | list[str] | list[int] | list[float] | list[bool]

#: A stack of experts that llama.cpp has as two, its biases, and what the halves are called here; the stack of the other
#: projection; a shared expert's gate.
STACK, GATE, UP, DOWN = ".mlp.experts.gate_up_proj", ":gate", ":up", ".mlp.experts.down_proj"
STACKED_BIAS = f"{STACK}_bias"
SHARED_GATE = ".mlp.shared_expert_gate.weight"
_EXPERTS = re.compile(r".*?layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?(:gate|:up)?")
_STACKS = {("gate_up", ":gate"): "ffn_gate_exps", ("gate_up", ":up"): "ffn_up_exps", ("down", None): "ffn_down_exps"}
#: Tensors of layers that are parameters of their own, and not a layer's weight or bias.
_ALONE = re.compile(r".*?layers\.(\d+)\.((?:self_attn|router|experts)\.\w+|layer_scalar)")
_STORED_ALONE = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
#: What xIELU has in each layer, which is metadata there.
_XIELU = re.compile(r".*?layers\.(\d+)\.mlp\.act_fn\.(alpha_n|alpha_p|beta|eps)")
#: What a gated delta net has that is neither a weight nor a bias of a layer, and the filter of its convolution.
_OF_DELTA_NETS = re.compile(r".*?layers\.(\d+)\.linear_attn\.(A_log|dt_bias)")
_STORED_OF_DELTA_NETS = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}
FILTER = ".linear_attn.conv1d.weight"
#: Heads of keys and of values, which may be more, among the numbers of heads.
KEY_HEADS, VALUE_HEADS = "ssm_k", "ssm_v"
#: Parts of a file whose rows are the features of the value heads, alone or behind those of queries and keys, and the
#: one whose columns are.
_OF_VALUES, _BEHIND_KEYS, _FROM_VALUES = (
    ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"),
    ("attn_qkv", "ssm_conv1d"),
    "ssm_out",
)
#: The library's table has bitnet's norms by the names of an older implementation than transformers'.
_SUB_NORMS = {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"}
_BACKBONE = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?(layers\.(\d+)\.)?(.+)\.(weight|bias)")
#: What a multimodal model has beside its language model; llama.cpp reads that from a file of its own.
_OTHER_PARTS = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_embedder|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of one model's language model.

    Attributes:
        stored: The name in the file of each tensor of the model.
        left_out: Tensors of the model's other parts.
        in_metadata: Key and layer of each tensor that is a number there.
    """

    stored: Mapping[str, str]
    left_out: Sequence[str]
    in_metadata: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def in_model(self) -> dict[str, str]:
        """The name in the model of each tensor of the file."""
        return {stored: name for name, stored in self.stored.items()}


def names_of(names: Sequence[str], architecture: Architecture) -> TensorNames:
    """Names of a model's tensors in a file: by the gguf library's own table, stacks of experts aside.

    Raises:
        FtcliError: FT756 for a tensor that llama.cpp has no place for.
    """
    table = _table(names, architecture)
    left_out = [name for name in names if is_other_part(name)]
    values = {name: key for name in names if (key := activation_key(name)) and architecture.activation == "xielu"}
    stored: dict[str, str] = {}
    for name in names:
        if name in left_out or name in values:
            continue
        found = _stored_name(name, table, architecture)
        if found is None:
            raise no_place(f"llama.cpp's {architecture.name} has no place for {name}")
        stored[name] = found
    if architecture.all_biases:
        _require_biases(stored, architecture)
    return TensorNames(stored, left_out, values)


def is_other_part(name: str) -> bool:
    """True for a tensor of a tower or a projector."""
    return _OTHER_PARTS.search(name) is not None


def activation_key(name: str) -> tuple[str, int] | None:
    """The full key and the layer of a tensor that is a number in the metadata."""
    match = _XIELU.fullmatch(name)
    return match and (f"xielu.{match[2]}", int(match[1]))


def _require_biases(stored: Mapping[str, str], architecture: Architecture) -> None:
    for name in stored:
        module, _, leaf = name.rpartition(".")
        if module.rpartition(".")[2] in architecture.biases and leaf == "weight" and f"{module}.bias" not in stored:
            raise no_place(f"llama.cpp's {architecture.name} needs the bias of {module}")


def _table(names: Sequence[str], architecture: Architecture) -> TensorNameMap:
    """The gguf library's names of this architecture's tensors, for as many layers as ``names`` have."""
    import gguf

    layers = [int(match[2]) for name in names if (match := _BACKBONE.fullmatch(name)) and match[2]]
    by_name = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = by_name[architecture.named_as or architecture.name]
    return gguf.get_tensor_name_map(number, max(layers, default=-1) + 1)


def _stored_name(name: str, table: TensorNameMap, architecture: Architecture) -> str | None:
    if name.endswith("lm_head.weight"):
        return None if architecture.tied else "output.weight"
    stack = _EXPERTS.fullmatch(name)
    if stack is not None:
        stacked = _STACKS.get((stack[2], stack[4]))
        return stacked and f"blk.{stack[1]}.{stacked}.{'bias' if stack[3] else 'weight'}"
    alone = _ALONE.fullmatch(name)
    if alone is not None and alone[2] in _STORED_ALONE:
        return f"blk.{alone[1]}.{_STORED_ALONE[alone[2]]}"
    net = _OF_DELTA_NETS.fullmatch(name)
    if net is not None and architecture.delta_nets:
        return f"blk.{net[1]}.{_STORED_OF_DELTA_NETS[net[2]]}"
    match = _BACKBONE.fullmatch(name)
    if match is None:
        return None
    layer, _, module, leaf = match.groups("")
    if leaf == "bias" and module.rpartition(".")[2] not in architecture.biases:
        return None
    found: str | None = table.get_name(f"model.{layer}{_SUB_NORMS.get(module, module)}")
    return found and f"{found}.{leaf}"


def in_stored_layout(name: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """A stack of experts with matrices as llama.cpp has them, (out, in); or of such a one, as transformers has it."""
    return tensor.mT if architecture.transposed and name.endswith((STACK, DOWN)) else tensor


def halves(tensor: Tensor, architecture: Architecture) -> tuple[Tensor, Tensor]:
    """Gate and up projection (E, width, ...) of a stack of both, or their biases."""
    if architecture.transposed:
        return tensor[:, ::2], tensor[:, 1::2]
    gate, up = tensor.chunk(2, dim=1)
    return gate, up


def joined_halves(gate: Tensor, up: Tensor, architecture: Architecture) -> Tensor:
    """The reverse of :func:`halves`."""
    return torch.stack((gate, up), dim=2).flatten(1, 2) if architecture.transposed else torch.cat((gate, up), dim=1)


def part_of(stored: str) -> str:
    """The part of its layer that a tensor of a file is, or of the model: ``attn_q``, ``output_norm``."""
    words = stored.split(".")
    return words[2] if words[0] == "blk" else words[0]


def heads_of(config: Any) -> dict[str, int]:
    """Numbers of heads in a language model: of queries and keys by GGUF's names of their weights, and in gated delta
    nets by :data:`KEY_HEADS` and :data:`VALUE_HEADS`.
    """
    queries: int = config.num_attention_heads
    heads = {"attn_q": queries, "attn_k": getattr(config, "num_key_value_heads", None) or queries}
    if hasattr(config, "linear_num_key_heads"):
        heads |= {KEY_HEADS: config.linear_num_key_heads, VALUE_HEADS: config.linear_num_value_heads}
    return heads


def to_file(stored: str, tensor: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor in float32 as a file has it.

    Args:
        heads: As :func:`heads_of` counts them.
    """
    return in_file_order(stored, numbers_in_file(stored, tensor, architecture), heads, architecture)


def numbers_in_file(stored: str, tensor: Tensor, architecture: Architecture) -> Tensor:
    """A tensor in float32 with a file's numbers, in the model's order."""
    value = tensor.float()
    if _is_shifted(stored, architecture):
        return value + 1.0
    return -value.exp() if part_of(stored) == "ssm_a" else value


def in_file_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor with a file's order of rows and columns."""
    rows = rows_in_file_order(stored, value, heads, architecture)
    return columns_in_file_order(stored, rows, heads, architecture) if value.dim() > 1 else rows


def rows_in_file_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor, or an adapter's B (out, r), with a file's order of rows."""
    part = part_of(stored)
    if architecture.permuted and part in heads:
        # (heads, halves, half, ...) to (heads, half, halves, ...): features half a head apart become neighbours.
        split = value.reshape(heads[part], 2, -1, *value.shape[1:])
        return split.transpose(1, 2).flatten(0, 2).contiguous()
    if architecture.delta_nets and part in (*_OF_VALUES, *_BEHIND_KEYS):
        before = 2 * heads[KEY_HEADS] if part in _BEHIND_KEYS else 0  # of queries and keys, as wide as those of values
        first = len(value) // (before + heads[VALUE_HEADS]) * before
        return torch.cat((value[:first], _values_apart(value[first:], heads)))
    return value


def columns_in_file_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A matrix, or an adapter's A (r, in), with a file's order of columns."""
    if not architecture.delta_nets or part_of(stored) != _FROM_VALUES:
        return value
    return _values_apart(value.mT, heads).mT.contiguous()


def _values_apart(rows: Tensor, heads: Mapping[str, int]) -> Tensor:
    """(key heads, values of each, features, ...) to (values of each, key heads, features, ...)."""
    keys = heads[KEY_HEADS]
    split = rows.reshape(keys, heads[VALUE_HEADS] // keys, -1, *rows.shape[1:])
    return split.transpose(0, 1).flatten(0, 2).contiguous()


def from_file(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A tensor of a file in float32 as transformers computes with it. Written apart from :func:`to_file`."""
    part = part_of(stored)
    if part == "ffn_gate_inp_shexp":
        return value[None]
    value = in_model_order(stored, value, heads, architecture)
    if _is_shifted(stored, architecture):
        return value - 1.0
    if part == "ssm_a":
        return (-value).log()
    return value[:, None] if part == "ssm_conv1d" else value


def in_model_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A file's tensor with the model's order of rows and columns."""
    rows = rows_in_model_order(stored, value, heads, architecture)
    return columns_in_model_order(stored, rows, heads, architecture) if value.dim() > 1 else rows


def rows_in_model_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A file's tensor, or its adapter's B, with the model's order of rows."""
    part = part_of(stored)
    if architecture.permuted and part in heads:
        dim = value.shape[0] // heads[part]
        # Row 2 i of a head in the file is feature i, row 2 i + 1 is feature i + dim / 2.
        feature = torch.arange(dim)
        within = torch.where(feature < dim // 2, 2 * feature, 2 * (feature - dim // 2) + 1)
        rows = (torch.arange(heads[part])[:, None] * dim + within).flatten()
        return value[rows]
    if architecture.delta_nets and part in (*_OF_VALUES, *_BEHIND_KEYS):
        return value[_places_of_values(part, len(value), heads)]
    return value


def columns_in_model_order(stored: str, value: Tensor, heads: Mapping[str, int], architecture: Architecture) -> Tensor:
    """A file's matrix, or its adapter's A, with the model's order of columns."""
    if not architecture.delta_nets or part_of(stored) != _FROM_VALUES:
        return value
    return value[:, _places_of_values(_FROM_VALUES, value.shape[1], heads)]


def _places_of_values(part: str, rows: int, heads: Mapping[str, int]) -> Tensor:
    """The row in the file of each of the model's: head v of values belongs to key head v // (values / keys)."""
    keys, values = heads[KEY_HEADS], heads[VALUE_HEADS]
    size = rows // (2 * keys + values if part in _BEHIND_KEYS else values)
    first = rows - values * size
    head = torch.arange(values)
    place = head % (values // keys) * keys + head // (values // keys)
    return torch.cat((torch.arange(first), (first + place[:, None] * size + torch.arange(size)).flatten()))


def _is_shifted(stored: str, architecture: Architecture) -> bool:
    part = part_of(stored)
    return architecture.shifted and part.endswith("norm") and part != "ssm_norm"


def no_place(reason: str) -> FtcliError:
    """FT756: a model that llama.cpp would not compute, or not as it was trained."""
    message = f"this model cannot be written as GGUF: {reason}"
    return FtcliError.single("FT756", message, exit_code=ExitCode.PREFLIGHT, help=INSTEAD)


#: Elements that are dequantized at once.
_PIECE = 1 << 24


class ReadFile:
    """A file as the gguf library's reader finds it.

    Raises:
        OSError, ValueError, IndexError, KeyError: it is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def values(self) -> JsonObject:
        return {key: field.contents() for key, field in self._reader.fields.items()}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def type_name(self, name: str) -> str:
        """The type that a tensor is stored in."""
        return str(self._tensors[name].tensor_type.name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape.tolist()))

    def read(self, name: str) -> Tensor:
        """A tensor in float32, dequantized."""
        import gguf

        tensor = self._tensors[name]
        shape, stored = self.shape(name), np.asarray(tensor.data)
        if len(shape) < 2:
            values = gguf.quants.dequantize(stored, tensor.tensor_type)
            return torch.from_numpy(np.array(values, np.float32)).view(shape)
        found = torch.empty(shape, dtype=torch.float32)
        rows, into = stored.reshape(-1, stored.shape[-1]), found.view(-1, shape[-1])
        step = max(1, _PIECE // shape[-1])  # the library takes three times the memory of what it makes
        for first in range(0, len(rows), step):
            piece = gguf.quants.dequantize(rows[first : first + step], tensor.tensor_type)
            into[first : first + step] = torch.from_numpy(np.array(piece, np.float32)).view(-1, shape[-1])
        return found


def reader_of(
    model: Any,
    file: ReadFile,
    names: Mapping[str, str],
    heads: Mapping[str, int],
    architecture: Architecture,
) -> Callable[[str], Tensor]:
    """Reads a weight of ``model`` from the file; ``names``: of the tensors in the file, by those in the model."""
    outputs: Any = model.get_output_embeddings()
    head = next((f"{name}.weight" for name, module in model.named_modules() if module is outputs), "")

    def read(weight: str) -> Tensor:
        gate, up = (f"{weight}{part}" for part in (GATE, UP))
        if gate in names:
            return in_stored_layout(weight, joined_halves(read(gate), read(up), architecture), architecture)
        stored, value = names.get(weight), activation_key(weight)
        if stored is None and value is not None:
            key, layer = value
            return torch.tensor(file.values[key][layer])
        if stored is None and weight == head:  # llama.cpp takes the embedding where there is no head
            stored = "token_embd.weight"
        if stored is None:
            raise KeyError(f"the file has no {weight}")
        return in_stored_layout(weight, from_file(stored, file.read(stored), heads, architecture), architecture)

    return read


def require_gguf_package() -> None:
    """Raises FtcliError FT758 where the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        message = "GGUF files need the package gguf, which is not installed"
        help = "pip install 'ftcli[gguf]'"
        raise FtcliError.single("FT758", message, exit_code=ExitCode.PREFLIGHT, help=help) from error


def require_quantizer(kinds: Sequence[str], others: Collection[str] = ()) -> str:
    """The program that makes K-quants, and the types ``others``; empty where none of the types is one.

    Raises:
        FtcliError: FT758 (exit 3) where it is not on the PATH.
    """
    made = [TYPES[kind].ggml for kind in kinds if TYPES[kind].quantized_by is not None or kind in others]
    program = quantizer() if made else ""
    if program is None:
        raise no_quantizer(f"{made[0]} is made by llama.cpp's {LLAMA_QUANTIZE}, which is not on the PATH")
    return program


def no_quantizer(reason: str) -> FtcliError:
    """FT758: K-quants cannot be made here."""
    return FtcliError.single("FT758", reason, exit_code=ExitCode.PREFLIGHT, help=WITHOUT_QUANTIZER)
