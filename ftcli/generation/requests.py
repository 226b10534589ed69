"""Requests to an engine, its completions, and the tokens and strings that end them; completions of several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from ftkernels.sampling import Sampling, row_seed

from ftcli.data.tokens import RowImage, TokenizedRow
from ftcli.rows.row import Row

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.pixels import PixelReader

#: Why a completion ended: a token or string that ends it, or its limit.
StopReason = Literal["stop", "limit"]


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of a prompt: its ``row`` with their measures; ``pixels`` reads them when it is their turn."""

    row: TokenizedRow
    pixels: PixelReader

    def of(self, prompt: Sequence[int]) -> TokenizedRow:
        """The row of a prompt that begins as this one: more turns may have followed."""
        return replace(self.row, input_ids=list(prompt), labels=[])

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """The inputs of transformers' own model for the images, beside ``ids`` (1, S) that begin with the prompt's."""
        vision = self.pixels.vision
        given = self.pixels.of([self.row])
        if vision.kind.marks is not None:
            marks = torch.zeros_like(ids, dtype=torch.int32)
            marks[0, torch.from_numpy(vision.seen_at(self.row))] = 1
            given[vision.kind.marks] = marks
        return given

    @property
    def shift(self) -> int:
        """How much further positions are than tokens behind the prompt: Qwen's images take fewer than their tokens."""
        if not self.pixels.vision.kind.three_rows:
            return 0
        return int(self.pixels.vision.positions(self.row).max()) + 1 - len(self.row.input_ids)


def shown_by(
    number: int, ids: list[int], images: tuple[RowImage, ...], pixels: PixelReader | None
) -> PromptImages | None:
    """The images of prompt number ``number`` of tokens ``ids``; None without any.

    Raises FtcliError FT415 where the prompt has another number of places than images.
    """
    if not images or pixels is None:
        return None
    row = TokenizedRow(Row("prompt", number, {}), ids, ids)
    return PromptImages(pixels.vision.expanded(row, images), pixels)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, and the seed of each completion of it: so many are generated, and the prompt is computed once.

    Attributes:
        prompt: Token ids, at least one.
        limit: Most tokens of each completion, at least one.
        seeds: Signed 64-bit (:func:`ftkernels.sampling.row_seed`). What is sampled depends on a completion's own alone.
        images: What the prompt shows.
    """

    prompt: tuple[int, ...]
    limit: int
    seeds: tuple[int, ...] = (0,)
    images: PromptImages | None = None

    def __post_init__(self) -> None:
        if not self.prompt or self.limit < 1 or not self.seeds:
            raise ValueError("a request has a prompt, room for a token, and a seed for each completion")


@dataclass(frozen=True, slots=True)
class Token:
    """One token of completion ``completion`` of request ``request``, as it comes.

    Attributes:
        logprob: Its log-probability at the sampling temperature, before filters; None where it is not known.
        ended: Why this token is the last one; None while more come.
        given: The model did not write it: it stands between two turns.
    """

    request: int
    completion: int
    token: int
    logprob: float | None
    ended: StopReason | None
    given: bool = False


@dataclass(slots=True)
class Completion:
    """All tokens of a completion; the one that ended it is among them.

    ``given``: places of those that the model did not write, whose log-probability is 0.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: StopReason = "limit"
    given: list[int] = field(default_factory=list)

    def add(self, token: Token) -> None:
        """Takes the next token."""
        if token.given:
            self.given.append(len(self.tokens))
        self.tokens.append(token.token)
        if token.logprob is not None:
            self.logprobs.append(token.logprob)
        self.ended = token.ended or self.ended


