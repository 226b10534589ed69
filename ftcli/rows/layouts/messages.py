"""Conversations: messages with roles, calls and tools, as rows and other layouts hold them.

Images stand among the text of a turn: a part of its content, or ``<image>`` in it where the row has a column of images.
Each becomes one character (:data:`ftcli.rows.row.IMAGE`) of the content, which stays text.

Marks say which turns, and which parts of a turn, bear no loss, in the words of the field's formats.
Of a turn: ``weight`` (OpenAI), ``train``, ``training`` and ``train_detail`` (axolotl), ``masked`` (torchtune). Of a
part of a content that is a list: ``train`` and ``weight``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from ftcli.config.data import ARGUMENTS_OF_RENDERING
from ftcli.plain import JsonObject
from ftcli.rows.limits import parse
from ftcli.rows.pictures import source_of
from ftcli.rows.row import IMAGE, Example, ImageSource, Message, Misfit, Ranges, Row, Switches

#: Keys of a message that hold an assistant's reasoning.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
#: Kinds of parts of a content that are reasoning, and would be taken for the answer.
_THOUGHTS = ("thinking", "reasoning")
#: Key under which a message that is being read holds the images of its parts; None for one of the row's column.
PARTS = "images of its parts"
#: What templates may show of a message beside its text and calls. Other keys (ids, sources, dates) are not rendered.
_SHOWN = ("role", "name", "tool_call_id", *REASONING_KEYS)
#: Columns of a row that hold its images, and how text says where each belongs.
_IMAGES = ("images", "image")
_PLACE = "<image>"
#: Kinds of parts of a content that are images, with the keys that may hold one; without one it is the column's next.
_IMAGE_PARTS = {"image": ("image", "path", "url", "bytes"), "image_url": ("image_url",)}
#: Columns of a row, and keys of a message, that hold something that is not trained on.
_MEDIA = ("audio", "video", "videos")
#: Columns that are read beside the messages.
_READ = frozenset(("tools", "functions", "chat_template_kwargs", *_IMAGES, *_MEDIA))
#: Keys of a message that are refused, because training without them would be training on something else.
_UNSUPPORTED = ("function_call", *_IMAGES, *_MEDIA)


def understand(row: Row) -> Example:
    """``{"messages": [{"role": "user", "content": ...}, ...], "tools": ...}``."""
    turns = list_of(row.fields["messages"])
    if row.fields.keys().isdisjoint(_READ) and all(isinstance(turn, dict) and _is_text(turn) for turn in turns):
        plain = tuple([{"role": turn["role"], "content": turn["content"]} for turn in turns])
        if any(message["role"] == "assistant" for message in plain):
            return Example(row, messages=plain)  # there is nothing else to be looked at
    messages = messages_of(turns)
    return conversation(row, messages, untrained=marks_of(turns, [message["role"] for message in messages]))


def conversation(
    row: Row,
    messages: Sequence[Message],
    completion_from: int | None = None,
    untrained: Mapping[int, Ranges | None] | None = None,
) -> Example:
    """The row as a chat of ``messages``, with the functions and the template's switches of its other columns.

    Args:
        completion_from: The message with which the completion begins; None: the last one.
        untrained: Messages that bear no loss, and ranges in them (:func:`ftcli.rows.layouts.messages.marks_of`).

    Raises Misfit without an assistant's turn, when its images are more or less than the places for them, or when the
    row holds audio or video beside them.
    """
    media = next((key for key in _MEDIA if row.fields.get(key)), None)
    if media is not None:
        raise Misfit(f"the row has {media!r}, which is not supported: text and images are trained")
    if not any(message["role"] == "assistant" for message in messages):
        raise Misfit("the conversation has no assistant turn, so there is nothing to train on")
    placed, images = with_images(row, messages)
    return Example(
        row,
        messages=placed,
        images=images,
        tools=tools_of(row),
        completion_from=completion_from,
        untrained=untrained or {},
        switches=switches_of(row),
    )


def messages_of(value: Any) -> list[Message]:
    """A list of messages in the form that chat templates take. Raises Misfit."""
    return [_message(item, number) for number, item in enumerate(list_of(value), 1)]


def with_images(row: Row, messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[ImageSource, ...]]:
    """The messages with a place for each image in their text, and the images in the order of their places.

    Raises Misfit where the row's column has more images or less than there are places left for.
    """
    column = _column_of_images(row)
    if not column and not any(PARTS in message for message in messages):
        return tuple(messages), ()
    left, images, made = iter(column), list[ImageSource | None](), []
    for message in messages:
        own = iter(message.get(PARTS, ()))
        content = str(message.get("content") or "")
        if column and PARTS not in message:
            content = content.replace(_PLACE, IMAGE)
        for _ in range(content.count(IMAGE)):
            given = next(own, None)
            images.append(next(left, None) if given is None else source_of(given))
        made.append({**{key: value for key, value in message.items() if key != PARTS}, "content": content})
    found = [image for image in images if image is not None]
    rest = sum(1 for _ in left)
    if rest or len(found) < len(images):
        places = len(images) - len(found) + len(column) - rest
        raise Misfit(
            f"the row has {len(column)} images and {places} places for them: a part of type 'image' in a message, or "
            f"{_PLACE} in its text, says where each belongs"
        )
    return tuple(made), tuple(found)


def _column_of_images(row: Row) -> list[ImageSource]:
    found = [(name, row.fields[name]) for name in _IMAGES if row.fields.get(name)]
    if len(found) > 1:
        raise Misfit("the columns 'image' and 'images' both hold something, and only one of them can be meant")
    if not found:
        return []
    value = found[0][1]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_text(row, found[0][0])
    return [source_of(one) for one in (value if isinstance(value, list) else [value])]


def list_of(value: Any) -> list[Any]:
    """The turns of a conversation: a list that is not empty, or the JSON text of one. Raises Misfit."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # CSV and many Parquet files hold JSON as text
        value = parsed(value, "the conversation is text that is not JSON")
    if not isinstance(value, list) or not value:
        raise Misfit("the conversation must be a list with at least one message")
    return value


