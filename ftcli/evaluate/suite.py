"""Everything that is measured of one model: loss on each held-out file, its tasks, and lm-evaluation-harness's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.config.evaluation import TaskConfig
from ftcli.data.asked import RenderedPrompt, asked_rows, room_of_task
from ftcli.data.reasoning import Answer
from ftcli.data.tokens import RowImage, TokenizedRow, by_file
from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.evaluate.generate import generate
from ftcli.evaluate.loss import BatchLayout, LossResult, combine, evaluate_loss, halved, row_too_large
from ftcli.job import Job
from ftcli.judges import CALLED_WITH, CompletionBatch, Judge, columns_of
from ftcli.model.backbone import compute_context
from ftcli.plain import FLATTENED, LEFT_OUT, JsonMap, JsonObject, plain_fields
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import Reporter
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import raise_findings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ftcli.run.process_group import RankGroup


def run_harness(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int,
    limit: int | None,
    max_length: int,
    plan: DtypePlan,
    device: torch.device,
    reporter: Reporter,
) -> dict[str, dict[str, float]]:
    """The harness's own metrics of each task, and of each group of tasks, by name ("acc", "acc_norm_stderr", ...).

    Args:
        limit: Rows of each task; None for all.
        max_length: Longest input in tokens; longer ones lose their beginning, as the harness does it.

    Raises:
        FtcliError: FT766 (exit 2) for a task that it does not know or cannot prepare, FT761 (exit 5) when a single row
            does not fit into memory. A batch that does not fit is halved and the tasks begin again, with the warning
            FT764.
        ModuleNotFoundError: the package is not installed, which preflight says before (FT253).
    """
    was_training = model.training
    model.eval()
    try:
        while True:
            results = None
            try:
                with compute_context(device, plan.compute, plan.autocast):
                    results = _evaluate(model, tokenizer, tasks, batch_size, limit, max_length)
            except torch.OutOfMemoryError as error:
                if batch_size == 1:
                    raise row_too_large("lm-evaluation-harness", None) from error
            if results is not None:
                return _metrics(results)
            tried, batch_size = batch_size, batch_size // 2  # not in the except block: it holds the batch's tensors
            reporter.finding(halved("lm-evaluation-harness", tried, batch_size))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        model.train(was_training)


def _evaluate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    batch_size: int,
    limit: int | None,
    max_length: int,
) -> JsonMap:
    harness = importlib.import_module("lm_eval")
    adapter = importlib.import_module("lm_eval.models.huggingface")
    wrapped = adapter.HFLM(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
    )
    try:
        results: JsonMap = harness.simple_evaluate(
            model=wrapped, tasks=list(tasks), limit=limit, log_samples=False, bootstrap_iters=0
        )
    except (KeyError, ValueError, OSError) as error:
        message = f"lm-evaluation-harness cannot run {', '.join(tasks)}: {type(error).__name__}: {first_line(error)}"
        help = "`lm_eval ls tasks` lists the tasks; most download their data from the Hub"
        raise FtcliError.single("FT766", message, help=help) from error
    return results


def _metrics(results: JsonMap) -> dict[str, dict[str, float]]:
    """Numbers only, without the harness's filter where it is the default one: "acc,none" is "acc"."""
    found: dict[str, dict[str, float]] = {}
    for table in ("results", "groups"):
        for name, values in results.get(table, {}).items():
            found[name] = {
                key.removesuffix(",none"): float(value)
                for key, value in values.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and "," in key
            }
    return found


SAMPLES_KEPT = 8


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """A task's rows with what the model said: ``texts`` are the prompts as the model saw them."""

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    answers: Sequence[Answer]
    images: Sequence[tuple[RowImage, ...]] = ()


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row of a task: the prompt as the model saw it, what was expected and answered, and the judge's number.

    ``reasoning`` is what the model wrote before its answer; None where it wrote none. ``images`` are what it saw, by
    their digests; ``pictures``, where they lie.
    """

    prompt: str
    reference: str | None
    completion: str
    score: float | None = None
    reasoning: str | None = None
    images: tuple[str, ...] | None = field(default=None, metadata=LEFT_OUT)
    pictures: tuple[RowImage, ...] | None = field(default=None, compare=False)

    def as_dict(self) -> JsonObject:
        """The JSON form, without what lies elsewhere."""
        return {name: value for name, value in plain_fields(replace(self, pictures=None)).items() if name != "pictures"}

    @property
    def key(self) -> tuple[str, str | None, tuple[str, ...] | None]:
        """The row's identity among others."""
        return self.prompt, self.reference, self.images


