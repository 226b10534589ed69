"""The straight line: recipe, preflight, model, data, trainer, run directory, export. One function per command.

Heavy libraries are imported inside the functions that need them, so that a recipe is refused before torch is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftcli.config.load import LoadedRecipe
from ftcli.pipeline.options import BenchOptions
from ftcli.reporting import Session

__all__ = ["BenchOptions", "bench", "check", "evaluate", "export", "grpo", "train"]

Result = dict[str, Any]


def check(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> Result:
    """Preflight only. ``as_gpu`` answers for a named GPU; ``samples`` rows of each training source are shown."""
    from ftcli.pipeline.checking import run

    return run(loaded, session, as_gpu, samples)


def train(loaded: LoadedRecipe, session: Session) -> Result:
    """Supervised fine-tuning into the recipe's run directory."""
    from ftcli.pipeline.training import run

    return run(loaded, session)


def grpo(loaded: LoadedRecipe, session: Session) -> Result:
    """GRPO reinforcement fine-tuning into the recipe's run directory."""
    from ftcli.pipeline.reinforcement import run

    return run(loaded, session)


def evaluate(loaded: LoadedRecipe, session: Session, run_dir: Path | None) -> Result:
    """Loss and tasks of the base model, and of the run in ``run_dir`` beside it."""
    from ftcli.pipeline.evaluation import run

    return run(loaded, session, run_dir)


def export(loaded: LoadedRecipe, session: Session, run_dir: Path) -> Result:
    """Writes the run's result in the recipe's formats, each verified by loading it again."""
    from ftcli.pipeline.exporting import run

    return run(loaded, session, run_dir)


def bench(loaded: LoadedRecipe, session: Session, options: BenchOptions) -> Result:
    """The real training step on synthetic tokens and random weights."""
    from ftcli.pipeline.benchmark import run

    return run(loaded, session, options)
