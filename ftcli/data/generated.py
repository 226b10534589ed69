"""Generated answers as rows to train on, which the reading of training rows has looked at."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig
from ftcli.data.asked import RenderedPrompt
from ftcli.data.encode import Encoder
from ftcli.data.reasoning import Answer
from ftcli.plain import JsonObject
from ftcli.rows.row import Message, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer as a row holds it: a message, or the text after a prompt of plain text.

    ``alike``: training reads it as it was generated.
    """

    content: Message | str
    alike: bool


class GeneratedRows:
    """Makes rows of prompts and answers: messages as the row of the prompt had them, with its tools and switches.

    Templates differ in where they want the reasoning. It has a key of its own where they then write what was generated,
    else it stays in the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int], data: DataConfig) -> None:
        settings = data.model_copy(update={"format": "auto", "loss_on": "auto"})
        self._tokenizer = tokenizer
        self._completions = Encoder(tokenizer, stops, settings, "prompt_completion")
        self._pairs = Encoder(tokenizer, stops, settings, "preference")

    def answer(self, asked: RenderedPrompt, said: Answer, whole: str) -> WrittenAnswer | None:
        """The answer, of which ``whole`` is all that was generated; None where training would refuse it."""
        found = None
        for content in _contents(asked, said, whole):
            read = self._completions.rows([_row(asked, self.completion(asked, content))])
            if len(read.tokens) != 1:
                continue
            if self._begins(read.tokens[0].input_ids, asked.text + whole):
                return WrittenAnswer(content, alike=True)
            found = found or WrittenAnswer(content, alike=False)
        return found

    def completion(self, asked: RenderedPrompt, answer: Message | str) -> JsonObject:
        """A row of `prompt` and `completion`."""
        return {**_prompt(asked), "completion": _side(answer), **_of_template(asked)}

    def pair(self, asked: RenderedPrompt, chosen: Message | str, rejected: Message | str) -> JsonObject | None:
        """A row of `prompt`, `chosen` and `rejected`; None where training would refuse it."""
        row = {**_prompt(asked), "chosen": _side(chosen), "rejected": _side(rejected), **_of_template(asked)}
        return row if self._pairs.rows([_row(asked, row)]).tokens else None

    def _begins(self, ids: list[int], text: str) -> bool:
        """True if ``ids`` begin with ``text``, in whatever tokens."""
        wanted = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids[: len(wanted)] == wanted:
            return True
        whole, part = (str(self._tokenizer.decode(each, skip_special_tokens=False)) for each in (ids, wanted))
        return whole.startswith(part)


def _contents(asked: RenderedPrompt, said: Answer, whole: str) -> list[Message | str]:
    """Ways to write an answer down, the most readable first."""
    if not asked.templated:
        return [whole]
    thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
    ways: list[Message] = [
        {"role": "assistant", "content": said.text, **thought},
        {"role": "assistant", "content": said.text.strip(), **thought},  # some templates write a space before it
        {"role": "assistant", "content": whole},
    ]
    return [way for at, way in enumerate(ways) if way not in ways[:at]]


def _prompt(asked: RenderedPrompt) -> JsonObject:
    prompt = asked.prompt
    return {"prompt": prompt.text if prompt.messages is None else list(prompt.messages)}


def _side(answer: Message | str) -> list[Message] | str:
    return answer if isinstance(answer, str) else [answer]


def _of_template(asked: RenderedPrompt) -> JsonObject:
    """Columns for the template's input beside the messages."""
    prompt = asked.prompt
    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    return {**tools, **({"chat_template_kwargs": dict(prompt.switches)} if prompt.switches else {})}


def _row(asked: RenderedPrompt, fields: JsonObject) -> Row:
    return Row(asked.prompt.row.source, asked.prompt.row.number, fields)
