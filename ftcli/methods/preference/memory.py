"""The memory of a step on pairs."""

from __future__ import annotations

from ftcli.methods.preference.choice import compares
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each, of which a rank has its part where ranks share rows. The loss takes log-probabilities from hidden states; the
    reference's pass keeps nothing, and is over before the policy's begins.

    Full fine-tuning that compares with a reference needs a second model, sharded where the first one is. Adapters can be
    switched off.
    """
    recipe = plan.recipe
    second = recipe.lora is None and compares(recipe.train.method, recipe.preference or PreferenceConfig())
    own_rows = plan.rows * -(-recipe.data.max_seq_len // plan.shares)
    parameters = -(-plan.shape.parameters // plan.shard_size)
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=plan.log_prob_bytes(own_rows),
        reference_bytes=parameters * plan.dtypes.parameter_bytes if second else 0,
    )
