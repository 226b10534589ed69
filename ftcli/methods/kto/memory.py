"""The memory of a step on labelled answers."""

from __future__ import annotations

from ftcli.methods.preference.choice import needs_second_model
from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Rows of up to ``data.max_seq_len`` tokens, or this rank's part of them. The loss takes log-probabilities from
    hidden states. The passes of the reference and of mismatched rows keep nothing, and are over before the policy's
    begins.

    Full fine-tuning whose reference is computed in each step needs a second model, sharded like the first. Adapters can
    be switched off.
    """
    recipe = plan.recipe
    reference = -(-plan.sizes.parameters // plan.shard_size) * plan.dtypes.parameter_bytes
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(plan.rows * -(-recipe.data.max_seq_len // plan.shares)),
        reference_bytes=reference if needs_second_model(recipe) else 0,
    )
