"""What held-out answers tell beside their means: accuracy without the help of length, and whether answers still end."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Finding
from ftcli.evaluate.margins import Floats, length_controlled
from ftcli.methods.preference.pairs import ends_at

#: Nats by which the stop token's log-probability may fall: to half the probability (docs/preference.md has what
#: becomes of answers beyond it).
_FALLEN = math.log(2)


def controlled(margins: Floats, lengths: Floats) -> dict[str, float]:
    """The length-controlled accuracy of pairs, where there is one."""
    found = length_controlled(margins, lengths)
    return {} if found is None else {"accuracy_length_controlled": found}


def stop_columns(
    rows: Sequence[TokenizedRow], stops: Container[int], policy: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of each row's last token its log-probability, and by how much that exceeds the reference's; NaN where an answer
    was cut off, or nothing is known of the reference.

    Args:
        stops: The tokens that end an answer.
        policy, reference: Log-probabilities of the rows' last tokens, (R,).
    """
    ends = torch.tensor([ends_at(row, stops) for row in rows], device=policy.device)
    unknown = torch.full_like(policy, torch.nan)
    change = unknown if reference is None else policy - reference
    return torch.where(ends, policy, unknown), torch.where(ends, change, unknown)


def stop_measures(columns: Floats) -> dict[str, float]:
    """Means of :func:`stop_columns` (R, 2) over the rows that have them."""
    found = {}
    for name, column in zip(("stop_logp", "stop_change"), columns.T, strict=True):
        known = column[~np.isnan(column)]
        if len(known):
            found[name] = float(known.mean())
    return found


def stop_findings(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
    """FT717, a warning, where a model has forgotten to stop.

    Args:
        before, after: Held-out measures by name. What was measured before training counts where the reference is not
            known.
    """
    change = after.get("stop_change")
    if change is None and "stop_logp" in before and "stop_logp" in after:
        change = after["stop_logp"] - before["stop_logp"]
    if change is not None and change < -_FALLEN:
        yield Finding(
            "FT717",
            f"after held-out chosen answers the stop token has lost {-change:.2g} nats: {math.exp(change):.2%} of its "
            "probability are left, and answers may not end by themselves",
            help="lower train.learning_rate, train fewer steps, or set preference.sft_weight (docs/preference.md)",
            severity="warning",
        )