def collected(requests: Sequence[GenerationRequest], tokens: Iterable[Token]) -> list[list[Completion]]:
    """The completions that ``tokens`` make, of each request, in the order of its seeds."""
    found = [[Completion() for _ in request.seeds] for request in requests]
    for token in tokens:
        found[token.request][token.completion].add(token)
    return found


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Token ids and strings that end a completion.

    A string ends it with the token that completes the string; cutting the text is the caller's.
    """

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


class NotFinite(Exception):
    """The logits of a token to be sampled hold NaN or infinity."""


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
        """True if the last of ``tokens`` ends the completion. Call it after each token."""
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
        """The text that can be shown now."""
        if self.ended:
            return ""
        text = self._held + piece
        shown = cut(text, self._strings)
        if len(shown) < len(text):
            self._held, self.ended = "", True
            return shown
        begun = max((_begun(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """The text held back that was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Number of characters of ``stop``, not all, that ``text`` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class Turns(Protocol):
    """Tokens between turns. Completions are named by their request and their number in it."""

    def ended(self, request: int, completion: int, tokens: Sequence[int], reason: StopReason) -> bool:
        """A turn has ended with the last of ``tokens``, which are all of the completion. True if it may go on:
        :meth:`given` says then how.
        """
        ...

    def given(self, *, wait: bool) -> Sequence[tuple[int, int, Sequence[int] | None]]:
        """The completions of which it is known by now how they go on: the tokens that come next, which leave room for
        another one; None where that was the last turn. Each is told once.

        Args:
            wait: There is nothing else to do: at least one is returned.
        """
        ...


@dataclass(slots=True)
class _Row:
    prompt: tuple[int, ...]
    seed: int
    limit: int
    images: PromptImages | None = None
    completion: Completion = field(default_factory=Completion)


def in_rounds(
    complete: Callable[[Sequence[GenerationRequest], Sampling, StopCheck], list[list[Completion]]],
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    stopping: StopCheck,
    turns: Turns,
) -> list[list[Completion]]:
    """Completions whose turns are requests of their own, all of a turn together: for generators that keep nothing."""
    rows = {
        (number, at): _Row(request.prompt, seed, request.limit, request.images)
        for number, request in enumerate(requests)
        for at, seed in enumerate(request.seeds)
    }
    asked, turn = list(rows), 0
    while asked:
        made = complete(_requests(rows, asked, requests if turn == 0 else None, turn), sampling, stopping)
        between = []
        for where, one in zip(asked, [one for each in made for one in each], strict=True):
            row = rows[where]
            row.completion.tokens += one.tokens
            row.completion.logprobs += one.logprobs
            row.completion.ended = one.ended
            if turns.ended(*where, row.completion.tokens, one.ended):
                between.append(where)
        asked, turn = _given(rows, between, turns), turn + 1
    return [[rows[number, at].completion for at in range(len(one.seeds))] for number, one in enumerate(requests)]


def _requests(
    rows: dict[tuple[int, int], _Row],
    asked: Sequence[tuple[int, int]],
    first: Sequence[GenerationRequest] | None,
    turn: int,
) -> list[GenerationRequest]:
    if first is not None:
        return list(first)
    found = []
    for where in asked:
        row, tokens = rows[where], rows[where].completion.tokens
        # A token's random number follows from the seed and its place in the request, which begins at 0 again.
        seed = row_seed(row.seed, turn, len(tokens), 0)
        found.append(GenerationRequest((*row.prompt, *tokens), row.limit - len(tokens), (seed,), row.images))
    return found


def _given(
    rows: dict[tuple[int, int], _Row], between: Sequence[tuple[int, int]], turns: Turns
) -> list[tuple[int, int]]:
    """Adds what is given to completions between two turns; those that go on, in order."""
    left, going_on = set(between), []
    while left:
        for request, completion, tokens in turns.given(wait=True):
            left.discard((request, completion))
            if not tokens:
                continue
            one = rows[request, completion].completion
            one.given += range(len(one.tokens), len(one.tokens) + len(tokens))
            one.tokens += tokens
            one.logprobs += [0.0] * len(tokens) if one.logprobs else []
            going_on.append((request, completion))
    return sorted(going_on)
