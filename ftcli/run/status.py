"""status.json: the state of a run, for scripts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ftcli.errors import ExitCode, first_line
from ftcli.plain import JsonMap, is_number
from ftcli.run.atomic import json_object_in, read_json_object, store_json, utc_now

State = Literal["running", "completed", "preempted", "failed"]

T = TypeVar("T", int, str)
_STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """Summary of training for the command's output: optimizer steps, tokens seen, loss and reward of the last step.

    ``tokens_computed``: with padding and filler, where these are counted. ``stopped_early``: why there are fewer steps
    than were asked for.
    """

    steps: int
    tokens: int | None = None
    train_loss: float | None = None
    reward: float | None = None
    tokens_computed: int | None = None
    stopped_early: str | None = None


@dataclass(frozen=True, slots=True)
class FinishedTraining:
    """Training is over and its result complete: the folder ``result`` (``adapter`` or ``model``), with its ``files`` by
    name, size and digest (:func:`ftcli.run.checkpoint.inventory`).
    """

    summary: TrainingSummary
    steps: int
    result: str
    files: Sequence[JsonMap]


@dataclass(frozen=True, slots=True)
class Status:
    """Content of status.json. ``exit_code`` is None while the run lasts; ``resumable``: the same command again goes
    on with it; ``resumed_from``: the checkpoint this process started from; ``earlier_seconds``: what the processes
    before it took; ``trained`` is there as soon as adapter/ or model/ is complete.

    A killed run leaves ``running`` behind: nobody holds its lock then (:func:`ftcli.run.directory.is_locked`).
    """

    state: State
    started: str
    pid: int
    ended: str | None = None
    exit_code: int | None = None
    resumable: bool = True
    resumed_from: str | None = None
    message: str | None = None
    trained: FinishedTraining | None = None
    earlier_seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Wall time of all processes of the run; None while it runs."""
        last = None if self.ended is None else _between(self.started, self.ended)
        return None if last is None else self.earlier_seconds + last


def _between(started: str, ended: str) -> float | None:
    try:
        return max(0.0, (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds())
    except (ValueError, TypeError):
        return None


def seconds_until_now(path: Path, metrics: Path) -> float:
    """Wall time of the processes of a run so far. A killed one counts up to its last line of metrics."""
    status = read_status(path)
    if status is None:
        return 0.0
    if status.ended is not None:
        return status.seconds or 0.0
    with contextlib.suppress(OSError):
        last = datetime.fromtimestamp(metrics.stat().st_mtime, UTC).isoformat()
        return status.earlier_seconds + (_between(status.started, last) or 0.0)
    return status.earlier_seconds


def state_of(exit_code: int) -> State:
    """The state that belongs to an exit status. An interrupted run counts as preempted: both go on when restarted."""
    if exit_code == ExitCode.OK:
        return "completed"
    return "preempted" if exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED) else "failed"


def read_status(path: Path) -> Status | None:
    """The status in ``path``, or None when there is none or it is not readable as one."""
    raw = read_json_object(path)
    if raw.get("state") not in _STATES:
        return None
    texts = {name: _if(str, raw.get(name)) for name in ("ended", "resumed_from", "message")}
    earlier = raw.get("earlier_seconds")
    return Status(
        raw["state"],
        started=_if(str, raw.get("started")) or "",
        pid=_if(int, raw.get("pid")) or 0,
        exit_code=_if(int, raw.get("exit_code")),
        resumable=raw.get("resumable") is not False,
        trained=_trained_in(raw.get("trained")),
        earlier_seconds=float(earlier) if is_number(earlier) else 0.0,
        **texts,
    )


def status_damage(path: Path) -> str:
    """Describes the damage of the file at ``path``; empty where there is none."""
    try:
        raw = json_object_in(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return first_line(error)
    if raw.get("state") not in _STATES:
        return f"it has no state, which is one of {', '.join(_STATES)}"
    kept = read_status(path)
    told = ("started", "ended", "message", "pid", "exit_code", "resumed_from")
    odd = [name for name in told if raw.get(name) is not None and raw[name] != getattr(kept, name)]
    return f"its {odd[0]} cannot be" if odd else ""


def _if(kind: type[T], value: object) -> T | None:
    """The value, where it is of the kind; true and false are no numbers, and neither is what no counter reaches."""
    sound = isinstance(value, kind) and (isinstance(value, str) or is_number(value))
    return value if sound else None  # type: ignore[return-value]


def _trained_in(raw: Any) -> FinishedTraining | None:
    """Reads ``trained``; None when it is incomplete, written by an older ftcli or edited by somebody."""
    told = raw if isinstance(raw, dict) else {}
    steps, result, files, summary = (told.get(name) for name in ("steps", "result", "files", "summary"))
    if not isinstance(steps, int) or isinstance(steps, bool) or not isinstance(result, str):
        return None
    if isinstance(files, dict):  # ftcli 0.1 noted sizes alone
        files = [{"name": name, "bytes": size} for name, size in files.items()]
    if not isinstance(files, list) or not all(isinstance(each, dict) for each in files):
        return None
    if not isinstance(summary, dict):
        return None
    tokens, loss, reward = (summary.get(name) for name in ("tokens", "train_loss", "reward"))
    known = TrainingSummary(
        steps,
        _if(int, tokens),
        loss if is_number(loss) else None,
        reward if is_number(reward) else None,
        stopped_early=_if(str, summary.get("stopped_early")),
    )
    return FinishedTraining(known, steps, result, files)


def begin(
    path: Path, *, resumed_from: Path | None, trained: FinishedTraining | None = None, earlier_seconds: float = 0.0
) -> Status:
    """Write that this process runs now; ``trained`` when only what follows training is left to do. Raises FtcliError
    FT723 or FT724.
    """
    status = Status(
        "running",
        utc_now(),
        os.getpid(),
        resumed_from=str(resumed_from) if resumed_from else None,
        trained=trained,
        earlier_seconds=earlier_seconds,
    )
    store_json(path, status)
    return status


def note_trained(path: Path, trained: FinishedTraining) -> Status:
    """Write that training is over and its result complete. Raises FtcliError FT723 or FT724."""
    status = replace(read_status(path) or Status("running", utc_now(), os.getpid()), trained=trained)
    store_json(path, status)
    return status


def write_end(path: Path, exit_code: int, *, message: str | None = None, resumable: bool | None = None) -> Status:
    """Write how the run ended, with the status the process will exit with and a sentence for people. ``resumable``:
    None means all but a completed run. Raises FtcliError FT723 or FT724.
    """
    state = state_of(exit_code)
    started = read_status(path) or Status("running", utc_now(), os.getpid())
    status = replace(
        started,
        state=state,
        ended=utc_now(),
        exit_code=int(exit_code),
        resumable=state != "completed" if resumable is None else resumable,
        message=message,
    )
    store_json(path, status)
    return status


def finish_own(path: Path, exit_code: int, *, message: str) -> None:
    """Write how the run ended where its status says that this process still runs it, as :func:`write_end`."""
    status = read_status(path)
    if status is not None and status.state == "running" and status.pid == os.getpid():
        write_end(path, exit_code, message=message)
