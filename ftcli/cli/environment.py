"""Reads the process environment, and what a launcher made of it: the rank of this process and its GPU, colours, offline
mode, the cache folder, and what a manifest records.

Output that cannot be written (a log reader that has left, a full disk, a terminal that is gone) never ends a run.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from ftcli.cli.options import CommonOptions
from ftcli.cli.render import Style
from ftcli.cli.reporters import CollectingReporter, TerminalReporter
from ftcli.errors import FtcliError, Origin
from ftcli.facts.device import usable_cores
from ftcli.paths import expanded
from ftcli.ranks import Place, hearing_its_end
from ftcli.reporting import Session
from ftcli.tables import loggers


class _Unfailing(io.TextIOBase):
    """A text stream that drops what cannot be written. What it does not have itself is asked of the real stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: What the handler of a signal wrote in the middle of a write. It waits for that one's end.
        self._late: list[str] = []

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            try:
                self._stream.write(text)
            except RuntimeError:  # "reentrant call"
                self._late.append(text)
            else:
                self._catch_up()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stream.flush()
            self._catch_up()

    def _catch_up(self) -> None:
        while self._late:
            self._stream.write(self._late.pop(0))
            self._stream.flush()

    def close(self) -> None:
        """Leaves the real stream open: it belongs to the process."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer


def unfailing(stream: TextIO) -> TextIO:
    """``stream``, whose writes do not fail."""
    return cast("TextIO", _Unfailing(stream))


def open_missing_streams() -> None:
    """Gives a process that was started without stdin, stdout or stderr (``>&-``) the null device in their place: else
    the next file that is opened, a checkpoint say, takes their number, and what is printed goes into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is taken, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))


def let_go_of_broken_streams() -> None:
    """Replaces stdout or stderr if it cannot be written any more, so that Python does not complain when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


#: In a rank's environment: the folder of :class:`ftcli.ranks.Place`.
FOLDER = "FTCLI_GROUP"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What torchrun always sets. Where one of them is missing, the others are somebody's leavings.
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
)


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place of a process that ftcli or torchrun has started as a rank; None for all others."""
    folder = environment.get(FOLDER)
    try:
        if folder is not None:
            return _place(environment, folder=Path(folder))
        if all(name in environment for name in _TORCHRUN):
            hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            port = int(environment["MASTER_PORT"])
            return _place(environment, address=environment["MASTER_ADDR"], port=port, hosted=hosted)
    except (KeyError, ValueError):
        return None
    return None


def _place(
    environment: Mapping[str, str],
    *,
    address: str = "127.0.0.1",
    port: int | None = None,
    folder: Path | None = None,
    hosted: bool = False,
) -> Place:
    rank, size, local, locally = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return Place(rank, size, local, locally, address, port, folder, hosted)


