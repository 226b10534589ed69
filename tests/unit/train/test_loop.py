"""The training loop by itself, driven by a linear layer and an objective of a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ftcli.config.training import TrainConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.plan.precision import DtypePlan
from ftcli.run.checkpoint import Checkpoints
from ftcli.run.metrics import MetricsLine
from ftcli.run.signals import SignalName
from ftcli.train.loop import Attendance, Objective, StepIntervals, StepMonitor, TrainerHooks, TrainingLoop
from ftcli.train.optimizer import Optimization
from ftcli.train.parallel import Divisors, MicroBatch, Parallel, TokenCounts

CPU = torch.device("cpu")
STEPS = 6


class Model(torch.nn.Linear):
    """Three weights, which are saved as transformers saves a model's."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        torch.nn.init.constant_(self.weight, 0.5)

    def save_pretrained(self, folder: str, **_: Any) -> None:
        save_file(self.state_dict(), Path(folder, "model.safetensors"))


class TwoBatches(Objective):
    """Two micro-batches a step, whose loss draws from every generator that training draws from.

    ``during`` is called with the number of each step while its batches are made, and may change them.
    """

    steps_per_epoch = STEPS

    def __init__(self, model: Model, during: Callable[[int, Tensor], None] = lambda step, x: None) -> None:
        self.model, self.during, self.losses = model, during, list[float]()

    def micro_batches(self, step: int, monitor: StepMonitor) -> Sequence[MicroBatch]:
        both = torch.arange(6.0).view(2, 1, 3) + step
        self.during(step + 1, both)
        return [MicroBatch({"x": x}, (2 * step + i,), TokenCounts(3, 3, 4)) for i, x in enumerate(both)]

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        noise = torch.rand(3) + random.random() + float(np.random.rand())
        loss: Tensor = (self.model(inputs["x"] + noise) ** 2).sum() / step.supervised
        self.losses.append(loss.item())
        return loss

    def epochs_done(self, step: int) -> float:
        return step / STEPS


class Watched:
    """Progress that nobody looks at, and a request to stop."""

    requested: SignalName | None = None

    def begin(self, step: int, total: int) -> None:
        pass

    def show(self, step: int, line: MetricsLine) -> None:
        pass

    def evaluated(self, step: int, metrics: MetricsLine) -> None:
        pass


class Run:
    """A loop over a new model, its lines of metrics and its checkpoints."""

    def __init__(
        self,
        folder: Path,
        *,
        during: Callable[[int, Tensor], None] = lambda step, x: None,
        evaluate: Callable[[int], dict[str, float]] | None = None,
        log_every: int = 1,
        save_every: int | None = None,
    ) -> None:
        self.model, self.watched, self.lines = Model(), Watched(), list[MetricsLine]()
        self.objective, self.checkpoints = TwoBatches(self.model, during), Checkpoints(folder)
        model: Any = self.model
        parallel = Parallel(None, model, seed=0, batch_size=1)
        settings = TrainConfig.model_validate({"learning_rate": 0.01})
        plan = DtypePlan("float32", None, "float32", False, "")
        optimization = Optimization(
            model, settings, plan, settings.optim, False, STEPS, device=CPU, stack=None, parallel=parallel
        )
        hooks = TrainerHooks(self.checkpoints, keep_last=2, evaluate=evaluate)
        self.loop = TrainingLoop(model, self.objective, optimization, parallel, hooks, steps=STEPS, device=CPU)
        intervals = StepIntervals(log_every, 2 if evaluate else None, save_every)
        self.attendance = Attendance(intervals, self.lines.append, self.watched, self.watched)

    def train(self, resume_from: Path | None = None, *, seed: int = 0) -> Run:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.loop.run(self.attendance, resume_from)
        return self

    def numbers(self) -> list[MetricsLine]:
        """The lines without what depends on the machine."""
        measured = ("tokens_per_second", "peak_memory_bytes")
        return [{name: value for name, value in line.items() if name not in measured} for line in self.lines]


def test_the_loss_of_a_step_is_the_sum_over_its_micro_batches(tmp_path: Path) -> None:
    run = Run(tmp_path).train()
    losses = torch.tensor(run.objective.losses).view(STEPS, 2)
    assert [line["loss"] for line in run.lines] == pytest.approx(losses.sum(1).tolist(), rel=1e-6)
    assert [line["tokens"] for line in run.lines] == [6 * step for step in range(1, STEPS + 1)]


def test_between_logs_the_loss_is_the_mean_over_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, log_every=4).train()
    losses = torch.tensor(run.objective.losses).view(STEPS, 2).sum(1)
    means = [losses[0], losses[1:4].mean(), losses[4:].mean()]
    assert [line["step"] for line in run.lines] == [1, 4, 6]
    assert [line["loss"] for line in run.lines] == pytest.approx([mean.item() for mean in means], rel=1e-6)


def test_training_draws_the_same_whether_an_evaluation_draws_or_not(tmp_path: Path) -> None:
    def drawing(step: int) -> dict[str, float]:
        return {"loss": torch.rand(5).sum().item() + random.random() + float(np.random.rand())}

    silent, drawn = Run(tmp_path / "a").train(), Run(tmp_path / "b", evaluate=drawing).train()
    assert [line["step"] for line in drawn.lines if "eval_loss" in line] == [2, 4]
    assert drawn.objective.losses == silent.objective.losses
    assert torch.equal(drawn.model.weight, silent.model.weight)


@pytest.mark.parametrize("stop_at", [2, 3])
def test_a_run_that_is_stopped_and_resumed_has_the_bits_of_one_that_is_not(tmp_path: Path, stop_at: int) -> None:
    """Also where the stop falls between two lines of metrics."""
    whole = Run(tmp_path / "whole", log_every=2).train()

    def stop(step: int, _: Tensor) -> None:
        if step == stop_at:
            first.watched.requested = "SIGTERM"

    first = Run(tmp_path / "stopped", during=stop, log_every=2)
    first.train()
    assert (first.loop.step, first.loop.stopped_by) == (stop_at, "SIGTERM")
    rest = Run(tmp_path / "stopped", log_every=2).train(first.checkpoints.newest(), seed=1)
    assert rest.loop.step == STEPS
    assert first.objective.losses + rest.objective.losses == whole.objective.losses
    assert first.numbers() + rest.numbers() == whole.numbers()
    assert torch.equal(rest.model.weight, whole.model.weight)


def test_a_step_that_diverged_is_never_saved(tmp_path: Path) -> None:
    """Nothing is logged at the step of a checkpoint here, so it is saving that has to look."""

    def spoil(step: int, batches: Tensor) -> None:
        if step == 4:
            batches[1] = torch.nan

    run = Run(tmp_path, during=spoil, log_every=100, save_every=2)
    with pytest.raises(FtcliError) as raised:
        run.train()
    assert raised.value.exit_code == ExitCode.DIVERGED
    assert raised.value.findings[0].code == "FT702"
    assert "the loss is nan at step 4" in raised.value.findings[0].message
    assert run.checkpoints.newest() == run.checkpoints.path(2)
