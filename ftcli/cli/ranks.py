"""Decides whether a command runs in this process or in several, and starts these."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.cli import options
from ftcli.cli.environment import gpus_of_host, refuse_copies
from ftcli.cli.options import EndedElsewhere
from ftcli.errors import ExitCode, FtcliError
from ftcli.reporting import Session
from ftcli.tables import engines

if TYPE_CHECKING:
    from ftcli.config.load import LoadedRecipe, Override


def run_as_ranks(
    load: Callable[[Sequence[Override]], LoadedRecipe], gpus: str | None, session: Session
) -> LoadedRecipe | EndedElsewhere:
    """The recipe to run in this process; or how the processes ended that have run it.

    Args:
        load: Loads the recipe, with further overrides.
        gpus: ``--gpus``: it says so for ``launch.num_processes``.

    Raises:
        FtcliError: FT516 (exit 3) for more GPUs than there are, FT150 (exit 2) for what is no number, FT517 (exit 3)
            where srun has started several copies of the command.
    """
    from ftcli.cli import children
    from ftcli.facts.device import most_processes, usable_cores

    refuse_copies(os.environ, session.place)
    if session.place is not None:
        return load(())
    devices: tuple[str | None, ...] = (None,)
    more: Sequence[Override] = ()
    if gpus is not None and _means_processes(gpus):
        more, gpus = options.overrides((), gpus=int(gpus)), None
    elif gpus is not None:
        devices = children.devices(gpus, os.environ, _count)
        more = options.overrides((), gpus=len(devices))
    loaded = load(more)
    wanted = loaded.recipe.launch.num_processes
    if wanted == 1 or engines.row(loaded.recipe.launch.engine).processes == 1:
        return loaded
    if gpus is None and _count():
        devices = children.devices(str(wanted), os.environ, _count)
    elif gpus is None and wanted > most_processes(usable_cores()):
        message = f"launch.num_processes {wanted:,}: there is no GPU here, and {usable_cores()} CPU cores"
        help = "use at most as many processes as there are cores"
        raise FtcliError.single("FT516", message, origin=loaded.origins.at("launch.num_processes"), help=help)
    from ftcli.cli.children import run_ranks

    run = Path(str(loaded.recipe.run.output_dir))
    ended = run_ranks(session.arguments, wanted, [device for device in devices if device is not None], run)
    if ended.exit_code == ExitCode.OK:
        session.on_complete()
    return ended


def _means_processes(gpus: str) -> bool:
    """True if ``--gpus N`` means processes on the CPU, on a machine without GPUs."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus.isdecimal() and int(gpus) > 0 and listed is None and not _count()


def exit_code(result: object) -> int:
    """The status of a command that may have run in several processes."""
    return result.exit_code if isinstance(result, EndedElsewhere) else int(ExitCode.OK)


def _count() -> int:
    from ftcli.cli.children import count_gpus

    found = gpus_of_host()
    return count_gpus() if found is None else found
