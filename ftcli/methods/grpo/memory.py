"""The memory of a GRPO step."""

from __future__ import annotations

from ftcli.facts.generation import MOST_ROWS
from ftcli.plan.run import Generation, MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """The completions of a generation batch are made together, as many as GRPO decodes at once. The loss takes
    log-probabilities from hidden states.

    Full fine-tuning with ``beta`` needs a second model as reference. Adapters need none: they can be switched off.
    """
    recipe, train = plan.recipe, plan.recipe.train
    settings = recipe.grpo
    if settings is None:
        return MethodMemory(seq_len=recipe.data.max_seq_len)
    seq_len = settings.max_prompt_length + settings.max_completion_length
    second = recipe.lora is None and settings.beta > 0
    completions = train.per_device_train_batch_size * settings.micro_batches(train.gradient_accumulation_steps)
    return MethodMemory(
        seq_len=seq_len,
        loss_bytes=plan.log_prob_bytes(train.per_device_train_batch_size * settings.max_completion_length),
        reference_bytes=plan.shape.parameters * plan.dtypes.parameter_bytes if second else 0,
        generation=Generation(min(completions, MOST_ROWS), settings.max_prompt_length, seq_len),
    )
