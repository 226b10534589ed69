"""Options of commands that are not part of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a benchmark. None takes the recipe's value.

    Attributes:
        batch: Rows of a step, or pairs of them where the recipe learns from pairs.
        seq: Tokens of a row.
        prompt: Tokens of a pair's prompt; None: a third of its shorter row.
        lengths: Where the lengths of rows come from (:func:`ftcli.data.lengths.lengths_of`); None: all have ``seq``.
        layers: Decoder layers of the model.
        steps: Timed steps after the first; with 0 the first is reported.
        profile: Record one more step with torch's profiler.
        evaluation: Time `ftcli eval` instead of training: a step is one batch, forward only.
    """

    batch: int | None = None
    seq: int | None = None
    prompt: int | None = None
    lengths: str | None = None
    layers: int | None = None
    steps: int = 10
    profile: bool = False
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat. None takes the recipe's value, or the default for a person.

    Attributes:
        prompt: The one turn to answer; None where a person talks.
        base: The base model, without the run's adapter or weights.
        checkpoint: Of the run, a step or ``best``, in place of its result.
        system: A system prompt.
        raw: Text is continued as it stands, without the chat template.
        temperature: 0 takes the likeliest token.
    """

    prompt: str | None = None
    base: bool = False
    checkpoint: str | None = None
    system: str | None = None
    raw: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None

    @property
    def interactive(self) -> bool:
        """True if a person talks."""
        return self.prompt is None


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        checkpoint: Of the run, a step or ``best``: it is written in place of the result, below ``<run>/export/step-…``.
        output: Folder for the formats' folders, in place of ``<run>/export``.
        force: Replace an earlier export of something else.
        verify: Hold what is written against what was trained.
        repo: Repository on the Hub that the exports are uploaded to.
    """

    checkpoint: str | None = None
    output: Path | None = None
    force: bool = False
    verify: bool = True
    repo: str | None = None


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Options of sampling, and of the selection. None takes the recipe's value.

    Attributes:
        kept: Rows for supervised fine-tuning, pairs for preference methods, or both.
        num_generations: Answers of a prompt.
        max_prompts: The first rows only.
        min_score: Least score of an answer to learn, or of the better one of a pair.
        min_margin: Least difference of the scores of a pair.
        per_prompt: Most rows of a prompt, in each file.
        truncated: What becomes of answers that were cut off.
        checkpoint: Of the run, a step or ``best``, in place of its result.
        output: Folder for the files, in place of ``samples/<name>``.
        force: Replace samples of something else.
    """

    kept: Literal["sft", "pairs", "all"] = "all"
    num_generations: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    max_prompts: int | None = None
    min_score: float | None = None
    min_margin: float = 0.0
    per_prompt: int = 1
    truncated: Literal["drop", "reject", "keep"] = "drop"
    checkpoint: str | None = None
    output: Path | None = None
    force: bool = False
