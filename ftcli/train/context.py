"""An open run as its phases see it: where it continues, where numbers go, who may stop it, and what is reported;
the message when memory runs out.
"""

from __future__ import annotations

import shutil
import stat
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.load import Settings
from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.plain import JsonMap
from ftcli.plan.memory.advice import savings
from ftcli.plan.memory.candidates import as_options
from ftcli.plan.memory.terms import BACKWARD, END, EVALUATION, FORWARD, Phase
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.run.atomic import WRITING_PREFIX, replace_directory, writing_into
from ftcli.run.checkpoint import Checkpoints
from ftcli.run.directory import RunDirectory
from ftcli.run.loggers import OpenLoggers
from ftcli.run.metrics import MetricsLine, MetricsWriter
from ftcli.run.mirror import Mirror
from ftcli.run.out_of_memory import asked_bytes, is_out_of_memory, resident_bytes
from ftcli.run.report import LiveProgress, LiveReport
from ftcli.run.resume import OpenedRun
from ftcli.run.signals import StopRequest
from ftcli.units import size

if TYPE_CHECKING:
    from ftcli.model.patch import LayerKernel
    from ftcli.model.quantized import QuantizedLayer
    from ftcli.model.selfcheck import SelfCheck
    from ftcli.plan.batches import Batches
    from ftcli.run.process_group import RankGroup
    from ftcli.train.data import EpochLayout
    from ftcli.train.loop import Doing, TrainingLoop

_size = partial(size, smallest="MiB")
_SUGGESTED = 3
_WORDS: Mapping[Phase, str] = {FORWARD: "forward pass", BACKWARD: "backward pass"}
#: Buffers of safetensors and torch, and some more.
_ROOM_BYTES = 4 << 20


def out_of_memory(where: str, report: PreflightReport, error: BaseException) -> FtcliError:
    """FT703 (exit 5) for a phase without a batch: ``where`` is like ``while loading the model``.

    What the failed frames hold is dropped (:func:`let_go`), so that there is memory to build the message.
    """
    allocated = _allocated({})
    let_go(error)
    evaluation: tuple[Phase, ...] = (EVALUATION,)
    found = savings(report.plan.on(report.device), evaluation) if where.endswith("evaluating") else ()
    return _error(f"out of memory {where}: {_asked(error)}{allocated}", found, report)


def out_of_memory_in_training(trainer: TrainingLoop, report: PreflightReport, error: BaseException) -> FtcliError:
    """FT703 (exit 5) with the step, the part of it, the batch, its rows and what was allocated.

    What the failed frames hold is dropped once it is counted (:func:`let_go`).
    """
    step = trainer.step
    doing = trainer.phase
    where = _where(doing, step, trainer.batch_shape, trainer.rows_of_batch())
    allocated = _allocated(_parts(trainer))
    let_go(error)
    found = savings(report.plan.on(report.device), _estimated(doing))
    return _error(f"out of memory {where}: {_asked(error)}{allocated}", found, report)


def _where(doing: Doing, step: int, batch_shape: tuple[int, ...] | None, rows: str) -> str:
    """In words: what was done after ``step`` steps, and with which batch; ``rows`` are those of it, by file."""
    if doing == "saving":
        return f"while step {step} was saved"
    if doing == EVALUATION:
        return f"in the evaluation after step {step}"
    part = f"step {step + 1}" if doing == "step" else f"the {_WORDS.get(doing, doing)} of step {step + 1}"
    return f"in {part}{_batch(batch_shape, rows)}"


def _estimated(doing: Doing) -> tuple[Phase, ...]:
    """The phases of the memory estimate that it may be in; none where the estimate knows nothing of it."""
    if doing == "step" or doing == "saving":
        return ()
    return (BACKWARD, END) if doing == BACKWARD else (doing,)


def with_checkpoint(error: FtcliError, checkpoint: Path) -> FtcliError:
    """The same error, saying in which checkpoint the steps that were finished are."""
    first, *others = error.findings
    saved = f"The steps so far are saved: `--resume {checkpoint}` continues from them, and allows such a change"
    help = f"{first.help}. {saved}" if first.help else saved
    return FtcliError([Finding(first.code, first.message, first.origin, help), *others], error.exit_code)


def has_room_to_save(trainer: TrainingLoop) -> bool:
    """True if the host has memory to write a checkpoint. Without it, native code would end the process."""
    largest = max((p.nbytes for p in trainer.model.parameters() if p.requires_grad), default=0)
    try:
        bytearray(_ROOM_BYTES + 2 * largest)
    except MemoryError:
        return False
    return True


