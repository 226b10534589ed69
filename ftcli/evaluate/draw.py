"""Several answers to each prompt, sampled by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from ftkernels.sampling import Sampling, row_seed

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.errors import Finding
from ftcli.evaluate.batching import row_too_large
from ftcli.evaluate.generate import answering
from ftcli.facts.generation import MOST_ROWS
from ftcli.generation.generator import OpenedGenerator, open_generator
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, StopConditions, cut
from ftcli.job import Job
from ftcli.reporting import Progress

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Drawing:
    """All settings of a drawing: the same values and the same model give the same answers.

    Attributes:
        num_generations: Answers of a prompt.
        top_k, top_p: 0 and 1 are off.
        max_length: Most tokens of a prompt and its answer.
    """

    num_generations: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    seed: int
    max_length: int


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """One answer.

    Attributes:
        whole: All of it as it was generated, reasoning and special tokens included, without the token that ended it.
        tokens: How many were generated.
    """

    said: Answer
    whole: str
    tokens: int


class Sampler:
    """Draws answers of one model to ``prompts``.

    What is drawn for a prompt depends on its place and on the prompts that are drawn with it, which share its batches.
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, job: Job, drawing: Drawing, prompts: Sequence[RenderedPrompt]
    ) -> None:
        self._model = model
        self._job = job
        self._drawing = drawing
        self._prompts = prompts
        self._ids: list[list[int]] = job.tokenizer([one.text for one in prompts], add_special_tokens=False)["input_ids"]
        self._sampling = Sampling(drawing.temperature, drawing.top_k, drawing.top_p)
        self._stopping = StopCheck(StopConditions(frozenset(job.stops), drawing.stop_strings), job.tokenizer)
        self._marks = job.reasoning_marks
        # A CPU does not say how much memory the cache may take.
        own = job.recipe.eval.per_device_eval_batch_size
        self._rows = min(MOST_ROWS, own) if job.device.type == "cpu" else MOST_ROWS
        self._opened: OpenedGenerator | None = None

    def draw(self, places: Sequence[int], progress: Progress) -> list[list[DrawnAnswer]]:
        """The answers to the prompts at ``places``; ``progress`` counts answers.

        Raises:
            FtcliError: FT761 (exit 5) when one answer alone does not fit into memory, FT762 (exit 6) when the model's
                logits are not finite. Where fewer rows at once do, they are drawn so, with the warning FT764.
        """
        seed, turns = self._drawing.seed, range(self._drawing.num_generations)
        requests = [
            GenerationRequest(tuple(self._ids[at]), self._limit(at), tuple(row_seed(seed, at, turn) for turn in turns))
            for at in places
        ]
        with answering(self._model):
            while (found := self._completed(requests, progress)) is None:
                self._fewer_rows()
        return [
            [self._read(one.tokens, self._prompts[at]) for one in completions]
            for completions, at in zip(found, places, strict=True)
        ]

    def _limit(self, at: int) -> int:
        """Most tokens of an answer to the prompt at ``at``, which is shorter than ``max_length``."""
        return min(self._drawing.max_new_tokens, self._drawing.max_length - len(self._ids[at]))

    def _completed(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[list[Completion]] | None:
        """The completions of each request; None where memory ran out."""
        found = [[Completion() for _ in request.seeds] for request in requests]
        try:
            for token in self._open().generator.run(requests, self._sampling, self._stopping):
                found[token.request][token.completion].add(token)
                if token.ended is not None:
                    progress.advance(1)
        except torch.OutOfMemoryError:
            return None
        return found

    def _open(self) -> OpenedGenerator:
        """The generator, which is kept: of all prompts, so that it does not depend on which come first."""
        if self._opened is None:
            job = self._job
            self._opened = open_generator(
                self._model,
                job.dtypes,
                job.device,
                rows=self._rows,
                longest=max(len(ids) + self._limit(at) for at, ids in enumerate(self._ids)),
                pad=job.pad_token_id,
                kernels=job.recipe.model.kernels,
                own_settings=False,  # answers are the model's own, without a penalty that training knows nothing of
            )
            job.reporter.info(self._opened.summary)
        return self._opened

    def _fewer_rows(self) -> None:
        if self._rows == 1:
            raise row_too_large("generation", None)
        self._opened, self._rows = None, self._rows // 2
        message = f"out of memory in generation: going on with {self._rows} answers at a time"
        help = "shorter answers (--max-new-tokens) leave room for more of them"
        self._job.reporter.finding(Finding("FT764", message, help=help, severity="warning"))
        if self._job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, tokens: list[int], prompt: RenderedPrompt) -> DrawnAnswer:
        strings = self._drawing.stop_strings
        said = self._marks.split(tokens, prompt.text, templated=prompt.templated)
        ended = bool(tokens) and self._stopping.stopped(tokens)
        kept = tokens[:-1] if tokens and tokens[-1] in self._stopping.ids else tokens
        whole = cut(str(self._job.tokenizer.decode(kept, skip_special_tokens=False)), strings)
        return DrawnAnswer(replace(said, text=cut(said.text, strings), cut=not ended), whole, len(tokens))
