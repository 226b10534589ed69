"""Everything that is measured of one model: loss on each held-out file, then each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftcli.config import Recipe, TaskConfig
from ftcli.data.formats import Prompt, prompts_of
from ftcli.data.load import read_rows
from ftcli.data.template import Renderer
from ftcli.data.tokens import Tokens
from ftcli.evaluate.generate import generate
from ftcli.evaluate.loss import evaluate_loss
from ftcli.evaluate.tasks import judge
from ftcli.preflight.precision import DtypePlan
from ftcli.reporting import Reporter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The recipe's evaluation, prepared once and run on any number of models."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    sequences: Sequence[Tokens]
    plan: DtypePlan
    device: torch.device
    reporter: Reporter

    def loss(self, model: PreTrainedModel | PeftModel) -> dict[str, Any]:
        """Loss, perplexity, token accuracy over all of ``data.eval``; empty without held-out data."""
        return self._loss(model, self.sequences) if self.sequences else {}

    def loss_by_dataset(self, model: PreTrainedModel | PeftModel) -> dict[str, dict[str, Any]]:
        """The same for each held-out file; :func:`ftcli.evaluate.loss.combine` makes the whole of them."""
        names = dict.fromkeys(s.row.source for s in self.sequences)
        return {name: self._loss(model, [s for s in self.sequences if s.row.source == name]) for name in names}

    def tasks(self, model: PreTrainedModel | PeftModel) -> dict[str, dict[str, Any]]:
        """Score and samples of each of ``eval.tasks``, by name."""
        results = {}
        for task in self.recipe.eval.tasks:
            result = judge(task, *self._completions(model, task))
            results[result.name] = result.as_dict()
        return results

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[dict[str, Any]]:
        """Prompt, reference and completion of the first held-out rows."""
        task = TaskConfig(max_rows=count, data=self.recipe.data.eval[:1])
        prompts, completions, references = self._completions(model, task)
        return [
            {"prompt": p, "reference": r, "completion": c}
            for p, c, r in zip(prompts, completions, references, strict=True)
        ]

    def _loss(self, model: PreTrainedModel | PeftModel, sequences: Sequence[Tokens]) -> dict[str, Any]:
        result = evaluate_loss(
            model,
            sequences,
            pad_token_id=int(self.tokenizer.pad_token_id),
            batch_size=self.recipe.eval.per_device_eval_batch_size,
            plan=self.plan,
            device=self.device,
            reporter=self.reporter,
        )
        return result.as_dict()

    def _completions(
        self, model: PreTrainedModel | PeftModel, task: TaskConfig
    ) -> tuple[list[str], list[str], list[str | None]]:
        prompts = self._prompts(task)
        renderer = Renderer(self.tokenizer, self.recipe.data.chat_template)
        texts = [renderer.prompt(prompt) for prompt in prompts]
        completions = generate(
            model,
            self.tokenizer,
            texts,
            self.recipe.eval.generate,
            batch_size=self.recipe.eval.per_device_eval_batch_size,
            plan=self.plan,
            device=self.device,
            reporter=self.reporter,
            stops=self.stops,
        )
        return texts, completions, [prompt.reference for prompt in prompts]

    def _prompts(self, task: TaskConfig) -> list[Prompt]:
        prompts: list[Prompt] = []
        for source in task.data or self.recipe.data.eval:
            prompts += prompts_of(read_rows(source), self.recipe.data.format)
        return prompts[: task.max_rows]