def _is_text(turn: JsonObject) -> bool:
    """True for a turn of a role and a text, of which nothing else can be said."""
    role, content = turn.get("role"), turn.get("content")
    return len(turn) == 2 and isinstance(role, str) and isinstance(content, str) and IMAGE not in content


def _message(item: Any, number: int) -> Message:
    if isinstance(item, dict) and _is_text(item):
        return {"role": item["role"], "content": item["content"]}
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise Misfit(f"message {number} has no 'role'")
    refuse_unsupported(item, number)
    message = {key: item[key] for key in _SHOWN if item.get(key) is not None}
    if item.get("tool_calls"):
        calls = item["tool_calls"]
        if not isinstance(calls, list):
            raise Misfit(f"message {number}: 'tool_calls' must be a list")
        message["tool_calls"] = [call_of(call, number) for call in calls]
    optional = "tool_calls" in message or any(message.get(key) for key in REASONING_KEYS)
    message["content"] = _content(item.get("content"), number, optional=optional)
    if IMAGE in message["content"]:
        message[PARTS] = [_held(part) for part in item["content"] if part.get("type") in _IMAGE_PARTS]
    return message


def refuse_unsupported(turn: JsonObject, number: int) -> None:
    """Raises Misfit for a turn that says something which training would ignore."""
    found = next((key for key in _UNSUPPORTED if turn.get(key)), None)
    if found is not None:
        raise Misfit(f"message {number} has {found!r}, which is not supported: text and `tool_calls` are")
    if any(turn.get(key) is not None and not isinstance(turn[key], str) for key in REASONING_KEYS):
        raise Misfit(f"message {number} has reasoning that is not text")
    if len({turn[key] for key in REASONING_KEYS if turn.get(key)}) > 1:
        raise Misfit(f"message {number} holds reasoning twice, and the two differ")


def _content(content: Any, number: int, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Misfit(f"message {number} holds something other than text and images, and only these are trained")
        return "".join(map(str, parts))
    if not isinstance(content, str) or IMAGE in content:
        raise Misfit(f"message {number} has no text in 'content'")
    return content


def _part(part: Any) -> str | None:
    """A part of a content as text; None where it is neither text nor an image."""
    if not isinstance(part, dict) or part.get("type") in _THOUGHTS:
        return None
    if part.get("type") in _IMAGE_PARTS:
        return IMAGE
    text = part.get("text")
    return text if isinstance(text, str) and IMAGE not in text else None


def _held(part: JsonObject) -> Any:
    """The image that a part holds; None where it stands for the next of the row's column."""
    return next((part[key] for key in _IMAGE_PARTS[str(part["type"])] if part.get(key)), None)


def call_of(call: Any, number: int) -> JsonObject:
    """One call as templates take it: ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit(f"message {number} calls a function without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parsed(arguments or "{}", f"message {number}: the arguments of {function['name']} are not JSON")
    if not isinstance(arguments, dict):
        raise Misfit(f"message {number}: the arguments of {function['name']} must be a JSON object")
    kept = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_of(row: Row) -> tuple[JsonObject, ...] | None:
    """The tools that a row's chat may call: its column `tools`, or `functions`, the former name. Raises Misfit."""
    found = {name: _tools(row, name) for name in ("tools", "functions")}
    given = {name: tools for name, tools in found.items() if tools is not None}
    if len(given) == 2 and given["tools"] != given["functions"]:
        raise Misfit("the columns 'tools' and 'functions' differ, and only one of them can be shown to the model")
    return next(iter(given.values()), None)


def _tools(row: Row, name: str) -> tuple[JsonObject, ...] | None:
    value = _from_text(row, name)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Misfit(f"column {name!r} must be a list of JSON schemas")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    named = (tool["function"].get("name") if isinstance(tool["function"], dict) else None for tool in tools)
    if not all(isinstance(called, str) and called for called in named):
        raise Misfit(f"column {name!r} holds a function without a name that is text")
    return tuple(tools)


def switches_of(row: Row) -> Switches:
    """A row's own values for switches of the chat template: its column `chat_template_kwargs`. Raises Misfit."""
    value = _from_text(row, "chat_template_kwargs")
    if not value:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, bool | int | float | str) for v in value.values()):
        raise Misfit("column 'chat_template_kwargs' must map names of switches to booleans, numbers or texts")
    taken = sorted(ARGUMENTS_OF_RENDERING & set(value))
    if taken:
        raise Misfit(f"column 'chat_template_kwargs' sets {taken[0]!r}, which is not a template switch")
    return value


