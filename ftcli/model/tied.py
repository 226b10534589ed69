"""An embedding that has the head's weight and takes its gradient, where both are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from ftkernels.tied_embedding import HeadGradient, tied_embedding
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TiedEmbedding(nn.Embedding):
    """Takes the place of an ``nn.Embedding`` with its weight. ``head_gradient`` is what the head hands its own to."""

    def __init__(self, embedding: nn.Embedding) -> None:
        weight = embedding.weight
        rows, columns = weight.shape
        super().__init__(rows, columns, padding_idx=embedding.padding_idx, _weight=weight.detach())
        self.weight = embedding.weight
        self.head_gradient = HeadGradient()
        self.train(embedding.training)

    def forward(self, input: Tensor) -> Tensor:
        """(...) int64 -> (..., H)."""
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return tied_embedding(input, self.weight, self.head_gradient, self.padding_idx)
        return super().forward(input)


def use_tied_embedding(base: PreTrainedModel) -> bool:
    """Has embedding and head of a model that is trained whole make one gradient, where they are one weight; whether
    they are.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not nn.Embedding or head is None or head.weight is not embedding.weight:
        return False
    if not embedding.weight.requires_grad or embedding.scale_grad_by_freq or embedding.max_norm is not None:
        return False
    name = next(name for name, module in base.named_modules() if module is embedding)
    tied = TiedEmbedding(embedding)
    tied._forward_hooks.update(embedding._forward_hooks)  # such as rounding what it gives
    base.set_submodule(name, tied)
    return True
