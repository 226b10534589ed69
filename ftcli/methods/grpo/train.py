"""`ftcli grpo`: prompts and rewards in, adapter or model out; and how prompts and rewards are looked at before that.

In `ftcli grpo --dry-rewards` no model answers, so a few rows get as completions their own known answer, those of other
rows, and nothing at all. A reward that tells none of these apart will hardly tell a model's first answers apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.data.asked import PromptLimit, uncut
from ftcli.data.ledger import raise_without_images
from ftcli.errors import Finding
from ftcli.facts.device import named_device
from ftcli.judges import JudgeAccess, JudgeScores, columns_of
from ftcli.methods.grpo.rewards import Reward, build_rewards
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.paths import expanded
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.rows.row import data_error
from ftcli.train.context import RunContext
from ftcli.train.lifecycle import CompleteRun, add_to_manifest
from ftcli.train.on_prompts import PromptMethod, PromptsResult, require_prompts, train_on_prompts
from ftcli.train.progress import TrainingRows

if TYPE_CHECKING:
    from ftcli.data.asked import RenderedPrompt
    from ftcli.data.survey import RowSurvey
    from ftcli.data.tokens import TokenizedRow
    from ftcli.job import Job
    from ftcli.methods.grpo.draws import Acting
    from ftcli.methods.grpo.policy import Parity
    from ftcli.methods.grpo.served import ServedGenerator
    from ftcli.run.inputs import Inputs
    from ftcli.run.process_group import RankGroup
    from ftcli.train.loop import TrainerHooks, TrainingLoop


class Grpo(PromptMethod):
    """Completions of prompts, judged and compared with each other."""

    command = "grpo"

    def __init__(self, grpo: GrpoConfig) -> None:
        self._grpo, self.kept = grpo, grpo.completions_kept
        self._rewards: list[Reward] = []
        self._acting: Acting | None = None
        self._reference: Any = None
        self._teacher: Any = None
        self._texts: list[str] | None = None
        self._served: ServedGenerator | None = None

    def room(self, recipe: Recipe) -> PromptLimit:
        return uncut("grpo", self._grpo.max_prompt_length)

    def training_rows(self, recipe: Recipe, prompts: int) -> TrainingRows:
        train, each = recipe.train, self._grpo.num_generations
        micro_batches = self._grpo.micro_batches(train.gradient_accumulation_steps)
        made = train.per_device_train_batch_size * recipe.launch.row_shares * micro_batches
        more = "" if micro_batches == train.gradient_accumulation_steps else f", {made:,} made at a time"
        return TrainingRows(prompts, "prompts", batch="completions", more=f", {each} of each prompt{more}")

    def prepare(self, job: Job, prompts: Sequence[RenderedPrompt]) -> None:
        """Rewards, and an environment if there is one. Raises FtcliError FT261 (exit 4) for too few prompts."""
        from ftcli.methods.grpo.draws import open_acting

        require_rollout(len(prompts), job.recipe)
        require_images(job.recipe, prompts)
        access = JudgeAccess(job.session.secret, job.session.cache_dir)
        self._rewards = build_rewards(self._grpo.rewards, columns_of([one.prompt for one in prompts]), access)
        self._acting = open_acting(job, self._grpo)
        if self._grpo.server is not None:
            from ftcli.methods.grpo.served import ServedGenerator

            run, longest = job.recipe.run.output_dir, self._grpo.max_prompt_length + self._grpo.max_completion_length
            self._served = ServedGenerator(self._grpo.server, access, expanded(run or "runs"), longest)
        if self._grpo.teacher_column is not None:
            from ftcli.methods.distill.objective import teacher_texts

            self._texts = teacher_texts(job, "grpo", self._grpo.teacher_column, prompts)

    def close(self) -> None:
        """Ends what acts, and has a server forget what it was given."""
        if self._served is not None:
            self._served.close()
        if self._acting is not None:
            self._acting.pool.close()

    def load_other(self, job: Job, rows: Sequence[TokenizedRow], group: RankGroup | None) -> Inputs | None:
        """The reference of full fine-tuning, where adapters can be switched off; a teacher that is another model."""
        from ftcli.train import assembly

        if job.recipe.lora is None and self._grpo.beta:
            self._reference = assembly.build_reference(job, rows)
            if group is not None:
                assembly.shard_weights(job, self._reference, group)
        if job.report.asked is None:
            return None
        from ftcli.train.on_rows import loaded_beside

        *self._teacher, inputs = loaded_beside(job, rows, group)
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
        from ftcli.methods.distill.objective import Teacher
        from ftcli.methods.grpo.objective import build_grpo

        teacher = None
        if self._grpo.teacher_coef:
            other, batches = self._teacher or (None, job.batches(model))
            teacher = Teacher(other, batches, self._texts)

        def agreement(parity: Parity) -> None:
            job.reporter.info(parity.summary())  # of several ranks, each looks at its own first batch
            add_to_manifest(context, {"log_probs": parity})

        beside = group, self._reference, self._acting, teacher, self._served
        return build_grpo(job, self._grpo, model, prompts, self._rewards, hooks, agreement, *beside)


def train_grpo(loaded: LoadedRecipe, session: Session, group: RankGroup | None = None) -> PromptsResult | CompleteRun:
    """GRPO on the recipe's prompts; see :func:`ftcli.train.on_prompts.train_on_prompts`."""
    grpo = loaded.recipe.grpo or GrpoConfig()  # preflight refuses a recipe without the section (FT260)
    method = Grpo(grpo)
    try:
        return train_on_prompts(loaded, session, method, group)
    finally:
        method.close()


