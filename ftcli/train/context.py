"""An open run as its phases see it: where it continues, where numbers go, who may stop it, and what is reported."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.recipe import Recipe
from ftcli.errors import is_out_of_memory
from ftcli.plain import JsonMap
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.run.atomic import WRITING_PREFIX, replace_directory, writing_into
from ftcli.run.checkpoint import Checkpoints
from ftcli.run.directory import RunDirectory
from ftcli.run.loggers import OpenLoggers
from ftcli.run.metrics import MetricsLine, MetricsWriter
from ftcli.run.mirror import Mirror
from ftcli.run.report import LiveProgress, LiveReport
from ftcli.run.resume import OpenedRun
from ftcli.run.signals import StopRequest
from ftcli.train.out_of_memory import out_of_memory

if TYPE_CHECKING:
    from ftcli.model.patch import LayerKernel
    from ftcli.model.quantized import QuantizedLayer
    from ftcli.model.selfcheck import SelfCheck
    from ftcli.plan.batches import Batches
    from ftcli.run.process_group import RankGroup
    from ftcli.train.data import EpochLayout


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
