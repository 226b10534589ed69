"""The section ``distill``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import Count, Fraction, Items, PathText, Section


class SampledConfig(Section):
    """The settings of every method whose model answers prompts itself, and which may have a teacher."""

    teacher: PathText | None = Field(
        default=None,
        description="The teacher: `OWNER/NAME` or a folder. Absent: the base without its adapters, which is shown "
        "`teacher_column`.",
    )
    teacher_revision: str | None = Field(default=None, description="Branch, tag or commit of a teacher on the Hub.")
    teacher_quantization: Literal["none", "nf4", "fp8"] = Field(
        default="none", description="How the teacher's weights are held."
    )
    teacher_column: str | None = Field(
        default=None,
        description="A column of the rows, of text that the teacher alone sees: it ends the last user turn.",
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus sampling; 1 is off.")
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Sample from the k likeliest; 0 is off.")
    max_prompt_length: Count = Field(default=512, description="Longest prompt in tokens; a longer one is an error.")
    max_completion_length: Count = Field(default=512, description="Longest completion in tokens; sampling ends there.")


class DistillConfig(SampledConfig):
    """Distillation: on the student's own answers (`train.method: distill`) or on those of the rows, from stored
    log-probabilities of a teacher (`distill_offline`). Leaf names are those of TRL's DistillationConfig where it has
    them.
    """

    teacher_logprobs: PathText | None = Field(
        default=None,
        description="distill_offline: folder of the teacher's log-probabilities. What it lacks is asked of `teacher` "
        "before training; without one, it has to be complete.",
    )
    teacher_top_k: Count = Field(
        default=64,
        description="distill_offline: likeliest tokens that are kept of each position; all others are one class.",
    )
    beta: Fraction = Field(
        default=1.0,
        description="1: the reverse KL divergence, 0: the forward one, between them the generalized Jensen-Shannon "
        "one.",
    )
    temperature: Annotated[float, Field(ge=0.001, le=10)] = Field(
        default=1.0, description="Of sampling, and of both distributions."
    )
    stop_strings: Items[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default=(), description="Texts that end a completion, beside the tokens that end a turn."
    )
