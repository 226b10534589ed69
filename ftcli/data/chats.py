"""Conversations as rows to train on: what precedes each answer is exactly what generation would be given.

Conversations of very many turns are looked at a piece at a time.
To find an answer, the conversation up to it is rendered; over thousands of turns that work grows with the square of
their number. Templates that never rewrite the history render a turn in the same way after a few turns as after all of
them. So each turn is looked at in a short conversation: the beginning of the long one, the turns right before it, and
the turn itself. What is found must stand letter for letter where it belongs in the text of the whole conversation, and
a few turns spread over all of it are checked in full; otherwise there is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftcli.data.answers import (
    AnswerTurn,
    Rendered,
    StopTexts,
    after_prompt,
    common_prefix,
    unopened,
    with_reasoning,
)
from ftcli.data.omissions import PROBE, Tools, reasoning_of
from ftcli.data.template import Renderer, left_out
from ftcli.errors import FtcliError
from ftcli.rows.limits import REFUSALS
from ftcli.rows.row import IMAGE, Message, Ranges, Row, data_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def stops_of(tokenizer: PreTrainedTokenizerBase, ids: Collection[int]) -> StopTexts:
    """The texts of stop tokens."""
    return StopTexts([str(text) for text in tokenizer.convert_ids_to_tokens(sorted(ids)) if text])


#: Answers times messages of a conversation that is looked at in pieces, and the most that are looked at in full:
#: two minutes.
_MANY = 200 * 400
_TOO_MANY = 2000 * 1000


class Chats:
    """Turns conversations into rows.

    Turns share a row as long as the template writes them as it wrote them for generation. A turn that it writes
    otherwise once others follow gets a row of its own, or is not trained under ``history: last``.
    """

    def __init__(self, renderer: Renderer, stops: StopTexts, history: str) -> None:
        self._renderer = renderer
        self._stops = stops
        self._history = history

    def rows(
        self,
        messages: Sequence[Message],
        row: Row,
        tools: Tools | None,
        trained: Sequence[int],
        partly: Mapping[int, Ranges],
    ) -> tuple[list[Rendered], int]:
        """The rows of one conversation, and how many of the turns to be trained are in none of them.

        Args:
            partly: Character ranges of such turns' contents that bear none.

        Raises FtcliError FT421, FT422, FT425 to FT427 as :meth:`Renderer.text`, FT423 when an answer cannot be told
        from what is before it, FT428 when a range cannot be found in the text.
        """
        chat = self._renderer.prepared(messages, row)
        plain = None if tools or partly else self._plain(chat, trained)
        if plain is not None:
            return [plain], 0
        whole = self._renderer.render(chat, row, tools=tools)
        self._renderer.require(chat, row, tools, whole, checked=frozenset(trained))

        def look(shown: Sequence[Message], number: int, index: int) -> AnswerTurn:
            turn = self._turn(shown, row, tools, number, whole if shown is chat else None)
            return replace(turn, holes=_holes(turn, messages[index], partly[index], row)) if index in partly else turn

        # After an answer that ends the conversation nothing needs to be shown.
        longest = None if trained and trained[-1] + 1 == len(chat) else whole
        if len(trained) * len(chat) > _MANY:
            long = _long(chat, row, trained, longest, look)
            if long is not None:
                return [replace(long, images=_images_in(chat))], 0
        return self._shared(chat, [look(chat, index, index) for index in trained], longest)

    def _plain(self, chat: Sequence[Message], trained: Sequence[int]) -> Rendered | None:
        """The one row of a conversation of plain text that the template writes message by message; else None.

        It is what each turn looked at by itself comes to: the turn's beginning and end are places of the one text.
        """
        told = self._renderer.told(chat, trained)
        if told is None:
            return None
        whole = told.text
        spans = []
        for turn in trained:
            start = told.places[turn] + len(told.prompt)
            answer = self._stops.ended(whole[start : told.places[turn + 1]] + told.end)
            if not (
                whole.startswith(told.prompt, told.places[turn])
                and self._stops.ends(answer)
                and whole.startswith(answer, start)
            ):
                return None
            spans.append((start, start + len(answer)))
        return Rendered(whole, tuple(spans), answers=True, images=0)

    def _shared(
        self, chat: Sequence[Message], turns: list[AnswerTurn], whole: str | None
    ) -> tuple[list[Rendered], int]:
        """The fewest rows that hold every turn; ``whole`` is the first text, if it goes on after the last turn."""
        rows: list[Rendered] = []
        left = list(turns)
        text = whole if whole is not None else left[-1].text if left else None
        shown = _images_in(chat)
        while text is not None:
            inside = [turn for turn in left if turn.begins(text)]
            if inside or not turns:
                spans = tuple((len(turn.prompt), turn.end) for turn in inside)
                holes = tuple(h for turn in inside for h in turn.holes)
                rows.append(Rendered(text, spans, holes, answers=True, images=shown))
            left = [turn for turn in left if turn not in inside]
            if not left or (rows and self._history == "last"):
                break
            text, shown = left[-1].text, _images_in(chat[: left[-1].index + 1])
        return rows[::-1], len(left)

    def _turn(
        self, chat: Sequence[Message], row: Row, tools: Tools | None, index: int, whole: str | None
    ) -> AnswerTurn:
        """An answer of the conversation ``chat``, whose text is ``whole`` where that is known."""
        history, until = chat[:index], chat[: index + 1]
        prompt = self._renderer.render(history, row, generation_prompt=True, tools=tools)
        after = whole if len(until) == len(chat) else None
        after = self._renderer.render(until, row, tools=tools) if after is None else after
        reasoning = reasoning_of(chat[index])
        answer, composed = self._answer(prompt, after, until, tools, reasoning)
        if answer is None:
            raise self._unplaced(prompt, index, reasoning, row)
        for part in self._renderer.lost(until, tools, after, index):
            if not (part.kind == "reasoning" and composed):
                raise left_out(part, row)
        ended = self._stops.ended(answer)
        if self._stops.ends(ended):
            return AnswerTurn(index, prompt, ended, prompt + answer)
        ended = answer + self._next_stop(answer, until, tools)
        return AnswerTurn(index, prompt, ended, prompt + ended)

    def _answer(
        self, prompt: str, after: str, until: Sequence[Message], tools: Tools | None, reasoning: str
    ) -> tuple[str | None, bool]:
        """The answer in ``after``, and whether its reasoning had to be added to what the template shows.

        Where the history is rewritten, the answer is what stays the same when the message before it changes.
        """
        if after.startswith(prompt):
            return after[len(prompt) :], False
        other: Message = {**until[-2], "content": PROBE}  # the last message of the history, with other words
        try:
            asked = self._renderer.apply([*until[:-2], other], tools, True)
            answered = self._renderer.apply([*until[:-2], other, until[-1]], tools, False)
        except REFUSALS:
            return None, False
        last = len(prompt) - common_prefix(prompt, asked)
        answer = after_prompt(prompt, after, last)
        if answer is not None and answered.endswith(answer):
            return answer, False
        closed = unopened(prompt)
        if closed is None:
            return None, False
        shown = after_prompt(closed, after, last - len(prompt) + len(closed))
        if shown is None or not answered.endswith(shown):
            return None, False
        return with_reasoning(shown, reasoning)

    def _next_stop(self, answer: str, until: Sequence[Message], tools: Tools | None) -> str:
        """The stop token that opens the next message, for templates whose turns end by it (GLM's); else nothing."""
        first, second = f"{PROBE}-answer", f"{PROBE}-next"
        calls = until[-1].get("tool_calls")
        asked: Message = {"role": "user", "content": second}
        if calls:
            asked = {"role": "tool", "content": second, "name": calls[0]["function"]["name"]}
            asked |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
        said = {"role": "assistant", "content": first, **({"tool_calls": calls} if calls else {})}
        try:
            alone = self._renderer.apply([*until[:-1], said], tools, False)
            text = self._renderer.apply([*until[:-1], said, asked], tools, False)
        except REFUSALS:
            return ""
        if self._stops.first(alone.partition(first)[2]) is not None:
            return ""  # turns of this template have an end of their own
        between = text.partition(first)[2].rpartition(second)[0]
        found = self._stops.first(between)
        return found[1] if found is not None and answer.endswith(found[0]) else ""

    @staticmethod
    def _unplaced(prompt: str, index: int, reasoning: str, row: Row) -> FtcliError:
        if reasoning.strip() and prompt.rstrip().endswith("</think>"):
            return data_error(
                "FT423",
                f"the generation prompt already closes the reasoning, so turn {index + 1}'s would never be generated",
                row.origin,
                "train without it (data.reasoning: drop), or switch it on where the template knows how: "
                "data.chat_template_kwargs: {enable_thinking: true}",
            )
        return data_error(
            "FT423",
            f"the chat template renders what precedes turn {index + 1} differently from the generation prompt, so the "
            "start of the answer cannot be found",
            row.origin,
            "use a template that keeps what is before an answer, such as data.chat_template: chatml",
        )


def _images_in(chat: Sequence[Message]) -> int:
    return sum(str(message.get("content") or "").count(IMAGE) for message in chat)


def _long(chat: Sequence[Message], row: Row, trained: Sequence[int], whole: str | None, look: Look) -> Rendered | None:
    """The one row of a conversation of very many turns; None where its turns do not share one.

    Raises FtcliError FT422 where it would then take minutes to look at each of them after all that is before it.
    """
    last = look(chat, trained[-1], trained[-1])
    text = last.text if whole is None else whole
    found = placed(chat, trained, last, text, look)
    if found is not None:
        spans = tuple((answer.start, answer.end) for answer in found)
        return Rendered(text, spans, tuple(hole for answer in found for hole in answer.holes), answers=True)
    if len(trained) * len(chat) > _TOO_MANY:
        message = f"the conversation has {len(chat):,} turns, and the chat template rewrites some of them once others "
        message += f"follow: each of {len(trained):,} answers would be rendered with all that precedes it"
        help = "split the conversation, train its last answers alone (data.history: last), or use a template that "
        raise data_error("FT422", message, row.origin, f"{help}keeps what is before an answer (chatml)")
    return None


def _holes(turn: AnswerTurn, message: Message, ranges: Ranges, row: Row) -> tuple[tuple[int, int], ...]:
    """Ranges of a message's content as ranges of the turn's text. Raises FtcliError FT428."""
    content = str(message.get("content") or "")
    inner = content.strip()  # many templates trim
    before = len(content) - len(content.lstrip())
    if not inner or turn.answer.count(inner) != 1:
        raise data_error(
            "FT428",
            f"the chat template changes the text of turn {turn.index + 1}, so its parts without loss cannot be placed",
            row.origin,
            "mark whole turns, or use a template that writes the text as it is",
        )
    start = len(turn.prompt) + turn.answer.index(inner) - before
    last = start + before + len(inner)
    return tuple((max(start + a, len(turn.prompt)), min(start + b, last)) for a, b in ranges if a < b)


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
        last: The last one, after all of the conversation before it.

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
