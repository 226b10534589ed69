"""Processes that a command starts: runs of a sweep, and the ranks of one run on this host.

Ranks are started, passed signals, and ended together. torch's elastic agent does not do what a run needs: when a worker
fails it kills the others after 30 seconds, even while they write; it does not report their exit codes; and a second
signal leaves them running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from ftcli.cli.environment import FOLDER, obeying
from ftcli.cli.options import EndedElsewhere
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.facts.device import usable_cores
from ftcli.paths import scratch
from ftcli.ranks import SIGNAL_NAME, lost_name, sign_name
from ftcli.run.heartbeat import Silence, Timeouts
from ftcli.run.signals import SignalName, exit_code_of
from ftcli.train.lifecycle import finish_for_leader

if TYPE_CHECKING:
    from ftcli.pipeline.sweep import Start, SweepRun

#: Which GPUs a process sees, by number or by UUID.
_VISIBLE = "CUDA_VISIBLE_DEVICES"

#: What a run is sent for each signal that this process gets. A scheduler may have sent SIGTERM to all processes, and a
#: second one would end a run without its last checkpoint; a second SIGHUP does not.
PASSED_ON: Mapping[SignalName, signal.Signals] = {
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGHUP,
    "SIGHUP": signal.SIGHUP,
}


class RunProcess:
    """`ftcli train` or `ftcli grpo` of one run, in a session of its own: what a terminal sends does not reach it."""

    def __init__(self, words: Sequence[str], device: str | None) -> None:
        environment = dict(os.environ) if device is None else {**os.environ, _VISIBLE: device}
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has been read
        self._process = subprocess.Popen(  # noqa: S603 - words of ours, and no shell
            [sys.executable, "-P", "-m", "ftcli", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._answer,
            env=environment,
            start_new_session=True,
            preexec_fn=obeying(),
        )
        self._signalled = 0

    def ended(self) -> tuple[int, str | None] | None:
        """Exit status and reason; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if self._answer.closed:
            return status, None
        self._answer.seek(0)
        text = self._answer.read()
        self._answer.close()
        return status, _reason(status, text)

    def signal(self, name: SignalName) -> None:
        """The first one is passed on so that it cannot count twice; the second one as it is."""
        self._signalled += 1
        if self._process.poll() is None:
            self._process.send_signal(PASSED_ON[name] if self._signalled == 1 else signal.Signals[name])


def _reason(status: int, answer: bytes) -> str | None:
    """The reason of a failed run: the first error of its JSON document, or the signal that killed it."""
    if status == 0:
        return None
    if status < 0:
        return f"killed by signal {-status}"
    try:
        findings = json.loads(answer)["findings"]
        errors = [found for found in findings if found["severity"] == "error"]
        return f"{errors[0]['code']}: {errors[0]['message']}"
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def starter(recipe: str, *, quiet: bool, offline: bool, debug: bool) -> Start:
    """Starts runs of a recipe with these common options."""

    def start(run: SweepRun, device: str | None) -> RunProcess:
        words = [run.command, recipe, "--json"]
        for override in run.overrides:
            words += ["--set", override.text]
        switches = {"--quiet": quiet, "--offline": offline, "--debug": debug}
        return RunProcess([*words, *(word for word, on in switches.items() if on)], device)

    return start


def devices(wanted: str | None, environment: Mapping[str, str], count: Callable[[], int]) -> tuple[str | None, ...]:
    """The GPUs that `--gpus` means, by the names that a process is given; (None,): what this process would use.
    ``count``: asks how many GPUs there are, where the environment does not list them.

    Raises FtcliError FT516 (exit 3) for more than there are, FT150 (exit 2) for what is no number.
    """
    if wanted is None:
        return (None,)
    listed = environment.get(_VISIBLE)
    found = _listed(listed) if listed is not None else tuple(str(number) for number in range(count()))
    if wanted == "auto":
        return found or (None,)
    origin = Origin(f"--gpus {wanted}")
    if not wanted.isdecimal() or int(wanted) < 1:
        help = "a number of GPUs, or `auto` for all that are visible"
        raise FtcliError.single("FT150", "that is not a number of GPUs", origin=origin, help=help)
    if int(wanted) > len(found):
        help = "ask for fewer, or set CUDA_VISIBLE_DEVICES; without --gpus one GPU is used"
        raise FtcliError.single("FT516", f"{len(found)} GPUs are visible here", origin=origin, help=help)
    return found[: int(wanted)]


def _listed(text: str) -> tuple[str, ...]:
    """CUDA's own rule: names up to the first that is none."""
    names = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def count_gpus() -> int:
    """Number of GPUs that torch sees. It asks the driver's library, which takes no memory of them."""
    import torch

    return torch.cuda.device_count()


_POLL_SECONDS = 0.05
#: A rank may take so long to end when another one was killed: rank 0 writes a checkpoint, the others do nothing.
_LAST_CHECKPOINT_SECONDS = 900.0
_NOTHING_TO_DO_SECONDS = 20.0


