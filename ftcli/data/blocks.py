"""Conversations of very many turns, looked at a piece at a time.

To find an answer, the conversation up to it is rendered; over thousands of turns that work grows with the square of
their number. Templates that never rewrite the history render a turn in the same way after a few turns as after all of
them. So each turn is looked at in a short conversation: the beginning of the long one, the turns right before it, and
the turn itself. What is found must stand letter for letter where it belongs in the text of the whole conversation, and
a few turns spread over all of it are checked in full; otherwise there is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftcli.data.answers import AnswerTurn
from ftcli.errors import FtcliError
from ftcli.rows.row import Message

#: Messages that are looked at together, and how many are before the first of them at least.
_MESSAGES = 48
_BEFORE = 16
#: Answers that are looked at after everything that is before them, the last one included.
_LOOKED_AT = 9

#: A conversation, the number of one of its answers, and that answer's number in the whole one, to the turn.
Look = Callable[[Sequence[Message], int, int], AnswerTurn]


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Start and end of an answer in the text of the whole conversation, and its ranges without loss."""

    start: int
    end: int
    holes: tuple[tuple[int, int], ...] = ()


def placed(
    chat: Sequence[Message], trained: Sequence[int], last: AnswerTurn, text: str, look: Look
) -> list[AnswerSpan] | None:
    """The place of each trained answer in ``text``; None if one is not there as generation would make it.

    Args:
        trained: The answers' messages, in order.
        last: The last one, after all of the conversation before it.
        text: Of the whole conversation.

    Raises FtcliError as ``look`` does.
    """
    lead = next(number for number, message in enumerate(chat) if message["role"] == "assistant")
    found: dict[int, AnswerSpan] = {}
    left = list(trained)
    while left:
        known = [] if not found else [next(reversed(found))]
        begin = _begin(chat, min([left[0] - _BEFORE, *known]), lead)
        block = [number for number in left if number < begin + _BEFORE + _MESSAGES] or left[:1]
        turns: dict[int, AnswerTurn] = {}
        for number in (*known, *block):
            try:
                turns[number] = look([*chat[:lead], *chat[begin : number + 1]], lead + number - begin, number)
            except FtcliError:
                look(chat[: number + 1], number, number)  # says the same with the right number
                return None
        later = found[known[0]].end - turns[known[0]].end if known else 0
        if not _stand_in(text, list(turns.values()), later):
            return None
        found |= {number: _place(turn, later) for number, turn in turns.items()}
        left = left[len(block) :]
    some = {trained[len(trained) * part // _LOOKED_AT] for part in range(1, _LOOKED_AT)}
    full = {number: look(chat[: number + 1], number, number) for number in some} | {trained[-1]: last}
    agree = all(turn.begins(text) and _place(turn, 0) == found[number] for number, turn in full.items())
    return list(found.values()) if agree else None


def _begin(chat: Sequence[Message], most: int, lead: int) -> int:
    """Index at which a short conversation goes on after its lead: that of another answer, else the lead's end."""
    return next((number for number in range(most, lead, -1) if chat[number]["role"] == "assistant"), lead)


def _stand_in(text: str, turns: Sequence[AnswerTurn], later: int) -> bool:
    """True if turns of one short conversation are in the text, the first one ``later`` characters further on."""
    written = turns[-1].text[: turns[-1].end]
    known = len(turns[0].prompt) if later else 0
    return all(turn.begins(written) for turn in turns) and text.startswith(written[known:], known + later)


def _place(turn: AnswerTurn, later: int) -> AnswerSpan:
    holes = tuple((first + later, last + later) for first, last in turn.holes)
    return AnswerSpan(len(turn.prompt) + later, turn.end + later, holes)
