"""The decoder layers of a model as one function of hidden states.

transformers' own forward passes through its list of layers one at a time, in Python. What is to run as a whole, as a
CUDA graph does, needs them all at once. So while a stack is collecting, each layer hands its call on, and the last one
has the stack run them all; nothing of transformers' is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from ftkernels.adapter_packs import AdapterPacks
from ftkernels.side_stream import DeferredStream
from ftkernels.weight_copies import WeightCopies
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftcli.model.adapted import LayerPacks, PreparedGroup
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.masks import CallMask

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.fused import FusedDecoderLayer

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer is called with besides hidden states: its mask, and (cos, sin), each (B or 1, S, R).

    Layers of one type share theirs.
    """

    mask: CallMask
    rotation: Rotation


@dataclass(frozen=True, slots=True)
class StackCall:
    """One call of the layers: what the first one reads, (B, S, H), and what each layer is called with."""

    hidden: Tensor
    layer_calls: tuple[LayerCall, ...]


class Runner(Protocol):
    """Runs a call of a stack: :class:`ftcli.model.cuda_graphs.GraphRunner`."""

    def __call__(self, call: StackCall) -> Tensor: ...


class DecoderStack:
    """The fused layers of one model, in order.

    ``runner`` runs a call; :meth:`run` where there is none.

    Args:
        dtype: Of the layers' products. The adapters of all layers are packed at once in it, and trained weights of
            another dtype copied; None has each layer see to its own.
    """

    def __init__(self, layers: Sequence[FusedDecoderLayer], dtype: torch.dtype | None = None) -> None:
        self.layers = tuple(layers)
        groups = [] if dtype is None else [group for layer in self.layers for group in layer.groups()]
        self._adapters = AdapterPacks(groups, dtype or torch.float32)
        self._copies = WeightCopies(groups, dtype or torch.float32)
        #: Where a backward pass whose gradients are read at its end alone makes those of the adapters.
        self.deferred = DeferredStream()
        pairs = zip(self._adapters.packs, self._copies.copies, strict=True)
        found = [PreparedGroup(packed, copies, self.deferred) for packed, copies in pairs]
        found = found or [PreparedGroup()] * (4 * len(self.layers))
        self._packs = [LayerPacks(*found[at : at + 4]) for at in range(0, len(found), 4)]
        self.runner: Runner | None = None
        self.drops = any(layer.drops for layer in self.layers)
        self._layer_calls: list[LayerCall] | None = None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, the layers hand their calls on, for one forward pass of the model without a cache."""
        self._layer_calls = []
        try:
            yield
        finally:
            self._layer_calls = None

    @property
    def collects(self) -> bool:
        """Whether layers hand their calls on."""
        return self._layer_calls is not None

    def take(self, layer: FusedDecoderLayer, hidden: Tensor, layer_call: LayerCall) -> Tensor:
        """A layer hands its call on: ``hidden`` as it came; from the last layer what all make of it, (B, S, H)."""
        assert self._layer_calls is not None
        if layer is not self.layers[len(self._layer_calls)]:
            raise RuntimeError("the layers of a stack were called out of order")
        self._layer_calls.append(layer_call)
        if len(self._layer_calls) < len(self.layers):
            return hidden
        call = StackCall(hidden, tuple(self._layer_calls))
        self._layer_calls = None
        return (self.runner or self.run)(call)

    @property
    def copies(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Trained weights, each with the copy of it that products read."""
        return self._copies.pairs

    def weights_changed(self) -> None:
        """Trained weights have changed and their copies have not: to be said after each step of an optimizer that knows
        nothing of them.
        """
        self._copies.outdate()

    def run(self, call: StackCall) -> Tensor:
        """(B, S, H) -> (B, S, H): the layers one after the other."""
        self._adapters.refresh()
        self._copies.refresh()
        hidden = call.hidden
        for layer, layer_call, packs in zip(self.layers, call.layer_calls, self._packs, strict=True):
            given = (hidden, layer_call.mask, layer_call.rotation, packs)
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                hidden = checkpoint(layer.compute, *given, use_reentrant=False, preserve_rng_state=self.drops)
            else:
                hidden = layer.compute(*given)
        return hidden


def stack_of(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> DecoderStack | str:
    """The layers of ``model`` as one function; or, as one clause, which of them is not on the kernels.

    ``dtype``: see :class:`DecoderStack`; that of a stack that the layers have already stays what it is.
    """
    from ftcli.model.fused import FusedDecoderLayer

    fused = []
    for index, layer in enumerate(decoder_layers(base_of(model))):
        if not isinstance(layer, FusedDecoderLayer):
            return f"layers.{index} is not on the kernels"
        fused.append(layer)
    stack = fused[0].stack or DecoderStack(fused, dtype)
    for layer in fused:
        layer.stack = stack
    return stack
