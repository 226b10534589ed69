"""Section `data`: what is read, how it is rendered, which tokens are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ftcli.config.base import Count, Items, Section

Format = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text"]


def _path_shorthand(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class DatasetConfig(Section):
    """One source of rows. A bare string is short for `{path: ...}`."""

    path: str = Field(
        min_length=1,
        description="A .jsonl or .json file (also .gz), or `bundled:NAME` for data that ships with ftcli. "
        "Relative paths start at the current directory.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: `{name that ftcli expects: name in the file}`."
    )
    max_rows: Count | None = Field(default=None, description="Use the first rows only.")


Dataset = Annotated[DatasetConfig, BeforeValidator(_path_shorthand, json_schema_input_type=str | DatasetConfig)]


class DataConfig(Section):
    """Training and held-out data."""

    train: Items[Dataset] = Field(default=(), description="Files to train on.")
    eval: Items[Dataset] = Field(default=(), description="Held-out files.")
    format: Format = Field(default="auto", description="Row layout; `auto` finds it from the columns and says so.")
    chat_template: str | None = Field(
        default=None, description="A .jinja file, or the name of a bundled template; the tokenizer's own when absent."
    )
    max_seq_len: Count = Field(
        default=2048, description="Longest sequence in tokens. The only length setting: all others follow from it."
    )
    overlong: Literal["error", "drop", "truncate"] = Field(
        default="error", description="What happens to rows longer than `max_seq_len`; each one is counted."
    )
    loss_on: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description="Which tokens are trained. `auto`: assistant turns of messages, completions of "
        "prompt_completion and alpaca rows, everything of text.",
    )
    packing: bool = Field(default=False, description="Put several rows into one sequence, without attention across.")
