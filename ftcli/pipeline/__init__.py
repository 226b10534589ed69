"""The straight line: recipe, preflight, data, model, trainer, run directory, export. One function for each command.

Heavy libraries are imported inside the functions that need them, so that a faulty recipe is refused before torch loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ftcli.config.load import LoadedRecipe
from ftcli.pipeline.launch import over_ranks
from ftcli.pipeline.options import BenchOptions, ChatOptions, ExportOptions, SampleOptions
from ftcli.reporting import Session
from ftcli.run.signals import stoppable
from ftcli.tables import code_of, engines, methods

if TYPE_CHECKING:
    from ftcli.pipeline.bench_result import BenchResult
    from ftcli.pipeline.chatting import Chat
    from ftcli.pipeline.checking import CheckResult
    from ftcli.pipeline.evaluation import EvaluationResult
    from ftcli.pipeline.every_gpu import EveryGpu
    from ftcli.pipeline.exporting import Exported
    from ftcli.pipeline.sample_rows import SampleResult
    from ftcli.run.process_group import RankGroup

T = TypeVar("T")

__all__ = [
    "BenchOptions",
    "ChatOptions",
    "ExportOptions",
    "SampleOptions",
    "bench",
    "chat",
    "check",
    "check_every_gpu",
    "evaluate",
    "export",
    "sample",
    "train",
]

_AS_THE_RECIPE_SAYS = ExportOptions()


def check(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> CheckResult:
    """Preflight only. ``as_gpu`` answers for a named GPU; ``samples`` rows of each training source are shown."""
    from ftcli.pipeline.checking import check_recipe

    return check_recipe(loaded, session, as_gpu, samples)


def check_every_gpu(loaded: LoadedRecipe, session: Session) -> EveryGpu:
    """Preflight only, for each GPU that has a name."""
    from ftcli.pipeline import every_gpu

    return every_gpu.check_every_gpu(loaded, session)


def train(loaded: LoadedRecipe, session: Session, command: str = "train") -> object:
    """Trains by the method that ``command`` and the recipe name, under the recipe's engine, into its run directory.

    Each method answers with a type of its own.
    """
    loaded = over_ranks(loaded, session.place)
    method = methods.method_of(loaded.recipe, command)
    run = code_of(method.run)

    def work(group: RankGroup | None) -> object:
        # Preflight refuses several processes for a method that is not made for them.
        return run(loaded, session) if group is None or not method.on_ranks else run(loaded, session, group)

    return _launched(work, loaded, session)


def _launched(work: Callable[[RankGroup | None], T], loaded: LoadedRecipe, session: Session) -> T:
    """The work, under the recipe's engine."""
    launch = loaded.recipe.launch
    start = code_of(engines.row(launch.engine).run)
    result: T = start(work, session, launch.num_processes)
    return result


def evaluate(
    loaded: LoadedRecipe, session: Session, run_dir: Path | None, checkpoint: str | None = None
) -> EvaluationResult:
    """Loss and tasks of the base model, and of the run in ``run_dir``, or a checkpoint of it, beside it."""
    with stoppable("evaluating"):
        from ftcli.pipeline.evaluation import evaluate_recipe

        return evaluate_recipe(loaded, session, run_dir, checkpoint)


def export(
    loaded: LoadedRecipe, session: Session, run_dir: Path, options: ExportOptions = _AS_THE_RECIPE_SAYS
) -> Exported:
    """Writes the run's result, or a checkpoint, in the recipe's formats, each verified by loading it again."""
    with stoppable("exporting"):
        from ftcli.pipeline.exporting import export_recipe

        return export_recipe(loaded, session, run_dir, options)


def chat(loaded: LoadedRecipe, session: Session, run_dir: Path, options: ChatOptions) -> Chat:
    """The run's model, or its base, loaded and ready to answer."""
    with stoppable("loading the model"):
        from ftcli.pipeline.chatting import open_chat

        return open_chat(loaded, session, run_dir, options)


def sample(loaded: LoadedRecipe, session: Session, run_dir: Path | None, options: SampleOptions) -> SampleResult:
    """Answers of the base model, or of the run in ``run_dir``, judged and written as rows to train on."""
    with stoppable("sampling"):
        from ftcli.pipeline.sampling import sample_recipe

        return sample_recipe(loaded, session, run_dir, options)


def bench(loaded: LoadedRecipe, session: Session, options: BenchOptions) -> BenchResult:
    """The real training step on synthetic tokens and random weights."""
    from ftcli.pipeline.benchmark import bench_step

    loaded = over_ranks(loaded, session.place)
    return _launched(lambda group: bench_step(loaded, session, options, group), loaded, session)
