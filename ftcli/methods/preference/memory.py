"""The memory of a step on pairs."""

from __future__ import annotations

from ftkernels.limits import log_prob_bytes

from ftcli.methods.preference.choice import compares
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.plan.run import MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """Two rows a pair, up to ``data.max_seq_len`` each. The loss takes log-probabilities from hidden states; the
    reference's pass keeps nothing, and is over before the policy's begins.

    Full fine-tuning that compares with a reference needs a second model. Adapters can be switched off.
    """
    recipe, shape = plan.recipe, plan.shape
    rows = plan.rows * recipe.data.max_seq_len
    on_gpu, element = plan.device.kind == "cuda", plan.dtypes.compute_bytes
    needed = log_prob_bytes(rows, shape.hidden_size, shape.vocab_size, element, on_gpu=on_gpu)
    if plan.dtypes.parameter_bytes != element or (plan.dtypes.autocast and plan.head_is_trained):
        needed += shape.vocab_size * shape.hidden_size * element
    second = recipe.lora is None and compares(recipe.train.method, recipe.preference or PreferenceConfig())
    return MethodMemory(
        seq_len=recipe.data.max_seq_len,
        loss_bytes=needed,
        reference_bytes=shape.parameters * plan.dtypes.parameter_bytes if second else 0,
    )
