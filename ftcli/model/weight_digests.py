"""Digests of a model's tensors as they are in memory, the same whether they are sharded or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.model.backbone import base_of, decoder_layers, root_of
from ftcli.model.fsdp import JoinedLinear, JoinedTensors
from ftcli.model.initial_adapters import initial_of, start_of
from ftcli.model.quantized import QuantizedLinear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Words of 8 bytes that are summed at a time, and what makes the sum depend on their order (the golden ratio, 2^64).
_WORDS, _SPREAD = 1 << 20, -7046029254386353131
#: What PEFT puts into the names of weights that it adapts.
_OF_ADAPTERS = ("base_model.model.", ".base_layer", ".original_module")


def weight_digests(model: PreTrainedModel | PeftModel) -> list[list[Any]]:
    """Name, dtype, shape and digest of each tensor of the reference, by the name that it has without adapters.

    Adapters are left out, unless they begin as a part of the weights, or are gone on from.
    """
    without = hasattr(model, "disable_adapter") and initial_of(model) is None and not start_of(model)
    found, sums = [], []
    for name, tensor in _tensors(model):
        if without and tensor.requires_grad and isinstance(tensor, nn.Parameter):
            continue
        for piece in _OF_ADAPTERS:
            name = name.replace(piece, "", 1)
        found.append([name, str(tensor.dtype), list(tensor.shape)])
        sums.append(_digest(tensor))
    digests = torch.stack([each.cpu() for each in sums]).tolist()  # the device is waited for once
    return sorted([*each, digest] for each, digest in zip(found, digests, strict=True))


def _tensors(model: PreTrainedModel | PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and buffers; sharded ones layer by layer, each gathered meanwhile."""
    places: dict[nn.Module, int] = {}
    layers: list[Any] = list(decoder_layers(base_of(model))) if root_of(model) is not None else []
    for number, layer in enumerate(layers):
        places |= dict.fromkeys(layer.modules(), number)
    of_unit: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        of_unit.setdefault(places.get(module, -1), []).append((name, module))
    for number, modules in of_unit.items():
        seen: set[int] = set()
        with _gathered(root_of(model) if number < 0 else layers[number]):
            for prefix, module in modules:
                for name, tensor in _own(module).items():
                    if isinstance(tensor, nn.Parameter):  # a view of what is joined has no identity
                        if id(tensor) in seen:
                            continue
                        seen.add(id(tensor))
                    yield f"{prefix}.{name}" if prefix else name, tensor


@contextmanager
def _gathered(unit: Any) -> Iterator[None]:
    """A block in which a unit of sharded weights is whole; all ranks enter it. None: nothing is sharded."""
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers under the names and in the form that they have where nothing is sharded."""
    if isinstance(module, JoinedTensors):
        return {}  # they are its neighbours'
    found: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    if isinstance(module, QuantizedLinear):
        found |= {name: module.state(name) for name in module.sharded}
    if isinstance(module, JoinedLinear):
        found["weight"] = module.weight
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """A sum of all bits, each word times an odd number of its own: no single word can change unnoticed."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * _WORDS):
        piece = flat[start : start + 8 * _WORDS]
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(words), device=flat.device)
        total += (words * ((places * _SPREAD) | 1)).sum()
    return total
