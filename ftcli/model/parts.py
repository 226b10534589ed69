"""Keeps only this rank's rows of each weight of a decoder layer, before torch spreads the model.

A model that is loaded tensor by tensor need never be whole anywhere. As soon as all tensors of a layer are there, each
rank keeps the rows that :func:`torch.distributed.fsdp.fully_shard` will give it, and lets go of the others. In their
place stand parameters of the full shape without memory, by which adapters are made and layers put on the kernels. The
first layers stay whole, for the checks of the model before it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.joint import join_shared
from ftcli.model.quantized import QuantizedLinear

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Layers that stay whole until the model is spread.
WHOLE = 2
_ATTRIBUTE = "_ftcli_parts"


@dataclass(slots=True, eq=False)
class RankWeights:
    """Which part of the weights a process keeps, that of ``rank`` among ``size``; and what it has kept, by the
    parameter that stands for the whole.

    Attributes:
        joins: Whether weights that read the same input are joined, as frozen ones are.
    """

    rank: int
    size: int
    joins: bool
    kept: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's rows, copied."""
        chunks = torch.chunk(whole, self.size)
        return chunks[self.rank].clone() if self.rank < len(chunks) else whole[:0].clone()

    def leave(self, layer: nn.Module) -> None:
        """Keeps this rank's rows of a whole layer without adapters.

        Raises:
            FtcliError: FT331 for a quantised layer whose state is not what it should be.
        """
        for module in layer.modules():
            if isinstance(module, QuantizedLinear):
                module.check_state()
        if self.joins:  # random weights are made to be trained, and adapters freeze them later
            layer.requires_grad_(False)
        ready(layer, joins=self.joins)
        for module in layer.modules():
            for name, whole in list(module._parameters.items()):
                if whole is None or (whole.dim() < 2 and not isinstance(module, QuantizedLinear)):
                    continue  # norms and biases take no room
                # Of the full shape on its device, and of one element: a parameter on `meta` would take adapters there.
                stand_in = nn.Parameter(whole.detach().new_empty(1).expand(whole.shape), whole.requires_grad)
                self.kept[stand_in] = self.of(whole.detach())
                module._parameters[name] = stand_in


def ready(layer: nn.Module, *, joins: bool) -> None:
    """Puts all large tensors of a whole layer into parameters, and joins those that read the same input."""
    if joins:
        join_shared(layer)
    for module in layer.modules():
        if isinstance(module, QuantizedLinear):
            module.as_parameters()


def keep_parts(base: PreTrainedModel, parts: RankWeights) -> None:
    """Leaves of all layers but the first ones only this rank's part, and notes ``parts`` on the model."""
    for layer in list(decoder_layers(base))[WHOLE:]:
        if not is_part(layer):
            parts.leave(layer)
    object.__setattr__(base, _ATTRIBUTE, parts)


def rank_weights_of(base: PreTrainedModel) -> RankWeights | None:
    """What :func:`keep_parts` has noted."""
    found: RankWeights | None = vars(base).get(_ATTRIBUTE)
    return found


def is_part(layer: nn.Module) -> bool:
    """Whether only a part of the layer's weights is here."""
    return any(p.numel() > 1 and not any(p.stride()) for p in layer.parameters())


@contextmanager
def whole_layers(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Within the block the model has only those of its layers that are whole; they are put back as they are then."""
    base = base_of(model)
    layers = decoder_layers(base)
    count = next((index for index, layer in enumerate(layers) if is_part(layer)), len(layers))
    if count == len(layers):
        yield
        return
    config, others = base.config.get_text_config(), list(layers)[count:]
    before: Any = config.num_hidden_layers
    del layers[count:]
    config.num_hidden_layers = count
    try:
        yield
    finally:
        config.num_hidden_layers = before
        decoder = next(m for m in base.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count)
        decoder.extend(others)
