"""`ftcli train` with `train.method: distill`: prompts and a teacher in, adapter or model out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.data.asked import PromptLimit, uncut
from ftcli.methods.distill.settings import DistillConfig
from ftcli.reporting import Session
from ftcli.train.context import RunContext
from ftcli.train.lifecycle import CompleteRun
from ftcli.train.on_prompts import PromptMethod, PromptsResult, require_prompts, train_on_prompts
from ftcli.train.progress import TrainingRows

if TYPE_CHECKING:
    from ftcli.data.asked import RenderedPrompt
    from ftcli.data.survey import RowSurvey
    from ftcli.data.tokens import TokenizedRow
    from ftcli.job import Job
    from ftcli.run.inputs import Inputs
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import Objective, TrainerHooks, TrainingLoop


class Distillation(PromptMethod):
    """Completions of prompts, whose tokens a teacher judges by its whole distribution."""

    command = "train"

    def __init__(self, settings: DistillConfig) -> None:
        self._settings = settings
        self._texts: list[str] | None = None
        self._other: Any = None

    def room(self, recipe: Recipe) -> PromptLimit:
        return uncut("distill", self._settings.max_prompt_length)

    def training_rows(self, recipe: Recipe, prompts: int) -> TrainingRows:
        return TrainingRows(prompts, "prompts", batch="completions")

    def prepare(self, job: Job, prompts: Sequence[RenderedPrompt]) -> None:
        """The prompts as the teacher sees them. Raises FtcliError FT261 (exit 4) for fewer than a step completes."""
        from ftcli.methods.distill.objective import teacher_texts

        require_step(len(prompts), job.recipe)
        if self._settings.teacher_column is not None:
            self._texts = teacher_texts(job, "distill", self._settings.teacher_column, prompts)

    def load_other(self, job: Job, rows: Sequence[TokenizedRow], group: RankGroup | None) -> Inputs | None:
        """The teacher, where it is another model, whose tokens have to be the student's (FT326)."""
        from ftcli.train.on_rows import loaded_beside

        if job.report.asked is None:
            return None
        self._other, batches, inputs = loaded_beside(job, rows, group)
        self._other = self._other, batches
        return inputs

    def build(
        self,
        context: RunContext,
        job: Job,
        model: Any,
        prompts: Sequence[RenderedPrompt],
        hooks: TrainerHooks,
        group: RankGroup | None,
    ) -> TrainingLoop:
        from ftcli.methods.distill.objective import DistillObjective, Teacher
        from ftcli.train.build import build_loop

        other, batches = (None, job.batches(model)) if self._other is None else self._other
        teacher = Teacher(other, batches, self._texts)

        def objective(stack: Any, _sequence: Any) -> Objective:
            return DistillObjective(job, self._settings, model, prompts, teacher, stack, group)

        return build_loop(job, model, objective, hooks, group)


def train_distill(
    loaded: LoadedRecipe, session: Session, group: RankGroup | None = None
) -> PromptsResult | CompleteRun:
    """Distillation on the recipe's prompts; see :func:`ftcli.train.on_prompts.train_on_prompts`."""
    return train_on_prompts(loaded, session, Distillation(loaded.recipe.distill or DistillConfig()), group)


def require_step(prompts: int, recipe: Recipe) -> None:
    """Refuses data of fewer prompts than a step completes. Raises FtcliError FT261 (exit 4)."""
    train = recipe.train
    needed = train.per_device_train_batch_size * train.gradient_accumulation_steps * recipe.launch.num_processes
    help = "add rows, or lower train.per_device_train_batch_size or train.gradient_accumulation_steps"
    require_prompts(prompts, needed, "in a step", help)


def survey(looking: RowSurvey, recipe: Recipe) -> None:
    """Looks at the prompts of ``data.train`` that lie on this machine."""
    settings = recipe.distill or DistillConfig()
    room = uncut("distill", settings.max_prompt_length)
    looking.training_prompts(recipe.data.train, room, partial(require_step, recipe=recipe))
