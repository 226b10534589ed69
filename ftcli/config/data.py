"""Section `data`: what is read, how it is rendered, which tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, field_validator

from ftcli.config.base import Count, Items, PathText, Section, Word, served
from ftcli.plain import JsonObject
from ftcli.tables import layouts, stores


def _path_shorthand(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _known_storage(value: str) -> str:
    return value if stores.of(value) is not None else served(value)


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a source whose hash lies below ``share`` (``held_out``), or the others."""

    share: float
    held_out: bool


class Shards(Protocol):
    """Lists and fetches the files of a remote source: :class:`ftcli.rows.remote.RemoteData`."""

    def listed(self, path: str) -> Sequence[tuple[str, str, Any]]:
        """Name and identity of each file, and what :meth:`fetch` takes."""
        ...

    def fetch(self, path: str, file: Any) -> Path:
        """The file on this machine."""
        ...


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """How far a stream has come: passes that are ``over``, shards of this one that are read (by name, with what tells
    their content), and of the one that is being read its name and the number of its last row.
    """

    over: int = 0
    read: Mapping[str, str] = field(default_factory=dict)
    shard: str | None = None
    row: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Up to ``rows`` rows of a streamed source, from ``place`` on; ``seed`` orders its shards.

    Attributes:
        ends: The window ends with a pass.
        remote: What reads the files of a remote source.
    """

    seed: int
    rows: int
    ends: bool = True
    remote: Shards | None = None
    place: StreamPlace = field(default_factory=StreamPlace)


class DatasetConfig(Section):
    """One source of rows. A bare string is short for `{path: ...}`."""

    path: Annotated[str, Field(min_length=1), AfterValidator(_known_storage)] = Field(
        description="A .jsonl, .json, .csv, .tsv, .parquet or .arrow file (each also .gz), a folder of them, "
        "`bundled:NAME`, `hub:ORG/NAME` for a dataset of the Hugging Face Hub, or a file, folder or pattern at "
        "`s3://`, `gs://`, `hf://` or `https://`.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: `{name that ftcli expects: name in the file}`."
    )
    max_rows: Count | None = Field(default=None, description="Use the first rows only.")
    remove_columns: Items[str] = Field(
        default=(),
        description="Columns of the file to ignore. For a `label` or `score` that is refused: it does not judge the "
        "answers.",
    )
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Share of this source in the mixture; with one weight, every source needs one. Each row is seen "
        "at least once an epoch; rows of small sources repeat.",
    )
    name: str | None = Field(default=None, description="Configuration of a Hub dataset.")
    split: str | None = Field(
        default=None, description="Split of a Hub dataset (`train` when absent), or of a folder by its file names."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hub dataset.")
    streaming: bool = Field(
        default=False,
        description="Read the first `max_rows` rows of a Hub dataset without downloading the rest.",
    )
    epochs: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="How often an epoch shows each row of this source: 2.5 is twice, and a random half once more. In"
        " place of `weight`.",
    )
    _files: tuple[tuple[str, Path], ...] | None = PrivateAttr(default=None)
    _part: Part | None = PrivateAttr(default=None)
    _window: Window | None = PrivateAttr(default=None)

    @property
    def window(self) -> Window | None:
        """The part of a streamed source that is read; None: it is no stream."""
        return self._window

    def with_window(self, window: Window) -> DatasetConfig:
        """The same source, of which these rows are read."""
        copy = self.model_copy()
        copy._window = window
        return copy

    @property
    def files(self) -> tuple[tuple[str, Path], ...] | None:
        """The files of this machine that a remote source was fetched into, by their names; None where none was."""
        return self._files

    def with_files(self, files: Sequence[tuple[str, Path]]) -> DatasetConfig:
        """The same source, read from these files."""
        copy = self.model_copy()
        copy._files = tuple(files)
        return copy

    @property
    def part(self) -> Part | None:
        """The part of the rows that is read; None: all."""
        return self._part

    def with_part(self, part: Part) -> DatasetConfig:
        """The same source, of which these rows are read."""
        copy = self.model_copy(update={"weight": None, "epochs": None} if part.held_out else {})
        copy._part = part
        return copy


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
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of the rows of `train` to measure on instead, beside `eval`; a hash of the row chooses.",
    )
    format: Annotated[str, Word(layouts.formats)] = Field(
        default="auto", description="Row layout; `auto` finds it from the columns and says so."
    )
    chat_template: PathText | None = Field(
        default=None, description="A .jinja file, or the name of a bundled template; the tokenizer's own when absent."
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Values for the template's switches, such as `{enable_thinking: true}`. Whoever serves the model "
        "has to set them too.",
    )
    history: Literal["split", "last", "template"] = Field(
        default="split",
        description="Earlier answers that the chat template rewrites. `split`: a row of their own, as in generation; "
        "`last`: no loss; `template`: the template's training form, where one is known.",
    )
    reasoning: Literal["keep", "drop", "refuse"] = Field(
        default="keep",
        description="Reasoning of answers (`reasoning_content`, `thinking`, `<think>`). `keep`: trained, and refused "
        "where the template drops it; `drop`: removed and counted; `refuse`: an error.",
    )
    max_seq_len: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=2048,
        description="Longest sequence in tokens, and the only length setting: all others follow from it.",
    )
    overlong: Literal["error", "drop", "truncate", "split"] = Field(
        default="error",
        description="What happens to rows longer than `max_seq_len`; each one is counted. `split`: rows of text of"
        " which everything is trained become several, and no token is lost.",
    )
    max_bad_rows: float = Field(
        default=0.0,
        ge=0.0,
        description="Broken rows of a source to skip and count: a share below 1, a number from 1 on. With more, all "
        "are named and nothing is trained.",
    )
    loss_on: Literal["auto", "assistant", "completion", "all"] = Field(
        default="auto",
        description="Tokens that bear loss. `auto`: assistant turns of messages, completions of prompt_completion and"
        " alpaca rows, all of text, the labels of tokenized rows.",
    )
    streaming: bool = Field(
        default=False,
        description="Read `train` in windows of `buffer_size` rows, tokenized while the one before is trained on; at "
        "most two lie on disk. Needs `train.max_steps`.",
    )
    buffer_size: Annotated[int, Field(ge=1, le=10**8)] = Field(
        default=16384, description="Rows that are shuffled, and packed, together under `streaming`."
    )
    packing: bool = Field(
        default=False,
        description="Several rows in one sequence of up to `max_seq_len` tokens, without attention across rows.",
    )
    padding_free: bool | Literal["auto"] = Field(
        default="auto",
        description="Lay the rows of a micro-batch end to end in place of padding, without attention across rows. "
        "`auto`: where ftcli's kernels run attention; `true`: elsewhere too, by a dense mask.",
    )
    remote_cache_gib: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=64.0,
        description="The most that files fetched from `s3://` and the like take on this machine; the longest unused go"
        " first.",
    )
    image_max_pixels: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Pixels of an image at most: larger ones are made smaller, which costs fewer tokens. Absent: what "
        "the model's image processor says.",
    )
    num_proc: Count | None = Field(
        default=None,
        description="Processes that tokenize, at most one a core; absent: one for small files, one a core for large "
        "ones.",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_arguments_of_rendering(cls, value: JsonObject) -> JsonObject:
        taken = sorted(ARGUMENTS_OF_RENDERING & set(value))
        if taken:
            raise ValueError(f"{taken[0]!r} is decided by ftcli, not by the template's switches")
        return value

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weight of each source of `train`; None where some have none."""
        found = tuple(source.weight for source in self.train if source.weight is not None)
        return found if found and len(found) == len(self.train) else None

    @property
    def epochs(self) -> tuple[float, ...] | None:
        """How often an epoch shows the rows of each source of `train`; None where all are seen once."""
        found = tuple(source.epochs or 1.0 for source in self.train)
        return found if any(source.epochs is not None for source in self.train) else None

    def rows_of_window(self, number: int) -> list[int]:
        """Rows of each source of `train` in a window of a stream: `buffer_size`, shared out by weights."""
        weights = self.weights or (1.0,) * len(self.train)
        share = self.buffer_size / sum(weights)
        ends = [[int(turn * share * weight) for weight in weights] for turn in (number, number + 1)]
        return [max(1, end - begin) for begin, end in zip(*ends, strict=True)]

    @property
    def measures(self) -> bool:
        """True if there are held-out rows."""
        return bool(self.eval) or self.held_out is not None

    def with_held_out(self) -> DataConfig:
        """The same data with `held_out` carried out: sources that read one part of the rows, or the other."""
        share = self.held_out
        if share is None or any(source.part is not None for source in self.train):
            return self
        trained = tuple(source.with_part(Part(share, held_out=False)) for source in self.train)
        measured = tuple(source.with_part(Part(share, held_out=True)) for source in self.train)
        return self.model_copy(update={"train": trained, "eval": (*self.eval, *measured)})
