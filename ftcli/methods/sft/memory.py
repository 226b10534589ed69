"""The memory of a step of supervised fine-tuning."""

from __future__ import annotations

from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Rows that hold their answers, up to ``data.max_seq_len``."""
    return MethodMemory(seq_len=plan.recipe.data.max_seq_len)