class Ranks:
    """The processes, each in a session of its own: what a terminal sends reaches them through this one, once. A rank
    that gives no sign of life for as long as ``limits`` say is killed. They inherit the descriptor ``held``: they
    outlive a launcher that is killed, and need the folder.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        devices: Sequence[str],
        folder: Path,
        limits: Timeouts | None = None,
        held: int | None = None,
        threads: str | None = None,
    ) -> None:
        self._folder, self._limits = folder, limits or Timeouts()
        self._silence = Silence(range(count))
        self._signs: dict[int, int] = {}
        self._signalled = 0
        self._asked: SignalName | None = None
        self._lost: dict[int, str] = {}
        self._since: dict[int, float] = {}
        prepare = obeying()
        self._processes = [
            subprocess.Popen(  # noqa: S603 - words of ours, and no shell
                command,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment_of(rank, count, devices, folder, threads)},
                start_new_session=True,
                preexec_fn=prepare,
                pass_fds=() if held is None else (held,),
            )
            for rank in range(count)
        ]

    def wait(self) -> EndedElsewhere:
        """Until all have ended. Raises FtcliError FT710 (exit 75, or 130 after Ctrl-C) where rank 0 could not say how
        itself.
        """
        with self._signals_passed_on():
            while any(process.poll() is None for process in self._processes):
                self._look()
                time.sleep(_POLL_SECONDS)
        self._look()
        status = self._processes[0].returncode
        if status >= 0:
            return EndedElsewhere(status)
        first = next(iter(self._lost), 0)
        message = f"rank {first} {self._lost.get(first, f'was killed by {signal_name(-status)}')}"
        help = "start the same command again: it goes on from the last checkpoint"
        code = ExitCode.PREEMPTED if self._asked is None else exit_code_of(self._asked)
        raise FtcliError([Finding("FT710", message, help=help)], code)

    def _look(self) -> None:
        """Leaves word of ranks that were lost, and kills those that are silent, or do not end after it."""
        now = time.monotonic()
        self._silence.count()
        for rank, process in enumerate(self._processes):
            status = process.poll()
            if status is None:
                self._hear(rank)
                continue
            self._since.setdefault(rank, now)
            if status < 0 and not self._signalled > 1:
                self._lose(rank, f"was killed by {signal_name(-status)}")
        if not self._since:
            return
        failed = any(process.poll() not in (None, 0) for process in self._processes)
        leader_over = 0 in self._since
        limit = _NOTHING_TO_DO_SECONDS if leader_over else _LAST_CHECKPOINT_SECONDS
        begun = self._since[0] if leader_over else min(self._since.values())
        if (failed or leader_over) and now - begun > limit:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()

    def _hear(self, rank: int) -> None:
        """Kills a rank that has been silent for too long: stopped, or held up where not even its threads go on."""
        sign = 0
        with contextlib.suppress(OSError):
            sign = (self._folder / sign_name(rank)).stat().st_mtime_ns
        if sign != self._signs.get(rank):
            self._signs[rank] = sign
            self._silence.heard(rank)
        elif self._silence.seconds()[rank] > self._limits.silent:
            self._lose(rank, f"has given no sign of life for {self._limits.silent:.0f} s")
            self._processes[rank].kill()

    def _lose(self, rank: int, how: str) -> None:
        if rank not in self._lost:
            word = self._folder / lost_name(rank)
            with contextlib.suppress(OSError):  # another rank of this host has ended it, and said why
                how = word.read_text(encoding="utf-8") or how
            self._lost[rank] = how
            word.write_text(how, encoding="utf-8")

    @contextlib.contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        names: tuple[SignalName, ...] = ("SIGINT", "SIGTERM", "SIGHUP")
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = {signal.Signals[name]: name for name in names if not (ignored and name == "SIGHUP")}

        def passed_on(number: int, _frame: FrameType | None) -> None:
            self._signal(numbers[signal.Signals(number)])

        before = {number: signal.signal(number, passed_on) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signal(self, name: SignalName) -> None:
        """The first one so that it cannot count twice, the second as it is, and the third ends all."""
        self._signalled += 1
        if self._signalled == 1:
            self._asked = name
            (self._folder / SIGNAL_NAME).write_text(name, encoding="utf-8")
        for process in self._processes:
            if process.poll() is None:
                if self._signalled > 2:
                    process.kill()
                else:
                    process.send_signal(PASSED_ON[name] if self._signalled == 1 else signal.Signals[name])


def environment_of(
    rank: int, count: int, devices: Sequence[str], folder: Path, threads: str | None = None
) -> Mapping[str, str]:
    """A rank's environment variables: its place, its GPU as the only visible one, and its share of the cores as
    ``threads`` where nobody has said how many.
    """
    found = {
        FOLDER: str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": threads or str(max(1, usable_cores() // count)),
    }
    return {**found, "CUDA_VISIBLE_DEVICES": devices[rank]} if devices else found


def run_ranks(
    words: Sequence[str], count: int, devices: Sequence[str], run: Path, threads: str | None = None
) -> EndedElsewhere:
    """Runs a command line as ``count`` ranks, each with one of ``devices``; on a CPU there are none. ``run``: the run
    directory. Where rank 0 was killed, it is said there how the run has ended. ``threads``: as the user has said.
    """
    command = [sys.executable, "-P", "-m", "ftcli", *words]
    with scratch("ranks") as folder:
        try:
            return Ranks(command, count, devices, folder.path, held=folder.descriptor, threads=threads).wait()
        except FtcliError as error:
            finish_for_leader(run, error)
            raise


def signal_name(number: int) -> str:
    """``SIGKILL``, or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
