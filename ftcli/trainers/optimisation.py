"""How a trainer's optimizer and learning-rate schedule are made from the recipe, and which weights are evaluated."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.optimization import get_scheduler

from ftcli.config.training import TrainConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.precision import DtypePlan
from ftcli.model.backbone import base_of
from ftcli.model.gradients import keep_gradients_in
from ftcli.model.initial import initial_of, load_over
from ftcli.model.rows import own
from ftcli.tables import code_of, optimizers, schedules
from ftcli.trainers.adamw import AdamW
from ftcli.trainers.muon import ParameterGroup

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

    from ftcli.model.stack import DecoderStack
    from ftcli.trainers.norms import GradientNorms


#: In a checkpoint, the weights that training goes on with, where those that are evaluated are others. It lies in a
#: folder of its own, since whoever loads the checkpoint as a model or adapter reads the files beside its config.
TRAINING_WEIGHTS = Path("training", "weights.safetensors")

#: Arguments by name for code that is not ours: TRL's configs, transformers' schedules.
Arguments: TypeAlias = dict[str, Any]


class OptimisationMixin:
    """Mixed into transformers' Trainer. ``settings``, ``plan``, ``own_optimizer`` (``Setup.own_optimizer``: our form of
    the recipe's optimizer is taken) and ``stack`` are set before training begins.
    """

    settings: TrainConfig
    plan: DtypePlan
    own_optimizer: bool
    #: Takes the norms of gradients while backward runs, where nothing changes them afterwards.
    norms: GradientNorms | None = None
    stack: DecoderStack | None
    model: PreTrainedModel
    optimizer: Any
    lr_scheduler: Any
    args: Any
    is_settled = False

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The recipe's optimizer; transformers' grouping of the parameters unless the optimizer needs another."""
        keep_gradients_in(getattr(torch, self.plan.gradient), self.model.parameters())
        row, args = optimizers.row(self.settings.optim), self.args
        build = row.build_own if self.own_optimizer else row.build
        if self.optimizer is None and build is not None:
            betas = (args.adam_beta1, args.adam_beta2)
            kwargs = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "params": self._groups()}
            if self.own_optimizer:
                kwargs["rounding"] = self.plan.rounding or "nearest"
            self.optimizer_cls_and_kwargs = (code_of(build), kwargs)
        elif self.optimizer is None and self.settings.loraplus_lr_ratio is not None:
            made, kwargs = self.get_optimizer_cls_and_kwargs(args, self.model)  # type: ignore[attr-defined]
            self.optimizer_cls_and_kwargs = (made, {**kwargs, "params": self._groups()})
        optimizer: Optimizer = super().create_optimizer(model)  # type: ignore[misc]
        self._keep_copies(optimizer)
        return optimizer

    def _keep_copies(self, optimizer: Optimizer) -> None:
        """Has the copies of trained weights that products read follow them: our own optimizer writes both."""
        stack = self.stack
        if stack is not None and isinstance(optimizer, AdamW):
            optimizer.copies = dict(stack.copies)
        elif stack is not None:
            optimizer.register_step_post_hook(lambda *_: stack.weights_changed())

    def clip_in_step(self) -> Tensor | None:
        """The norm of all gradients, where the optimizer clips them itself as it reads them; else None.

        torch clips before the step, in a pass of its own over all gradients: the same numbers.
        """
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, AdamW):
            return None
        if self.norms is not None:
            norm = self.norms.total()
        else:
            gradients = [own(p.grad) for p in self.model.parameters() if p.grad is not None]
            norm = self.norm_of_all(_total_norm(gradients))
        optimizer.clip = torch.clamp(self.settings.max_grad_norm / (norm + 1e-6), max=1.0)
        return norm

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of those which this process has."""
        return norm

    def _groups(self) -> list[ParameterGroup]:
        """The trained parameters in groups, of which none is empty; those with the recipe's learning rate come first.

        Under LoRA+ matrices B, and with them what has one dimension, have a higher rate
        (``peft.optimizers.create_loraplus_optimizer``). Muon is told which matrices are hidden ones, our AdamW in 8
        bits which are no embedding.
        """
        model: Any = self.model
        decays = set(self.get_decay_parameter_names(model))  # type: ignore[attr-defined]
        state = optimizers.row(self.settings.optim).state
        by_kind = state == "momentum" or (state == "blockwise" and self.own_optimizer)
        outer = _outer_parameters(model, head=state == "momentum") if by_kind else set()
        ratio = self.settings.loraplus_lr_ratio
        groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                fast = ratio is not None and ("lora_B" in name or parameter.dim() == 1)
                hidden = by_kind and parameter.dim() == 2 and id(parameter) not in outer
                groups.setdefault((fast, hidden, name in decays), []).append(parameter)
        return [
            ParameterGroup(
                params=found,
                lr=self.args.learning_rate * (ratio if fast and ratio is not None else 1.0),
                weight_decay=self.settings.weight_decay if decay else 0.0,
                hidden=hidden,
            )
            for (fast, hidden, decay), found in sorted(groups.items(), key=lambda item: item[0][0])
        ]

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """transformers' schedule with the recipe's arguments.

        Raises FtcliError FT272 (exit 2) for stages of a schedule that are longer than training.
        """
        if self.lr_scheduler is None:
            warm_up = schedules.steps_of(self.settings.warmup_steps, num_training_steps)
            made = self.optimizer if optimizer is None else optimizer
            for group in made.param_groups:  # schedule-free optimizers warm up by themselves
                if "warmup_steps" in group:
                    group["warmup_steps"] = warm_up
            arguments = schedule_arguments(self.settings, num_training_steps)
            with warnings.catch_warnings():  # of a stable stage that is given beside the number of all steps
                warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
                self.lr_scheduler = get_scheduler(
                    self.settings.lr_scheduler_type, made, warm_up, num_training_steps, arguments
                )
            self._created_lr_scheduler = True
        scheduler: LRScheduler = self.lr_scheduler
        return scheduler

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # transformers steps schedules here by a metric that its own arguments name.
        metrics: dict[str, float] = self.evaluate()  # type: ignore[attr-defined]
        return metrics

    def schedule_by(self, value: float | None) -> None:
        """Tells a schedule that looks at evaluations what one has measured: the smaller the better."""
        if schedules.row(self.settings.lr_scheduler_type).by_evaluations and value is not None:
            self.lr_scheduler.step(value)

    # -- weights that are evaluated --------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        initial = initial_of(self.model)
        if initial is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            load_over(self.model, initial, Path(resume_from_checkpoint))

    @property
    def _averages(self) -> bool:
        row = optimizers.row(self.settings.optim)
        return row.schedule_free and self.optimizer is not None and not self.is_settled

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within the block the model has the weights that are to be evaluated and saved.

        Schedule-free optimizers train at another point than the average that they find. It takes the place of the
        weights, which come back afterwards as they were, bit for bit: no weight depends on when it was looked at.
        """
        if not self._averages:
            yield
            return
        training = [(p, p.detach().clone()) for p in self.model.parameters() if p.requires_grad]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                for parameter, value in training:
                    parameter.copy_(value)

    def settle(self) -> None:
        """Training is over: the model keeps the weights that are to be evaluated."""
        if self._averages:
            self.optimizer.eval()
        self.is_settled = True

    def save_training_weights(self, folder: Path) -> None:
        """Writes the weights that training goes on with, where :meth:`evaluated_weights` are others."""
        if self._averages:
            from safetensors.torch import save_file

            trained = {n: p.detach().contiguous() for n, p in self.model.named_parameters() if p.requires_grad}
            (folder / TRAINING_WEIGHTS).parent.mkdir()
            save_file(trained, folder / TRAINING_WEIGHTS)

    def load_training_weights(self, folder: Path) -> None:
        """Takes what :meth:`save_training_weights` wrote, if anything. Raises ValueError where it does not fit."""
        path = folder / TRAINING_WEIGHTS
        if not path.exists():
            return
        from safetensors.torch import load_file

        saved = load_file(path)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if set(saved) != set(trained):
            raise ValueError(f"{TRAINING_WEIGHTS} holds parameters other than those trained")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def schedule_arguments(settings: TrainConfig, all_steps: int) -> Arguments:
    """`train.lr_scheduler_kwargs` with numbers of steps in place of fractions. Raises FtcliError FT272 (exit 2)."""
    name, arguments = settings.lr_scheduler_type, dict(settings.lr_scheduler_kwargs)
    stages = schedules.stages(name, arguments, settings.warmup_steps, all_steps)
    problem = schedules.stages_too_long(name, stages, all_steps)
    if problem is not None:
        raise FtcliError.single("FT272", problem, exit_code=ExitCode.RECIPE, help=schedules.SHORTER)
    return {**arguments, **{stage: steps for stage, steps in stages.items() if stage in arguments}}


def _outer_parameters(model: nn.Module, *, head: bool) -> set[int]:
    """Parameters of embedding and ``head``, and adapters of stacks of experts, which are no matrices of one layer."""
    from peft.tuners.lora.layer import ParamWrapper

    base: Any = base_of(model)
    outer = [base.get_input_embeddings(), base.get_output_embeddings() if head else None]
    outer += [module for module in model.modules() if isinstance(module, ParamWrapper)]
    return {id(parameter) for module in outer if module is not None for parameter in module.parameters()}


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together: torch's own, which would round it to bfloat16 where gradients are."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
