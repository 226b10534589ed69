"""Reads the process environment: colours, offline mode, the cache folder, and what a manifest records."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import MappingProxyType

from ftcli.cli.place import obeying, own_gpu, place_of
from ftcli.cli.render import Style
from ftcli.cli.reporters import CollectingReporter, TerminalReporter
from ftcli.cli.request import CommonOptions
from ftcli.cli.streams import unfailing
from ftcli.facts.device import usable_cores
from ftcli.paths import expanded
from ftcli.reporting import Session
from ftcli.tables import loggers

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


def recorded(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables worth recording."""
    return MappingProxyType({name: environment[name] for name in _RECORDED if name in environment})


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
