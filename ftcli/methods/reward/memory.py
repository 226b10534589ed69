"""The memory of a step of reward modelling."""

from __future__ import annotations

from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each. No logits and no log-probabilities are made."""
    return MethodMemory(seq_len=plan.recipe.data.max_seq_len, loss_bytes=0)
