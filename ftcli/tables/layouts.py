"""Layouts of rows: what ``data.format`` may name, which columns tell each, and the code that understands its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One layout of data rows.

    Attributes:
        columns: Columns that a row needs. ``format: auto`` takes the first layout of the table whose columns are there.
            None: its code says what is missing.
        code: Turns a row that has these columns into an example; raises Misfit.
        loss_on: Values of ``data.loss_on`` that have a meaning; the first is what `auto` means.
        asks: Its rows end with an answer: it can be left to the model, and judges get it as `answer`.
        optional: Further columns that are read where they are there.
        conversation: Columns that hold the conversation itself; judges get the rendered prompt in their place.
        unit: Training rows that one of its rows makes, which are kept or dropped together; 2 for pairs.
        renamed: Code: a row in the columns of other tools as one in these.
    """

    columns: tuple[str, ...]
    code: str
    loss_on: tuple[str, ...] = ("assistant", "completion", "all")
    asks: bool = True
    optional: tuple[str, ...] = ()
    conversation: tuple[str, ...] = ()
    unit: int = 1
    labelled: bool = False
    renamed: str | None = None

    @property
    def imitated(self) -> bool:
        """True if its rows are answers to imitate. ``auto`` takes no others: their purpose is the method's to say."""
        return self.unit == 1 and not self.labelled

    def takes_loss_on(self, value: str) -> bool:
        """True if a recipe's ``data.loss_on`` has a meaning for rows of this layout."""
        return value in ("auto", *self.loss_on)


#: What is read of a conversation beside its turns.
_OF_CHATS = ("tools", "functions", "chat_template_kwargs", "images", "image")
#: What LLaMA-Factory, axolotl and ms-swift call the parts of a pair.
_OF_OTHER_PAIRS = (
    *("messages", "conversations", "chosen_response", "rejected_response", "rejected_messages"),
    *("instruction", "question", "input", "system", "history"),
)

#: In the order in which ``format: auto`` tries them.
TABLE: Mapping[str, RowLayout] = {
    "messages": RowLayout(
        ("messages",),
        "ftcli.rows.layouts.messages:understand",
        optional=_OF_CHATS,
        conversation=("messages",),
    ),
    "sharegpt": RowLayout(
        ("conversations",),
        "ftcli.rows.layouts.prompted:understand_sharegpt",
        optional=("system", *_OF_CHATS),
        conversation=("conversations",),
    ),
    "prompt_completion": RowLayout(
        ("prompt", "completion"),
        "ftcli.rows.layouts.prompted:understand_completion",
        loss_on=("completion", "assistant", "all"),
        optional=_OF_CHATS,
        conversation=("prompt", "completion"),
    ),
    "prompt_answer": RowLayout(
        ("prompt", "answer"),
        "ftcli.rows.layouts.prompted:understand_answer",
        optional=_OF_CHATS,
        conversation=("prompt",),
    ),
    "alpaca": RowLayout(
        ("instruction", "output"),
        "ftcli.rows.layouts.prompted:understand_instruction",
        optional=("input", "system", "history", *_OF_CHATS),
    ),
    "text": RowLayout(("text",), "ftcli.rows.layouts.prompted:understand_text", loss_on=("all",), asks=False),
    "tokenized": RowLayout(
        ("input_ids", "labels"),
        "ftcli.rows.layouts.prompted:understand_tokenized",
        loss_on=("all",),
        asks=False,
        optional=("attention_mask", "position_ids"),
    ),
    "preference": RowLayout(
        ("chosen", "rejected"),
        "ftcli.methods.preference.rows:understand",
        loss_on=("completion", "assistant"),
        optional=("prompt", "margin", *_OF_OTHER_PAIRS, *_OF_CHATS),
        conversation=("prompt", "chosen", "rejected", *_OF_OTHER_PAIRS),
        unit=2,
        renamed="ftcli.methods.preference.rows:renamed",
    ),
    "labelled": RowLayout(
        (),
        "ftcli.methods.kto.rows:understand",
        loss_on=("completion", "assistant"),
        optional=(
            *("label", "kto_tag", "prompt", "completion", "messages", "conversations", "chosen", "rejected"),
            *("instruction", "input", "output", "system", "history"),
            *_OF_CHATS,
        ),
        conversation=("prompt", "completion", "messages", "conversations", "chosen", "rejected"),
        labelled=True,
    ),
}


def names() -> tuple[str, ...]:
    return tuple(TABLE)


def row(name: str) -> RowLayout:
    return TABLE[name]


def formats(unit: int | None = None) -> tuple[str, ...]:
    """Values of ``data.format`` for methods that imitate rows (1) or learn from pairs (2); for all with None."""
    named = (name for name, layout in TABLE.items() if unit is None or (layout.unit == unit and not layout.labelled))
    return ("auto", *named)


def detect(columns: Iterable[str]) -> str | None:
    """The first layout whose columns are all there; None when no layout fits."""
    present = set(columns)
    return next(
        (name for name, layout in TABLE.items() if layout.imitated and present.issuperset(layout.columns)), None
    )


def chat_columns() -> tuple[str, ...]:
    """Columns that every row of a chat or a prompt may have."""
    return _OF_CHATS


def conversation_columns() -> frozenset[str]:
    """The columns, of any layout, that hold the conversation itself."""
    return frozenset(column for layout in TABLE.values() for column in layout.conversation)
