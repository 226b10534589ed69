"""Whether a completion has come to an end, as its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcli.generation.requests import StopConditions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Characters of text that a token stands for at least, where strings are looked for: none is shorter than a byte, and a
#: character of four bytes may be four tokens.
_TOKENS_A_CHARACTER = 4


class StopCheck:
    """Looks at the end of completions for what stops them.

    Raises ValueError for strings without a tokenizer.
    """

    def __init__(self, stops: StopConditions, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if stops.strings and tokenizer is None:
            raise ValueError("stop strings are looked for in text, which needs the tokenizer")
        self._stops = stops
        self._tokenizer = tokenizer
        self._reach = max((len(text) for text in stops.strings), default=0) * _TOKENS_A_CHARACTER

    @property
    def ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return self._stops.ids

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` ends the completion. Call it after each token."""
        if tokens[-1] in self._stops.ids:
            return True
        if not self._stops.strings or self._tokenizer is None:
            return False
        # The last few tokens hold a string that the last one completes; text before it does not matter.
        text = str(self._tokenizer.decode(list(tokens[-self._reach :]), skip_special_tokens=False))
        return any(stop in text for stop in self._stops.strings)


def cut(text: str, strings: Sequence[str]) -> str:
    """``text`` up to the first of ``strings``."""
    found = [at for stop in strings if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


class TextUntilStop:
    """Text that comes in pieces, up to the first of ``strings``: what may be the beginning of one is held back.

    ``ended`` says that one has come.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.ended = False

    def add(self, piece: str) -> str:
        """What can be told now."""
        if self.ended:
            return ""
        text = self._held + piece
        told = cut(text, self._strings)
        if len(told) < len(text):
            self._held, self.ended = "", True
            return told
        begun = max((_begun(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """What was held back, where it was no such string after all."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many characters of ``stop``, not all, ``text`` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
