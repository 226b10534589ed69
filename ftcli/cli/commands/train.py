"""`ftcli train`, and the commands of training methods that have one of their own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.cli import options
from ftcli.cli.environment import gpus_of_host, refuse_copies, results_only_on_stdout
from ftcli.cli.options import AnyRequest, EndedElsewhere
from ftcli.errors import ExitCode, FtcliError
from ftcli.reporting import Session
from ftcli.tables import code_of, engines
from ftcli.tables.methods import Method

if TYPE_CHECKING:
    from ftcli.config.load import LoadedRecipe, Override


def run_as_ranks(
    load: Callable[[Sequence[Override]], LoadedRecipe], gpus: str | None, session: Session
) -> LoadedRecipe | EndedElsewhere:
    """The recipe to run in this process, as ``load`` gives it with further overrides (``--gpus`` says so for
    ``launch.num_processes``); or how the processes ended that have run it.

    Raises FtcliError FT516 (exit 3) for more GPUs than there are, FT150 (exit 2) for what is no number, FT517 (exit 3)
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
    # What the user has said: this process has set it for itself since.
    threads = session.environment.get("OMP_NUM_THREADS")
    ended = run_ranks(session.arguments, wanted, [device for device in devices if device is not None], run, threads)
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


def training_command(method: Method) -> Callable[..., AnyRequest]:
    def train(
        session: Session,
        recipe: options.RecipeArgument,
        set_: options.SetOption = None,
        output_dir: options.OutputDirOption = None,
        max_steps: options.MaxStepsOption = None,
        resume: options.ResumeOption = None,
        gpus: options.GpusOption = None,
        dry_rewards: options.DryRewardsOption = False,
    ) -> object:
        from ftcli.pipeline.launch import train

        changes = options.overrides(set_, output_dir=output_dir, max_steps=max_steps, resume=resume)
        if dry_rewards and method.dry is not None:
            with results_only_on_stdout():
                result: object = code_of(method.dry)(options.load(recipe, changes), session)
            return result
        started = run_as_ranks(lambda more: options.load(recipe, (*changes, *more)), gpus, session)
        if isinstance(started, EndedElsewhere):
            return started
        with results_only_on_stdout():
            return train(started, session, method.command)

    train.__doc__ = method.help
    made = options.command(method.command, exit_code=exit_code, owns_stdout=True)(train)
    if method.dry is None:
        signature = inspect.signature(made)
        kept = [each for name, each in signature.parameters.items() if name != "dry_rewards"]
        made.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return made
