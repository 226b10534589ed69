"""Finds an assistant's answer in rendered text: after the generation prompt, up to the token that stops generation.

Many templates write an earlier turn differently from the last one (they drop its reasoning, or end it with another
token), and some end the generation prompt inside the reasoning. So an answer is looked for in the text that ends with
it, never in a longer one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

#: The end of a generation prompt that has opened the reasoning: the tag is part of the prompt, not of the answer.
OPENED_REASONING = re.compile(r"<think>\s*\Z")
#: Characters by which the places are found that may be the end of a generation prompt.
_SEED = 12


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of one training row and the half-open character ranges in it that the model is to learn.

    Attributes:
        holes: Ranges inside the spans that bear no loss, because the row says so.
        answers: The spans are answers: what is before each of them is what generation is given. Else (plain text) a
            token that begins before a span and ends in it is left alone.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    holes: tuple[tuple[int, int], ...] = ()
    answers: bool = False


@dataclass(frozen=True, slots=True)
class AnswerTurn:
    """One assistant's turn that is trained.

    Attributes:
        index: Its message, counted from 0.
        prompt: What generation is given: the history with the generation prompt.
        answer: What generation is to give, up to its stop token.
        text: The prompt, the answer, and what the template writes after it.
        holes: Ranges of ``text`` inside the answer without loss.
    """

    index: int
    prompt: str
    answer: str
    text: str
    holes: tuple[tuple[int, int], ...] = field(default=())

    @property
    def end(self) -> int:
        """End of the answer in ``text``."""
        return len(self.prompt) + len(self.answer)

    def begins(self, text: str) -> bool:
        """True if ``text`` begins with this turn exactly as generation would make it."""
        return text.startswith(self.text[: self.end])


def after_prompt(prompt: str, text: str, last_turn: int) -> str | None:
    """The text that follows ``prompt``, the same conversation before the answer; None if it cannot be told.

    Args:
        last_turn: Length of the end of ``prompt`` that shows its last message and the generation prompt. Where the
            history before it is rewritten, the answer follows the place that agrees longest with the prompt.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    # A search for each length that is tried: at a text that repeats itself, looking at each place would never end.
    best = _agreed(min(len(prompt), len(text)), lambda n: prompt[-n:] in text)
    end_of_prompt = prompt[len(prompt) - best :]
    place = text.find(end_of_prompt)
    if not best or best < max(min(_SEED, len(prompt)), last_turn) or text.rfind(end_of_prompt) != place:
        return None
    return text[place + best :]


def common_prefix(one: str, other: str) -> int:
    """Number of characters that two texts begin with alike."""
    return _agreed(min(len(one), len(other)), lambda n: one.startswith(other[:n]))


def _agreed(most: int, agree: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` for which ``agree`` holds; it holds for all smaller ones."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if agree(middle) else (least, middle - 1)
    return least


def unopened(prompt: str) -> str | None:
    """``prompt`` without the opening of the reasoning at its end; None when it has none."""
    found = OPENED_REASONING.search(prompt)
    return prompt[: found.start()] if found else None


def with_reasoning(answer: str, reasoning: str) -> tuple[str, bool]:
    """The answer after an opened reasoning, and whether the reasoning was added to what the template shows.

    Such templates (DeepSeek's) show nothing of the reasoning in a conversation, though generation begins with it. An
    empty one is closed at once, in the form that these models publish.
    """
    shown = answer.lstrip()
    if shown.startswith("<think>"):
        return shown.removeprefix("<think>").lstrip("\n"), False
    if shown.startswith("</think>"):
        return f"{reasoning.strip()}\n{shown}", True
    if "</think>" in shown:
        return shown, False
    return f"{reasoning.strip()}\n</think>\n\n{answer.lstrip(chr(10))}", True


class StopTexts:
    """The texts of the tokens at which generation stops."""

    def __init__(self, texts: Sequence[str]) -> None:
        chosen = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        self._any = re.compile(chosen) if chosen else None
        # A stop token after which nothing comes but white space and further ones, which are never generated.
        self._last = re.compile(rf"({chosen})(?:\s|{chosen})*\Z") if chosen else None

    def ended(self, answer: str) -> str:
        """The answer up to its stop token; as it is, where something else follows the last one, or there is none."""
        found = self._last.search(answer) if self._last is not None else None
        return answer if found is None else answer[: found.end(1)]

    def ends(self, answer: str) -> bool:
        """True if a stop token is in the answer."""
        return self._any is None or self._any.search(answer) is not None

    def first(self, text: str) -> tuple[str, str] | None:
        """The first stop token of ``text`` with what is before it; None when there is none."""
        found = self._any.search(text) if self._any is not None else None
        return None if found is None else (text[: found.start()], found[0])
