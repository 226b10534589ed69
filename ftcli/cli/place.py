"""The rank of this process, read from the environment that a launcher made, and its own GPU."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from ftcli.errors import FtcliError
from ftcli.ranks import Place, hearing_its_end

#: In a rank's environment: the folder of :class:`ftcli.ranks.Place`.
FOLDER = "FTCLI_GROUP"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What torchrun always sets. Where one of them is missing, the others are somebody's leavings.
_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
)


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place of a process that ftcli or torchrun has started as a rank; None for all others.

    Raises:
        FtcliError: FT517 (exit 3) where srun has started the same command several times, each of which would train.
    """
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
    """Refuses a command that srun has started several times without a launcher.

    Raises:
        FtcliError: FT517 (exit 3).
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if place is None and tasks.isdecimal() and int(tasks) > 1:
        raise FtcliError.single(
            "FT517",
            f"srun has started this command {tasks} times, and each would train the same run",
            help="start one task on each host, and torchrun in it: docs/multi-gpu.md shows how",
        )


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
