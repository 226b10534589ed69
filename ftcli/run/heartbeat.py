"""Heartbeats: each rank of a run reports every second that it lives and where it is, and ends where another does not.

Two threads of each rank do this, since anything else may be held up by a rank that is silent: the talking one by the
process that holds what all say, the main one by an exchange, on the host or on a GPU. The watching one only counts.
Time in which this process was stopped itself does not count.

A rank that fails tells the others why (:class:`PeerFailed`); one that was killed or hangs is :class:`RankLost`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.errors import ExitCode, Finding, FtcliError, first_line, is_out_of_memory
from ftcli.plain import JsonObject
from ftcli.ranks import Place, lost_name, sign_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: What torch says of connections that are closed, cut or silent, whichever library they are of.
_OF_CONNECTIONS = ("gloo", "NCCL", "nccl", "Connection closed", "communicator")


class PeerFailed(FtcliError):
    """Another rank has failed, and this one ends with it: that one's findings and exit code."""


class RankLost(FtcliError):
    """A rank was killed, or hangs (FT710, exit 75): ``ranks``, none where that is not known, and ``how`` ("was killed
    by SIGKILL").
    """

    def __init__(self, ranks: Sequence[int], how: str, who: str = "a rank") -> None:
        """``who`` it is where no ranks are named."""
        self.ranks, self.how = ranks, how
        if ranks:
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        finding = Finding(
            "FT710",
            f"{who} {how}: no rank can go on without it",
            help="start the same command again: it goes on from the last checkpoint. docs/multi-gpu.md says where to "
            "look for the reason",
        )
        super().__init__([finding], ExitCode.PREEMPTED)


def reasons(error: BaseException) -> tuple[ExitCode, Sequence[Finding]]:
    """The exit code and the findings of a failure."""
    if isinstance(error, FtcliError):
        return error.exit_code, error.findings
    text = f"{type(error).__name__}: {first_line(error)[:300]}"
    if is_out_of_memory(error):
        help = "lower train.per_device_train_batch_size or data.max_seq_len; `ftcli check` says what fits"
        return ExitCode.OUT_OF_MEMORY, (Finding("FT192", f"out of memory: {text}", help=help),)
    help = "run it again with --debug: the rank prints its traceback"
    return ExitCode.BUG, (Finding("FT190", f"this is a bug in ftcli: {text}", help=help),)


def as_json(finding: Finding) -> JsonObject:
    """A finding for another process, which has no files to show lines of."""
    origin = "" if finding.origin is None else f"{finding.origin}: "
    return {**asdict(finding), "message": f"{origin}{finding.message}", "origin": None}


def is_of_connections(error: RuntimeError) -> bool:
    """True if an error says that another rank cannot be reached any more."""
    return not is_out_of_memory(error) and any(word in str(error) for word in _OF_CONNECTIONS)


def from_json(text: str | bytes) -> PeerFailed:
    """The failure that a rank has published: findings of :func:`as_json`, and its number."""
    said = json.loads(text)
    findings = [Finding(**{**raw, "origin": None}) for raw in said["findings"]]
    named = [Finding(f.code, f"rank {said['rank']}: {f.message}", None, f.help, f.severity) for f in findings]
    return PeerFailed(named, ExitCode(said["exit_code"]))


def killed(place: Place) -> RankLost | None:
    """The first rank that was lost, as ftcli's own launcher has seen it."""
    if place.folder is None:
        return None
    for rank in range(place.size):
        with contextlib.suppress(OSError):
            how = (place.folder / lost_name(rank)).read_text(encoding="utf-8")
            if how:  # else the launcher is just writing it
                return RankLost([rank], how)
    return None


_SECONDS = 1.0
#: Until every other rank has been heard once: only a process that is known can be ended.
_FIRST_SECONDS = 0.05
#: Of a rank that has left as it should, where it is: its silence means nothing.
_LEFT = "left"
#: The host is given so long to find out by itself that a rank is gone, before connections between GPUs are cut: a GPU
#: that waits for another one waits for ever, and once enough work is queued behind it, so does the host.
_CUT_SECONDS = 5.0
#: A process that was stopped, or did not come to run, counts no more than this at once.
_MOST_AT_ONCE = 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to find the others; until a wait is reported; without a sign of life until a rank counts as lost; that a
    rank that lives may be late; and that a rank which has nothing to save may take to leave once another is lost.
    """

    meeting: float = 600.0
    told: float = 10.0
    silent: float = 60.0
    late: float = 7200.0
    leaving: float = 30.0


class Silence:
    """Seconds for which each of some ranks has been silent, of the time in which this process ran."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(ranks, 0.0)
        self._counted = time.monotonic()

    def count(self) -> None:
        """Adds the time since this was called last."""
        now = time.monotonic()
        with self._lock:
            passed, self._counted = min(now - self._counted, _MOST_AT_ONCE), now
            for rank in self._seconds:
                self._seconds[rank] += passed

    def heard(self, rank: int) -> None:
        with self._lock:
            self._seconds[rank] = 0.0

    def seconds(self) -> Mapping[int, float]:
        """Seconds of silence by rank."""
        with self._lock:
            return dict(self._seconds)


def show_life(place: Place) -> None:
    """Starts a thread that tells ftcli's launcher, for as long as this process runs, that it does."""
    if place.folder is None:
        return
    sign = place.folder / sign_name(place.rank)

    def show() -> None:
        while True:
            with contextlib.suppress(OSError):
                sign.touch()
            time.sleep(_SECONDS / 2)

    threading.Thread(target=show, daemon=True, name="signs of life for the launcher").start()


