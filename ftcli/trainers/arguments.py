"""transformers' arguments for a job, and what keeps a trainer's constructor from changing the model or the process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.trainer_utils import SaveStrategy

from ftcli.job import Job
from ftcli.reporting import Reporter
from ftcli.tables import optimizers, policies
from ftcli.train.optimizer import Arguments

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainingArguments

_NO_SAVING = {"save_strategy": SaveStrategy.NO, "push_to_hub": False, "report_to": "none"}


def training_arguments(job: Job, scratch_dir: str) -> Arguments:
    """transformers' arguments that all methods share, from the recipe."""
    recipe, train, device = job.recipe, job.recipe.train, job.device
    return {
        **_NO_SAVING,
        "output_dir": scratch_dir,
        "seed": recipe.run.seed,
        "data_seed": recipe.run.seed,
        "num_train_epochs": train.num_train_epochs,
        "max_steps": train.max_steps if train.max_steps is not None else -1,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "learning_rate": train.learning_rate,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "optim": job.report.setup.optim if optimizers.row(train.optim).build is None else "adamw_torch",
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm,
        "neftune_noise_alpha": train.neftune_noise_alpha,
        # The other policies are set on the layers: see ftcli.model.checkpointing.
        "gradient_checkpointing": policies.row(train.checkpointing).by_transformers,
        "logging_steps": recipe.logging.every_steps,
        # Our own precision plan decides; accelerate must not wrap the model in a second autocast.
        "bf16": False,
        "fp16": False,
        "use_cpu": device.type == "cpu",
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "dataloader_pin_memory": device.type == "cuda",
        # A copy of a batch that is waited for would wait for everything that the device still has to do.
        "accelerator_config": {"non_blocking": device.type == "cuda"},
    }


def use_one_gpu(args: TrainingArguments, reporter: Reporter) -> None:
    """Keeps transformers from spreading the model over all visible GPUs (DataParallel): one is used, and said so."""
    if args.n_gpu > 1:
        reporter.info(f"{args.n_gpu} GPUs are visible; the first is used (CUDA_VISIBLE_DEVICES chooses another)")
        args._n_gpu = 1


@contextmanager
def own_ranks() -> Iterator[None]:
    """A block in which transformers does not warn that nobody has told it of the other ranks."""
    logger = logging.getLogger("transformers.training_args")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def config_kept(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Takes back what a trainer's constructor writes into the model's config.

    It turns caches off and, in models with experts, the router's logits on. Generation then fails or is slow, and a
    full fine-tune would be saved with another config than its base has. Training itself asks for no cache in each call.
    """
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    before = [(config, dict(vars(config))) for config in configs]
    yield
    for config, values in before:
        for name in set(vars(config)) | set(values):
            if name in values:
                setattr(config, name, values[name])
            else:
                delattr(config, name)