def _from_text(row: Row, name: str) -> Any:
    """The column's value, which tables hold as JSON text."""
    value = row.fields.get(name)
    return (
        parsed(value, f"column {name!r} is text that is not JSON")
        if isinstance(value, str) and value.strip()
        else value
    )


def parsed(text: str, otherwise: str) -> Any:
    """The value of a JSON text. Raises Misfit, which says what is wrong ``otherwise``."""
    try:
        return parse(text)
    except ValueError as error:
        raise Misfit(f"{otherwise}: {error}") from error


_TRAIN = ("train", "training")


def marks_of(turns: Sequence[Any], roles: Sequence[str], first: int = 0) -> dict[int, Ranges | None]:
    """For each assistant's turn that is marked: the character ranges of its text without loss, None for all of it.

    Args:
        turns: The turns as the row holds them, with their ``roles`` as they are understood.
        first: The number of the first turn, counted from 0.

    Raises:
        Misfit: a mark that nothing can be made of: a weight between 0 and 1, or a turn of somebody else to be trained.
    """
    found: dict[int, Ranges | None] = {}
    for place, (turn, role) in enumerate(zip(turns, roles, strict=True)):
        if _is_text(turn):
            continue
        number = first + place + 1
        name = f"message {number}"
        whole, parts = _wanted(turn, name), _parts(turn, name)
        if role != "assistant":
            # A weight of 1 is what OpenAI's format means without one, whoever speaks; it says nothing here.
            if (whole and turn.get("weight") is None) or any(train for _, train in parts):
                raise Misfit(f"{name} is marked to be trained, and only the assistant's turns are")
            continue
        ranges = tuple(place for place, train in parts if not train)
        if whole is False or (ranges and _covered(ranges, len(_text(turn)))):
            found[number - 1] = None
        elif ranges:
            found[number - 1] = ranges
    return found


def _text(turn: JsonObject) -> str:
    """The text of a turn, whose content may be a list of parts."""
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        return "".join(_part(part) or "" for part in content)
    return content if isinstance(content, str) else ""


def _wanted(item: JsonObject, name: str) -> bool | None:
    """True if a turn or a part is to be trained; None if it does not say."""
    said = {key: _flag(item[key], key, name) for key in (*_TRAIN, "weight") if item.get(key) is not None}
    if item.get("masked") is not None:
        said["masked"] = not _flag(item["masked"], "masked", name)
    if len(set(said.values())) > 1:
        raise Misfit(f"{name} says in {', '.join(map(repr, said))} that it is to be trained and that it is not")
    return next(iter(said.values()), None)


def _flag(value: Any, key: str, name: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise Misfit(f"{name} has {key!r} {value!r}: a turn is trained (1, true) or not (0, false), and nothing between")


def _parts(turn: JsonObject, name: str) -> list[tuple[tuple[int, int], bool]]:
    """The marked parts of a turn's text, from a content that is a list and from ``train_detail``."""
    found: list[tuple[tuple[int, int], bool]] = []
    content, end = turn.get("content"), 0
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict):
            start, end = end, end + len(_part(part) or "")
            wanted = _wanted(part, f"a part of {name}")
            found += [((start, end), wanted)] if wanted is not None else []
    details = turn.get("train_detail") or []
    if not isinstance(details, list):
        raise Misfit(f"{name}: 'train_detail' must be a list")
    for detail in details:
        try:
            place = (index(detail["begin_offset"]), index(detail["end_offset"]) + 1)  # axolotl counts the last one in
            found.append((place, _flag(detail["train"], "train", name)))
        except (KeyError, TypeError, ValueError) as error:
            raise Misfit(f"{name}: each 'train_detail' needs begin_offset, end_offset and train") from error
    return found


def _covered(ranges: Ranges, length: int) -> bool:
    """True if ``ranges`` leave nothing of a text of ``length`` characters."""
    reached = 0
    for start, end in sorted(ranges):
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= length
