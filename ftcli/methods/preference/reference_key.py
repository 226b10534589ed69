"""The key of a reference: of all that log-probabilities depend on beside the tokens, each weight by its content.

A model whose weights are sharded over ranks has the key of the same model on one process, since its passes gather the
same weights and give the same bits; where they are gathered in another dtype, the digests tell. Ranks that share rows
multiply other shapes, which rounds otherwise, so they have a key of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from ftcli import __version__
from ftcli.model.backbone import base_of, decoder_layers, root_of
from ftcli.model.fsdp import JoinedLinear, JoinedTensors
from ftcli.model.initial_adapters import initial_of
from ftcli.model.quantized import QuantizedLinear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job

#: Part of every key: raised whenever the same model and tokens give other log-probabilities.
_SCORING = 1
#: Words of 8 bytes that are summed at a time, and what makes the sum depend on their order (the golden ratio, 2^64).
_WORDS, _SPREAD = 1 << 20, -7046029254386353131
#: What PEFT puts into the names of weights that it adapts.
_OF_ADAPTERS = ("base_model.model.", ".base_layer", ".original_module")


def reference_key(
    job: Job, model: PreTrainedModel | PeftModel, ld_alpha: float, *, rows: int = 2, shares: int = 1
) -> str:
    """Of each weight of the reference as it is in memory, its configuration, how it is computed and by which code. No
    setting of training is in it. All ranks call it where the weights are sharded, and have the same.

    Args:
        rows: Rows of a unit.
        shares: Ranks that share each row.
    """
    base, plan, batches = base_of(model), job.plan, job.batches(model)
    config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
    execution = plan.execution
    computed = {
        "ld_alpha": ld_alpha,
        "rows": [rows, shares],
        "dtypes": [job.dtypes.compute, job.dtypes.autocast, plan.stream],
        "kernels": [job.recipe.model.kernels, execution.on_kernels, execution.layers.code, execution.attention],
        "attention": str(base.config._attn_implementation),
        "quantization": job.recipe.quantization.model_dump(mode="json"),
        "batches": [batches.layout, batches.shares_prompts],
        "device": job.device.type,
        "matmul": torch.get_float32_matmul_precision(),
        "code": [_SCORING, __version__, torch.__version__, transformers.__version__],
    }
    text = json.dumps([computed, config, weight_digests(model)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weight_digests(model: PreTrainedModel | PeftModel) -> list[list[Any]]:
    """Name, dtype, shape and digest of each tensor of the reference, by the name that it has without adapters.

    Adapters are left out, unless they begin as a part of the weights.
    """
    without = hasattr(model, "disable_adapter") and initial_of(model) is None
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
