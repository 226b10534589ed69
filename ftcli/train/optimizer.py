"""The optimizer of a run, its learning-rate schedule and loss scale: from gradients to new weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names
from transformers.training_args import OptimizerNames

from ftcli.config.training import TrainConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.backbone import base_of
from ftcli.model.cuda_graphs import keep_gradients_in
from ftcli.model.shards import local_shard
from ftcli.plan.precision import DtypePlan
from ftcli.tables import code_of, optimizers, schedules
from ftcli.train.adamw import AdamW, ParameterGroup

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel, TrainingArguments

    from ftcli.model.fused import DecoderStack
    from ftcli.train.parallel import Parallel


def is_better(value: float, best: float, threshold: float, *, relative: bool) -> bool:
    """True if ``value`` is less than ``best`` by more than the threshold, or by that share of its size, of any sign.

    torch and transformers multiply the best by 1 - threshold, which lies above a negative best: an evaluation that
    repeats it would count as better, and the rate would never fall. Scores of tasks are such numbers, since what is
    told is to be minimised.
    """
    if not relative:
        return value < best - threshold
    return value < best * (1.0 - threshold if best > 0 else 1.0 + threshold)


class _Plateau(ReduceLROnPlateau):
    def _is_better(self, a: float, best: float) -> bool:
        return is_better(a, best, self.threshold, relative=self.threshold_mode == "rel")


class _Greedy(GreedyLR):  # type: ignore[misc]  # transformers is not typed
    def is_better(self, current: float, best: float) -> bool:
        return is_better(current, best, self.threshold, relative=self.threshold_mode == "rel")


_SCHEDULES: dict[str, Any] = {"reduce_lr_on_plateau": _Plateau, "greedy": _Greedy}


#: In a checkpoint, the weights that training goes on with, where those that are evaluated are others. It lies in a
#: folder of its own, since whoever loads the checkpoint as a model or adapter reads the files beside its config.
TRAINING_WEIGHTS = Path("training", "weights.safetensors")
#: Arguments by name for code that is not ours: TRL's configs, transformers' schedules.
Arguments: TypeAlias = dict[str, Any]

#: A loss scale starts at 2^16. So many steps skipped in a row leave it below 2^-4, where nothing overflows but what is
#: infinite to begin with.
MOST_SKIPPED = 20
#: Parameters of a name with one of these have no weight decay, nor have those of LayerNorm modules: transformers' rule.
_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class Optimization:
    """Optimizer, schedule and loss scale of one run.

    Args:
        optim: Its row in :mod:`ftcli.tables.optimizers`; ``own``: whether ftcli's own form of it is taken.
        steps: Optimizer steps of the whole run.
        stack: The decoder layers, whose copies of trained weights follow the optimizer; None where there are none.
        parallel: Joins the gradient norms of ranks that each hold a shard.

    Raises FtcliError FT272 (exit 2) for stages of a schedule that are longer than training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainConfig,
        plan: DtypePlan,
        optim: str,
        own: bool,
        steps: int,
        *,
        device: torch.device,
        stack: DecoderStack | None,
        parallel: Parallel,
    ) -> None:
        self.model, self.settings, self.parallel = model, settings, parallel
        self.trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, settings, plan, optim, own)
        follow_weights(self.optimizer, stack)
        self.schedule = make_schedule(self.optimizer, settings, steps)
        self.scaler = torch.amp.GradScaler(device.type) if plan.loss_scaling else None
        self._skipped = 0
        self._settled = False
        self._norms: GradientNorms | None = None
        if own and parallel.group is None and not plan.loss_scaling and device.type == "cuda":
            self._norms = GradientNorms([p for _, p in self.trained])

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of ``loss`` to those of the step, multiplied by the loss scale."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self) -> Tensor:
        """Clips the gradients of all trained weights together; their norm before, as a scalar on the device.

        Our own AdamW multiplies them as it reads them: the same numbers in one pass less.
        """
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        limit = self.settings.max_grad_norm
        if not isinstance(self.optimizer, AdamW):
            return torch.nn.utils.clip_grad_norm_([p for _, p in self.trained], limit)
        if self._norms is not None:
            norm = self._norms.total()
        else:
            gradients = [local_shard(p.grad) for _, p in self.trained if p.grad is not None]
            norm = self.parallel.norm_of_all(total_norm(gradients))
        self.optimizer.clip = clipping(norm, limit)
        return norm

    def step(self, number: int) -> float:
        """Changes the weights and forgets the gradients; the learning rate that the step had.

        Raises FtcliError FT702 (exit 6) when no loss scale is small enough.
        """
        self._schedule_free("train")
        done = True
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            done = self.scaler.get_scale() >= before  # it is halved where a gradient was infinite
            self._note_skipped(skipped=not done, step=number)
        rate = self.learning_rate()
        if done and not schedules.row(self.settings.lr_scheduler_type).by_evaluations:
            self.schedule.step()
        self.zero_grad()
        return rate

    def zero_grad(self) -> None:
        for _, parameter in self.trained:
            parameter.grad = None

    def learning_rate(self) -> float:
        """The learning rate of the first group of parameters."""
        by_evaluations = schedules.row(self.settings.lr_scheduler_type).by_evaluations
        rates = [self.optimizer.param_groups[0]["lr"]] if by_evaluations else self.schedule.get_last_lr()
        return float(rates[0])

    def schedule_by(self, value: float | None) -> None:
        """Tells a schedule that looks at evaluations what one has measured: the smaller the better."""
        if schedules.row(self.settings.lr_scheduler_type).by_evaluations and value is not None:
            self.schedule.step(value)  # type: ignore[arg-type]  # one that looks at evaluations takes a number

    def _note_skipped(self, *, skipped: bool, step: int) -> None:
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= MOST_SKIPPED:
            message = (
                f"the gradients overflow float16 at every loss scale, {MOST_SKIPPED} steps in a row up to step {step}"
            )
            help = "use model.dtype: bfloat16 or float32, or a smaller learning rate; the last checkpoint is whole"
            raise FtcliError.single("FT702", message, exit_code=ExitCode.DIVERGED, help=help)

    # -- weights that are evaluated --------------------------------------------------------------------------

    @property
    def _averages(self) -> bool:
        return optimizers.row(self.settings.optim).schedule_free and not self._settled

    def _schedule_free(self, mode: str) -> None:
        if self._averages:
            getattr(self.optimizer, mode)()

    def begin(self) -> None:
        """Before the first micro-batch of a step: a schedule-free optimizer trains at a point of its own."""
        self._schedule_free("train")

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Within the block the model has the weights that are to be evaluated and saved.

        Schedule-free optimizers train at another point than the average that they find. It takes the place of the
        weights, which come back afterwards as they were, bit for bit: no weight depends on when it was looked at.
        """
        if not self._averages:
            yield
            return
        training = [(p, p.detach().clone()) for _, p in self.trained]
        self._schedule_free("eval")
        try:
            yield
        finally:
            self._schedule_free("train")
            with torch.no_grad():
                for parameter, value in training:
                    parameter.copy_(value)

    def settle(self) -> None:
        """Training is over: the model keeps the weights that are to be evaluated."""
        self._schedule_free("eval")
        self._settled = True

    def save_training_weights(self, folder: Path) -> None:
        """Writes the weights that training goes on with, where :meth:`evaluated_weights` are others."""
        if self._averages:
            save_training_weights(self.trained, folder)


def make_optimizer(
    model: PreTrainedModel, settings: TrainConfig, plan: DtypePlan, optim: str, own_form: bool
) -> Optimizer:
    """The recipe's optimizer over what ``model`` trains: ours, a class of the table's row, or transformers' choice."""
    keep_gradients_in(getattr(torch, plan.gradient), model.parameters())
    row = optimizers.row(settings.optim)
    build = row.build_own if own_form else row.build
    if build is not None:
        betas = (settings.adam_beta1, settings.adam_beta2)
        more = {"rounding": plan.rounding or "nearest"} if own_form else {}
        groups = parameter_groups(model, settings, own_form)
        made: Optimizer = code_of(build)(
            lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon, params=groups, **more
        )
        return made
    asked = SimpleNamespace(
        optim=OptimizerNames(optim),
        optim_args=None,
        learning_rate=settings.learning_rate,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_epsilon=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
    )
    # Of all that its arguments are this is what it reads; the whole would set up devices and ranks.
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(cast("TrainingArguments", asked), model)
    by_rate = settings.loraplus_lr_ratio is not None
    made = kind(parameter_groups(model, settings, own_form) if by_rate else _two_groups(model, settings), **keywords)
    if keywords.get("optim_bits") == 8:
        _keep_embeddings_whole(model)
    return made


