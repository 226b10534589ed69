"""Everything that is measured of one model: loss on each held-out file, then each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftcli.config import TaskConfig
from ftcli.data.template import Renderer
from ftcli.data.tokens import Tokens
from ftcli.evaluate.generate import generate
from ftcli.evaluate.harness import run_harness
from ftcli.evaluate.loss import evaluate_loss
from ftcli.evaluate.tasks import Answered, judge
from ftcli.job import Job
from ftcli.judges import Function
from ftcli.rows.prompts import Prompt, prompts_of
from ftcli.rows.reading import read_rows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Evaluator:
    """A job's evaluation, prepared once and run on any number of models.

    ``sequences`` are the held-out rows of ``data.eval`` as tokens.
    ``functions`` holds the user's judges by what the recipe's tasks call them (``path.py:function``).
    """

    job: Job
    sequences: Sequence[Tokens]
    functions: Mapping[str, Function] = field(default_factory=dict)

    def loss(self, model: PreTrainedModel | PeftModel) -> dict[str, Any]:
        """Loss, perplexity, token accuracy over all of ``data.eval``; empty without held-out data."""
        return self.loss_of(model, self.sequences) if self.sequences else {}

    def loss_by_dataset(self, model: PreTrainedModel | PeftModel) -> dict[str, dict[str, Any]]:
        """:meth:`loss` for each held-out file; :func:`ftcli.evaluate.loss.combine` adds them up."""
        parts: dict[str, list[Tokens]] = {}
        for tokens in self.sequences:
            parts.setdefault(tokens.row.source, []).append(tokens)
        return {name: self.loss_of(model, rows) for name, rows in parts.items()}

    def tasks(self, model: PreTrainedModel | PeftModel) -> dict[str, dict[str, Any]]:
        """Score and samples of each of ``eval.tasks``, by name."""
        results = {}
        for task in self.job.recipe.eval.tasks:
            function = self.functions[task.file] if task.file is not None else None
            result = judge(task, self._answered(model, task), function)
            results[result.name] = result.as_dict()
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

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[dict[str, Any]]:
        """Prompt, reference and completion of the first held-out rows."""
        answered = self._answered(model, TaskConfig(max_rows=count, data=self.job.recipe.data.eval[:1]))
        return [
            {"prompt": text, "reference": prompt.reference, "completion": completion}
            for prompt, text, completion in zip(answered.prompts, answered.texts, answered.completions, strict=True)
        ]

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[Tokens]) -> dict[str, Any]:
        """Loss, perplexity and token accuracy of ``sequences``."""
        result = evaluate_loss(
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
        return result.as_dict()

    def _answered(self, model: PreTrainedModel | PeftModel, task: TaskConfig) -> Answered:
        prompts = self._prompts(task)
        renderer = Renderer(self.job.tokenizer, self.job.recipe.data.chat_template)
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
