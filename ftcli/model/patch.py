"""Puts a model's layers on the fused kernels, one instance at a time, and takes them off again.

Nothing outside the model changes, except that transformers' attention table gains the entry ``ftcli``. Every layer
that is left as it was is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.device import BackendName, gpu_of
from ftkernels.projection import join_weights
from torch import nn

from ftcli.config.model import Kernels
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.layers import Layer
from ftcli.facts.model import activation_of
from ftcli.facts.shape import ModelShape, shape_of
from ftcli.model import attention
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.experts import why_not_experts
from ftcli.model.fsdp import JoinedLinear
from ftcli.model.fused import FusedDecoderLayer, FusedNorm
from ftcli.model.layers import FusedDeltaLayer, FusedGemma4Layer, FusedLatentLayer
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear, check_weights
from ftcli.plan.execution import DORA, TRAINED_WHOLE, LayerChoice, choose_layers
from ftcli.tables.architecture import Family, Groups
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from ftkernels.limits import NormForm
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """One line of the manifest's kernel table."""

    layer: str
    kernel: str
    on: bool
    reason: str


@dataclass(slots=True)
class Patch:
    """The record of a :func:`patch`. :meth:`undo` restores the model exactly."""

    table: list[LayerKernel]
    _restore: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def off(self) -> list[LayerKernel]:
        """Layers left as they were."""
        return [entry for entry in self.table if not entry.on]

    def undo(self) -> None:
        """Puts every original module and setting back; calling it again does nothing."""
        while self._restore:
            self._restore.pop()()


def patch(model: PreTrainedModel | PeftModel, kernels: Kernels, *, joins: bool = True) -> Patch:
    """Puts what it can of ``model`` on the kernels.

    Args:
        joins: Whether weights are there to be looked at, and to be laid one behind the other where they read the same
            input. Sharded weights are neither.
        kernels: ``off`` changes nothing; ``reference`` uses the plain torch versions; ``auto`` uses the Triton kernels
            where they run, and leaves the rest as transformers built it; ``triton`` makes a layer that is left an
            error.

    Raises:
        FtcliError: FT705 (exit 3) under ``triton`` when a layer cannot be fused, with every reason; FT331 (exit 1) for
            a packed weight without its state.
    """
    base = base_of(model)
    if joins:
        check_weights(base)
    done = Patch([])
    if kernels == "off":
        return done
    shape = shape_of(base.config.to_dict())
    choice = _choose(base, shape, kernels)
    if choice.code == "transformers" or shape is None:
        entry = LayerKernel("model", "transformers", on=False, reason=choice.reason)
        if kernels == "triton":
            raise _required([entry])
        done.table.append(entry)
        return done
    _patch_layers(base, shape, choice, done, "torch" if kernels == "reference" else "auto", joins=joins)
    if kernels == "triton" and done.off:
        off = done.off
        done.undo()
        raise _required(off)
    return done


def _choose(base: PreTrainedModel, shape: ModelShape | None, kernels: Kernels) -> LayerChoice:
    config = base.config.get_text_config()
    device = next(base.parameters()).device
    activation = activation_of(config.to_dict(), family_of(config.model_type))
    gpu = gpu_of(device) if device.type == "cuda" else None
    return choose_layers(config.model_type, shape, activation, kernels, device=str(device), gpu=gpu)


def _patch_layers(
    base: PreTrainedModel, shape: ModelShape, choice: LayerChoice, done: Patch, backend: BackendName, *, joins: bool
) -> None:
    family = shape.family
    backbone: Any = base.get_decoder()
    layers = list(decoder_layers(base))
    reasons = [_why_not(layer, one, family) for layer, one in zip(layers, shape.layers, strict=True)]
    # Those that stay would not hear of documents, or of keys that are shared.
    if family.attention_alone or family.delta_nets is not None or family.shared_keys is not None:
        reasons = [next(filter(None, reasons), None)] * len(layers)
    for index, (layer, described, reason) in enumerate(zip(layers, shape.layers, reasons, strict=True)):
        name = f"layers.{index}"
        if reason is not None:
            done.table.append(LayerKernel(name, "transformers", on=False, reason=reason))
            continue
        if joins:
            _join(layer, described.groups, done)
        fused = _kind_of(described, family)(layer, shape, described, choice.activation or "silu", backend)
        _swap(backbone, name, layer, fused, done)
        model_type = base.config.get_text_config().model_type
        done.table.append(LayerKernel(name, "fused layer", on=True, reason=f"{model_type}, {backend}"))
    if any(entry.on for entry in done.table):
        if family.norm == "layer":
            done.table.append(LayerKernel("norm", "LayerNorm", on=True, reason="torch's own kernel"))
        else:
            form = family.final_norm or family.norm
            _swap_norm(backbone, "norm", form, backend, done)
            done.table.append(LayerKernel("norm", "RMSNorm", on=True, reason=f"{form} form"))
        _use_attention(base, done)


