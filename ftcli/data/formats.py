"""Turns rows of the known layouts into conversations, prompts with completions, or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ftcli.config.data import Format
from ftcli.data.load import Row, data_error, raise_findings
from ftcli.errors import Finding, Origin

Layout = Literal["messages", "prompt_completion", "prompt_answer", "alpaca", "sharegpt", "text"]
Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
_REQUIRED: dict[Layout, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "prompt_answer": ("prompt", "answer"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One row, understood. Either ``messages`` (a chat) or ``text``; ``prompt_text`` is its part without loss.

    For plain prompt/completion strings ``text`` is the whole and ``prompt_text`` the leading part of it.
    """

    row: Row
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prompt_text: str | None = None


def detect_format(rows: Sequence[Row]) -> Layout:
    """The layout of the first row, by its columns.

    Raises FtcliError FT411 when no layout fits, naming the columns found and those expected.
    """
    fields = rows[0].fields
    for layout, required in _REQUIRED.items():
        if all(name in fields for name in required):
            return layout
    expected = "; ".join(f"{layout}: {', '.join(required)}" for layout, required in _REQUIRED.items())
    raise data_error(
        "FT411",
        f"the columns {', '.join(sorted(fields)) or 'none'} fit no known layout",
        rows[0].origin,
        help=f"rename columns with `columns`; expected one of {expected}",
    )


def to_examples(rows: Sequence[Row], requested: Format) -> tuple[Layout, list[Example]]:
    """All rows as examples, and the layout that was used.

    Raises FtcliError FT412 naming every row that does not fit the layout.
    """
    layout: Layout = detect_format(rows) if requested == "auto" else requested
    findings: list[Finding] = []
    examples: list[Example] = []
    for row in rows:
        try:
            examples.append(_example(row, layout))
        except _Misfit as misfit:
            findings.append(Finding("FT412", f"{misfit} (format {layout})", row.origin))
    raise_findings(findings)
    return layout, examples


class _Misfit(Exception):
    """A row that does not fit its layout; the message says how."""


def _example(row: Row, layout: Layout) -> Example:
    missing = [name for name in _REQUIRED[layout] if name not in row.fields]
    if missing:
        raise _Misfit(f"column {missing[0]!r} is missing")
    fields = row.fields
    if layout == "text":
        return Example(row, text=_text(fields["text"], "text"))
    if layout == "messages":
        return Example(row, messages=_messages(fields["messages"], "role", "content"))
    if layout == "sharegpt":
        return Example(row, messages=_messages(fields["conversations"], "from", "value", _SHAREGPT_ROLES))
    if layout == "alpaca":
        user = _text(fields["instruction"], "instruction")
        if fields.get("input"):
            user = f"{user}\n\n{_text(fields['input'], 'input')}"
        return Example(row, messages=_turns(user, _text(fields["output"], "output"), fields.get("system")))
    if layout == "prompt_answer":
        return Example(row, messages=(*_asked(fields["prompt"]), _answer(fields["answer"])))
    return _prompt_completion(row)


def _asked(prompt: Any) -> tuple[Message, ...]:
    """A bare prompt as a chat: a string is a user's turn, since chat models are asked through their template."""
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt):
        return tuple(prompt)
    raise _Misfit("`prompt` must be a string or a list of messages")


def _answer(answer: Any) -> Message:
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and answer != "":
        return {"role": "assistant", "content": str(answer)}
    raise _Misfit("'answer' must be a string or a number")


def _prompt_completion(row: Row) -> Example:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise _Misfit("prompt and completion must both be strings, or both lists of messages")
    if isinstance(prompt, list):
        return Example(row, messages=_messages([*prompt, *completion], "role", "content"))
    prompt, completion = _text(prompt, "prompt", empty=True), _text(completion, "completion")
    return Example(row, text=prompt + completion, prompt_text=prompt)


def _turns(user: str, assistant: str, system: Any) -> tuple[Message, ...]:
    head = [{"role": "system", "content": _text(system, "system")}] if system else []
    return (*head, {"role": "user", "content": user}, {"role": "assistant", "content": assistant})


def _messages(value: Any, role_key: str, text_key: str, roles: dict[str, str] | None = None) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _Misfit("the conversation must be a list with at least one message")
    messages = []
    for index, item in enumerate(value):
        if not isinstance(item, dict) or not isinstance(item.get(role_key), str):
            raise _Misfit(f"message {index + 1} has no {role_key!r}")
        role = item[role_key] if roles is None else roles.get(item[role_key])
        if role is None:
            raise _Misfit(f"message {index + 1} has the unknown role {item[role_key]!r}")
        if not isinstance(item.get(text_key), str):
            raise _Misfit(f"message {index + 1} has no text in {text_key!r}")
        messages.append({"role": role, "content": item[text_key]})
    if not any(message["role"] == "assistant" for message in messages):
        raise _Misfit("the conversation has no assistant turn, so there is nothing to train on")
    return tuple(messages)


def _text(value: Any, name: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise _Misfit(f"{name!r} must be a string that is not empty")
    return value


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked: a chat or a string; ``reference`` is the known answer, if the row has one."""

    row: Row
    messages: tuple[Message, ...] | None
    text: str | None
    reference: str | None


def to_prompt(example: Example) -> Prompt:
    """The example without its last answer, which becomes the reference.

    Raises FtcliError FT413 for plain text (nothing separates question and answer) and for chats that do not end
    with the assistant.
    """
    if example.messages is not None:
        last = example.messages[-1]
        if last["role"] != "assistant" or len(example.messages) < 2:
            raise data_error("FT413", "the conversation does not end with an assistant's answer", example.row.origin)
        return Prompt(example.row, example.messages[:-1], None, str(last["content"]))
    if example.prompt_text is None or example.text is None:
        raise data_error("FT413", "plain text has no answer to compare with", example.row.origin)
    return Prompt(example.row, None, example.prompt_text, example.text.removeprefix(example.prompt_text))


def prompts_of(rows: Sequence[Row], requested: Format) -> list[Prompt]:
    """Prompts for generation and GRPO: rows with only ``prompt`` (string or messages), or any trainable layout.

    Raises FtcliError as :func:`to_examples`, and FT414 for a prompt that is neither string nor messages.
    """
    fields = rows[0].fields
    if requested == "auto" and "prompt" in fields and not {"completion", "answer"} & set(fields):
        return [_bare_prompt(row) for row in rows]
    return [to_prompt(example) for example in to_examples(rows, requested)[1]]


def _bare_prompt(row: Row) -> Prompt:
    try:
        return Prompt(row, _asked(row.fields.get("prompt")), None, None)
    except _Misfit as misfit:
        raise data_error("FT414", str(misfit), Origin(row.source, row.number)) from misfit
