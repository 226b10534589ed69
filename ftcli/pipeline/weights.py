"""A run's weights for evaluation, chat and export: its result or a checkpoint, under the recipe that trained them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftcli.config.load import LoadedRecipe
from ftcli.config.yaml import dump_recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.reporting import Reporter
from ftcli.run.atomic import irregular_file, read_text
from ftcli.run.directory import RunDirectory, is_run_directory, unreadable_file
from ftcli.run.integrity import hold_result
from ftcli.run.metrics import read_metrics
from ftcli.run.recipe_changes import ChangedKey, recipe_changes
from ftcli.run.status import read_status
from ftcli.tables import methods
from ftcli.train.evaluation import BestEvaluation

BEST = "best"


def weights_of(
    loaded: LoadedRecipe, run: RunDirectory | None, name: str | None, reporter: Reporter, act: str
) -> tuple[Path | None, Path | None]:
    """The run's checkpoint of this name, if one is taken, and the folder of its weights; nothing without a run. Raises
    FtcliError as :func:`refuse_training`, :func:`checkpoint_of` and :func:`result_of`.
    """
    if run is None:
        return None, None
    refuse_training(loaded, run, act)
    chosen = checkpoint_of(run, name, reporter)
    return chosen, chosen or result_of(run, reporter)


def checkpoint_of(run: RunDirectory, name: str | None, reporter: Reporter) -> Path | None:
    """The checkpoint that ``--checkpoint NAME`` means, a step or ``best``; None for the run's result, which is the best
    when the evaluation at the end of training was: no checkpoint is written of it. Raises FtcliError FT725 (exit 2)
    when there is none.
    """
    if name is None:
        return None
    if name == BEST and _the_end_is_best(run):
        reporter.info(f"{run.path}: the best evaluation was at the end, so the run's result is taken")
        return None
    return run.checkpoints.named(name)


def result_of(run: RunDirectory, reporter: Reporter) -> Path:
    """The folder with the run's adapter or model, as training wrote it; what cannot be held against that is told.

    Raises FtcliError FT763 (exit 2) when there is none, FT727 when something in it is no file, FT771 when it was
    changed since.
    """
    result = run.result_dir if is_run_directory(run.path) else None
    if result is None:
        message = f"{run.path} holds no finished run: neither adapter/ nor model/ is there"
        help = "train first, name the run's directory, or take one of its checkpoints with --checkpoint STEP"
        raise FtcliError.single("FT763", message, help=help)
    irregular = irregular_file(result)
    if irregular:
        raise unreadable_file(result, ValueError(irregular))
    for finding in hold_result(run):
        reporter.finding(finding)
    return result


def _the_end_is_best(run: RunDirectory) -> bool:
    status = read_status(run.status_path)
    if run.result_dir is None or status is None or status.trained is None:
        return False
    best = BestEvaluation()
    for line in read_metrics(run.metrics_path).lines:
        best.note(int(line["step"]), line)
    return best.value is not None and best.step == status.trained.steps


#: What only training reads, besides the sections of its methods: weights that are there already know nothing of it.
_TRAINING = ("lora", "train", "checkpoint", "launch")
#: What the loss of held-out rows depends on as well; and what of it says only how that is computed.
_MEASURED = ("preference", "reward")
_NOT_MEASURED = ("preference.reference_cache", "preference.share_prompts", "preference.kl_rows")


def changed_since(loaded: LoadedRecipe, run: RunDirectory) -> tuple[ChangedKey, ...]:
    """Changes of the recipe since the run was trained by it; none for a run without a recipe."""
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


def measured_otherwise(loaded: LoadedRecipe, run: RunDirectory) -> list[Finding]:
    """FT749, a warning, for settings of a loss with which the run is measured, and was not trained."""
    found = [change for change in changed_since(loaded, run) if change.is_in(_MEASURED)]
    changes = [str(change) for change in found if not change.is_in(_NOT_MEASURED)]
    if not changes:
        return []
    message = f"{run.path} was trained with other settings: {', '.join(changes)}; losses and margins are this recipe's"
    help = f"name the run's own recipe: {run.recipe_path}"
    return [Finding("FT749", message, help=help, severity="warning")]


def refuse_settings(loaded: LoadedRecipe, changes: Sequence[ChangedKey], act: str) -> None:
    """Raises FtcliError FT749 (exit 2) for those of ``changes`` that ``--set`` makes: they would have no effect.
    ``act``: what cannot change them, with its article.
    """
    help = f"{act} uses what was trained, by the recipe of the run: train again with it, or leave it out"
    places = [(change, loaded.origins.at(change.key)) for change in changes]
    found = [
        Finding("FT749", f"{act} cannot change {change}", origin, help)
        for change, origin in places
        if origin is not None and origin.source.startswith("--set")
    ]
    if found:
        raise FtcliError(found, ExitCode.RECIPE)
