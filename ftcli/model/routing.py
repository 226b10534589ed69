"""What the routers of a mixture of experts choose: read from transformers' outputs, and held while passes are compared.

A router's input that is rounded otherwise sends a few tokens elsewhere, where scores are nearly equal. Two passes that
are to be compared would differ by whole experts, and nothing would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.model.backbone import base_of, decoder_layers
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def choice_of(output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Weights (T, P) and experts (T, P), the latter integers, of what a router returns.

    transformers returns scores, weights, experts; Granite's returned them the other way round up to 5.17.
    """
    first, weights, last = output
    return weights, first if last.is_floating_point() else last


def scores_of(output: tuple[Tensor, ...]) -> Tensor:
    """The scores (T, E) of all experts that a router returns; see :func:`choice_of`."""
    return output[0] if output[0].is_floating_point() else output[-1]


def routers_of(base: PreTrainedModel) -> list[nn.Module]:
    """The routers of a model whose family's experts are described, layer by layer."""
    family = family_of(base.config.get_text_config().model_type)
    if family is None or family.experts is None:
        return []
    path, found = family.experts.path(family.experts.router), list[nn.Module]()
    for layer in decoder_layers(base):
        try:
            found.append(layer.get_submodule(path))
        except AttributeError:  # a layer without experts
            continue
    return found


@contextmanager
def same_routing(model: PreTrainedModel | PeftModel) -> Iterator[list[Routing]]:
    """A block in which tokens go to the experts that they went to in the first pass; the hooks of its routers."""
    hooks: list[Routing] = []
    with ExitStack() as stack:
        for router in routers_of(base_of(model)):
            hooks.append(Routing())
            stack.callback(router.register_forward_hook(hooks[-1]).remove)
        yield hooks


class Routing:
    """A hook of one router: the choice of its first call, and in later ones of the same tokens that one where theirs is
    another. Weights stay those of the call: where scores are nearly equal, so are they. Their gradient flows, but not
    from tokens that a call has had to send back, in that one and all that follow: it is another score's.
    """

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.moved: Tensor | None = None

    def __call__(self, _router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        weights, index = choice_of(output)
        if self.first is None or self.first.shape != index.shape:
            self.first, self.moved = index, None
            return output
        alike = self.first[:, :, None] == index[:, None, :]  # of a token's experts then and now, (T, P, P)
        # An expert that is not chosen any more gets the weight of one that has come in its place.
        come = (~alike.any(dim=1)).int().argsort(dim=-1, descending=True, stable=True)
        gone = ~alike.any(dim=2)
        rank = (gone.int().cumsum(-1) - 1).clamp(min=0)
        place = torch.where(gone, come.gather(-1, rank), alike.int().argmax(dim=2))
        moved = gone.any(dim=1, keepdim=True)
        if self.moved is not None and self.moved.shape == moved.shape:
            moved = self.moved | moved
        self.moved = moved
        held = weights.gather(-1, place)
        held = torch.where(moved, held.detach(), held)
        return tuple(held if t is weights else self.first if t is index else t for t in output)
