"""Choices of the routers of a mixture of experts: read from transformers' outputs, and held while passes are compared.

A router's input that is rounded otherwise sends a few tokens elsewhere, where scores are nearly equal. Two passes that
are to be compared would differ by whole experts, and nothing would be wrong.

The auxiliary loss keeps tokens spread over the experts: transformers' ``load_balancing_loss_func``. Over the L layers
with experts and the T tokens of a micro-batch that fill nothing up, p_t being the softmax of a router's scores over the
E experts, and c_te 1 where e is among the k largest of p_t, else 0:

    loss = E * sum over e of  (sum over layers and tokens of c_te / LT) * (sum over layers and tokens of p_te / LT)

The first factor has no gradient; of the second's every layer needs the first over all layers. Layers hand nothing out
for it: each router notes its sums in a ledger, the loss is formed behind the last layer, and backward begins with
leaving there what the loss is multiplied by, for the routers to find. So layers may be checkpointed, or have sharded
weights: one that runs again notes the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftcli.model.backbone import HiddenStates, base_of, decoder_layers
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


#: Attribute of a model that holds its routers' hooks.
_HOOKS = "_ftcli_balance_hooks"


class RouterBalance:
    """The auxiliary loss of a model whose routers are trained: hooks on them, which do nothing in evaluation.

    Args:
        coefficient: What the loss is multiplied by; None: as the model's config says.
    """

    def __init__(self, model: PreTrainedModel, coefficient: float | None, device: torch.device) -> None:
        base: Any = base_of(model)
        config: Any = base.config.get_text_config()
        self.coefficient = float(config.router_aux_loss_coef if coefficient is None else coefficient)
        routers = routers_of(base)
        experts = int(getattr(base, "num_experts", None) or config.num_experts)
        top = int(getattr(base, "num_experts_per_tok", None) or config.num_experts_per_tok)
        self.ledger = _Ledger(len(routers), experts, top, device)
        for handle in vars(base).pop(_HOOKS, ()):
            handle.remove()
        handles = [one.register_forward_hook(partial(self._noted, at)) for at, one in enumerate(routers)]
        object.__setattr__(base, _HOOKS, handles)

    def begin(self, counted: Tensor) -> None:
        """A micro-batch begins: ``counted`` (B, S) is 1 for tokens and 0 for what fills rows up."""
        self.ledger.counted = counted.reshape(-1).float()

    def closed(self, states: HiddenStates) -> tuple[HiddenStates, Tensor]:
        """The last layer's output, for the loss to read, and the auxiliary loss with its coefficient."""
        tensor, loss = _Closing.apply(self.ledger, states.tensor)  # type: ignore[no-untyped-call]
        return replace(states, tensor=tensor), self.coefficient * loss

    def _noted(self, layer: int, router: nn.Module, _given: object, output: tuple[Tensor, ...]) -> Any:
        """The router's output, whose scores get the auxiliary loss's gradient with that of its weights."""
        if not router.training:
            return output
        weights, _ = choice_of(output)  # type: ignore[arg-type]
        noted = _Noting.apply(self.ledger, layer, scores_of(output), weights)  # type: ignore[no-untyped-call]
        return tuple(noted if each is weights else each for each in output)


class _Ledger:
    """Notes of routers: counts and sums, (L, E) each; which tokens count, (T,), and the loss's gradient."""

    def __init__(self, layers: int, experts: int, top: int, device: torch.device) -> None:
        self.top = top
        self.counts, self.sums = torch.zeros((2, layers, experts), device=device).unbind()
        self.counted, self.scale = torch.zeros(0, device=device), torch.zeros((), device=device)

    @property
    def rows(self) -> Tensor:
        """LT, at least 1."""
        return (self.counted.sum() * self.counts.shape[0]).clamp(min=1)

    def share(self) -> Tensor:
        """(E,): each expert's share of the tokens, over all layers."""
        return self.counts.sum(0) / self.rows


class _Noting(torch.autograd.Function):
    """Hands the router's weights on, and notes its scores' sums; backward adds the auxiliary loss's gradient."""

    @staticmethod
    def forward(ctx: Any, ledger: _Ledger, layer: int, scores: Tensor, weights: Tensor) -> Tensor:
        p, counted = scores.float().softmax(-1), ledger.counted
        chosen = p.topk(ledger.top, dim=-1).indices
        ledger.counts[layer].zero_().scatter_add_(0, chosen.reshape(-1), counted.repeat_interleave(ledger.top))
        torch.sum(p * counted[:, None], 0, out=ledger.sums[layer])
        ctx.ledger = ledger
        ctx.save_for_backward(scores)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights: Tensor) -> tuple[None, None, Tensor, Tensor]:
        ledger: _Ledger = ctx.ledger
        (scores,) = ctx.saved_tensors
        p = scores.float().softmax(-1)
        by_expert = ledger.share() * (ledger.scale * p.shape[1] / ledger.rows)
        d_scores = p * (by_expert - (p * by_expert).sum(-1, keepdim=True)) * ledger.counted[:, None]
        return None, None, d_scores.to(scores.dtype), d_weights


class _Closing(torch.autograd.Function):
    """Hands hidden states on beside the loss; backward leaves the loss's gradient in the ledger, before any layer's."""

    @staticmethod
    def forward(ctx: Any, ledger: _Ledger, states: Tensor) -> tuple[Tensor, Tensor]:
        ctx.ledger = ledger
        # No matrix product: autocast would round it.
        loss = ledger.counts.shape[1] * (ledger.share() * ledger.sums.sum(0) / ledger.rows).sum()
        return states.view_as(states), loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_loss: Tensor) -> tuple[None, Tensor]:
        ctx.ledger.scale = d_loss
        return None, d_states


def counted_tokens(batch: dict[str, Tensor]) -> Tensor:
    """(B, S) float32: 1 for the tokens of a batch that :mod:`ftcli.data.collate` made, 0 for what fills rows up."""
    if "attention_mask" in batch:
        return batch["attention_mask"].float()
    return (torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]).float()