@dataclass(frozen=True, slots=True)
class TaskResult:
    """``score`` is the mean over the rows that were judged; built-in judges give 0 or 1 a row. ``answers`` are all.

    ``failed`` counts rows that the judge failed on; ``failure`` is the first of them in words. ``cut`` counts answers
    that ended only with the room for them, ``cut_reasoning`` those of them whose reasoning had not ended.
    """

    name: str
    use: str
    score: float
    rows: int
    answers: tuple[JudgedRow, ...]
    failed: int = 0
    failure: str | None = None
    cut: int = 0
    cut_reasoning: int = 0

    @property
    def cut_words(self) -> str:
        """Text on the number of answers that were cut off."""
        inside = f", {self.cut_reasoning:,} of them while reasoning," if self.cut_reasoning else ""
        return f"{self.cut:,} of {len(self.answers):,} answers were cut off{inside}"

    @property
    def samples(self) -> tuple[JudgedRow, ...]:
        """The first rows."""
        return self.answers[:SAMPLES_KEPT]

    def as_dict(self) -> JsonObject:
        said = {"name": self.name, "use": self.use, "score": self.score, "rows": self.rows, "failed": self.failed}
        return {**said, "cut": self.cut, "cut_reasoning": self.cut_reasoning, "samples": self.samples}


def judge(task: TaskConfig, answered: AnsweredTask, judge: Judge) -> TaskResult:
    """Scores one task; all rows are kept, for the report to choose from.

    Args:
        judge: The task's. It is asked once with all completions, as rewards of GRPO are, so that one function of the
            user's can serve both.

    Raises:
        FtcliError: FT765 (exit 4) as :meth:`ftcli.judges.Judge.scores`.
    """
    references = [prompt.reference for prompt in answered.prompts]
    # Names that the function is called with anyway cannot be columns; every task has answers, known or not.
    lent = columns_of(answered.prompts)
    columns = {"answer": references, **{k: v for k, v in lent.items() if k not in CALLED_WITH}}
    origins = [prompt.row.origin for prompt in answered.prompts]
    known = [text or "" for text in references]
    completions, reasoning = [one.text for one in answered.answers], [one.reasoning for one in answered.answers]
    asked = answered.prompts  # reward models render them by a template of their own
    scores = judge.scores(CompletionBatch(completions, answered.texts, known, columns, origins, reasoning, asked))
    shown = [_digests(some) for some in answered.images] or [None] * len(references)
    pictures = [some or None for some in answered.images] or [None] * len(references)
    kept = zip(answered.texts, references, completions, scores.values, reasoning, shown, pictures, strict=True)
    answers = tuple(JudgedRow(*row) for row in kept)
    cut = [one for one in answered.answers if one.cut]
    judged = [score for score in scores.values if score is not None]
    score = math.fsum(judged) / max(len(judged), 1)
    return TaskResult(
        task.label,
        task.kind,
        score,
        len(judged),
        answers,
        len(scores.failed),
        scores.example,
        len(cut),
        sum(one.reasoning is not None and not one.text for one in cut),
    )


