"""Whether a completion has come to an end, as its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcli.generation.requests import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Characters of text that a token stands for at least, where strings are looked for: none is shorter than a byte, and a
#: character of four bytes may be four tokens.
_TOKENS_A_CHARACTER = 4


class Stopping:
    """Looks at the end of completions for what stops them.

    Raises ValueError for strings without a tokenizer.
    """

    def __init__(self, stops: Stops, tokenizer: PreTrainedTokenizerBase | None) -> None:
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
