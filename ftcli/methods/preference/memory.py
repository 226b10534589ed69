"""The memory of a step on pairs."""

from __future__ import annotations

from ftcli.methods.preference.choice import needs_second_model
from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each. The loss takes log-probabilities from hidden states; the
    reference's pass keeps nothing, and is over before the policy's begins.

    Full fine-tuning whose reference is computed in each step needs a second model. Adapters can be switched off.
    """
    recipe = plan.recipe
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(plan.rows * recipe.data.max_seq_len),
        reference_bytes=plan.shape.parameters * plan.dtypes.parameter_bytes if needs_second_model(recipe) else 0,
    )
