"""Notices that a model's logits are no longer finite while text is sampled, before sampling itself fails on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class NotFinite(Exception):
    """The logits of a token to be sampled hold NaN or infinity."""


@contextlib.contextmanager
def finite_logits(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which ``model`` generates.

    From such logits torch samples nothing: on a CPU it raises an error of its own, and on a GPU an assertion in a
    kernel makes the device unusable for the rest of the process. The look waits for the device, as generation does for
    each token anyway.

    Raises:
        NotFinite: the output of the model's head, float (rows, tokens, vocabulary), is not finite at its last token.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_hook(_require_finite)
    try:
        yield
    finally:
        hook.remove()


def _require_finite(_head: nn.Module, _inputs: object, output: Tensor) -> None:
    if not bool(torch.isfinite(output[:, -1]).all()):
        raise NotFinite