def require_images(recipe: Recipe, prompts: Sequence[RenderedPrompt]) -> None:
    """Raises FtcliError (exit 4): FT448 for a tower without images, FT412 for images before an environment or a
    teacher that does not see them.
    """
    seeing = next((one for one in prompts if one.images), None)
    if seeing is None:
        raise_without_images(recipe)
        return
    grpo = recipe.grpo or GrpoConfig()
    for key in ("environment", "teacher", "teacher_column", "server"):
        if getattr(grpo, key) is not None:
            message = f"the row has images, and prompts of grpo.{key} are text alone"
            raise data_error("FT412", message, seeing.prompt.row.origin, f"leave the images or grpo.{key} out")


def require_rollout(prompts: int, recipe: Recipe) -> None:
    """Refuse data of fewer prompts than GRPO completes at a time: no step could be made of them.

    Raises FtcliError FT261 (exit 4).
    """
    grpo, train = recipe.grpo, recipe.train
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    micro_batches = grpo.micro_batches(train.gradient_accumulation_steps)
    completions = train.per_device_train_batch_size * micro_batches * recipe.launch.num_processes
    help = "add rows, lower train.per_device_train_batch_size or train.gradient_accumulation_steps (or "
    help += "grpo.steps_per_generation), or raise grpo.num_generations"
    time = f"at a time ({completions:,} completions, {grpo.num_generations:,} of each prompt)"
    require_prompts(prompts, completions // grpo.num_generations, time, help)


def survey(looking: RowSurvey, recipe: Recipe) -> None:
    """Looks at the prompts of ``data.train`` that lie on this machine."""
    grpo = recipe.grpo
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    room = uncut("grpo", grpo.max_prompt_length)
    looking.training_prompts(recipe.data.train, room, partial(require_rollout, recipe=recipe))


#: Rows that are scored, and answers of other rows that each of them gets.
ROWS, OTHERS = 16, 3


@dataclass(frozen=True, slots=True)
class DryReward:
    """What one reward said.

    Attributes:
        right, others: Its mean for known answers, and for all other texts; None where there were none.
        without_opinion: Texts that it did not judge.
        failed: Texts that it failed on.
        constant: It said the same of all.
    """

    reward: str
    weight: float
    mean: float | None
    deviation: float | None
    right: float | None
    others: float | None
    without_opinion: int
    failed: int
    constant: bool


@dataclass(frozen=True, slots=True)
class DryRewards:
    """What `ftcli grpo --dry-rewards` answers. ``rows_without_spread``: all of their texts have the same sum."""

    rewards: tuple[DryReward, ...]
    rows: int
    texts: int
    rows_without_spread: int


def dry_rewards(loaded: LoadedRecipe, session: Session) -> DryRewards:
    """Scores sample texts for the first rows.

    Raises FtcliError as preflight does, whatever machine this is, and whatever the rewards raise.
    """
    from ftcli.data.asked import asked_rows
    from ftcli.job import open_job

    report = checked(loaded, session, "grpo", named_device("b200"))  # the largest: which one it will be is no matter
    job, grpo = open_job(report, session), report.recipe.grpo
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    data = job.recipe.data
    room = uncut("grpo", grpo.max_prompt_length)
    asked, _ = asked_rows(
        data.train, data, job.tokenizer, room, offline=session.offline, max_rows=ROWS, vision=job.vision
    )
    columns = columns_of([one.prompt for one in asked])
    texts = _texts(len(asked), _answers(grpo, columns))
    places = [row for row, group in enumerate(texts) for _ in group]
    lent = {name: [values[row] for row in places] for name, values in columns.items()}
    flat = [text for group in texts for text in group]
    prompts = [asked[row].text for row in places]
    rewards = build_rewards(grpo.rewards, columns, JudgeAccess(session.secret, session.cache_dir))
    origins = [asked[row].prompt.row.origin for row in places]
    of_rows = [asked[row].prompt for row in places]
    scored = [reward.scores(prompts, flat, lent, origins, asked=of_rows) for reward in rewards]
    scores = [each.values for each in scored]
    first = [at == 0 or places[at] != places[at - 1] for at in range(len(places))]
    known = bool(_answers(grpo, columns))
    found = tuple(_said(reward, said, first if known else None) for reward, said in zip(rewards, scored, strict=True))
    for one, said in zip(found, scored, strict=True):
        if said.example is not None:
            session.reporter.warn(said.example)
        if one.constant:
            session.reporter.finding(_constant(one, len(flat)))
    sums = [sum(r.weight * (s[at] or 0.0) for r, s in zip(rewards, scores, strict=True)) for at in range(len(flat))]
    spread: dict[int, set[float]] = {}
    for place, total in zip(places, sums, strict=True):
        spread.setdefault(place, set()).add(total)
    return DryRewards(found, len(asked), len(flat), sum(len(totals) < 2 for totals in spread.values()))


def _answers(grpo: GrpoConfig, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The rows' known answers: the column that a reward compares with; none where there is none."""
    names = [reward.answer for reward in grpo.rewards if reward.answer in columns]
    return [str(value) for value in columns[names[0]]] if names else []


def _texts(rows: int, answers: Sequence[str]) -> list[list[str]]:
    """For each row: its own answer, the next ones that are others, and nothing. The own answer comes first."""
    made = []
    for row in range(rows):
        own = answers[row : row + 1]
        following = dict.fromkeys(answers[(row + step) % rows] for step in range(1, rows)) if answers else {}
        others = [text for text in following if text not in own][:OTHERS]
        made.append([*own, *others, ""] if answers else ["", "I do not know.", "0"])
    return made


def _said(reward: Reward, found: JudgeScores, right: Sequence[bool] | None) -> DryReward:
    scores = found.values
    judged = [score for score in scores if score is not None]

    def mean(which: bool) -> float | None:
        if right is None:
            return None
        chosen = [s for s, own in zip(scores, right, strict=True) if s is not None and own is which]
        return statistics.fmean(chosen) if chosen else None

    return DryReward(
        reward.name,
        reward.weight,
        statistics.fmean(judged) if judged else None,
        statistics.pstdev(judged) if judged else None,
        mean(True),
        mean(False),
        len(scores) - len(judged),
        len(found.failed),
        bool(judged) and math.isclose(max(judged), min(judged)),
    )


def _constant(one: DryReward, texts: int) -> Finding:
    return Finding(
        "FT278",
        f"the reward {one.reward} is {one.mean:g} for all of {texts} sample texts: known answers, answers of other "
        "rows, and no text",
        help="right for a reward of form that no sample meets; otherwise check its columns, pattern or function",
        severity="warning",
    )
