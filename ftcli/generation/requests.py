"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Why a completion ended: a token or string that ends it, or its limit.
StopReason = Literal["stop", "limit"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, and the seed of each completion of it: so many are generated, and the prompt is computed once.

    Attributes:
        prompt: Token ids, at least one.
        limit: Most tokens of each completion, at least one.
        seeds: Signed 64-bit (:func:`ftkernels.sampling.row_seed`). What is sampled depends on a completion's own alone.
    """

    prompt: tuple[int, ...]
    limit: int
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.prompt or self.limit < 1 or not self.seeds:
            raise ValueError("a request has a prompt, room for a token, and a seed for each completion")


@dataclass(frozen=True, slots=True)
class Token:
    """One token of completion ``completion`` of request ``request``, as it comes.

    Attributes:
        logprob: Its log-probability at the sampling temperature, before filters; None where it is not known.
        ended: Why this token is the last one; None while more come.
    """

    request: int
    completion: int
    token: int
    logprob: float | None
    ended: StopReason | None


@dataclass(slots=True)
class Completion:
    """All tokens of a completion; the one that ended it is among them."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: StopReason = "limit"

    def add(self, token: Token) -> None:
        """Takes the next token."""
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
    """What ends a completion: token ids, and strings in its text.

    A string ends it with the token that completes the string; cutting the text is the caller's.
    """

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
