"""Finds an assistant's answer in rendered text: after the generation prompt, up to the token that stops generation.

Many templates write an earlier turn differently from the last one (they drop its reasoning, or end it with another
token), and some end the generation prompt inside the reasoning. So an answer is looked for in the text that ends with
it, never in a longer one.

Tokens of each answer begin where generation begins: after those of its prompt.
A tokenizer may join the last characters of a prompt with the first ones of the answer (`"The sky is "` and `"blue"`, or
two line breaks). Generation never makes such a token: it is given the prompt's own ones.
"""

from __future__ import annotations

import json
import re
from array import array as packed
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftcli.labels import IGNORE_INDEX, labels_of
from ftcli.plain import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The end of a generation prompt that has opened the reasoning: the tag is part of the prompt, not of the answer.
OPENED_REASONING = re.compile(r"<think>\s*\Z")
#: Characters by which the places are found that may be the end of a generation prompt.
_SEED = 12
#: Texts of which the ids are remembered, and how long these may be.
_MOST_KNOWN, _SHORT = 4096, 200


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


Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of a text, the text with its spans, and the half-open ranges of ids that stand for these.

    Attributes:
        offsets: The characters that each token stands for, as the tokenizer told them.
        apart: False where the first token of the last answer could not be told from its prompt's last one.
        array: The ids, int32, where they lie in one.
    """

    rendered: Rendered
    ids: list[int]
    trained: Spans | None = None
    offsets: list[tuple[int, int]] = field(default_factory=list)
    apart: bool = True
    array: NDArray[np.int32] | None = field(default=None, compare=False)

    def labels(self) -> list[int]:
        """The id inside a span, IGNORE_INDEX elsewhere; nothing predicts the first token."""
        if self.trained is None:
            return labels_of(self.ids, self.offsets, self.rendered.spans)
        labels = [IGNORE_INDEX] * len(self.ids)
        for first, last in self.trained:
            labels[max(1, first) : last] = self.ids[max(1, first) : last]
        return labels

    def spans(self) -> Spans:
        """The supervised positions, if they are known: runs that touch are one. Nothing predicts the first token."""
        found: list[tuple[int, int]] = []
        for first, last in self.trained or ():
            first = max(1, first)
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(last, found[-1][1]))
            elif first < last:
                found.append((first, last))
        return tuple(found)

    def ends_at(self, stops: Collection[int]) -> bool:
        """True if it is known that each span ends with one of these tokens."""
        return self.trained is not None and all(self.ids[last - 1] in stops for _, last in self.trained)


class BoundaryTokenizer:
    """Tokenizes rendered rows.

    Where a tokenizer spells a text character by character, and answers end with an added token, the places of answers
    are known without asking for each token's characters: behind so many added tokens and the tokens of what is between
    the last of these and the answer. That takes a third less time. All other rows are placed by their offsets.

    Args:
        split: Give an earlier answer whose tokens are others in the conversation a row of its own; else it is left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, split: bool = True) -> None:
        self._tokenizer = tokenizer
        self._split = split
        # Added tokens are found before anything else: what is tokenized after one does not depend on what is before.
        added = {str(token): index for token, index in tokenizer.get_added_vocab().items()}
        self._breaks = frozenset(tokenizer.all_special_ids) | frozenset(added.values())
        self._added = added if frozenset(added.values()) == self._breaks and spells(tokenizer) else {}
        self._is_break = np.zeros(max(self._breaks, default=0) + 1, dtype=bool)
        self._is_break[list(self._breaks)] = True
        self._find = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
        self._known: dict[str, list[int]] = {}

    def tokenized(self, rows: Sequence[Rendered]) -> list[list[TokenizedText]]:
        """The tokens of each row; of several rows where an earlier answer needs one of its own."""
        placed = self._placed(rows)
        left = [row for row, one in zip(rows, placed, strict=True) if one is None]
        encoded = self._encoded([row.text for row in left])
        joint = [TokenizedText(row, ids, None, offsets) for row, (ids, offsets) in zip(left, encoded, strict=True)]
        windows = [[self._window(one, start) for start, _ in one.rendered.spans] for one in joint]
        alone = self._alone([text for row in windows for text, _ in row])
        separated = iter(
            self._separated(one, [not text or alone[text] == ids for text, ids in row])
            for one, row in zip(joint, windows, strict=True)
        )
        return [next(separated) if one is None else [one] for one in placed]

    def _alone(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """The ids of each text by itself. Prompts end alike, so that most are known."""
        wanted = dict.fromkeys(text for text in texts if text)
        new = [text for text in wanted if text not in self._known]
        encoded = self._encoded(new)
        found = {text: self._known[text] for text in wanted if text in self._known}
        found |= {text: ids for text, (ids, _) in zip(new, encoded, strict=True)}
        self._known.update({text: ids for text, ids in found.items() if len(text) <= _SHORT})
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        return found

    def _placed(self, rows: Sequence[Rendered]) -> list[TokenizedText | None]:
        """The rows whose places can be told without offsets, and whose answers each begin with a token of their own."""
        chosen = [row for row in rows if row.answers and row.spans and not row.holes] if self._added else []
        if not chosen:
            return [None] * len(rows)
        self._encoded(["a"])  # no truncation, no padding from here on, whatever was asked of the tokenizer before
        encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(
            [row.text for row in chosen], add_special_tokens=False
        )
        ids = [one.ids for one in encoded]
        arrays, breaks = self._arrays(ids)
        heads = [self._heads(row, *found) for row, *found in zip(chosen, ids, breaks, strict=True)]
        alone = self._alone([text for row in heads for _, text, _ in row])
        made: dict[int, TokenizedText] = {}
        for row, found, places, array in zip(chosen, ids, heads, arrays, strict=True):
            trained = tuple((begin + len(alone[text]), last) for begin, text, last in places)
            starts = ((begin, text) for begin, text, _ in places)
            if places and all(found[begin : begin + len(alone[text])] == alone[text] for begin, text in starts):
                made[id(row)] = TokenizedText(row, found, trained, array=array)
        return [made.get(id(row)) for row in rows]

    def _arrays(self, rows: Sequence[list[int]]) -> tuple[list[NDArray[np.int32]], list[list[int]]]:
        """The ids of each row as an array, and which of them are added tokens."""
        flat, ends = packed("i"), [0]
        for ids in rows:
            flat.extend(ids)
            ends.append(len(flat))
        held = np.frombuffer(flat, dtype=np.int32) if flat else np.zeros(0, dtype=np.int32)
        found = np.flatnonzero(self._is_break[np.minimum(held, len(self._is_break) - 1)] & (held < len(self._is_break)))
        parts = np.searchsorted(found, ends).tolist()
        arrays = [held[begin:end] for begin, end in pairwise(ends)]
        inside = found - np.repeat(ends[:-1], np.diff(parts))
        places: list[int] = inside.tolist()
        return arrays, [places[begin:end] for begin, end in pairwise(parts)]

    def _heads(self, row: Rendered, ids: list[int], breaks: list[int]) -> list[tuple[int, str, int]]:
        """For each span the last added token of its prompt with the text from there on, and the end of the span.

        Empty where added tokens and text do not agree, and where an answer begins with the text or ends otherwise.
        """
        marks = [(*found.span(), self._added[found[0]]) for found in self._find.finditer(row.text)]
        if [ids[n] for n in breaks] != [token for _, _, token in marks]:
            return []
        ends = [end for _, end, _ in marks]
        made = []
        for start, end in row.spans:
            before, last = bisect_right(ends, start) - 1, bisect_left(ends, end)
            if before < 0 or last == len(ends) or ends[last] != end:
                return []
            made.append((breaks[before], row.text[marks[before][0] : start], breaks[last] + 1))
        return made

    def _encoded(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not texts:
            return []
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
                ids, offsets = self._encoded([alone.text])[0]
                made.append(self._apart(TokenizedText(alone, ids, None, offsets)))
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
                return TokenizedText(one.rendered, joined, None, [*offsets, *places])
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


def spells(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if tokens, one after the other, spell a text character by character, each in its own place.

    So ids that spell the beginning of a text are those of the tokens that stand for it, and no token reaches beyond.
    It holds for pairs of bytes or of characters with a token for every byte; not where characters are left out, or
    become one unknown token.
    """
    from tokenizers import pre_tokenizers

    backend: Any = tokenizer.backend_tokenizer
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    if type(model).__name__ != "BPE" or model.dropout or any(token.single_word for token in added):
        return False
    late = [token.content for token in added if token.normalized]
    early = [token.content for token in added if not token.normalized]
    splits, changes = _parts(backend.pre_tokenizer), _parts(backend.normalizer)
    if (late and changes) or any(_meet(one, other) for one in early for other in late):
        return False  # some added tokens are looked for after others, or in another text
    known = {"ByteLevel", "Split", "Digits", "Metaspace"}
    if any(part["type"] not in known or part.get("behavior") == "Removed" for part in splits):
        return False
    if any(part["type"] == "ByteLevel" for part in splits):
        alphabet: Iterable[str] = pre_tokenizers.ByteLevel.alphabet()
    elif model.byte_fallback:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    if any(backend.token_to_id(token) is None for token in alphabet):
        return False
    return all(part["type"] in ("NFC", "Prepend") or _of_one(part) for part in changes)


def _meet(one: str, other: str) -> bool:
    """True if there is a text in which two tokens share a character."""
    ends = any(a.endswith(b[:n]) for a, b in ((one, other), (other, one)) for n in range(1, len(b) + 1))
    return ends or one in other or other in one


def _of_one(part: JsonObject) -> bool:
    """True if a part of a normalizer writes one character as others, wherever it stands."""
    return part["type"] == "Replace" and len(part["pattern"].get("String", "")) == 1 and bool(part["content"])


def _parts(part: Any) -> list[JsonObject]:
    """The parts of a normalizer or a pre-tokenizer, as tokenizer.json describes them."""
    if part is None:
        return []
    told: JsonObject = json.loads(part.__getstate__())
    waiting, found = [told], []
    while waiting:
        one = waiting.pop()
        inner = one.get("normalizers") or one.get("pretokenizers")
        if inner is None:
            found.append(one)
        else:
            waiting += inner
    return found


def _first_token(offsets: Sequence[tuple[int, int]], place: int) -> int:
    """The first token that begins at ``place`` or after it."""
    return bisect_left(offsets, (place,))


def _with(row: Rendered, spans: Sequence[tuple[int, int]]) -> Rendered:
    """The row with these spans alone, and the holes in them."""
    holes = tuple(hole for hole in row.holes if any(a <= hole[0] < b for a, b in spans))
    return replace(row, spans=tuple(spans), holes=holes)
