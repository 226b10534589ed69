"""`ftcli train` and `ftcli grpo`, and what starts the processes of a run: the code of :mod:`ftcli.tables.engines`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ftcli.config.load import LoadedRecipe
from ftcli.errors import FtcliError
from ftcli.ranks import Place
from ftcli.reporting import Session
from ftcli.tables import code_of, engines, methods

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup

T = TypeVar("T")


def train(loaded: LoadedRecipe, session: Session, command: str = "train") -> object:
    """Trains by the method that ``command`` and the recipe name, under the recipe's engine, into its run directory.

    Each method answers with a type of its own.
    """
    loaded = over_ranks(loaded, session.place)
    method = methods.method_of(loaded.recipe, command)
    run, asked = code_of(method.run), loaded.recipe.train.method
    if asked not in (methods.DEFAULT, method.name):
        session.reporter.info(f"train.method: {asked} is for `ftcli train`; `ftcli {command}` trains by {method.title}")

    def work(group: RankGroup | None) -> object:
        # Preflight refuses several processes for a method that is not made for them.
        return run(loaded, session) if group is None or not method.on_ranks else run(loaded, session, group)

    return launched(work, loaded, session)


def launched(work: Callable[[RankGroup | None], T], loaded: LoadedRecipe, session: Session) -> T:
    """The work, under the recipe's engine."""
    launch = loaded.recipe.launch
    result: T = code_of(engines.row(launch.engine).run)(work, session, launch.num_processes)
    return result


def in_this_process(work: Callable[[RankGroup | None], T], session: Session, processes: int) -> T:
    """``single``: runs the work in this process. Preflight has refused recipes that ask for more than one."""
    return work(None)


def as_rank(work: Callable[[RankGroup | None], T], session: Session, processes: int) -> T:
    """``ddp``: runs the work as one of several ranks that `ftcli train --gpus N` or torchrun have started, each with
    the whole model; as ``single`` where there is one. What fails on one ends them all. Raises FtcliError FT517 (exit 3)
    in a process that nobody has started as a rank.
    """
    place = session.place
    if processes == 1 and (place is None or place.size == 1):
        return work(None)
    if place is None:
        help = "the command `ftcli train` starts the others; a program that calls ftcli.pipeline has to do it itself"
        raise FtcliError.single("FT517", f"launch.num_processes {processes}: this process was started alone", help=help)
    from ftcli.run.heartbeat import show_life

    show_life(place)  # before torch is imported, which may take a while
    from ftcli.run.process_group import RankGroup, announced

    if place.rank:  # rank 0 says what transformers has to say
        from transformers.utils import logging

        logging.set_verbosity_error()
    group = RankGroup(place, session.reporter)
    with announced(group):
        return work(group)


def over_ranks(loaded: LoadedRecipe, place: Place | None) -> LoadedRecipe:
    """The recipe for as many processes as there are, where a launcher has started them. Raises FtcliError FT517 (exit
    3) when the recipe asks for another number.
    """
    if place is None:
        return loaded
    launch = loaded.recipe.launch
    if place.folder is None and launch.num_processes not in (1, place.size):
        message = f"launch.num_processes is {launch.num_processes}, and {place.size} processes were started"
        help = "leave launch.num_processes out under torchrun: it says how many there are"
        raise FtcliError.single("FT517", message, help=help)
    return replace(loaded, recipe=loaded.recipe.changed({"launch.num_processes": place.size}))
