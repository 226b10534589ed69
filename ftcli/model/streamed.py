"""Builds a model with quantised layers without ever holding it in full precision.

The model is made without memory; each weight is drawn or read by itself on the device where it will live, quantised
where it is a linear layer's, and its full-precision form freed before the next one. At the peak there are the quantised
model and one layer's matrix; packed files are gathered in host memory first. Weights come from safetensors in full
precision, or in the layout in which bitsandbytes saves NF4 (``weight``, ``weight.absmax``, ``weight.quant_map``,
``weight.nested_absmax``, ``weight.nested_quant_map``, ``weight.quant_state.bitsandbytes__nf4``), which
needs neither bitsandbytes nor a GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.nf4 import NF4_TABLE, NestedScales, NF4Weight
from torch import Tensor, nn

from ftcli.config import QuantizationConfig
from ftcli.model.quantized import (
    DequantizedLinear,
    NF4Linear,
    QuantizedLinear,
    is_quantizable,
    quantize_linear,
    unreadable,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_STATE = re.compile(
    r"(?P<layer>.+)\.weight\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)


@dataclass(frozen=True, slots=True)
class Holding:
    """How a model is held: quantised by ``settings``, the rest in ``dtype`` on ``device``; of the decoder layers the
    first ``kept_layers`` dequantised.
    """

    settings: QuantizationConfig
    dtype: torch.dtype
    device: torch.device
    kept_layers: int = 0

    def held(self, layer: QuantizedLinear) -> nn.Linear:
        """The layer itself, or its numbers in ``dtype``."""
        found = _DECODER_LAYER.search(layer.layer_name)
        kept = found is not None and int(found[1]) < self.kept_layers
        return DequantizedLinear(layer, self.dtype) if kept and isinstance(layer, NF4Linear) else layer


def random_quantized(config: PretrainedConfig, holding: Holding, attention: str, seed: int) -> PreTrainedModel:
    """A model of random weights, each drawn on ``device``: on one kind of device a seed gives the same weights."""
    model = _hollow(config, holding.dtype, attention)
    torch.manual_seed(seed)
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        _give_memory(module, holding.device, shared)
        model._init_weights(module)
        if is_quantizable(name, module):
            assert isinstance(module, nn.Linear)
            model.set_submodule(name, holding.held(quantize_linear(module, holding.settings, name)))
            full = module._parameters.pop("weight")  # the list above holds the module
            shared = {hollow: given for hollow, given in shared.items() if given is not full}
            del full
    return model.eval()


def load_quantized(
    source: str, config: PretrainedConfig, holding: Holding, attention: str, *, revision: str | None, offline: bool
) -> PreTrainedModel:
    """The weights of ``source`` (a folder or a Hub id), linear layers quantised from the dtype they are stored in.

    Raises:
        OSError: no safetensors files can be found.
        safetensors.SafetensorError: a file is damaged.
        FtcliError: FT323 for tensors that are missing, of another shape, or that the model has no place for.
    """
    model = _hollow(config, holding.dtype, attention)
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            _give_buffers(module, holding.device)
            model._init_weights(module)  # rotary tables and the like: computed, not stored
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _tensors(source, revision, offline):
        found = _STATE.fullmatch(key)
        if found is not None:
            states.setdefault(_own_name(model, found["layer"] + ".weight", names), {})[found["part"]] = tensor
            continue
        name = _own_name(model, key, names)
        if name not in names:
            _require_ignorable(model, key)
        elif tensor.dtype.is_floating_point and not _is_packed(model, name, tensor):
            _place(model, name, tensor, holding)
        else:
            states.setdefault(name, {})["weight"] = tensor
    for name, parts in states.items():
        _place_packed(model, name, parts, holding)
    model.tie_weights()
    _require_complete(model)
    model.requires_grad_(False)
    return model.eval()


def _hollow(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # transformers would look for the package that wrote it
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def _give_memory(module: nn.Module, device: torch.device, shared: dict[nn.Parameter, nn.Parameter]) -> None:
    """Unwritten memory for a module's own parameters and buffers; a parameter that two modules share stays shared."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            if parameter not in shared:
                shared[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            module._parameters[name] = shared[parameter]
    _give_buffers(module, device)


def _give_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _tensors(source: str, revision: str | None, offline: bool) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every stored tensor, one in memory at a time."""
    from safetensors import safe_open

    for path in _files(source, revision, offline):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # no dict
                yield key, file.get_tensor(key)


def _files(source: str, revision: str | None, offline: bool) -> list[Path]:
    from transformers.utils.hub import cached_file

    def find(name: str, *, needed: bool) -> Path | None:
        path = cached_file(
            source, name, revision=revision, local_files_only=offline, _raise_exceptions_for_missing_entries=needed
        )
        return None if path is None else Path(path)

    index = find("model.safetensors.index.json", needed=False)
    if index is None:
        shards = {"model.safetensors"}
    else:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [path for shard in sorted(shards) if (path := find(shard, needed=True)) is not None]


def _own_name(model: PreTrainedModel, key: str, names: set[str]) -> str:
    """The model's name of a stored tensor: files saved from the bare backbone leave its prefix out."""
    prefixed = f"{model.base_model_prefix}.{key}"
    return prefixed if key not in names and prefixed in names else key


def _require_ignorable(model: PreTrainedModel, key: str) -> None:
    patterns = ["rotary_emb.inv_freq", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if not any(re.search(pattern, key) for pattern in patterns):
        raise unreadable(f"the model has no place for the stored tensor {key}")


def _is_packed(model: nn.Module, name: str, tensor: Tensor) -> bool:
    """bitsandbytes can store its bytes as any dtype; then the shape is not the matrix's."""
    module = model.get_submodule(name.rpartition(".")[0])
    return is_quantizable(name.rpartition(".")[0], module) and name.endswith(".weight") and tensor.shape[-1:] == (1,)


def _place(model: nn.Module, name: str, tensor: Tensor, holding: Holding) -> None:
    """One full-precision tensor to its place, quantised where it is a linear layer's weight."""
    layer, _, leaf = name.rpartition(".")
    module = model.get_submodule(layer)
    wanted = module._parameters[leaf]
    assert wanted is not None
    if wanted.shape != tensor.shape:
        raise unreadable(f"{name} is stored with shape {tuple(tensor.shape)} and must be {tuple(wanted.shape)}")
    if leaf == "weight" and is_quantizable(layer, module):
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(tensor.to(holding.device), requires_grad=False)
        model.set_submodule(layer, holding.held(quantize_linear(module, holding.settings, layer)))
    else:
        placed = tensor.to(holding.device, holding.dtype)
        module._parameters[leaf] = nn.Parameter(placed, requires_grad=False)


def _place_packed(model: nn.Module, name: str, parts: Mapping[str, Tensor], holding: Holding) -> None:
    layer = name.removesuffix(".weight")
    module = model.get_submodule(layer)
    if not is_quantizable(layer, module):
        raise unreadable(f"{layer} is stored quantized, and ftcli keeps it in full precision")
    assert isinstance(module, nn.Linear)
    shape = torch.Size((module.out_features, module.in_features))
    try:
        weight = nf4_from_bitsandbytes({part: tensor.to(holding.device) for part, tensor in parts.items()}, shape)
    except ValueError as error:
        raise unreadable(f"{layer} {tuple(shape)}: {error}") from error
    model.set_submodule(layer, holding.held(NF4Linear(weight, module.bias, layer)))


def nf4_from_bitsandbytes(parts: Mapping[str, Tensor], shape: torch.Size) -> NF4Weight:
    """A weight from the tensors of bitsandbytes' file layout, keyed by what follows the layer's name.

    Raises:
        ValueError: a tensor is missing, the numbers are not NF4, or the parts do not make a matrix of ``shape``.
    """
    states = [key for key in parts if key.startswith("quant_state.")]
    if states and not states[0].endswith("__nf4"):
        raise ValueError(f"it is stored as {states[0].rpartition('__')[2]}, and only nf4 is read")
    missing = [key for key in ("weight", "absmax", "quant_map") if key not in parts]
    if not states or missing:
        raise ValueError(f"it is stored packed, without its {', '.join(missing) or 'quant_state'}")
    state: dict[str, Any] = json.loads(bytes(parts[states[0]].cpu().tolist()).decode("utf-8"))
    if tuple(parts["quant_map"].float().tolist()) != NF4_TABLE:
        raise ValueError("its quant_map is not NF4's")
    if tuple(state["shape"]) != tuple(shape):
        raise ValueError(f"its state is of a matrix {tuple(state['shape'])}")
    nested = None
    if "nested_blocksize" in state:
        if "nested_absmax" not in parts or "nested_quant_map" not in parts:
            raise ValueError("its scales are quantised, and what turns them back is missing")
        offset = torch.tensor(float(state["nested_offset"]), dtype=torch.float32, device=parts["weight"].device)
        nested = NestedScales(
            parts["nested_absmax"].float(), parts["nested_quant_map"].float(), offset, int(state["nested_blocksize"])
        )
    absmax = parts["absmax"] if nested is not None else parts["absmax"].float()
    data = parts["weight"].contiguous().view(torch.uint8).view(-1)
    return NF4Weight(data, absmax, parts["quant_map"].float(), shape, int(state["blocksize"]), nested)


def _require_complete(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise unreadable(f"{', '.join(missing[:3])}{more} not stored")
