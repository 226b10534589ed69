"""Everything that is measured of one model: loss on each held-out file, then each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.config.evaluation import TaskConfig
from ftcli.data.asked import RenderedPrompt, asked_rows, room_of_task
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.evaluate.generate import generate
from ftcli.evaluate.harness import run_harness
from ftcli.evaluate.loss import BatchLayout, LossResult, combine, evaluate_loss
from ftcli.evaluate.tasks import AnsweredTask, JudgedRow, TaskResult, judge
from ftcli.job import Job
from ftcli.judges import Judge
from ftcli.plain import FLATTENED, LEFT_OUT
from ftcli.rows.row import raise_findings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup


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
        parts: dict[str, list[TokenizedRow]] = {}
        for tokens in self.sequences:
            parts.setdefault(tokens.row.source, []).append(tokens)
        return parts

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
            JudgedRow(text, prompt.reference, answer.text, reasoning=answer.reasoning)
            for prompt, text, answer in zip(answered.prompts, answered.texts, answered.answers, strict=True)
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
        )
        return AnsweredTask([one.prompt for one in asked], texts, answers)

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
        return asked_rows(sources, data, self.job.tokenizer, room, offline=offline, max_rows=max_rows)


def _failures(result: TaskResult) -> Finding:
    return Finding(
        "FT768",
        f"the task {result.name}: {result.failed} of its {len(result.answers)} answers could not be judged; the "
        f"first: {result.failure}",
        help="the judge's `on_error` says what becomes of them: a number is their score, `skip` leaves them out",
        severity="warning",
    )