class Heartbeat:
    """Says that this rank lives, hears when the others have said so last, and sees to it that it ends without them.

    ``cut`` cuts the connections between GPUs. ``at``: where this rank is, in words; ``noticed``: the main thread knows
    that the run is over, and ends it; ``unreachable``: the process that holds what all say is gone.
    """

    def __init__(self, store: Store, place: Place, patience: Timeouts, cut: Callable[[], None]) -> None:
        self._store, self._place, self._patience, self._cut = store, place, patience, cut
        self._others = [rank for rank in range(place.size) if rank != place.rank]
        self._silence = Silence([*self._others, place.rank])  # its own: since it could talk to the others last
        self._said: dict[int, str] = {}
        self._processes: dict[int, tuple[int, int]] = {}
        self._failed: FtcliError | None = None
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._talk, self._watch)]
        self.at, self.noticed, self.unreachable = "starting", False, False

    def start(self) -> None:
        """Says it and listens, every second, and watches."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, orderly: bool) -> None:
        """This rank says nothing more; ``orderly``: the last is that it has left."""
        self.at = _LEFT if orderly else self.at
        self._over.set()
        for thread in self._threads:
            thread.join(5)

    # -- what is known -----------------------------------------------------------------------------------------

    def silent_for(self) -> Mapping[int, float]:
        """Seconds since each other rank was heard last; since this one began to listen where it never was."""
        found = self._silence.seconds()
        return {rank: 0.0 if self._where(rank) == _LEFT else found[rank] for rank in self._others}

    def lost(self) -> FtcliError | None:
        """The reason why no rank can go on, as far as this one knows."""
        return self._failed or killed(self._place) or self._hung()

    def described(self, ranks: Sequence[int], silent: Mapping[int, float]) -> str:
        """``rank 1 (at: step begins)``, or how long it has been silent."""
        return ", ".join(
            f"rank {rank} ("
            + (f"no sign of life for {silent[rank]:.0f} s" if silent[rank] > 3 else f"at: {self._where(rank)}")
            + ")"
            for rank in ranks
        )

    def _where(self, rank: int) -> str:
        return self._said.get(rank, "   ?").split(" ", 3)[3]

    def _hung(self) -> RankLost | None:
        limit = self._patience.silent
        silent = [rank for rank, seconds in self.silent_for().items() if seconds > limit]
        if not silent:
            return None
        how = f"has given no sign of life for {limit:.0f} s"
        if self._silence.seconds()[self._place.rank] <= limit / 2:
            return RankLost(silent, how)
        if not self._place.hosted:  # whoever holds what all say says nothing himself
            return RankLost([0], how)
        return RankLost([], how, "torchrun")

    # -- the threads -------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        count = 0
        while not self._over.wait(self._until_next() if count else 0.0):
            count += 1
            try:
                self._say(count)
                self._listen()
                self._silence.heard(self._place.rank)
            except RuntimeError:  # who holds what is said may be gone: its silence tells
                self.unreachable = True
        if self.at == _LEFT:
            with contextlib.suppress(RuntimeError):
                self._say(count + 1)

    def _until_next(self) -> float:
        seconds = _SECONDS if len(self._said) == len(self._others) else _FIRST_SECONDS
        return min(seconds, self._patience.silent / 4)

    def _say(self, count: int) -> None:
        self._store.set(f"sign/{self._place.rank}", f"{count} {os.getpid()} {_space()} {self.at}")

    def _listen(self) -> None:
        for rank in self._others:
            if self._store.check([f"sign/{rank}"]):
                said = self._store.get(f"sign/{rank}").decode()
                if self._said.get(rank) != said:
                    self._said[rank] = said
                    self._silence.heard(rank)
                    self._hold(rank, said)
        if self._failed is None and self._store.check(["failed"]):
            self._failed = from_json(self._store.get("failed"))

    def _hold(self, rank: int, said: str) -> None:
        """Notes the pid of a process of this host with a pidfd, which no other process gets when it has ended."""
        _, pid, space, _ = said.split(" ", 3)
        if rank not in self._processes and space == _space() and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._processes[rank] = int(pid), os.pidfd_open(int(pid))

    def _watch(self) -> None:
        gone_for, looked, is_cut = 0.0, time.monotonic(), False
        while not self._over.wait(min(0.25, self._patience.silent / 8)):
            self._silence.count()
            now = time.monotonic()
            passed, looked = min(now - looked, _MOST_AT_ONCE), now
            if self.lost() is None:
                continue
            self._end_silent()
            gone_for += passed
            if gone_for > _CUT_SECONDS and not is_cut:
                is_cut = True
                self._cut()
            if gone_for > self._patience.leaving and not (self._place.leads or self.noticed):
                os._exit(ExitCode.PREEMPTED)

    def _end_silent(self) -> None:
        """Kills those processes of this host that are silent, so that nothing waits for them, nor is left of them.
        Where nobody can be heard, these are those that are stopped.
        """
        hung = self._hung()
        if hung is None:
            return
        for rank, (pid, handle) in list(self._processes.items()):
            if rank not in hung.ranks and (hung.ranks or not _is_stopped(pid)):
                continue
            del self._processes[rank]
            with contextlib.suppress(OSError):
                if self._place.folder is not None:
                    (self._place.folder / lost_name(rank)).write_text(hung.how, encoding="utf-8")
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].startswith(" T")
    return False


def _space() -> str:
    """In which process ids mean the same: this boot of this host, and this namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - no path
    return f"?{os.getpid()}"