def _kind_of(described: Layer, family: Family) -> type[FusedDecoderLayer]:
    """The class that computes a layer with this mixer."""
    if described.delta_net is not None:
        return FusedDeltaLayer
    if described.latent is not None:
        return FusedLatentLayer
    return FusedGemma4Layer if family.global_heads else FusedDecoderLayer


def _why_not(layer: nn.Module, described: Layer, family: Family) -> str | None:
    for name in [name for group in described.groups for name in group]:
        try:
            projection = layer.get_submodule(name)
        except AttributeError:
            return f"it has no {name}"
        reason = why_not_fused(projection)
        if reason is not None:
            return f"{name}: {reason}"
    if described.stacks and family.experts is not None:
        reason = why_not_experts(layer.get_submodule(family.experts.block), family.experts)
        if reason is not None:
            return reason
    if described.attention is None or family.head_norm is None:
        return None
    if not hasattr(layer.self_attn, family.head_norm.q):
        return "its attention has no norm by head"
    return None


def why_not_fused(layer: nn.Module) -> str | None:
    """The reason why the fused layers cannot take this linear layer; None if they can."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    base = layer
    if isinstance(layer, ModulesToSaveWrapper):
        return TRAINED_WHOLE
    if isinstance(layer, LoraLinear | ParamWrapper):  # the second where PEFT takes a layer's name for an expert's
        base = layer.base_layer
        if any(layer.use_dora.values()):
            return DORA
        if any(getattr(layer, "lora_bias", {}).values()):
            return "the adapter has a bias"
        if getattr(layer, "fan_in_fan_out", False):
            return "the weight is stored transposed"
        if len(layer.active_adapters) > 1:
            return "several adapters are active at once"
    if type(base) is not nn.Linear and not isinstance(base, QuantizedLinear | DequantizedLinear | JoinedLinear):
        return f"its base is a {type(base).__name__}, not a plain linear layer"
    if isinstance(base, QuantizedLinear) and base.rounds_input:
        return f"its {base.method} products round activations to int8, which the fused layers do not"
    if base is not layer and (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)):
        return "its base weight is trained beside an adapter"
    return None


def _join(layer: nn.Module, groups: Groups, done: Patch) -> None:
    """Lays weights that read the same input one behind the other, so that each group is one product."""
    for names in (group for group in groups if len(group) > 1):
        modules: list[Any] = [layer.get_submodule(name) for name in names]
        bases = [getattr(module, "base_layer", module) for module in modules]
        quantized = [base for base in bases if isinstance(base, QuantizedLinear)]
        if quantized:
            alike = len({type(base) for base in bases}) == 1
            part = type(quantized[0]).join(quantized) if alike else None
            if part is not None:
                done._restore.append(part)
            continue
        weights = [base.weight for base in bases]
        join_weights(weights)
        done._restore.append(partial(_part, weights))


def _part(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.data = weight.data.clone()


def _swap(parent: nn.Module, name: str, original: nn.Module, fused: nn.Module, done: Patch) -> None:
    parent.set_submodule(name, fused)
    done._restore.append(lambda: parent.set_submodule(name, original))


def _swap_norm(parent: nn.Module, name: str, form: NormForm, backend: BackendName, done: Patch) -> None:
    """Puts a fused norm in a norm's place.

    A norm that ``lora.modules_to_save`` trains has PEFT's wrapper around it, which holds the frozen norm and the
    trained copy. The wrapper stays: it saves the copy and switches between the two. Both norms in it are replaced.
    """
    from peft.utils.other import ModulesToSaveWrapper

    norm = parent.get_submodule(name)
    if isinstance(norm, ModulesToSaveWrapper):
        _swap_norm(norm, "original_module", form, backend, done)
        for adapter in list(norm.modules_to_save):
            _swap_norm(norm.modules_to_save, adapter, form, backend, done)
        return
    _swap(parent, name, norm, FusedNorm(norm, form, backend), done)


def _use_attention(base: PreTrainedModel, done: Patch) -> None:
    before = attention.use(base)

    def put_back() -> None:
        attention.use(base, before)

    done._restore.append(put_back)


def _required(off: list[LayerKernel]) -> FtcliError:
    shown = "; ".join(f"{entry.layer}: {entry.reason}" for entry in off[:4])
    return FtcliError.single(
        "FT705",
        f"model.kernels: triton, but {len(off)} of the layers cannot use the kernels: {shown}",
        exit_code=ExitCode.PREFLIGHT,
        help="use model.kernels: auto, which leaves those layers as they are",
    )
