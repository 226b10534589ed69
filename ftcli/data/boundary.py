"""Tokens of training rows, with each answer beginning where generation begins: after the tokens of its prompt.

A tokenizer may join the last characters of a prompt with the first ones of the answer (`"The sky is "` and `"blue"`, or
two line breaks). Generation never makes such a token: it is given the prompt's own ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftcli.data.answers import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of a text, the characters that each stands for, and the text with its spans.

    ``apart`` is False where the first token of the last answer could not be told from its prompt's last one.
    """

    rendered: Rendered
    ids: list[int]
    offsets: list[tuple[int, int]]
    apart: bool = True


class BoundaryTokenizer:
    """Tokenizes rendered rows.

    Args:
        split: Give an earlier answer whose tokens are others in the conversation a row of its own; else it is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, split: bool = True) -> None:
        self._tokenizer = tokenizer
        self._split = split
        # Added tokens are found before anything else: what is tokenized after one does not depend on what is before.
        self._breaks = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.get_added_vocab().values())

    def tokenized(self, rows: Sequence[Rendered]) -> list[list[TokenizedText]]:
        """The tokens of each row; of several rows where an earlier answer needs one of its own."""
        if not rows:
            return []
        encoded = self._encoded([row.text for row in rows])
        joint = [TokenizedText(row, *both) for row, both in zip(rows, encoded, strict=True)]
        windows = [[self._window(one, start) for start, _ in one.rendered.spans] for one in joint]
        texts = list(dict.fromkeys(text for row in windows for text, _ in row if text))
        alone = dict(zip(texts, (ids for ids, _ in self._encoded(texts)), strict=True)) if texts else {}
        return [
            self._separated(one, [not text or alone[text] == ids for text, ids in row])
            for one, row in zip(joint, windows, strict=True)
        ]

    def _encoded(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded: Any = self._tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def _window(self, one: TokenizedText, start: int) -> tuple[str, list[int] | None]:
        """The end of the prompt before ``start``, and the row's tokens of it; None if one of them goes beyond it."""
        if not one.rendered.answers or start == 0:
            return "", None
        first = _first_token(one.offsets, start)
        if first and one.offsets[first - 1][1] > start:
            return one.rendered.text[:start], None
        begin = next((n for n in range(first - 1, -1, -1) if one.ids[n] in self._breaks), 0)
        place = one.offsets[begin][0] if first else 0
        return one.rendered.text[place:start], one.ids[begin:first]

    def _separated(self, one: TokenizedText, agree: list[bool]) -> list[TokenizedText]:
        """The row, with its last answer's tokens apart from the prompt's, and rows for earlier answers that differ."""
        if all(agree):
            return [one]
        row = one.rendered
        kept = [span for span, good in zip(row.spans[:-1], agree[:-1], strict=True) if good]
        made = [replace(one, rendered=_with(row, [*kept, row.spans[-1]]))]
        if not agree[-1]:
            made = [self._apart(made[0])]
        for span, good in zip(row.spans[:-1], agree[:-1], strict=True):
            if not good and self._split:
                alone = _with(replace(row, text=row.text[: span[1]]), [span])
                made.append(self._apart(TokenizedText(alone, *self._encoded([alone.text])[0])))
        return made

    def _apart(self, one: TokenizedText) -> TokenizedText:
        """The row with its last answer tokenized by itself, if that spells the same text."""
        text, start = one.rendered.text, one.rendered.spans[-1][0]
        ids, offsets = self._encoded([text[:start]])[0]
        wanted = self._spelled(one.ids)
        # Tokenizers that write a space before a text (SentencePiece) do not after a line break.
        for lead in ("", "\n"):
            answer, places = self._encoded([lead + text[start:]])[0]
            skip = _first_token(places, len(lead))
            places = [(start + a - len(lead), start + b - len(lead)) for a, b in places[skip:]]
            joined = [*ids, *answer[skip:]]
            if self._spelled(joined) == wanted:
                return TokenizedText(one.rendered, joined, [*offsets, *places])
        return replace(one, apart=False)

    def _spelled(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _first_token(offsets: Sequence[tuple[int, int]], place: int) -> int:
    """The first token that begins at ``place`` or after it."""
    return bisect_left(offsets, place, key=lambda offset: offset[0])


def _with(row: Rendered, spans: Sequence[tuple[int, int]]) -> Rendered:
    """The row with these spans alone, and the holes in them."""
    holes = tuple(hole for hole in row.holes if any(a <= hole[0] < b for a, b in spans))
    return replace(row, spans=tuple(spans), holes=holes)
