"""Completions of several turns: where one has ended, somebody may give tokens, and the model goes on behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ftkernels.sampling import Sampling, row_seed

from ftcli.generation.requests import Completion, GenerationRequest, PromptImages, StopCheck, StopReason


class Turns(Protocol):
    """What stands between turns. Completions are named by their request and their number in it."""

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
