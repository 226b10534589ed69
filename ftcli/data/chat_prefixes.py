"""Renders a conversation once for all its prefixes, under chat templates that write one message after the other.

A template that asks for message after message has written, when it asks for message k, what it writes of the first k
messages up to there: it has seen no other. What it writes after its loop is the same for all of them, if it depends on
nothing that the loop changes. So one text, with the place at which each message was asked for, holds the text and the
prompt of each of its prefixes.

Nothing is assumed of a template: its tree is looked at once, what it asks of the messages is watched in each rendering,
and the first conversation of each shape is compared with what transformers makes of all its prefixes. Templates that
look ahead (at the number of messages, at the last one) are rendered for each prefix by :mod:`ftcli.data.template`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

from jinja2 import Environment, nodes

from ftcli.rows.limits import REFUSALS, TemplateStopped
from ftcli.rows.row import IMAGE, Message, Switches

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

_MESSAGES, _PROMPT = "messages", "add_generation_prompt"
#: Who may ask for the next message: a loop of the template, without and with the variable ``loop``. Who asks for it
#: while the one before is written (``loop.last``, in jinja2's ``_peek_next``) has another name; were these names others
#: in another jinja2, every conversation would be rendered prefix by prefix.
_LOOPS = frozenset({"root", "__next__"})
#: Shapes of conversations that are remembered.
_MOST_SHAPES = 2000


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A conversation's ``text``, the place in it at which each message is asked for, and the end of them, and what the
    template writes there, without and with a generation prompt.
    """

    text: str
    places: list[int]
    end: str
    prompt: str

    def of(self, count: int, *, generation_prompt: bool) -> str:
        """The first ``count`` messages as the template writes them, of which there is at least one."""
        return self.text[: self.places[count]] + (self.prompt if generation_prompt else self.end)


class PrefixRenderer:
    """Renders conversations of text with a template that writes message after message.

    Args:
        switches: Values of the template's own switches.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, switches: Switches) -> None:
        self._source = source
        self._given = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **switches}
        self._in_order: bool | None = None
        self._prompt: str | None = None
        self._shapes: dict[object, bool] = {}

    def prefixes(self, chat: Sequence[Message], render: Callable[[Sequence[Message], bool], str]) -> Prefixes | None:
        """The conversation's prefixes; None where they have to be rendered one by one.

        Args:
            render: What transformers makes of messages, without and with a generation prompt.

        Raises TemplateStopped.
        """
        template = compiled(self._source)
        if self._in_order is None:
            self._in_order = template is not None and writes_in_order(template.environment, self._source)
        shape = tuple([(message["role"], *message) for message in chat])
        known = self._shapes.get(shape)
        if template is None or not self._in_order or known is False:
            return None
        if not all(type(value) is str and IMAGE not in value for message in chat for value in message.values()):
            return None
        try:
            made = self._made(template, chat)
            if known is None:
                known = made is not None and all(
                    made.of(count, generation_prompt=prompt) == render(chat[:count], prompt)
                    for count in range(1, len(chat) + 1)
                    for prompt in (False, True)
                )
        except TemplateStopped:
            raise
        except REFUSALS:  # of this conversation, or of what would be asked of another one
            return None
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        self._shapes[shape] = known and made is not None
        return made if known else None

    def _made(self, template: Template, chat: Sequence[Message]) -> Prefixes | None:
        if self._prompt is None:
            asked = self._written(template, chat, prompt=True)
            if asked is None:
                return None
            self._prompt = asked[0][asked[1][-1] :]
        found = self._written(template, chat, prompt=False)
        if found is None:
            return None
        text, places = found
        return Prefixes(text, places, text[places[-1] :], self._prompt)

    def _written(self, template: Template, chat: Sequence[Message], *, prompt: bool) -> tuple[str, list[int]] | None:
        """The text, and how much of it was there whenever the next message, or the end of them, was asked for."""
        watch = _Watch(chat)
        pieces: list[str] = []
        for piece in template.generate({**self._given, _MESSAGES: _Messages(watch, 0), _PROMPT: prompt}):
            pieces.append(piece)
            watch.length += len(piece)
        return ("".join(pieces), watch.places) if watch.next == len(chat) and not watch.spoiled else None


class _Watch:
    """What was asked of a conversation's messages, and how much was written by then.

    Attributes:
        places: Characters that were there when each message, and at last the end of them, was asked for.
        next: The message that is asked for next.
        spoiled: Something was asked of which the answer may be another one for a prefix of the conversation.
    """

    __slots__ = ("chat", "length", "loop", "next", "places", "spoiled")

    def __init__(self, chat: Sequence[Message]) -> None:
        self.chat = chat
        self.length = 0
        self.places: list[int] = []
        self.next = 0
        self.loop: object = None
        self.spoiled = False


class _Messages:
    """A conversation from its message ``start`` on. It tells its first message, and those that were asked for in order;
    everything else spoils the watch.
    """

    __slots__ = ("_start", "_watch")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, watch: _Watch, start: int) -> None:
        self._watch, self._start = watch, start

    def __iter__(self) -> _Asked:
        return _Asked(self._watch, self._start)

    def __getitem__(self, key: object) -> Any:
        watch = self._watch
        if isinstance(key, slice):
            if isinstance(key.start, int) and key.start >= 0 and key.stop is None and key.step is None:
                return _Messages(watch, self._start + key.start)
            self._spoil()
        number = key + self._start if isinstance(key, int) and key >= 0 else len(watch.chat)
        if number and number >= watch.next:
            self._spoil()
        return watch.chat[number]

    def __getattr__(self, name: str) -> Never:
        self._spoil()

    def _spoil(self, *_: object) -> Never:
        self._watch.spoiled = True
        raise LookupError("only messages that were shown can be told")

    __len__ = __bool__ = __contains__ = __reversed__ = __eq__ = __ne__ = __str__ = __repr__ = _spoil


class _Asked:
    """Gives message after message, and notes what was written by then."""

    __slots__ = ("_next", "_watch")

    def __init__(self, watch: _Watch, start: int) -> None:
        self._watch, self._next = watch, start

    def __iter__(self) -> _Asked:
        return self

    def __next__(self) -> Message:
        watch = self._watch
        if watch.loop is None:
            watch.loop = self
            watch.places = [0] * self._next
            watch.next = self._next
        if watch.loop is not self or sys._getframe(1).f_code.co_name not in _LOOPS:
            watch.spoiled = True
        watch.places.append(watch.length)
        if watch.next >= len(watch.chat):
            raise StopIteration
        watch.next += 1
        return watch.chat[watch.next - 1]


def compiled(source: str) -> Template | None:
    """The template as transformers compiles and remembers it; None where transformers has another way."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    template: Template = _compile_jinja_template(source)
    return template


