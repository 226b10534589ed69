"""What the process of a command does before it runs, in drills: where it stops or fails, and what it is spared."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.drill_clean import connect

_SECONDS = 600.0
_M_MMAP_THRESHOLD = -3  # malloc.h
_BLOCK = 1 << 16


def _wrap(target: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts a function around ``module:function`` or ``module:Class.method``, in this process only."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, around(getattr(owner, name)))


def pause(target: str, call: int, folder: str) -> None:
    """In the ``call``-th call of ``target``, makes ``folder/reached`` and waits for ``folder/released``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def waiting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                Path(folder, "reached").touch()
                deadline = time.monotonic() + _SECONDS
                while not Path(folder, "released").exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
            return function(*args, **kwargs)

        return waiting

    _wrap(target, around)


def starve(target: str, call: int, spare: int) -> None:
    """From the ``call``-th call of ``target`` on, this process may take ``spare`` bytes more than it has.

    Blocks of 64 KiB and more are taken from the system one by one and given back at once; those that are free in the
    process itself are taken from it before.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def starved(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK)
                libc.malloc_trim(0)
                lines = Path("/proc/self/status").read_text().splitlines()
                held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
                resource.setrlimit(resource.RLIMIT_DATA, (held, resource.RLIM_INFINITY))
                while libc.malloc(_BLOCK):
                    pass
                resource.setrlimit(resource.RLIMIT_DATA, (held + spare, resource.RLIM_INFINITY))
            return function(*args, **kwargs)

        return starved

    _wrap(target, around)


def fail(target: str, message: str, call: int = 1) -> None:
    """From its ``call``-th call on, ``target`` raises RuntimeError."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= call:
                raise RuntimeError(message)
            return function(*args, **kwargs)

        return failing

    _wrap(target, around)


def scarce(what: str, rows: int) -> None:
    """Memory runs out in the middle of a forward pass of sharded weights of more than ``rows`` rows: in `evaluation`,
    or in `generation`, where keys and values are kept.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def short(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_it = not self.training and ("cached" in kwargs) == (what == "generation")
            if is_it and isinstance(self, FSDPModule) and self.self_attn.layer_idx and len(hidden) > rows:
                raise torch.OutOfMemoryError
            return function(self, hidden, *args, **kwargs)

        return short

    _wrap("ftcli.model.fused:FusedDecoderLayer.compute", around)


def no_room_for_all() -> None:
    """This rank has no room for all weights of a model that is sharded: layers are gathered for each token."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def by_layer(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, "whole": False})

        return by_layer

    for module in ("ftcli.generation.generator", "ftcli.methods.grpo.rollouts"):
        _wrap(f"{module}:generating", around)


