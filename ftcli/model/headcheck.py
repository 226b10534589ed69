"""Compares the logits that the loss implies with the model's own, before anything is trained or measured.

The loss never calls the model's ``forward``: it takes the backbone's hidden states and does what the head does with
them. A family whose head does something else, through a setting that ftcli does not know, would train on other logits
than it answers with. That is caught here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import compute_context, head_of, hidden_states, rotation_kept
from ftcli.plan.precision import DtypePlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens that are looked at.
LONGEST = 32
#: Largest relative difference (Frobenius norm) by compute dtype: one product, rounded in another place. A scale or a
#: cap that is missing shows as percents.
_ALLOWED: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


@torch.no_grad()
def check_head(model: PreTrainedModel, input_ids: Sequence[int], plan: DtypePlan, device: torch.device) -> float:
    """The relative difference between both kinds of logits on one row; the model leaves as it came.

    Args:
        input_ids: Ordinary text: no ids that stand for images.

    Raises:
        FtcliError: FT335 (exit 3) when they differ, or when the head is of a kind that the loss cannot read.
    """
    ids = torch.tensor([list(input_ids)[:LONGEST]], device=device)
    training = model.training
    model.eval()
    with rotation_kept(model), compute_context(device, plan.compute, plan.autocast):
        wanted = model(input_ids=ids, use_cache=False).logits.float()
        try:
            found = _logits(model, ids)
        except TypeError as error:
            raise _differs(model, str(error)) from error
    if training:
        model.train()
    if not bool(torch.isfinite(wanted).all()):
        return 0.0  # a broken model is not a matter of its head: training and evaluation name it
    difference = float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
    if not difference <= _ALLOWED[plan.compute]:  # NaN fails, too
        said = f"its own logits and those of the loss differ by {difference:.2g} (relative, on one row)"
        raise _differs(model, said)
    return difference


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(1, S, vocab_size) float32, as :func:`ftcli.model.loss.next_token_loss` understands the head."""
    head = head_of(model)
    hidden = hidden_states(model, {"input_ids": ids}).tensor
    if hidden.shape[-1] != head.weight.shape[1]:
        raise TypeError(f"hidden states of width {hidden.shape[-1]} do not fit a head of width {head.weight.shape[1]}")
    bias = None if head.bias is None else head.bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, head.weight.to(hidden.dtype), bias).float() * head.logit_scale
    return torch.tanh(logits / head.softcap) * head.softcap if head.softcap else logits


def _differs(model: PreTrainedModel, said: str) -> FtcliError:
    return FtcliError.single(
        "FT335",
        f"ftcli would compute the loss of a {type(model).__name__} wrongly: {said}",
        exit_code=ExitCode.PREFLIGHT,
        help="choose another model, and report this with the model's name: its config.json has a value that ftcli does "
        "not know",
    )
