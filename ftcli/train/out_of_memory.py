"""The message when memory runs out in a run: where, what was held, and the cheapest changes that save enough."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.load import Settings
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.plan.memory.advice import savings
from ftcli.plan.memory.candidates import as_options
from ftcli.plan.memory.terms import BACKWARD, END, EVALUATION, FORWARD, Phase
from ftcli.preflight.report import PreflightReport
from ftcli.units import size

if TYPE_CHECKING:
    from ftcli.train.loop import Doing, TrainingLoop

#: ``Tried to allocate 20.00 GiB`` (CUDA) and ``you tried to allocate 8192 bytes`` (CPU).
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
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


def asked_bytes(error: BaseException) -> int | None:
    """Bytes that were asked for when memory ran out, if the error says so."""
    match = _ASKED.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def resident_bytes() -> int | None:
    """Bytes of memory that this process uses now; None where /proc does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)
