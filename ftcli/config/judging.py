"""The common part of rewards and tasks: who judges a completion, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import PathText, Section, Served, Word
from ftcli.plain import JsonObject
from ftcli.tables import judges

#: What becomes of completions that could not be judged: an end of the run, no score, or this one.
OnError = Literal["stop", "skip"] | Annotated[float, Field(ge=-1e12, le=1e12)]


class JudgeConfig(Section):
    """A built-in judge (`use`) or a function of yours (`file`), and what it is told."""

    use: Annotated[str, Word(judges.names)] | None = Field(default=None, description="A built-in judge.")
    file: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), Served] | None = Field(
        default=None,
        description="`path.py:function` with `function(completions, prompts, **columns) -> list[float | None]`.",
    )
    extract: str | None = Field(
        default=None, description="exact_match: a regular expression whose first group is compared, not all the text."
    )
    pattern: str | None = Field(default=None, description="regex: what a completion must match.")
    model: PathText | None = Field(
        default=None,
        description="reward_model: the folder of a reward model, such as `runs/reward/export/safetensors`.",
    )
    min_chars: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        default=None, description="length: fewest characters that pass; 0 when absent."
    )
    max_chars: Annotated[int, Field(ge=0, le=10_000_000)] | None = Field(
        default=None, description="length: most characters that pass."
    )
    json_schema: PathText | JsonObject | None = Field(
        default=None,
        description="json_valid: the JSON Schema to fit, written here or the path of a JSON file.",
    )
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None,
        description="Seconds. python_tests: each program (5); math_verify: each completion (5); your function: each "
        "call, which judges a whole batch (60).",
    )
    memory_mb: Annotated[int, Field(ge=64, le=1_048_576)] | None = Field(
        default=None, description="python_tests: MiB of address space of each program; 512 when absent."
    )
    args: JsonObject = Field(default_factory=dict, description="Further keyword arguments for your function.")
    on_error: OnError | None = Field(
        default=None,
        description="What happens to a completion that cannot be judged: `stop` ends the command, `skip` leaves the "
        "completion out, a number is its score. Absent: `stop` for your functions, `skip` for built-in "
        "judges.",
    )


class RewardConfig(JudgeConfig):
    """One reward: a built-in (`use`) or a function of yours (`file`)."""

    answer: str = Field(
        default="answer",
        description="exact_match, contains, math_verify: the column with the right answer; python_tests: with tests.",
    )
    weight: Annotated[float, Field(ge=-10_000, le=10_000)] = Field(
        default=1.0, description="Weight of this reward in the sum."
    )