def let_go(error: BaseException) -> None:
    """Drops what the frames of a failed step still hold, mostly activations, to make room for a checkpoint."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def _error(message: str, found: Sequence[tuple[Settings, int]], report: PreflightReport) -> FtcliError:
    if found:
        parts = [f"{as_options(change)} (saves about {_size(saved)})" for change, saved in found[:_SUGGESTED]]
        help = "the cheapest changes, by what the memory estimate predicts: " + "; ".join(parts)
    else:
        weights = None if report.memory is None else report.memory.parts.get("weights")
        alone = "" if weights is None else f"the weights alone take {_size(weights)}: "
        help = f"{alone}use a smaller model or a device with more memory; `ftcli check` lists what needs how much"
    return FtcliError.single("FT703", message, exit_code=ExitCode.OUT_OF_MEMORY, help=help)


def _batch(shape: tuple[int, ...] | None, named: str) -> str:
    if shape is None or len(shape) != 2:
        return ""
    rows, tokens = shape
    return f" (a batch of {rows:,} row{'s' * (rows != 1)} of {tokens:,} tokens{': ' * bool(named)}{named})"


def _asked(error: BaseException) -> str:
    asked = asked_bytes(error)
    return "" if asked is None else f"{_size(asked)} more were asked for; "


def _allocated(parts: Mapping[str, int]) -> str:
    """Text on allocated memory, and each part's bytes. The rest is activations and temporaries."""
    import torch

    if torch.cuda.is_available():
        held, (_, total) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        text = f"{_size(held)} of {_size(total)} were allocated (at most {_size(peak)} before)"
    else:
        resident = resident_bytes()
        if resident is None:
            return "what was held is not known"
        held, text = resident, f"the process held {_size(resident)}"
    if not parts:
        return text
    rest = max(0, held - sum(parts.values()))
    listed = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    other = "activations and workspace" if torch.cuda.is_available() else "activations, libraries and workspace"
    return f"{text}: {listed}, {other} {_size(rest)}"


def _parts(trainer: TrainingLoop) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state that exist at this moment."""
    parameters = list(trainer.model.parameters())
    optimizer: Any = trainer.optimization.optimizer
    states = optimizer.state_dict()["state"].values() if optimizer is not None else ()
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(value.nbytes for state in states for value in state.values() if hasattr(value, "nbytes")),
    }


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Stands for metrics.jsonl, loggers and report on ranks that do not lead: nothing is written."""

    path: Path

    def sync(self) -> None:
        """Nothing."""

    def update(self, live: LiveProgress, *, urgent: bool = False) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """The manifest's record of the model as built: the kernel of each layer, what is stored quantized, whether the
    layers run as CUDA graphs (``on``, or why not), and the layout of batches.
    """

    kernels: Sequence[LayerKernel]
    self_check: SelfCheck | None
    quantization: Sequence[QuantizedLayer]
    cuda_graphs: str
    batches: EpochLayout | Batches


@dataclass(frozen=True, slots=True)
class RunContext:
    """An open run: its directory, where it continues, where metrics go, and who may stop it.

    ``previous`` is the manifest of the run that this process continues; empty for a new run.
    """

    session: Session
    command: str
    report: PreflightReport
    opened: OpenedRun
    previous: JsonMap
    metrics: MetricsWriter | Unwritten
    loggers: OpenLoggers | Unwritten
    stop: StopRequest
    live: LiveReport | Unwritten
    group: RankGroup | None = None
    mirror: Mirror | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints, which are copied to its mirror where it has one."""
        return self.directory.checkpoints if self.mirror is None else self.mirror.store()

    @property
    def leads(self) -> bool:
        """True if this process writes: the only one, or rank 0 of several."""
        return self.group is None or self.group.leads

    @property
    def stops(self) -> StopRequest | RankGroup:
        """The stop request to ask; for several ranks the one that they have agreed on."""
        return self.group or self.stop

    @property
    def recipe(self) -> Recipe:
        return self.report.recipe

    @property
    def directory(self) -> RunDirectory:
        return self.opened.directory

    @property
    def held_to_inputs(self) -> bool:
        """True if the inputs must be those that the run began with.

        With ``--resume PATH`` they need not be: its user asks to do something else with a checkpoint.
        """
        return bool(self.previous) and not self.recipe.run.resumes_elsewhere

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the run that a signal ends at once: ``loading the model``, ``evaluating`` …

        Raises FtcliError FT728 (exit 75 or 130) after a signal, FT703 (exit 5) when memory runs out.
        """
        try:
            with self.stop.interruptible(name):
                yield
        except (RuntimeError, MemoryError, OSError, ImportError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(f"while {name}", self.report, error) from error

    def write_line(self, line: MetricsLine) -> None:
        """Appends to metrics.jsonl and gives the numbers to the loggers; ``line`` has ``step``."""
        if isinstance(self.metrics, Unwritten) or isinstance(self.loggers, Unwritten):
            return
        step = int(line["step"])
        self.metrics.write(step, {key: value for key, value in line.items() if key != "step"})
        self.loggers.log(step, line)

    def save_result(self, *writers: Callable[[Path], object]) -> Path:
        """Writes adapter/ or model/ under another name and renames it. Each of ``writers`` writes into the folder.

        Raises FtcliError FT723 or FT724 when it cannot be written.
        """
        assert self.leads
        target = self.directory.adapter_dir if self.recipe.lora is not None else self.directory.model_dir
        staged = target.with_name(f"{WRITING_PREFIX}{target.name}")
        try:
            with writing_into(staged, target):
                shutil.rmtree(staged, ignore_errors=True)  # left behind by a crash
                staged.mkdir()
                for write in writers:
                    write(staged)
                for file in staged.iterdir():
                    # safetensors makes files that only their owner can read; the umask decides, as for all others.
                    file.chmod(stat.S_IMODE(self.directory.status_path.stat().st_mode))
                replace_directory(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return target
