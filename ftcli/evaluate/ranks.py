"""Passes without gradients on ranks that hold shards of the weights, each with something of its own to compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from ftcli.generation.generator import unsharded_model
from ftcli.model.backbone import root_of
from ftcli.model.shards import forwards_in_step, with_whole_weights

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup

R = TypeVar("R")


def passes_in_step(
    group: RankGroup | None, model: PreTrainedModel | PeftModel, compute: Callable[[], R] | None
) -> R | None:
    """Runs ``compute``, any number of passes of ``model``, on each rank that has something to compute.

    Where the weights are sharded all ranks call this, and take part in the passes of all.

    Raises PeerFailed or RankLost when a rank is gone whose weights are needed.
    """
    if group is None or root_of(model) is None:
        return None if compute is None else compute()

    def announce(another: bool) -> bool:
        return any(told[0] for told in group.agree("generating", [another]))

    with group.exchanging():
        return forwards_in_step(model, compute, announce)


def led_by_first(group: RankGroup | None, model: PreTrainedModel | PeftModel, compute: Callable[[], R]) -> R | None:
    """:func:`passes_in_step` of rank 0 alone; None on the others."""
    return passes_in_step(group, model, compute if group is None or group.leads else None)


def generating(
    group: RankGroup | None,
    model: PreTrainedModel | PeftModel,
    compute: Callable[[PreTrainedModel | PeftModel], R] | None,
    *,
    whole: bool,
    merged_in: torch.dtype | None = None,
) -> R | None:
    """Runs ``compute`` with the model that it is to generate with. Where the weights are sharded all ranks call this.

    Args:
        whole: This rank has room for all weights. Where each has, they are gathered once, and no rank waits for what
            another one generates; else every pass gathers layer by layer, and all ranks make it.
        merged_in: As :func:`ftcli.generation.generator.unsharded_model`, for weights that are gathered once.

    Raises PeerFailed or RankLost when a rank is gone whose weights are needed.
    """
    if group is None or root_of(model) is None:
        return None if compute is None else compute(model)
    mine = compute
    if not all(told[0] for told in group.agree("gathering", [whole])):
        return passes_in_step(group, model, None if mine is None else lambda: mine(model))
    with group.exchanging():
        return with_whole_weights(model, lambda: None if mine is None else mine(unsharded_model(model, merged_in)))