def writes_in_order(environment: Environment, source: str) -> bool:
    """True if a template has one loop over the messages, with what is written after it the same after each of them.

    Then only the end may read whether a generation prompt is asked for, and it reads nothing that the template sets.
    """
    body = environment.parse(source).body
    tree = nodes.Template(body)
    if any(True for _ in tree.find_all((nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block))):
        return False
    loops = [n for n, node in enumerate(body) if isinstance(node, nodes.For) and _is_messages(tree, node.iter)]
    if len(loops) != 1:
        return False
    loop, after = body[loops[0]], nodes.Template(body[loops[0] + 1 :])
    assert isinstance(loop, nodes.For)  # it was chosen for that
    read = {name.name for name in after.find_all(nodes.Name) if name.ctx == "load"}
    before = nodes.Template(body[: loops[0] + 1])
    return (
        not (loop.test or loop.else_ or loop.recursive)
        and read.isdisjoint({*_set_in(tree), _MESSAGES, "loop"})
        and not any(name.name == _PROMPT for name in before.find_all(nodes.Name))
    )


def _set_in(tree: nodes.Template) -> set[str]:
    """Names that a template gives a value, or adds to."""
    names = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    names |= {node.name for node in tree.find_all(nodes.Macro)}
    return names | {node.name for node in tree.find_all(nodes.NSRef)}


def _is_messages(tree: nodes.Template, over: nodes.Node) -> bool:
    """True if a name never stands for anything else than the messages, or those from one on."""
    if not isinstance(over, nodes.Name):
        return False
    names = {over.name, _MESSAGES}
    given = [node.node for node in tree.find_all(nodes.Assign) if _named(node.target) in names]
    stored = [name for name in tree.find_all(nodes.Name) if name.name in names and name.ctx != "load"]
    return len(given) == len(stored) and all(map(_from_messages, given)) and (bool(given) or over.name == _MESSAGES)


def _named(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _from_messages(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        end = node.arg
        return _named(node.node) == _MESSAGES and end.stop is None and end.step is None
    return _named(node) == _MESSAGES
