"""The routers' auxiliary loss, which keeps tokens spread over the experts: transformers' ``load_balancing_loss_func``.

Over the L layers with experts and the T tokens of a micro-batch that fill nothing up, p_t being the softmax of a
router's scores over the E experts, and c_te 1 where e is among the k largest of p_t, else 0:

    loss = E * sum over e of  (sum over layers and tokens of c_te / LT) * (sum over layers and tokens of p_te / LT)

The first factor has no gradient; of the second's every layer needs the first over all layers. Layers hand nothing out
for it: each router notes its sums in a ledger, the loss is formed behind the last layer, and backward begins with
leaving there what the loss is multiplied by, for the routers to find. So layers may be checkpointed, or have sharded
weights: one that runs again notes the same numbers again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftcli.model.backbone import HiddenStates, base_of
from ftcli.model.routing import choice_of, routers_of, scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        """What comes from the last layer, for the loss to read, and the auxiliary loss with its coefficient."""
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
    """What routers have noted: counts and sums, (L, E) each; which tokens count, (T,), and the loss's gradient."""

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