@dataclass(frozen=True, slots=True)
class ModelScores:
    """All that was measured of one model.

    ``loss`` is over all held-out files, ``datasets`` of each; ``lm_eval`` holds the metrics of each task of
    lm-evaluation-harness.
    """

    loss: LossResult | None = field(metadata=FLATTENED)
    datasets: Mapping[str, LossResult]
    tasks: Mapping[str, TaskResult]
    lm_eval: Mapping[str, Mapping[str, float]] = field(metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A job's evaluation, prepared once and run on any number of models.

    ``sequences`` are the held-out rows of ``data.eval`` as tokens.
    ``judges`` are those of the recipe's tasks by the tasks' names (:func:`ftcli.judges.judges_of`).
    ``group`` are the ranks that share the rows of :meth:`loss`; what is generated, one rank generates.
    """

    job: Job
    sequences: Sequence[TokenizedRow]
    judges: Mapping[str, Judge] = field(default_factory=dict)
    group: RankGroup | None = None
    _asked: dict[str, list[RenderedPrompt]] = field(default_factory=dict, repr=False)

    def read_tasks(self) -> None:
        """Reads the rows of every task, so that what is wrong with them is said before a model is loaded.

        Raises FtcliError as :func:`ftcli.data.asked.asked_rows`, with the faults of all tasks.
        """
        findings: list[Finding] = []
        for task in self.job.recipe.eval.tasks:
            try:
                self._of_task(task)
            except FtcliError as error:
                if error.exit_code != ExitCode.DATA:
                    raise
                findings += error.findings
        raise_findings(list(dict.fromkeys(findings)))

    def take_tasks(self, read: Evaluator) -> None:
        """Takes the rows of tasks that ``read`` has read."""
        self._asked.update(read._asked)

    def measure(self, model: PreTrainedModel | PeftModel) -> ModelScores:
        """All that the recipe asks to be measured of one model."""
        loss, datasets = self.losses(model)
        return ModelScores(loss, datasets, self.tasks(model), self.harness(model))

    def losses(self, model: PreTrainedModel | PeftModel) -> tuple[LossResult | None, dict[str, LossResult]]:
        """:meth:`loss` over all held-out files, and for each of them."""
        parts = {name: self.loss_of(model, rows) for name, rows in self.by_dataset().items()}
        return combine(parts.values()), parts

    def by_dataset(self) -> dict[str, list[TokenizedRow]]:
        """The held-out rows of each file."""
        return by_file(self.sequences)

    def loss(self, model: PreTrainedModel | PeftModel) -> LossResult | None:
        """Loss, perplexity, token accuracy over all of ``data.eval``; None without held-out data."""
        return self.loss_of(model, self.sequences) if self.sequences else None

    def tasks(self, model: PreTrainedModel | PeftModel) -> dict[str, TaskResult]:
        """Each of ``eval.tasks``, by name."""
        results = {}
        for task in self.job.recipe.eval.tasks:
            result = judge(task, self._answered(model, self._of_task(task)), self.judges[task.label])
            if result.failed:
                self.job.reporter.finding(_failures(result))
            if result.cut:
                limit = f"eval.generate.max_new_tokens {self.job.recipe.eval.generate.max_new_tokens}"
                self.job.reporter.info(f"{result.name}: {result.cut_words} at {limit} or data.max_seq_len")
            results[result.name] = result
        return results

    def harness(self, model: PreTrainedModel | PeftModel) -> dict[str, dict[str, float]]:
        """Metrics of each of ``eval.lm_eval``, by name; empty without any."""
        settings = self.job.recipe.eval
        if not settings.lm_eval:
            return {}
        return run_harness(
            model,
            self.job.tokenizer,
            settings.lm_eval,
            batch_size=settings.per_device_eval_batch_size,
            limit=settings.lm_eval_limit,
            max_length=self.job.recipe.data.max_seq_len,
            plan=self.job.dtypes,
            device=self.job.device,
            reporter=self.job.reporter,
        )

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[JudgedRow]:
        """The first held-out rows with the model's answers, not judged; those that are too long are left out."""
        data = self.job.recipe.data.model_copy(update={"overlong": "drop"})
        answered = self._answered(model, self._read(data, data.eval[:1], count)[0])
        return [
            JudgedRow(text, prompt.reference, answer.text, None, answer.reasoning, _digests(seen), seen or None)
            for prompt, text, answer, seen in zip(
                answered.prompts, answered.texts, answered.answers, answered.images, strict=True
            )
        ]

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> LossResult:
        """Loss, perplexity and token accuracy of ``sequences``."""
        packing = self.job.recipe.data.packing
        layout: BatchLayout = "packed" if packing else "right"
        if self.job.batches(model).layout == "unpadded":
            layout = "unpadded"
        return evaluate_loss(
            model,
            sequences,
            pad_token_id=self.job.pad_token_id,
            batch_size=self.job.recipe.eval.per_device_eval_batch_size,
            plan=self.job.dtypes,
            device=self.job.device,
            reporter=self.job.reporter,
            layout=layout,
            pack_length=self.job.recipe.data.max_seq_len if packing else None,
            group=self.group,
            pixels=self.job.pixel_reader(),
        )

    def _answered(self, model: PreTrainedModel | PeftModel, asked: Sequence[RenderedPrompt]) -> AnsweredTask:
        texts = [one.text for one in asked]
        answers = generate(
            model,
            self.job.tokenizer,
            texts,
            self.job.recipe.eval.generate,
            batch_size=self.job.recipe.eval.per_device_eval_batch_size,
            plan=self.job.dtypes,
            device=self.job.device,
            reporter=self.job.reporter,
            stops=self.job.stops,
            max_length=self.job.recipe.data.max_seq_len,
            marks=self.job.reasoning_marks,
            templated=[one.templated for one in asked],
            images=[one.images for one in asked],
            pixels=self.job.pixel_reader(),
        )
        return AnsweredTask([one.prompt for one in asked], texts, answers, [one.images for one in asked])

    def _of_task(self, task: TaskConfig) -> list[RenderedPrompt]:
        """A task's rows, read once for all models."""
        if task.label not in self._asked:
            data = self.job.recipe.data
            asked, warnings = self._read(data, task.data or data.eval, task.max_rows)
            for warning in warnings:
                self.job.reporter.finding(warning)
            self._asked[task.label] = asked
        return self._asked[task.label]

    def _read(
        self, data: DataConfig, sources: Sequence[DatasetConfig], max_rows: int | None
    ) -> tuple[list[RenderedPrompt], list[Finding]]:
        room = room_of_task(data, self.job.recipe.eval.generate)
        offline = self.job.session.offline
        return asked_rows(
            sources, data, self.job.tokenizer, room, offline=offline, max_rows=max_rows, vision=self.job.vision
        )


def _digests(images: tuple[RowImage, ...]) -> tuple[str, ...] | None:
    return tuple(image.id for image in images) or None


def _failures(result: TaskResult) -> Finding:
    return Finding(
        "FT768",
        f"the task {result.name}: {result.failed} of its {len(result.answers)} answers could not be judged; the "
        f"first: {result.failure}",
        help="the judge's `on_error` says what becomes of them: a number is their score, `skip` leaves them out",
        severity="warning",
    )
