"""What the command line asks of a finished run that was decided when it was trained."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.config.dump import dump_recipe
from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.run.atomic import read_text
from ftcli.run.directory import RunDirectory
from ftcli.run.recipe_changes import ChangedKey, recipe_changes
from ftcli.tables import methods

#: What only training reads, besides the sections of its methods: weights that are there already know nothing of it.
_TRAINING = ("lora", "train", "checkpoint", "launch")


def changed_since(loaded: LoadedRecipe, run: RunDirectory) -> tuple[ChangedKey, ...]:
    """How the recipe, as it is now, differs from the one that the run was trained by; nothing of a run without one."""
    try:
        return recipe_changes(read_text(run.recipe_path), dump_recipe(loaded.recipe))
    except (OSError, ValueError):
        return ()  # whoever reads the run says what is wrong with it


def refuse_training(loaded: LoadedRecipe, run: RunDirectory, act: str) -> None:
    """Raises FtcliError FT749 (exit 2) where ``--set`` changes how the run was trained, as :func:`refuse_settings`."""
    refuse_settings(
        loaded,
        [change for change in changed_since(loaded, run) if change.is_in((*_TRAINING, *methods.sections()))],
        act,
    )


def refuse_settings(loaded: LoadedRecipe, changes: Sequence[ChangedKey], act: str) -> None:
    """Raises FtcliError FT749 (exit 2) for those of ``changes`` that ``--set`` makes: they would have no effect.

    Args:
        act: What cannot change them, with its article.
    """
    refused = [change for change in changes if _is_set(loaded, change)]
    if refused:
        help = f"{act} uses what was trained, by the recipe of the run: train again with it, or leave it out"
        found = [
            Finding("FT749", f"{act} cannot change {change}", loaded.origins.at(change.key), help) for change in refused
        ]
        raise FtcliError(found, ExitCode.RECIPE)


def _is_set(loaded: LoadedRecipe, change: ChangedKey) -> bool:
    origin = loaded.origins.at(change.key)
    return origin is not None and origin.source.startswith("--set")
