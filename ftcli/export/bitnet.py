"""A model of ternary weights in the packed layout that transformers calls ``bitnet``: two bits a weight.

``ftkernels.ternary`` has the layout. config.json says which class transformers is to build, and so what it does with a
scale: ``autobitlinear`` multiplies by it; ``bitlinear`` divides, and is taken where linear layers have biases, which
the other one would multiply as well. Everything but the linear layers is as it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.ternary import PER_BYTE, pack_ternary
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.export.clean.request import LAYER, rows_for
from ftcli.export.images import copy_processors
from ftcli.export.safetensors import SHARD_BYTES
from ftcli.export.source import ExportSource, local_config, not_verified, source_stops, source_tokenizer
from ftcli.export.tensorfile import read_tensors
from ftcli.export.verify import (
    Verified,
    check_answer,
    compare_tensors,
    continued,
    logits,
    model_request,
    not_asked,
    probe_batch,
    reloaded,
    sent,
)
from ftcli.export.weights import base_weights
from ftcli.model.bitnet import BitLinear, TernaryLinear, declaration
from ftcli.model.load_quantized import ModelStorage, load_quantized
from ftcli.model.pretrained import hollow
from ftcli.plan.quantization import stores_ternary_masters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Largest relative error of a layer's output, on the same input: float32 sums in another order.
LAYER_TOLERANCE = 1e-5
#: Largest relative error of the logits. Where the last bit of a sum decides how an activation is rounded, it comes out
#: 1/127 of its row's largest value apart; what that makes of the logits has no sharp bound.
LOGITS_TOLERANCE = 5e-2


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Packs a full fine-tune into ``folder`` and loads it again with plain transformers.

    Raises FtcliError FT740 for a model that was not trained with ``quantization.method: bitnet`` or cannot be packed,
    FT741 when what was written is not the model; OSError where it cannot be written.
    """
    if source.kind != "model" or not stores_ternary_masters(local_config(source.folder).to_dict()):
        raise _unpackable("only a model that was trained whole with quantization.method: bitnet has ternary weights")
    say("rounding the masters")
    masters = load_masters(source.folder)
    layers = {name: module for name, module in masters.named_modules() if isinstance(module, BitLinear)}
    divides = any(layer.bias is not None for layer in layers.values())
    tensors = _packed(masters, layers, divides=divides)
    _save(masters, tensors, folder, divides=divides)
    source_tokenizer(source).save_pretrained(str(folder))
    if source.base.init == "pretrained":
        copy_processors(source.base, folder, offline=source.offline)
    if not source.verify:
        return not_asked()
    say("verifying: loading the result again")
    return _verify(source, folder, masters, layers, tensors)


def bitnet_bytes(source: ExportSource) -> int:
    """Bytes on disk: two bits for each weight that is rounded, float32 for everything else."""
    stored = base_weights(source)
    rounded = rounded_weights(local_config(source.folder))
    return sum(math.prod(stored.shape(name)) * (1 if name in rounded else 16) // 4 for name in stored.names)


def rounded_weights(config: PretrainedConfig) -> frozenset[str]:
    """Names of the weights that a model trained with ``quantization.method: bitnet`` rounds in every product."""
    said: Any = config.to_dict()
    plain = set(said["quantization_config"].get("modules_to_not_convert") or ())
    linears = [name for name, module in hollow(config).named_modules() if isinstance(module, nn.Linear)]
    return frozenset(f"{name}.weight" for name in linears if name not in plain)


def load_masters(folder: Path) -> PreTrainedModel:
    """The model that was trained: masters in ``folder``, rounded in every product, and activations with them."""
    return _load(folder, trained=True)


def _load(folder: Path, *, trained: bool) -> PreTrainedModel:
    holding = ModelStorage(QuantizationConfig(method="bitnet"), torch.float32, torch.device("cpu"), trained=trained)
    config = local_config(folder)
    return load_quantized(str(folder), config, holding, "eager", revision=None, offline=True).eval()


def _packed(model: PreTrainedModel, layers: dict[str, BitLinear], *, divides: bool) -> dict[str, Tensor]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    for name, layer in layers.items():
        if layer.out_features % PER_BYTE:
            raise _unpackable(f"{name} has {layer.out_features} rows, and four are packed in a byte")
        scale = layer.ternary.scale.reshape(1)
        tensors[f"{name}.weight"] = pack_ternary(layer.ternary.data)
        tensors[f"{name}.weight_scale"] = 1.0 / scale if divides else scale.clone()
    return tensors


def _save(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path, *, divides: bool) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_BYTES)
    model.config.quantization_config = {
        **declaration(model),
        "linear_class": "bitlinear" if divides else "autobitlinear",
        "quantization_mode": "offline",
    }
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _verify(
    source: ExportSource,
    folder: Path,
    masters: PreTrainedModel,
    layers: dict[str, BitLinear],
    tensors: dict[str, Tensor],
) -> Verified:
    tokenizer = source_tokenizer(source)
    stops = source_stops(source, tokenizer)
    probe = continued(masters, probe_batch(tokenizer, masters.get_input_embeddings().weight.shape[0]))
    parameters = sum(parameter.numel() for parameter in masters.parameters())
    alone = {name: layer.in_features for name, layer in layers.items()}
    tied: dict[str, str] = getattr(masters, "all_tied_weights_keys", None) or {}
    names = {**{name: name for name in tensors}, **{name: other for name, other in tied.items() if other in tensors}}
    answer = source.reload(model_request(folder, probe, parameters, layers=alone, names=names), sent(probe))
    if answer.problems:
        raise not_verified(folder, list(answer.problems))
    problems = compare_tensors(read_tensors(folder), tensors)
    try:
        frozen = _load(folder, trained=False)
    except FtcliError as error:  # what training refuses as somebody's file is here the export's own fault
        raise not_verified(folder, [*problems, *(finding.message for finding in error.findings)]) from error
    for name, layer in layers.items():
        problems += _unlike_masters(name, frozen.get_submodule(name), layer)
    for name, layer in layers.items():
        problems += _unlike_output(name, answer.tensors.get(f"{LAYER}{name}"), layer)
    others, facts = check_answer(answer, logits(masters, probe), probe, tokenizer, stops, LOGITS_TOLERANCE)
    if problems or others:
        raise not_verified(folder, [*problems, *others])
    compared = "every ternary value and scale, each layer's output, logits in float32, tokenizer, stop tokens"
    return Verified(compared, {"packed": len(layers), **facts, **reloaded(answer)})


def _unlike_masters(name: str, found: nn.Module, layer: BitLinear) -> list[str]:
    if not isinstance(found, TernaryLinear):
        return [f"{name} is not stored packed"]
    weight, wanted = found.frozen_weight(), layer.ternary
    off = abs(float(weight.scale) / float(wanted.scale) - 1)
    if not torch.equal(weight.data, wanted.data) or off > 2.0**-22:  # a scale's inverse is rounded
        return [f"{name}: the packed values are not those of its masters"]
    return []


@torch.no_grad()
def _unlike_output(name: str, given: Tensor | None, layer: BitLinear) -> list[str]:
    if given is None:  # weights that do not fit into memory are there layer by layer
        return []
    wanted = layer(rows_for(layer.in_features))
    error = float((given - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return [] if error <= LAYER_TOLERANCE else [f"{name}: transformers computes a different product, {error:.1e} off"]


def _unpackable(reason: str) -> FtcliError:
    help = "export.formats: [safetensors] writes the masters"
    return FtcliError.single("FT740", f"nothing can be packed: {reason}", help=help)
