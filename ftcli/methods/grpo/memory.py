"""The memory of a GRPO step."""

from __future__ import annotations

from ftcli.facts.generation import MOST_ROWS
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.paths import expanded
from ftcli.plan.run import Generation, MethodMemory, RunPlan


def memory(plan: RunPlan) -> MethodMemory:
    """The completions of a generation batch are made together, as many as GRPO decodes at once. The loss takes
    log-probabilities from hidden states.

    Full fine-tuning with ``beta`` needs a second model as reference. Adapters need none: they can be switched off.
    Reward models stay beside the policy, in bfloat16.
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
        reference_bytes=(plan.sizes.parameters * plan.dtypes.parameter_bytes if second else 0)
        + _reward_bytes(settings),
        generation=Generation(min(completions, MOST_ROWS), settings.max_prompt_length, seq_len),
    )


def _reward_bytes(settings: GrpoConfig) -> int:
    """The weights of the recipe's reward models as they are stored; 0 for folders that are not there."""
    folders = {reward.model for reward in settings.rewards if reward.file is None and reward.model is not None}
    return sum(path.stat().st_size for folder in folders for path in expanded(folder).glob("*.safetensors"))
