"""Everything that is measured of one model: loss on each held-out file, then each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftcli.config import TaskConfig
from ftcli.data.template import renderer_of
from ftcli.data.tokens import Tokens
from ftcli.evaluate.generate import generate
from ftcli.evaluate.harness import run_harness
from ftcli.evaluate.loss import LossResult, combine, evaluate_loss
from ftcli.evaluate.tasks import Answered, JudgedRow, TaskResult, judge
from ftcli.job import Job
from ftcli.judges import Function
from ftcli.rows.prompts import Prompt, prompts_of
from ftcli.rows.reading import read_rows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelScores:
    """All that was measured of one model.

    ``loss`` is over all held-out files, ``datasets`` of each; ``lm_eval`` holds the metrics of each task of
    lm-evaluation-harness.
    """

    loss: LossResult | None
    datasets: dict[str, LossResult]
    tasks: dict[str, TaskResult]
    lm_eval: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        whole = {} if self.loss is None else self.loss.as_dict()
        datasets = {name: part.as_dict() for name, part in self.datasets.items()}
        tasks = {name: task.as_dict() for name, task in self.tasks.items()}
        return {**whole, "datasets": datasets, "tasks": tasks, **({"lm_eval": self.lm_eval} if self.lm_eval else {})}


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A job's evaluation, prepared once and run on any number of models.

    ``sequences`` are the held-out rows of ``data.eval`` as tokens.
    ``functions`` holds the user's judges by what the recipe's tasks call them (``path.py:function``).
    """

    job: Job
    sequences: Sequence[Tokens]
    functions: Mapping[str, Function] = field(default_factory=dict)

    def measure(self, model: PreTrainedModel | PeftModel) -> ModelScores:
        """All that the recipe asks to be measured of one model."""
        datasets = self.loss_by_dataset(model)
        return ModelScores(combine(datasets.values()), datasets, self.tasks(model), self.harness(model))

    def loss(self, model: PreTrainedModel | PeftModel) -> LossResult | None:
        """Loss, perplexity, token accuracy over all of ``data.eval``; None without held-out data."""
        return self.loss_of(model, self.sequences) if self.sequences else None

    def loss_by_dataset(self, model: PreTrainedModel | PeftModel) -> dict[str, LossResult]:
        """:meth:`loss` for each held-out file; :func:`ftcli.evaluate.loss.combine` adds them up."""
        parts: dict[str, list[Tokens]] = {}
        for tokens in self.sequences:
            parts.setdefault(tokens.row.source, []).append(tokens)
        return {name: self.loss_of(model, rows) for name, rows in parts.items()}

    def tasks(self, model: PreTrainedModel | PeftModel) -> dict[str, TaskResult]:
        """Each of ``eval.tasks``, by name."""
        results = {}
        for task in self.job.recipe.eval.tasks:
            function = self.functions[task.file] if task.file is not None else None
            result = judge(task, self._answered(model, task), function)
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
            plan=self.job.plan,
            device=self.job.device,
            reporter=self.job.reporter,
        )

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[JudgedRow]:
        """The first held-out rows with the model's answers, not judged."""
        answered = self._answered(model, TaskConfig(max_rows=count, data=self.job.recipe.data.eval[:1]))
        return [
            JudgedRow(text, prompt.reference, completion)
            for prompt, text, completion in zip(answered.prompts, answered.texts, answered.completions, strict=True)
        ]

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[Tokens]) -> LossResult:
        """Loss, perplexity and token accuracy of ``sequences``."""
        return evaluate_loss(
            model,
            sequences,
            pad_token_id=self.job.pad_token_id,
            batch_size=self.job.recipe.eval.per_device_eval_batch_size,
            plan=self.job.plan,
            device=self.job.device,
            reporter=self.job.reporter,
            layout="packed" if self.job.recipe.data.packing else "right",
            pack_length=self.job.recipe.data.max_seq_len,
        )

    def _answered(self, model: PreTrainedModel | PeftModel, task: TaskConfig) -> Answered:
        prompts = self._prompts(task)
        renderer = renderer_of(self.job.tokenizer, self.job.recipe.data)
        texts = [renderer.prompt(prompt) for prompt in prompts]
        completions = generate(
            model,
            self.job.tokenizer,
            texts,
            self.job.recipe.eval.generate,
            batch_size=self.job.recipe.eval.per_device_eval_batch_size,
            plan=self.job.plan,
            device=self.job.device,
            reporter=self.job.reporter,
            stops=self.job.stops,
        )
        return Answered(prompts, texts, completions)

    def _prompts(self, task: TaskConfig) -> list[Prompt]:
        prompts: list[Prompt] = []
        for source in task.data or self.job.recipe.data.eval:
            prompts += prompts_of(read_rows(source), self.job.recipe.data.format)
        return prompts[: task.max_rows]
