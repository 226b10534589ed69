"""A checkpoint's content besides the model's weights: optimizer, schedule, loss scale, random states, and progress.

The half-filled average of the loss is part of it, with all else that belongs to the next line of metrics, so that a
resumed run writes the same metrics. Files have the names and the content of transformers' checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import safe_globals

from ftcli.errors import FtcliError, first_line, is_out_of_memory
from ftcli.plain import JsonObject
from ftcli.run.atomic import read_text
from ftcli.run.checkpoint import STATE_NAME, TRAINER_STATE
from ftcli.train.evaluation import BestEvaluation

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

    from ftcli.train.optimizer import Optimization

_RANDOM_STATES = "rng_state.pth"

#: What torch, numpy and pickle raise at content that is not what they wrote.
_UNREADABLE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, pickle.PickleError)


class LogWindow:
    """Tokens and seconds of training since the last line of metrics; evaluation and saving are not training."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Starts the clock: training resumes."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Training pauses. Call it when the device has finished its queued work."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def take_rate(self) -> float:
        """Tokens per second of the window; begins a new window."""
        self.stop()
        rate = self.tokens / max(self.seconds, 1e-9)
        self.tokens, self.seconds = 0, 0.0
        self.start()
        return rate


@dataclass(frozen=True, slots=True)
class WindowState:
    """The half-filled line of metrics at the time of a checkpoint.

    Attributes:
        loss_sum: Sum of the losses of the steps after ``logged_step``, in nats per token.
        logged_step: The last step with a line.
        tokens: Tokens seen since then.
        seconds: Seconds trained since then.
        tokens_seen: Tokens seen since the run began; None in a checkpoint of an ftcli that kept them elsewhere.
        tokens_computed: The same with padding and filler; None in a checkpoint of an ftcli that did not count them.
        evaluation_due: An evaluation of this very step has not been made, because the run was to stop at once.
        best: The best evaluation so far; None in a checkpoint of an older ftcli.
        extra: What a trainer gathers besides (GRPO: rewards and lengths).
    """

    loss_sum: float
    logged_step: int
    tokens: int
    seconds: float
    tokens_seen: int | None = None
    tokens_computed: int | None = None
    evaluation_due: bool = False
    best: BestEvaluation | None = None
    extra: JsonObject = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes it into a checkpoint that is being filled. Floats survive JSON to the last bit."""
        text = json.dumps({"format": 1, **asdict(self)}, indent=2) + "\n"
        (folder / STATE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> WindowState | None:
        """The state in a checkpoint; None in checkpoints of old versions, which have none."""
        path = folder / STATE_NAME
        if not path.exists():
            return None
        raw = json.loads(read_text(path))
        known = {name: raw[name] for name in cls.__slots__ if name in raw}
        best = known.get("best")
        return cls(**{**known, "best": None if best is None else BestEvaluation(**best)})


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, as transformers' ``trainer_state.json`` has it.

    Attributes:
        step: Optimizer steps that are done, of ``steps``.
        epoch: How often all data has been seen.
        tokens_seen: Tokens that were trained on.
    """

    step: int
    steps: int
    epoch: float
    tokens_seen: int

    def write(self, folder: Path) -> None:
        """Writes it into a checkpoint that is being filled."""
        state = {
            "epoch": self.epoch,
            "global_step": self.step,
            "max_steps": self.steps,
            "num_input_tokens_seen": self.tokens_seen,
        }
        (folder / TRAINER_STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """The progress that a checkpoint was written with. Raises what :func:`readable` turns into FT725."""
        raw = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        return cls(int(raw["global_step"]), int(raw["max_steps"]), raw["epoch"], int(raw["num_input_tokens_seen"]))


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of all random generators that training draws from."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> RandomStates:
        """Copies them, which takes tens of microseconds and does not wait for the GPU."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)

    def save(self, folder: Path) -> None:
        states = {"python": self.python, "numpy": self.numpy, "cpu": self.cpu}
        torch.save(states if self.cuda is None else {**states, "cuda": self.cuda}, folder / _RANDOM_STATES)

    @classmethod
    def load(cls, folder: Path) -> RandomStates:
        """Loads the states that :meth:`save` wrote. A checkpoint of a GPU resumes on a CPU, and the other way round."""
        with safe_globals():
            found = torch.load(folder / _RANDOM_STATES, weights_only=True)
        cuda = found.get("cuda") if torch.cuda.is_available() else None
        return cls(found["python"], found["numpy"], found["cpu"], cuda)


def draw_of_epoch() -> None:
    """Draws the number that torch's DataLoader draws when an epoch begins: runs of 0.1 resume with their bits."""
    torch.empty((), dtype=torch.int64).random_()


def save_state(folder: Path, optimization: Optimization, optimizer_state: StateDict | None) -> None:
    """Writes optimizer, schedule and loss scale; ``optimizer_state`` is that of one process."""
    torch.save(optimizer_state, folder / OPTIMIZER_NAME)
    torch.save(optimization.schedule.state_dict(), folder / SCHEDULER_NAME)
    if optimization.scaler is not None:
        torch.save(optimization.scaler.state_dict(), folder / SCALER_NAME)


def load_state(folder: Path, optimization: Optimization, *, mapped: bool) -> None:
    """Loads what :func:`save_state` wrote. ``mapped``: of what is stored each rank reads its own shards."""
    state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=mapped)
    optimization.optimizer.load_state_dict(state)
    optimization.schedule.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
    if optimization.scaler is not None and (folder / SCALER_NAME).exists():
        optimization.scaler.load_state_dict(torch.load(folder / SCALER_NAME, weights_only=True))


@contextlib.contextmanager
def readable(checkpoint: str | None) -> Iterator[None]:
    """A block that loads a checkpoint's state. Its files are as they were written; what was written may be rubbish."""
    try:
        yield
    except _UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        raise FtcliError.single(
            "FT725",
            f"cannot resume from {checkpoint}: its state cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)[:200]}",
            help="move this checkpoint away and use --resume auto, which takes the one before it",
        ) from error
