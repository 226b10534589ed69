"""Section `data`: what is read, how it is rendered, which tokens are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ftcli.config.base import Count, Items, PathText, Section, Word
from ftcli.plain import JsonObject
from ftcli.tables import layouts


def _path_shorthand(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class DatasetConfig(Section):
    """One source of rows. A bare string is short for `{path: ...}`."""

    path: PathText = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file (each also .gz), a folder of such files, "
        "`bundled:NAME` for data that ships with ftcli, or `hub:ORG/NAME` for a dataset of the Hugging Face Hub. "
        "Relative paths are relative to the current directory.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: `{name that ftcli expects: name in the file}`."
    )
    max_rows: Count | None = Field(default=None, description="Use the first rows only.")
    remove_columns: Items[str] = Field(
        default=(),
        description="Columns of the file that are left out as if they were not there, by their names in the file. Says "
        "of a `label` or `score` that would be refused that it does not judge the answers.",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Share of this source in the mixture, relative to the other weights; with one weight, every source "
        "needs one. Each row is seen at least once an epoch; rows of sources that are too small repeat.",
    )
    name: str | None = Field(default=None, description="Configuration of a Hub dataset.")
    split: str | None = Field(
        default=None, description="Split of a Hub dataset (`train` when absent), or of a folder by its file names."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hub dataset.")
    streaming: bool = Field(
        default=False,
        description="Read the first `max_rows` rows of a Hub dataset without downloading the rest of it.",
    )


Dataset = Annotated[DatasetConfig, BeforeValidator(_path_shorthand, json_schema_input_type=str | DatasetConfig)]


#: Arguments of rendering that are no switch of a template.
ARGUMENTS_OF_RENDERING = {
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
} | {
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "tokenizer_kwargs",
    "return_assistant_tokens_mask",
    "bos_token",
    "eos_token",
}


class DataConfig(Section):
    """Training and held-out data."""

    train: Items[Dataset] = Field(default=(), description="Files to train on.")
    eval: Items[Dataset] = Field(default=(), description="Held-out files.")
    format: Annotated[str, Word(layouts.formats)] = Field(
        default="auto", description="Row layout; `auto` finds it from the columns and says so."
    )
    chat_template: PathText | None = Field(
        default=None, description="A .jinja file, or the name of a bundled template; the tokenizer's own when absent."
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Values for the template's own switches, such as `{enable_thinking: true}`, in training, "
        "evaluation and GRPO alike. Whoever serves the model has to set them, too.",
    )
    history: Literal["split", "last", "template"] = Field(
        default="split",
        description="What happens to an earlier answer that the chat template writes differently once others follow. "
        "`split`: a row of its own, as generation sees it. `last`: no loss. `template`: the conversation is written by "
        "the training form of its template, where one is known. Each is counted.",
    )
    reasoning: Literal["keep", "drop", "refuse"] = Field(
        default="keep",
        description="Reasoning of answers (`reasoning_content`, `thinking`, `<think>`): trained and refused where the "
        "template cannot show it, taken out and counted, or not allowed.",
    )
    max_seq_len: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=2048,
        description="Longest sequence in tokens. The only length setting: all others follow from it. Of 2 tokens the "
        "second is learnt, given the first.",
    )
    overlong: Literal["error", "drop", "truncate"] = Field(
        default="error", description="What happens to rows longer than `max_seq_len`; each one is counted."
    )
    max_bad_rows: float = Field(
        default=0.0,
        ge=0.0,
        description="Rows of one source that may be broken: a share below 1, a number from 1 on. Up to there they are "
        "skipped and counted; with more, all of them are named and nothing is trained.",
    )
    loss_on: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description="Which tokens are trained. `auto`: assistant turns of messages, completions of "
        "prompt_completion and alpaca rows, everything of text, the labels of tokenized rows.",
    )
    packing: bool = Field(
        default=False,
        description="Put several rows into one sequence of up to `max_seq_len` tokens, without attention across rows.",
    )
    padding_free: bool | Literal["auto"] = Field(
        default="auto",
        description="Lay the rows of a micro-batch one after the other in a single row, without padding and without "
        "attention across rows. `auto` does so where attention runs on kernels that skip other rows; `true` elsewhere "
        "too, by a mask over all pairs of tokens.",
    )
    num_proc: Count | None = Field(
        default=None,
        description="Processes that tokenize, at most one a core. When absent: one for small files, one a core "
        "for large ones.",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_arguments_of_rendering(cls, value: JsonObject) -> JsonObject:
        taken = sorted(ARGUMENTS_OF_RENDERING & set(value))
        if taken:
            raise ValueError(f"{taken[0]!r} is decided by ftcli, not by the template's switches")
        return value
