"""The history of a chat, rendered as the model was trained to see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.data.answers import OPENED_REASONING
from ftcli.data.asked import PromptLimit
from ftcli.data.omissions import split_reasoning
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.data.template import Renderer
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Message, Row, data_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHERE = "chat"


@dataclass(frozen=True, slots=True)
class Question:
    """A turn as the model sees it: everything said up to where its answer begins, and how many tokens that is."""

    said: str
    text: str
    tokens: int


class Conversation:
    """Turns that were asked and answered, and the next one rendered after them.

    Args:
        renderer: None where there is no chat template: every turn is plain text on its own, to be continued.
        room: How long a prompt may be.
        refuses_reasoning: ``data.reasoning: refuse``; then reasoning of earlier answers is not part of the history.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer,
        room: PromptLimit,
        *,
        system: str | None = None,
        raw: bool = False,
        refuses_reasoning: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._room = room
        self._raw = raw
        self._refuses_reasoning = refuses_reasoning
        self._first: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self._turns: list[Message] = []

    @property
    def turns(self) -> tuple[Message, ...]:
        """The turns so far."""
        return (*self._first, *self._turns)

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._turns.clear()

    def question(self, text: str) -> Question:
        """The next turn, not yet part of the history.

        Raises:
            FtcliError: (exit 4) FT412, FT422, FT425 and FT426 as :meth:`ftcli.data.template.Renderer.prompt`, FT431
                when it leaves no room for an answer.
        """
        row = Row(_WHERE, len(self._turns) // 2 + 1, {})
        messages = None if self._raw else (*self.turns, {"role": "user", "content": text})
        rendered = self._renderer.prompt(Prompt(row, messages, text if self._raw else None, None))
        count = len(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if count > self._room.tokens or not count:
            message = f"the conversation has {count:,} tokens, {self._room.limit}" if count else "nothing is asked"
            raise data_error("FT431", message, row.origin, self._room.help)
        return Question(text, rendered, count)

    def told_apart(self, question: Question, tokens: Sequence[int]) -> Answer:
        """The answer and the reasoning before it, by the marks of the template that wrote the question."""
        marks = ReasoningMarks(self._tokenizer, self._renderer.source)
        return marks.split(tokens, question.text, templated=not self._raw)

    def answered(self, question: Question, completion: str) -> None:
        """Adds the turn and its answer, as far as that came, to the history."""
        if self._raw:
            return
        content = _with_reasoning(completion) if OPENED_REASONING.search(question.text) else completion
        if self._refuses_reasoning:
            content = split_reasoning(content)[3]
        self._turns += [{"role": "user", "content": question.said}, {"role": "assistant", "content": content}]


def _with_reasoning(completion: str) -> str:
    """An answer whose reasoning began in the prompt, with both of its tags."""
    return f"<think>\n{completion}" if "</think>" in completion else f"<think>\n{completion}\n</think>\n\n"
