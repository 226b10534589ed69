"""The prompts of GRPO: how long they may be, how many a rollout needs, and how `ftcli check` looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.config.recipe import Recipe
from ftcli.data.asked import PromptLimit
from ftcli.errors import ExitCode, FtcliError
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.rows.places import local_sources
from ftcli.train.start import TrainingRows

if TYPE_CHECKING:
    from ftcli.data.survey import RowSurvey


def room_of_grpo(grpo: GrpoConfig) -> PromptLimit:
    """Prompts of GRPO are never cut."""
    limit, help = grpo.max_prompt_length, "raise grpo.max_prompt_length, choose data.overlong: drop, or remove the row"
    return PromptLimit(limit, "FT781", f"more than grpo.max_prompt_length {limit}", help)


def require_rollout(prompts: int, recipe: Recipe) -> None:
    """Refuse data of fewer prompts than GRPO completes at a time: no step could be made of them.

    Raises:
        FtcliError: FT261 (exit 4).
    """
    grpo, train = recipe.grpo, recipe.train
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    micro_batches = grpo.micro_batches(train.gradient_accumulation_steps)
    completions = train.per_device_train_batch_size * micro_batches * recipe.launch.num_processes
    needed = completions // grpo.num_generations
    if prompts < needed:
        raise FtcliError.single(
            "FT261",
            f"data.train has {prompts:,} {'prompt' if prompts == 1 else 'prompts'}, and {needed:,} are completed at a "
            f"time ({completions:,} completions, {grpo.num_generations:,} of each prompt): no step can be made",
            exit_code=ExitCode.DATA,
            help="add rows, lower train.per_device_train_batch_size or train.gradient_accumulation_steps (or "
            "grpo.steps_per_generation), or raise grpo.num_generations",
        )


def training_rows(recipe: Recipe, prompts: int) -> TrainingRows:
    """What a run of so many prompts trains on, for the summary at its start."""
    grpo, train = recipe.grpo, recipe.train
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    micro_batches = grpo.micro_batches(train.gradient_accumulation_steps)
    made = train.per_device_train_batch_size * recipe.launch.row_shares * micro_batches
    more = "" if micro_batches == train.gradient_accumulation_steps else f", {made:,} made at a time"
    return TrainingRows(prompts, "prompts", batch="completions", more=f", {grpo.num_generations} of each prompt{more}")


def survey(looking: RowSurvey, recipe: Recipe) -> None:
    """Looks at the prompts of ``data.train`` that lie on this machine."""
    grpo = recipe.grpo
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    looking.prompts("data.train", local_sources(recipe.data.train), room_of_grpo(grpo))
    if len(looking.found) == len(recipe.data.train) and all(one.whole for one in looking.found):
        try:
            require_rollout(sum(one.rows for one in looking.found), recipe)
        except FtcliError as error:
            looking.failures.append(error)