def obeying() -> Callable[[], None]:
    """A function that a process calls before it becomes a run: it hears SIGHUP, also when whoever started it is killed.

    That comes for each thread of the one that is killed; of SIGHUP only the first one counts.
    """
    hear = hearing_its_end(signal.SIGHUP)

    def before() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` it is ignored, and with it what is passed on
        hear()

    return before


def leave(status: int) -> NoReturn:
    """Ends a rank, whose output is written. What Python does at an end is done, but not what torch's connections do:
    they wait for ranks that are gone, for hours.
    """
    atexit._run_exitfuncs()
    os._exit(status)


def refuse_copies(environment: Mapping[str, str], place: Place | None) -> None:
    """Refuses a command that srun has started several times without a launcher. Raises FtcliError FT517 (exit 3)."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if place is None and tasks.isdecimal() and int(tasks) > 1:
        message = f"srun has started this command {tasks} times, and each would train the same run"
        help = "start one task on each host, and torchrun in it: docs/multi-gpu.md shows how"
        raise FtcliError.single("FT517", message, help=help)


def own_gpu(environment: Mapping[str, str], place: Place | None) -> Mapping[str, str]:
    """CUDA_VISIBLE_DEVICES for this rank when the launcher exposes the GPUs of all ranks."""
    if place is None or place.folder is not None or place.size == 1:
        return {}
    listed = environment.get(_VISIBLE)
    if listed is None:
        return {_VISIBLE: str(place.local_rank)} if gpus_of_host() else {}
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return {_VISIBLE: names[place.local_rank]} if place.local_rank < len(names) and len(names) > 1 else {}


def gpus_of_host() -> int | None:
    """Number of GPUs on this host by NVIDIA's driver; None if it does not say. Takes no time, unlike torch."""
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))  # noqa: PTH208 - only the number matters
    except OSError:
        return None


#: Variables that change what a run computes or where it runs. None of them is a secret.
_RECORDED = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "TORCH_COMPILE_DISABLE",
    "TRITON_INTERPRET",
    "WANDB_MODE",
    "WANDB_PROJECT",
)


#: What launchers of several processes and `accelerate config` leave behind. accelerate and transformers would obey it.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")
#: MPI's and SLURM's process managers set these for a single process as well, so they are not worth a word.
_MPI_PREFIXES = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")


def style_for(stream: object) -> Style:
    """Colours on a terminal, unless NO_COLOR is set or the terminal is dumb."""
    return Style(color=_wants_color(stream))


def open_session(options: CommonOptions, argv: Sequence[str]) -> tuple[Session, CollectingReporter]:
    """The session of one invocation, and its reporter, which keeps all findings."""
    from ftcli.config.secrets import mask

    terminal = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
    style = style_for(sys.stderr)
    reporter: CollectingReporter
    place = place_of(os.environ)
    if place is not None and place.folder is None:
        obeying()()  # a torchrun that is killed
    if place is not None and not place.leads:
        reporter = CollectingReporter(unfailing(open(os.devnull, "w")), style, quiet=True)  # noqa: SIM115, PTH123
    elif terminal and not options.quiet:
        reporter = TerminalReporter(unfailing(sys.stderr), style, quiet=False, color=_wants_color(sys.stderr))
    else:
        reporter = CollectingReporter(unfailing(sys.stderr), style, quiet=options.quiet)
    session = Session(
        reporter=reporter,
        quiet=options.quiet,
        json=options.json,
        offline=options.offline or _flag("HF_HUB_OFFLINE"),
        debug=options.debug,
        is_tty=terminal,
        command=("ftcli", *(mask(word) for word in argv)),
        arguments=tuple(argv),
        environment=recorded(os.environ),
        secret=os.environ.get,
        cache_dir=cache_dir(os.environ),
        place=place,
    )
    return session, reporter


def cache_dir(environment: Mapping[str, str]) -> Path | None:
    """The cache of tokenized data: FTCLI_CACHE (``off``: none), else ``ftcli`` in XDG_CACHE_HOME or ~/.cache."""
    own = environment.get("FTCLI_CACHE")
    if own:
        return None if own.lower() == "off" else expanded(own)
    base = environment.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ftcli"
    except RuntimeError:  # a user without a home
        return None


def secret(name: str, option: str) -> str:
    """The value of a variable that holds a secret. Raises FtcliError FT791 (exit 2) where it is not set."""
    value = os.environ.get(name)
    if not value:
        message, help = f"the variable {name} is not set, and {option} names it", f"export {name}=…"
        raise FtcliError.single("FT791", message, origin=Origin(f"{option} {name}"), help=help)
    return value


def recorded(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables worth recording."""
    return {name: environment[name] for name in _RECORDED if name in environment}


@contextmanager
def library_environment(session: Session) -> Iterator[None]:
    """While a command runs: no network with ``--offline``, no bars of other libraries where there is no terminal, and
    as many threads as there are cores for it, unless OMP_NUM_THREADS is set.

    Must be entered before transformers or huggingface_hub are imported, which read these variables only then.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    wanted["OMP_NUM_THREADS"] = str(usable_cores())  # torch, MKL, OpenBLAS and Arrow count those of the host otherwise
    for name in loggers.names():
        wanted |= loggers.row(name).environment
    if session.offline:
        wanted |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if not session.is_tty or session.quiet:
        wanted |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    wanted |= _of_ranks(session)
    left_over = _of_launchers(os.environ)
    unset = [*left_over, *(name for name in os.environ if name.startswith(_MPI_PREFIXES))]
    before = {name: os.environ.get(name) for name in (*wanted, *unset)}
    for name, value in wanted.items():
        if before[name] is None or name in ("HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"):
            os.environ[name] = value
    for name in unset:
        del os.environ[name]
    try:
        yield
    finally:
        for name, value_before in before.items():
            if value_before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value_before


def _of_ranks(session: Session) -> Mapping[str, str]:
    """A rank's environment variables; reports variables of other launchers, which have no effect."""
    if session.place is not None:  # what torch says of closed connections, ftcli says with the rank's number
        return {"TORCH_CPP_LOG_LEVEL": "ERROR", **own_gpu(os.environ, session.place)}
    left_over = _of_launchers(os.environ)
    if left_over:
        names = ", ".join(left_over)
        session.reporter.warn(f"one process is used: {names} in the environment has no effect on ftcli")
    return {}


def _of_launchers(environment: Mapping[str, str]) -> list[str]:
    return sorted(n for n in environment if n in _LAUNCHERS or n.startswith(_LAUNCHERS_PREFIXES))


@contextmanager
def fewer_library_warnings(session: Session) -> Iterator[None]:
    """While a command runs, hides warnings about future versions of libraries: they are not for users of ftcli."""
    with warnings.catch_warnings():
        if not session.debug:
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def results_only_on_stdout() -> Iterator[None]:
    """While a command runs, everything that any library prints goes to stderr, C code included; none of it fails."""
    saved = _duplicate_stdout()
    stderr = unfailing(sys.stderr)
    try:
        with redirect_stdout(stderr), redirect_stderr(stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


def _duplicate_stdout() -> int | None:
    """Point file descriptor 1 at stderr and return a copy of what it was; None where these are not the real streams."""
    try:
        if sys.stdout.fileno() != 1 or sys.stderr.fileno() != 2:
            return None
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        return None
    return saved


def is_terminal(stream: object) -> bool:
    """True if a person is at the other side of ``stream``."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty()) if callable(isatty) else False


def _wants_color(stream: object) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
