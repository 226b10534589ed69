"""What each training method decides about the memory of a step: the code of :mod:`ftcli.tables.methods`."""

from __future__ import annotations

from ftcli.preflight.memory.setup import Generation, MethodMemory, Setup

#: Rows and columns of the one tile of logits in TRL's fused head.
_TRL_TILE = (4096, 2048)


def supervised(setup: Setup) -> MethodMemory:
    """Rows that hold their answers, up to ``data.max_seq_len``."""
    return MethodMemory(seq_len=setup.recipe.data.max_seq_len)


def grpo(setup: Setup) -> MethodMemory:
    """All completions of an optimizer step are generated at once; the loss is TRL's.

    Full fine-tuning with ``beta`` needs a second model as reference. Adapters need none: they can be switched off.
    """
    recipe, train = setup.recipe, setup.recipe.train
    settings = recipe.grpo
    if settings is None:
        return supervised(setup)
    seq_len = settings.max_prompt_length + settings.max_completion_length
    tokens = train.per_device_train_batch_size * seq_len
    second = recipe.lora is None and settings.beta > 0
    completions = train.per_device_train_batch_size * train.gradient_accumulation_steps
    return MethodMemory(
        seq_len=seq_len,
        loss_bytes=_trl_loss_bytes(tokens, setup.shape.hidden_size, setup.plan.compute_bytes),
        reference_bytes=setup.shape.parameters * setup.plan.parameter_bytes if second else 0,
        generation=Generation(completions, settings.max_prompt_length, seq_len),
    )


def _trl_loss_bytes(tokens: int, hidden_size: int, element: int) -> int:
    """TRL's fused head: one tile of logits, two copies of the hidden states and their float32 gradient."""
    rows, columns = _TRL_TILE
    return min(rows, tokens) * columns * 4 + tokens * hidden_size * (2 * element + 4)
