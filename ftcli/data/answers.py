"""Finds an assistant's answer in rendered text: after the generation prompt, up to the token that stops generation.

Many templates write an earlier turn differently from the last one (they drop its reasoning, or end it with another
token), and some end the generation prompt inside the reasoning. So an answer is looked for in the text that ends with
it, never in a longer one.

Tokens of each answer begin where generation begins: after those of its prompt.
A tokenizer may join the last characters of a prompt with the first ones of the answer (`"The sky is "` and `"blue"`, or
two line breaks). Generation never makes such a token: it is given the prompt's own ones.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        images: Images of the conversation up to the end of the text; None where nobody has counted them.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    holes: tuple[tuple[int, int], ...] = ()
    answers: bool = False
    images: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerTurn:
    """One assistant's turn that is trained.

    Attributes:
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
                alone = _with(replace(row, text=row.text[: span[1]], images=None), [span])
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


def split_between(one: TokenizedText, other: TokenizedText, places: Iterable[int]) -> int | None:
    """The first of these characters before which the tokens of two texts are the same, and none goes beyond it."""
    for place in places:
        first = _first_token(one.offsets, place)
        alike = one.ids[:first] == other.ids[:first] and first == _first_token(other.offsets, place)
        if first and alike and max(each.offsets[first - 1][1] for each in (one, other)) <= place:
            return place
    return None


def answered_from(place: int, one: TokenizedText) -> TokenizedText:
    """The text with everything from a character on as what the model is to learn."""
    return replace(one, rendered=replace(one.rendered, spans=((place, len(one.rendered.text)),)))


def _first_token(offsets: Sequence[tuple[int, int]], place: int) -> int:
    """The first token that begins at ``place`` or after it."""
    return bisect_left(offsets, (place,))


def _with(row: Rendered, spans: Sequence[tuple[int, int]]) -> Rendered:
    """The row with these spans alone, and the holes in them."""
    holes = tuple(hole for hole in row.holes if any(a <= hole[0] < b for a, b in spans))
    return replace(row, spans=tuple(spans), holes=holes)
