"""An embedding whose table lies in pinned host memory, from where the GPU reads the rows that it needs.

A frozen table of 128,256 x 4,096 takes 0.98 GiB of the device, of which a micro-batch of 2,048 tokens reads 16 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from ftkernels.host_rows import host_rows
from torch import Tensor, nn

from ftcli.model.backbone import base_of
from ftcli.reporting import Reporter
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class HostEmbedding(nn.Module):
    """Takes the place of a frozen ``nn.Embedding``, and gives its bits.

    The table is neither a parameter nor a buffer: what moves a model to a device, saves it or asks for its first
    parameter must not meet it.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        table = embedding.weight.detach()
        self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        self._table.copy_(table)

    @property
    def weight(self) -> Tensor:
        """(V, H), on the host."""
        return self._table

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., H), on the device of ``ids``."""
        return host_rows(self._table, ids)


def why_not_on_host(model: PreTrainedModel | PeftModel) -> str | None:
    """Why the embedding has to stay on the device, as one clause; None where it need not."""
    base = base_of(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        return f"it is a {type(embedding).__name__}, which does more than look rows up"
    if embedding.weight.requires_grad:
        return "it is trained"
    if head is not None and head.weight is embedding.weight:
        return "the head has the same weight"
    if embedding.max_norm is not None:
        return "its rows are renormalised when they are read"
    return None


def use_host_embedding(model: PreTrainedModel | PeftModel, reporter: Reporter) -> None:
    """Puts the model's embedding into host memory, or tells why it has to stay."""
    reason = why_not_on_host(model)
    if reason is not None:
        reporter.info(f"embedding: on the device, since {reason}")
        return
    base = base_of(model)
    embedding = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    moved = HostEmbedding(embedding)
    moved._forward_hooks.update(embedding._forward_hooks)  # such as rounding what it gives
    moved.train(embedding.training)
    base.set_submodule(name, moved)
    table = moved.weight
    reporter.info(f"embedding: {gib(table.numel() * table.element_size())} GiB in host memory")