def _two_groups(model: PreTrainedModel, settings: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay; either may be empty, as in transformers."""
    decays = _decayed(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if name in decays], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in trained if name not in decays], "weight_decay": 0.0},
    ]


def _decayed(model: PreTrainedModel) -> set[str]:
    return set(get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))


def _keep_embeddings_whole(model: nn.Module) -> None:
    """bitsandbytes keeps 32-bit state for embeddings, whose rows differ too much in how often they are trained."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def parameter_groups(model: Any, settings: TrainConfig, own_form: bool) -> list[ParameterGroup]:
    """The trained parameters in groups, of which none is empty; those with the recipe's learning rate come first.

    Under LoRA+ matrices B, and with them what has one dimension, have a higher rate
    (``peft.optimizers.create_loraplus_optimizer``). Muon is told which matrices are hidden ones, our AdamW in 8
    bits which are no embedding.
    """
    decays = _decayed(model)
    state = optimizers.row(settings.optim).state
    by_kind = state == "momentum" or (state == "blockwise" and own_form)
    outer = _outer_parameters(model, head=state == "momentum") if by_kind else set()
    ratio = settings.loraplus_lr_ratio
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            fast = ratio is not None and ("lora_B" in name or parameter.dim() == 1)
            hidden = by_kind and parameter.dim() == 2 and id(parameter) not in outer
            groups.setdefault((fast, hidden, name in decays), []).append(parameter)
    return [
        ParameterGroup(
            params=found,
            lr=settings.learning_rate * (ratio if fast and ratio is not None else 1.0),
            weight_decay=settings.weight_decay if decay else 0.0,
            hidden=hidden,
        )
        for (fast, hidden, decay), found in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def _outer_parameters(model: nn.Module, *, head: bool) -> set[int]:
    """Parameters of embedding and ``head``, and adapters of stacks of experts, which are no matrices of one layer."""
    from peft.tuners.lora.layer import ParamWrapper

    base: Any = base_of(model)
    outer = [base.get_input_embeddings(), base.get_output_embeddings() if head else None]
    outer += [module for module in model.modules() if isinstance(module, ParamWrapper)]
    return {id(parameter) for module in outer if module is not None for parameter in module.parameters()}


def follow_weights(optimizer: Optimizer, stack: DecoderStack | None) -> None:
    """Has the copies of trained weights that products read follow them: our own optimizer writes both."""
    if stack is not None and isinstance(optimizer, AdamW):
        optimizer.copies = dict(stack.copies)
    elif stack is not None:
        optimizer.register_step_post_hook(lambda *_: stack.weights_changed())


def make_schedule(optimizer: Any, settings: TrainConfig, steps: int) -> LRScheduler:
    """transformers' schedule with the recipe's arguments, over ``steps``.

    Raises FtcliError FT272 (exit 2) for stages of a schedule that are longer than training.
    """
    warm_up = schedules.steps_of(settings.warmup_steps, steps)
    for group in optimizer.param_groups:  # schedule-free optimizers warm up by themselves
        if "warmup_steps" in group:
            group["warmup_steps"] = warm_up
    arguments = schedule_arguments(settings, steps)
    if schedules.row(settings.lr_scheduler_type).by_evaluations:
        by_value: LRScheduler = _SCHEDULES[settings.lr_scheduler_type](optimizer, **arguments)
        return by_value
    with warnings.catch_warnings():  # of a stable stage that is given beside the number of all steps
        warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
        made: LRScheduler = get_scheduler(settings.lr_scheduler_type, optimizer, warm_up, steps, arguments)
    return made


def schedule_arguments(settings: TrainConfig, all_steps: int) -> Arguments:
    """`train.lr_scheduler_kwargs` with numbers of steps in place of fractions. Raises FtcliError FT272 (exit 2)."""
    name, arguments = settings.lr_scheduler_type, dict(settings.lr_scheduler_kwargs)
    stages = schedules.stages(name, arguments, settings.warmup_steps, all_steps)
    problem = schedules.stages_too_long(name, stages, all_steps)
    if problem is not None:
        raise FtcliError.single("FT272", problem, exit_code=ExitCode.RECIPE, help=schedules.SHORTER)
    return {**arguments, **{stage: steps for stage, steps in stages.items() if stage in arguments}}


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together: torch's own, which would round it to bfloat16 where gradients are."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clipping(norm: Tensor, limit: float) -> Tensor:
    """Factor of gradients of this norm, so that their norm is at most ``limit``."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def save_training_weights(trained: list[tuple[str, nn.Parameter]], folder: Path) -> None:
    """Writes the trained weights as they are into a checkpoint, beside those that are evaluated."""
    from safetensors.torch import save_file

    (folder / TRAINING_WEIGHTS).parent.mkdir()
    save_file({name: p.detach().contiguous() for name, p in trained}, folder / TRAINING_WEIGHTS)


def load_training_weights(trained: list[tuple[str, nn.Parameter]], folder: Path) -> None:
    """Takes what :func:`save_training_weights` wrote, if anything. Raises ValueError where it does not fit."""
    path = folder / TRAINING_WEIGHTS
    if not path.exists():
        return
    from safetensors.torch import load_file

    saved, wanted = load_file(path), dict(trained)
    if set(saved) != set(wanted):
        raise ValueError(f"{TRAINING_WEIGHTS} holds parameters other than those trained")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(saved[name])


class GradientNorms:
    """The norm of each parameter's gradient, taken on a stream of its own when backward has accumulated it.

    Clipping needs the norm of all gradients before the optimizer changes any weight. Taken then, it is a pass over all
    of them in which products wait; here it reads what backward has just written while the next products run.

    In an accumulated step the norm of the last micro-batch's sum is the one that stays. Nothing else may change a
    gradient before :meth:`total` is asked.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        device = parameters[0].device
        self._norms = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self._stream = torch.cuda.Stream(device)
        for index, parameter in enumerate(parameters):
            hook = partial(self._take, index)
            parameter.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _take(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            torch.linalg.vector_norm(gradient, dtype=torch.float32, out=self._norms[index])

    def total(self) -> Tensor:
        """The norm of all gradients since it was last asked, as a scalar on the device."""
        current = torch.cuda.current_stream(self._norms.device)
        current.wait_stream(self._stream)
        total: Tensor = torch.linalg.vector_norm(self._norms)
        self._norms.zero_()  # a parameter without a gradient in the next step counts for nothing
        self._stream.wait_stream(current)
        return total
