"""Answers without their reasoning: what a model writes before it answers, by the marks of the chat template.

Only a template that knows such marks makes them mean something: in a text without one they are words like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.rows.layouts.messages import REASONING_KEYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A closing tag as templates write it: `</think>`, `</thought>`, `</seed:think>`, `[/THINK]`, `◁/think▷`.
_CLOSING_TAG = re.compile(r"([<\[◁])/((?:\w+:)?(?:think|thinking|thoughts?|reasoning))([>\]▷])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer.

    Attributes:
        text: The answer: empty where the reasoning never ended.
        reasoning: What it wrote before; None where there was none, "" where it was empty.
        cut: No token or text ended it: it came to the limit of its length.
    """

    text: str
    reasoning: str | None = None
    cut: bool = False


class _Mark:
    """Start and end of reasoning, as regular expressions."""

    def __init__(self, opening: str, closing: str) -> None:
        self.opening = re.compile(rf"\s*(?:{opening})")
        self.opened = re.compile(rf"(?:{opening})\s*\Z")
        self.closing = re.compile(closing)


#: Marks that are no pair of tags: what a template with them holds, then how reasoning begins and ends.
_CHANNELS: tuple[tuple[str, str, str], ...] = (
    (
        "<|channel|>final<|message|>",
        r"<\|channel\|>analysis<\|message\|>",
        r"(?:<\|end\|>\s*<\|start\|>assistant\s*)?<\|channel\|>final<\|message\|>",
    ),
    ("<channel|>", r"<\|channel>(?:thought\b)?", r"<channel\|>"),
    ("<|END_THINKING|>", r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    ("<|inner_suffix|>", r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (
        "assistant to=self<|message|>",
        r"to=self<\|message\|>",
        r"(?:<\|eom\|>\s*<\|start\|>assistant)?\s{0,9}(?:to=user)?<\|message\|>",
    ),
)


class ReasoningMarks:
    """The marks of a chat template, and of a tokenizer's ``response_template``, which says how answers are read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._marks = [] if template is None else [*_of_template(template), *_of_tokenizer(tokenizer)]

    def split(self, tokens: Sequence[int], prompt: str, *, templated: bool = True) -> Answer:
        """The completion ``tokens`` of ``prompt``, without special tokens.

        Reasoning stands at the beginning, or was opened by the prompt; anywhere else its marks are part of the answer.

        Args:
            templated: Whether the template wrote the prompt. A completion of plain text is all answer.
        """
        marks, ids = self._marks if templated else (), list(tokens)
        raw = self._decoded(ids, whole=True) if marks else ""
        for mark in marks:
            opened = mark.opening.match(raw)
            start = opened.end() if opened else 0
            inside = opened is not None or mark.opened.search(prompt) is not None
            closed = mark.closing.search(raw, start)
            if closed is None and inside:
                return Answer("", self._after(ids, mark.opening).strip() if opened else self._decoded(ids).strip())
            if closed is not None and (inside or not raw[: closed.start()].strip()):
                return Answer(self._after(ids, mark.closing, start), raw[start : closed.start()].strip())
        return Answer(self._decoded(ids))

    def _after(self, ids: list[int], mark: re.Pattern[str], start: int = 0) -> str:
        """The text after a mark: white space between the two belongs to neither."""
        least, most = 1, len(ids)  # the fewest tokens that hold the mark, which may be a special token
        while least < most:
            middle = (least + most) // 2
            if mark.search(self._decoded(ids[:middle], whole=True), start):
                most = middle
            else:
                least = middle + 1
        text = self._decoded(ids[:least], whole=True)
        found = mark.search(text, start)
        rest = text[found.end() :] if found else ""
        return f"{rest}{self._decoded(ids[least:])}".lstrip()

    def _decoded(self, ids: list[int], *, whole: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not whole))


def _of_template(template: str) -> Iterator[_Mark]:
    for known, opening, closing in _CHANNELS:
        if known in template:
            yield _Mark(opening, closing)
    for begin, name, end in dict.fromkeys(_CLOSING_TAG.findall(template)):
        yield _Mark(re.escape(f"{begin}{name}{end}"), re.escape(f"{begin}/{name}{end}"))


def _of_tokenizer(tokenizer: Any) -> Iterator[_Mark]:
    """Marks that are written out there; expressions of a model's author are not run on what models say."""
    told = getattr(tokenizer, "response_template", None)
    fields = told.get("fields") if isinstance(told, Mapping) else None
    for key in REASONING_KEYS:
        field = fields.get(key) if isinstance(fields, Mapping) else None
        opening, closing = (field.get(end) for end in ("open", "close")) if isinstance(field, Mapping) else (None, None)
        if isinstance(opening, str) and isinstance(closing, str) and opening.strip() and closing.strip():
            yield _Mark(re.escape(opening.strip()), re.escape(closing.strip()))
