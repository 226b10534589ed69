"""How much of a layer's activations is kept for backward, set on a model's layers.

=============  =======================================================================================================
``false``      everything that backward needs
``selective``  all but gate and up of the gated MLP, two thirds of the bytes and a third of the arithmetic: they are
               formed again. Layers that are not on the kernels are checkpointed whole
``true``       a layer's input alone; the layer runs again
``offload``    the input of each half of a layer, in pinned host memory; the halves run again up to what is kept.
               Where the host has no room for that, the layer's input alone; the layer runs again
=============  =======================================================================================================

All give the same bits. ``true`` and ``false`` are transformers' own setting, applied by its trainer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ftcli.config.training import Checkpointing
from ftcli.model.backbone import base_of
from ftcli.model.fused import FusedDecoderLayer
from ftcli.model.offload import Offload
from ftcli.preflight.memory.activations import Offloaded

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def use_checkpointing(
    model: PreTrainedModel | PeftModel,
    policy: Checkpointing,
    *,
    offloaded: Offloaded = "halves",
    uncheckpointed_layers: int = 0,
) -> Offload | None:
    """Sets ``selective`` or ``offload`` on the layers of ``model``, after it was put on the kernels.

    Args:
        offloaded: What ``offload`` sends to the host, as preflight chose it by the host's memory
            (``MemoryEstimate.offloaded``). Layers that are not on the kernels know ``layers`` alone.
        uncheckpointed_layers: The last so many keep everything: theirs is what backward frees first.

    Returns:
        The offload that the layers share, None under every other policy. ``true`` and ``false`` change nothing here.
    """
    if isinstance(policy, bool):
        return None
    base = base_of(model)
    layers: list[Any] = list(getattr(base, base.base_model_prefix).layers)
    layers = layers[: max(len(layers) - uncheckpointed_layers, 0)]
    if policy == "selective":
        for layer in layers:
            if isinstance(layer, FusedDecoderLayer):
                layer.selective = True
            else:
                _checkpoint_with(layer, partial(checkpoint, use_reentrant=False))
        return None
    for layer in layers:
        if isinstance(layer, FusedDecoderLayer):
            layer.offloaded = offloaded
    offload = Offload(ahead=max([2, *map(_kept, layers)]) - 1)
    for layer in layers:
        if isinstance(layer, FusedDecoderLayer):
            layer.offload = offload
        else:
            _checkpoint_with(layer, offload.checkpoint)
    return offload


def _kept(layer: Any) -> int:
    """Tensors that a layer sends away."""
    return layer.offloaded_tensors if isinstance(layer, FusedDecoderLayer) else 1


def _checkpoint_with(layer: Any, function: Any) -> None:
    """What transformers' ``gradient_checkpointing_enable`` does, for one layer."""
    if isinstance(layer, GradientCheckpointingLayer):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function
