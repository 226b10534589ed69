"""The memory of a step on pairs."""

from __future__ import annotations

from ftcli.methods.preference.choice import needs_second_model
from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each, at worst with nothing in common; or this rank's part of them.
    The loss takes log-probabilities from hidden states, which are picked out for it where prompts are shared; the
    reference's pass keeps nothing, and is over before the policy's begins.

    Full fine-tuning whose reference is computed in each step needs a second model, sharded like the first. Adapters can
    be switched off.
    """
    recipe = plan.recipe
    tokens = plan.rows * -(-recipe.data.max_seq_len // plan.shares)
    picked = 2 * tokens * plan.sizes.hidden_size * plan.dtypes.compute_bytes  # and their gradient
    reference = -(-plan.sizes.parameters // plan.shard_size) * plan.dtypes.parameter_bytes
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(tokens) + (picked if plan.execution.batches.shares_prompts else 0),
        reference_bytes=reference if needs_second_model(recipe) else 0,
    )
