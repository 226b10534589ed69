"""Builds the training loop of a job's model: checkpointing policy, decoder stack, optimizer, ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import set_seed

from ftcli.config.model import QuantizationConfig
from ftcli.job import Job
from ftcli.model.backbone import base_of, root_of, use_tied_embedding
from ftcli.model.cuda_graphs import GraphRunner
from ftcli.model.fused import DecoderStack, stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.offload import use_host_embedding
from ftcli.tables import code_of, policies, quantizations
from ftcli.train.loop import Objective, StepWatcher, TrainerHooks, TrainingLoop
from ftcli.train.optimizer import Optimization
from ftcli.train.parallel import Parallel, sequence_part

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup

#: Makes a method's objective of the decoder stack and of this rank's part of each row.
MakeObjective = Callable[["DecoderStack | None", "SequencePart | None"], Objective]


def build_loop(
    job: Job,
    model: PreTrainedModel | PeftModel,
    make_objective: MakeObjective,
    hooks: TrainerHooks,
    group: RankGroup | None = None,
) -> TrainingLoop:
    """A loop over the objective's micro-batches, ready for :meth:`TrainingLoop.train`.

    Args:
        group: The ranks that train together; None for one process.
    """
    train, plan = job.recipe.train, job.plan
    use_policy(job, model)
    _tell_gpus(job, group)
    set_seed(job.recipe.run.seed)
    if policies.row(train.checkpointing).by_transformers:
        _checkpoint_layers(model)
    sequence = sequence_part(group, job.recipe.launch.context_parallel_size)
    stack, graphs = use_stack(job, model)
    objective = make_objective(stack, sequence)
    steps = train.max_steps or math.ceil(train.num_train_epochs * objective.steps_per_epoch)
    parallel = Parallel(group, model, seed=job.recipe.run.seed, batch_size=train.per_device_train_batch_size)
    optimization = Optimization(
        model,
        train,
        job.dtypes,
        plan.optim,
        plan.own_optimizer,
        steps,
        device=job.device,
        stack=stack,
        parallel=parallel,
    )
    return TrainingLoop(
        model,
        objective,
        optimization,
        parallel,
        hooks,
        steps=steps,
        device=job.device,
        watchers=_quantized(model, job.recipe.quantization) if job.recipe.lora is None else (),
        setting_up=_noise(model, train.neftune_noise_alpha),
        graphs=graphs,
    )


def use_policy(job: Job, model: PreTrainedModel | PeftModel) -> None:
    """Sets the job's checkpointing policy on its model, which is on the kernels."""
    train = job.recipe.train
    use_checkpointing(
        model, train.checkpointing, offloaded=job.offloaded, uncheckpointed_layers=train.uncheckpointed_layers
    )
    if job.plan.host_table_bytes:
        use_host_embedding(model, job.reporter)
    if job.recipe.lora is None and root_of(model) is None:
        use_tied_embedding(base_of(model))


def _checkpoint_layers(model: Any) -> None:
    """Sets transformers' own checkpointing. Behind a frozen embedding nothing would need a gradient otherwise."""
    base: Any = base_of(model)
    enable = getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)  # before 5.23
    enable({"use_reentrant": False})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()


def _tell_gpus(job: Job, group: RankGroup | None) -> None:
    visible = torch.cuda.device_count() if job.device.type == "cuda" and group is None else 1
    if visible > 1:
        job.reporter.info(f"{visible} GPUs are visible; the first is used (CUDA_VISIBLE_DEVICES chooses another)")


class QuantizedTraining(StepWatcher):
    """Has a model quantize its trained weights once a step, and sets how far: all of it after ``steps`` steps.

    The share follows from the number of the step alone, so a resumed run has the share of one that never stopped.

    Args:
        written: Tells a model that its weights have changed.
        share: Sets a model's share of quantized values, 0 to 1.
    """

    def __init__(
        self,
        model: nn.Module,
        written: Callable[[nn.Module], None],
        share: Callable[[nn.Module, float], None],
        steps: int,
    ) -> None:
        self._model, self._written, self._share, self._steps = model, written, share, steps

    def begin(self, step: int) -> None:
        """Weights may have been loaded, or put back."""
        self._written(self._model)
        if self._steps:
            self._share(self._model, min(step / self._steps, 1.0))

    def stepped(self, step: int) -> None:
        """The optimizer has written."""
        self._written(self._model)

    def end(self) -> None:
        """Makes layers read their weights anew: those that are evaluated and saved may be an average."""
        self._written(self._model)


def _quantized(model: nn.Module, settings: QuantizationConfig) -> tuple[StepWatcher, ...]:
    """Watchers that a quantization needs to train its weights; none for most methods."""
    training = quantizations.row(settings.method).training
    if training is None:
        return ()
    steps = settings.lambda_warmup_steps
    return (QuantizedTraining(model, code_of(training.written), code_of(training.share), steps),)


def _noise(model: PreTrainedModel | PeftModel, alpha: float | None) -> Callable[[], AbstractContextManager[object]]:
    return nullcontext if alpha is None else partial(noisy_embeddings, model, alpha)


@contextmanager
def noisy_embeddings(model: PreTrainedModel | PeftModel, alpha: float) -> Iterator[None]:
    """NEFTune: within the block embeddings e in training are e + U(-a, a), a = alpha / sqrt(length x width).

    Source: Jain et al. 2023, arXiv:2310.05914.
    """
    embedding: Any = base_of(model).get_input_embeddings()
    handle = embedding.register_forward_hook(partial(add_noise, alpha))
    try:
        yield
    finally:
        handle.remove()


def add_noise(alpha: float, embedding: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """The (rows, length, width) output of an embedding, with noise in training."""
    if not embedding.training:
        return output
    most = float(alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2))))
    return output + torch.zeros_like(output).uniform_(-most, most)


def why_not_graphed(job: Job, model: PreTrainedModel | PeftModel) -> str | None:
    """The reason why the layers of ``model`` are trained without CUDA graphs, as one clause; None if they have them."""
    reason: str | None = job.plan.why_no_graphs
    if reason is not None:
        return reason
    stack = stack_of(model, getattr(torch, job.dtypes.compute))
    return stack if isinstance(stack, str) else None


def use_stack(job: Job, model: PreTrainedModel | PeftModel) -> tuple[DecoderStack | None, GraphRunner | None]:
    """The model's layers as one function, where all are on the kernels, and the graphs that run them, if there are.

    Layers whose weights are sharded over ranks are called one by one, since each has its weights in its own call alone.
    """
    if root_of(model) is not None:
        return None, None
    stack = stack_of(model, getattr(torch, job.dtypes.compute))
    if isinstance(stack, str):
        return None, None
    if why_not_graphed(job, model):
        return stack, None
    memory = job.report.memory
    pool = 0 if memory is None else memory.graph_pool_bytes
    stack.runner = runner = GraphRunner(stack, job.plan.graph_tokens, job.reporter, pool_bytes=pool)
    return stack, runner