def spoil(target: str, call: int) -> None:
    """In its ``call``-th call, ``target`` gives NaN."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args, **kwargs)
            return result * float("nan") if calls == call else result

        return spoilt

    _wrap(target, around)


def impatient(seconds: float) -> None:
    """The ranks of this process wait for others no longer than ``seconds`` without a sign of life."""
    _be_patient(
        importlib.import_module("ftcli.run.heartbeat").Timeouts(told=seconds / 2, silent=seconds, leaving=seconds)
    )


def hurried(untold: float, folder: str) -> None:
    """The ranks of this process wait for others until there is ``folder/released``; then they say so, and from then on
    none may be silent for three seconds, thrice the time between two signs of life.

    Args:
        untold: Seconds that one may be silent after that where nobody says so: while a library waits. On a machine
            where others work, the way to the wait takes longer than any time that is short.
    """
    _be_patient(_Hurried(Path(folder, "released"), untold))


class _Hurried:
    """Patience that ends."""

    meeting, late, leaving = 600.0, 7200.0, 30.0

    def __init__(self, released: Path, untold: float) -> None:
        self._released, self._untold, self._is_told = released, untold, False

    @property
    def told(self) -> float:
        self._is_told = self._released.exists()
        return 0.0 if self._is_told else 60.0

    @property
    def silent(self) -> float:
        if self._is_told:
            return 3.0
        return self._untold if self._released.exists() else 60.0


def forked_ranks(seconds: float, folder: str) -> None:
    """The ranks that this launcher starts are forks of it. None may be silent for longer than ``seconds`` once there is
    ``folder/released``.
    """
    limits = _Limited(seconds, Path(folder, "released"))
    _be_patient(limits)

    def limited(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **more: function(self, *args, limits, **more)

    def forked(function: Callable[..., Any]) -> Callable[..., Any]:
        def started(command: list[str], **options: Any) -> Any:
            return (_Fork if command[1:4] == ["-P", "-m", "ftcli"] else function)(command, **options)

        return started

    _wrap("ftcli.cli.children:Ranks.__init__", limited)
    _wrap("ftcli.cli.children:subprocess.Popen", forked)


class _Limited:
    """Patience that is short from some time on."""

    meeting, told, late = 600.0, 10.0, 7200.0

    def __init__(self, seconds: float, released: Path) -> None:
        self._seconds, self._released = seconds, released

    @property
    def silent(self) -> float:
        return self._seconds if self._released.exists() else 60.0

    leaving = silent


class _Fork:
    """What a launcher asks of `subprocess.Popen`."""

    def __init__(self, command: list[str], *, env: dict[str, str], preexec_fn: Callable[[], None], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 99
        try:
            os.setsid()
            preexec_fn()
            os.environ.clear()
            os.environ.update(env)
            status = importlib.import_module("ftcli.cli.app").main(command[4:])
        finally:
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _be_patient(patience: Any) -> None:
    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, place, reporter: function(self, place, reporter, patience)

    _wrap("ftcli.run.process_group:RankGroup.__init__", around)


def small_files(limit: int) -> None:
    """No file of this process may grow beyond ``limit`` bytes: the system refuses, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def few_held_out(count: int, folder: str) -> None:
    """Of each file of held-out data that ships with ftcli there are the first ``count`` rows, in ``folder``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def shortened(name: str, kind: str) -> Path | None:
            stem: Path | None = function(name, kind)
            if stem is None or not stem.name.endswith("-eval"):
                return stem
            short = Path(folder, f"{stem.name}.jsonl")
            if not short.exists():
                rows = Path(f"{stem}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
                short.write_text("".join(rows[:count]), encoding="utf-8")
            return short.with_suffix("")

        return shortened

    _wrap("ftcli.rows.places:bundled", around)


def bundled_models(folder: str) -> None:
    """The models that ship with ftcli are those in ``folder``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def found(*parts: str) -> Path:
            path: Path = function(*parts)
            return Path(folder, *parts[1:]) if parts[0] == "models" else path

        return found

    for module in ("ftcli.assets", "ftcli.facts.config_file"):
        _wrap(f"{module}:asset", around)


def warm_children(socket: str) -> None:
    """The runs of a sweep are forks of the server, too: what `python -m ftcli` would start is its client."""
    client = [sys.executable, "-S", "-E", str(Path(__file__).with_name("drill_client.py")), socket]

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def started(command: list[str], **options: Any) -> Any:
            ours = command[1:4] == ["-P", "-m", "ftcli"]
            return function([*client, *command[4:]] if ours else command, **options)

        return started

    _wrap("ftcli.cli.children:subprocess.Popen", around)


def warm_check() -> None:
    """The process that checks a sweep's runs is a fork of it, and need not import anything."""
    _wrap("ftcli.pipeline.sweep:get_context", lambda get: lambda _method: get("fork"))


def warm_clean(socket: str) -> None:
    """The process that loads exports again is one that has imported its libraries; see drill_clean.py."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: self._running is None and connect(self, f"{socket}-clean")

    _wrap("ftcli.export.clean.process:CleanProcess.start", around)


_FAULTS = (pause, starve, fail, scarce, no_room_for_all, spoil, impatient, hurried, forked_ranks, small_files)
_SHORTCUTS = (few_held_out, bundled_models, warm_children, warm_check, warm_clean)
#: By name, as a request of drill.py has them.
PREPARATIONS = {f.__name__: f for f in (*_FAULTS, *_SHORTCUTS)}
