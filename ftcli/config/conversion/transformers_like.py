"""What the recipes of TRL and LLaMA-Factory, which pass settings on to transformers' trainer, leave unsaid."""

from __future__ import annotations

from ftcli.config.conversion.draft import Draft


def trainer_defaults(draft: Draft) -> None:
    """Defaults of transformers' TrainingArguments (5.x) that are not ours."""
    draft.default("train.num_train_epochs", 3.0)
    draft.default("train.per_device_train_batch_size", 8)
    draft.default("train.optim", "adamw_torch_fused")
