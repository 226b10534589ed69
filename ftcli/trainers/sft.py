"""Supervised fine-tuning: TRL's SFTTrainer with our collator and a loss that never holds all logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from ftcli.data.collate import EpochCollator
from ftcli.data.order import Epochs, EpochSampler, RankSampler, plain_epochs
from ftcli.data.parts import part_of
from ftcli.data.tokens import TokenizedRow
from ftcli.facts.precision import DtypePlan
from ftcli.job import Job
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import base_of, compute_context, head_of, root_of
from ftcli.model.checkpointing import use_checkpointing
from ftcli.model.host_embedding import use_host_embedding
from ftcli.model.loss import SUPERVISED, forward_loss, next_tokens, target_positions
from ftcli.model.tied import use_tied_embedding
from ftcli.preflight.memory.terms import BACKWARD
from ftcli.reporting import Reporter
from ftcli.tables import optimizers, policies
from ftcli.trainers.base import NO_SAVING, RunTrainerMixin
from ftcli.trainers.graphed import use_stack
from ftcli.trainers.hooks import TrainerHooks
from ftcli.trainers.norms import GradientNorms
from ftcli.trainers.optimisation import Arguments
from ftcli.trainers.quantised import train_quantised
from ftcli.trainers.scaling import use_loss_scaling
from ftcli.trainers.spread import SpreadMixin
from ftcli.trainers.together import COUNTS_KEY, TogetherMixin, host_counts, sequence_part
from ftcli.trainers.view import TrainedView
from ftcli.trainers.watch import ROWS_KEY

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, TrainingArguments

    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.model.stack import DecoderStack
    from ftcli.run.group import RankGroup


class SftTrainer(SpreadMixin, TogetherMixin, RunTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer; the loss goes from hidden states to cross-entropy in chunks of rows.

    ``sequence`` is this rank's part of each row, where ranks share rows.
    """

    plan: DtypePlan
    epochs: Epochs
    stack: DecoderStack | None
    sequence: SequencePart | None = None

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> EpochSampler:
        return self.sampler()

    def sampler(self) -> EpochSampler:
        """The order of this process's sequences."""
        if self.group is None:
            return EpochSampler(self.epochs)
        parts = 1 if self.sequence is None else self.sequence.parts
        size = self.args.per_device_train_batch_size
        return RankSampler(self.epochs, size, self.group.rank // parts, self.group.size // parts)

    def _wrap_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return model if isinstance(model, TrainedView) else TrainedView(super()._wrap_model(model, *args, **kwargs))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Mean loss in nats over the supervised tokens of the whole accumulated batch.

        Divided by ``num_items_in_batch``, so that any split into micro-batches gives the same gradient.
        """
        if return_outputs:
            raise ValueError("logits are never kept; evaluation goes through ftcli.evaluate")
        # Padded rows come with a mask, others with their lengths. The sum of either is the number of tokens.
        real = inputs["attention_mask"] if "attention_mask" in inputs else inputs["lengths"]
        self.count_tokens(real, computed=inputs["input_ids"].numel())
        inputs = {name: value for name, value in inputs.items() if name != "lengths"}
        device = inputs["input_ids"].device
        items = num_items_in_batch
        if items is None:
            items = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        with compute_context(device, self.plan.compute, self.plan.autocast):
            loss = forward_loss(self.model, inputs, num_items=items, stack=self.stack, sequence=self.sequence).loss
        self.watch_loss(loss)
        self.phase = BACKWARD
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs without TRL's extra metrics: they come from a forward pass that is not ours."""
        super(SFTTrainer, self).log(logs, start_time)


@dataclass(frozen=True, slots=True)
class RowNamingCollator:
    """A collator that also says which sequences a batch holds, so that messages can name the rows of a bad batch, and
    where its supervised positions are, for which the loss would have to wait for the device.
    """

    collate: EpochCollator
    vocab_size: int
    sequence: SequencePart | None = None

    def __call__(self, chosen: Sequence[dict[str, int]]) -> dict[str, Tensor | list[int]]:
        """The batch, or this rank's part of it; under ROWS_KEY the numbers of its sequences, under SUPERVISED the
        positions, and under COUNTS_KEY how many tokens it has. The sequence after the last one stands for a batch of
        which nothing is learnt.
        """
        blank = chosen[0]["index"] == self.collate.epochs.units
        batch = self.collate([{"index": 0}] if blank else chosen)
        if blank:
            batch["labels"].fill_(IGNORE_INDEX)
        if self.sequence is not None:
            batch = part_of(batch, self.sequence.part, self.sequence.parts)
        targets = batch["targets"].reshape(-1) if "targets" in batch else next_tokens(batch["labels"])
        supervised = target_positions(targets, self.vocab_size)
        rows = [] if blank else [row["index"] for row in chosen]
        return {**batch, SUPERVISED: supervised, ROWS_KEY: rows, COUNTS_KEY: host_counts(batch, supervised, blank)}


def training_arguments(job: Job, scratch_dir: str) -> Arguments:
    """transformers' arguments that all methods share, from the recipe."""
    recipe, train, device = job.recipe, job.recipe.train, job.device
    return {
        **NO_SAVING,
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


def use_policy(job: Job, model: PreTrainedModel | PeftModel) -> None:
    """Sets the job's checkpointing policy on its model, which is on the kernels."""
    train = job.recipe.train
    use_checkpointing(
        model, train.checkpointing, offloaded=job.offloaded, uncheckpointed_layers=train.uncheckpointed_layers
    )
    if job.report.setup.host_table_bytes:
        use_host_embedding(model, job.reporter)
    if job.recipe.lora is None and root_of(model) is None:
        use_tied_embedding(base_of(model))


def _numbers(count: int) -> Dataset:
    """The numbers below ``count``, under "index". With ``from_dict`` datasets would hash them all, pickled."""
    return Dataset(pa.table({"index": pa.array(range(count), pa.int64())}), fingerprint=f"below-{count}")


def build_sft_trainer(
    job: Job,
    model: PreTrainedModel | PeftModel,
    data: Epochs | Sequence[TokenizedRow],
    hooks: TrainerHooks,
    scratch_dir: str,
    group: RankGroup | None = None,
) -> SftTrainer:
    """A trainer over tokenized ``data``, ready for :meth:`train`.

    Args:
        data: What an epoch holds, and in which order; or rows, of which an epoch holds each once.
        scratch_dir: A folder for the files that transformers insists on writing; none of them is part of the run.
        group: The ranks that train together; None for one process.
    """
    train = job.recipe.train
    epochs = data if isinstance(data, Epochs) else plain_epochs(data, job.recipe.run.seed)
    use_policy(job, model)
    with own_ranks():
        args = SFTConfig(
            **training_arguments(job, scratch_dir),
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
    use_one_gpu(args, job.reporter)
    sequence = sequence_part(group, job.recipe.launch.context_parallel_size)
    collate = EpochCollator(epochs, job.pad_token_id, job.batches(model))
    with config_kept(model):
        trainer = SftTrainer(
            model=model,
            args=args,
            data_collator=RowNamingCollator(collate, head_of(model).weight.shape[0], sequence),
            # The trainer draws numbers; the collator reads those rows from the memory-mapped files.
            train_dataset=_numbers(epochs.units + (group is not None)),
            processing_class=job.tokenizer,
        )
    trainer.plan, trainer.own_optimizer = job.plan, job.report.setup.own_optimizer
    trainer.group, trainer.sequence = group, sequence
    if job.plan.loss_scaling:
        use_loss_scaling(trainer, job.device)
    trainer.epochs = epochs
    trainer.stack, trainer.graphs = use_stack(job, model)
    if trainer.own_optimizer and group is None and not job.plan.loss_scaling and job.device.type == "cuda":
        trainer.norms = GradientNorms([p for p in model.parameters() if p.requires_grad])
    trainer.model_accepts_loss_kwargs = True  # our loss is normalised over the whole accumulated batch
    train_quantised(trainer, job.recipe.quantization, trained=job.recipe.lora is None)
    trainer.bind(hooks, train, lambda unit: [tokens.row.origin for tokens in epochs.members(unit)])
    return trainer
