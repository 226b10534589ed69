"""Sets a checkpointing policy on a model's layers: the code of :mod:`ftcli.tables.policies`.

=============  =======================================================================================================
``false``      everything that backward needs
``selective``  all but gate and up of the gated MLP, two thirds of the bytes and a third of the arithmetic: they are
               formed again. Layers that are not on the kernels are checkpointed whole
``true``       a layer's input alone; the layer runs again
``offload``    the input of each half of a layer, in pinned host memory; the halves run again up to what is kept.
               Where the host has no room for that, the layer's input alone; the layer runs again
``lean``       as ``true``; a frozen embedding lies in pinned host memory (:mod:`ftcli.model.offload`)
=============  =======================================================================================================

Layers of a vision tower that is trained are checkpointed whole under all of them but ``false``.

All give the same bits. ``true`` and ``false`` are transformers' own setting, applied by its trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.fused import FusedDecoderLayer
from ftcli.model.offload import Offload
from ftcli.plan.memory.checkpointing import Offloaded, fetched_ahead
from ftcli.tables import code_of, policies
from ftcli.tables.policies import PolicyName

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def use_checkpointing(
    model: PreTrainedModel | PeftModel,
    policy: PolicyName,
    *,
    offloaded: Offloaded = "halves",
    uncheckpointed_layers: int = 0,
) -> Any:
    """Sets a policy on the layers of ``model``, after it was put on the kernels.

    Args:
        offloaded: What ``offload`` sends to the host, as preflight chose it by the host's memory
            (``MemoryEstimate.offloaded``). Layers that are not on the kernels know ``layers`` alone.
        uncheckpointed_layers: The last so many keep everything: theirs is what backward frees first.

    Returns:
        What the policy's code returns: :func:`use_offload` the offload that the layers share. None for policies
        without code here, which change nothing.
    """
    if policies.row(policy).recomputes != "nothing":
        for layer in trained_tower_layers(base_of(model)):
            checkpoint_with(layer, partial(checkpoint, use_reentrant=False))
    apply = policies.row(policy).apply
    if apply is None:
        return None
    layers: list[Any] = list(decoder_layers(base_of(model)))
    return code_of(apply)(layers[: max(len(layers) - uncheckpointed_layers, 0)], offloaded)


def trained_tower_layers(base: PreTrainedModel) -> Iterator[GradientCheckpointingLayer]:
    """The layers beside the language model's that have something to train."""
    own = {id(module) for module in base.get_decoder().modules()}
    for module in base.modules():
        beside = isinstance(module, GradientCheckpointingLayer) and id(module) not in own
        if beside and any(p.requires_grad for p in module.parameters()):
            yield module


def use_selective(layers: Sequence[Any], offloaded: Offloaded) -> None:
    """``selective``: layers on the kernels form gate and up again; others are checkpointed whole."""
    for layer in layers:
        if isinstance(layer, FusedDecoderLayer):
            layer.selective = True
        else:
            checkpoint_with(layer, partial(checkpoint, use_reentrant=False))


def use_lean(layers: Sequence[Any], offloaded: Offloaded) -> None:
    """``lean``: layers are checkpointed whole. Unlike transformers' own setting this asks for no gradient of what the
    first one reads.
    """
    for layer in layers:
        checkpoint_with(layer, partial(checkpoint, use_reentrant=False))


def use_offload(layers: Sequence[Any], offloaded: Offloaded) -> Offload:
    """``offload``: one for all layers."""
    for layer in layers:
        if isinstance(layer, FusedDecoderLayer):
            layer.offloaded = offloaded
    offload = Offload(ahead=fetched_ahead(max(map(_sent, layers), default=0)))
    for layer in layers:
        if isinstance(layer, FusedDecoderLayer):
            layer.offload = offload
        else:
            checkpoint_with(layer, offload.checkpoint)
    return offload


def _sent(layer: Any) -> int:
    """Tensors that a layer sends away."""
    return layer.offloaded_tensors if isinstance(layer, FusedDecoderLayer) else 1


def checkpoint_with(layer: Any, function: Any) -> None:
    """Checkpoints one layer, as transformers' ``gradient_checkpointing_enable`` does all."""
    if isinstance(layer, GradientCheckpointingLayer):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = function


@contextmanager
def without_checkpointing(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Within the block, of passes without gradients, layers run as they are; then they are checkpointed as before."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    kept = [(layer, layer.gradient_checkpointing) for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, on in kept:
            layer.gradient_checkpointing = on
