"""How a model calls tools and is answered: what its chat template writes of either, in tokens.

What a model has said is never rendered again: templates write earlier turns in another form than the model did. Only
what is said to it comes from the template, as the difference that tool messages make to a made-up conversation.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftcli.data.template import Renderer, of_trl
from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonObject
from ftcli.rows.limits import REFUSALS
from ftcli.rows.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Of templates that TRL does not know: the form of Hermes and Qwen.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PROBE = "ftcli-probe"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a model has said: calls, by name and arguments, of which those in ``broken`` are none that can be made."""

    calls: tuple[tuple[str, JsonObject], ...]
    broken: tuple[str, ...] = ()


class ToolTalk:
    """The chat template's way with some tools.

    Raises FtcliError FT473 (exit 2) for a template that shows no tools, or no answers of tools behind what was said.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer,
        schemas: Sequence[JsonObject],
        stops: Sequence[int],
    ) -> None:
        self._tokenizer, self._renderer, self._schemas, self._stops = tokenizer, renderer, tuple(schemas), set(stops)
        self._parser = _parser_of(tokenizer)
        try:
            self._require()
        except FtcliError:
            # Some templates write a turn otherwise once another one follows; TRL has forms of them that do not.
            form = of_trl(tokenizer, str(tokenizer.chat_template or ""))
            if form is None or renderer.source != tokenizer.chat_template:
                raise
            renderer.use(form)
            self._require()

    def _require(self) -> None:
        names = [str(schema["function"]["name"]) for schema in self._schemas]
        try:
            shown = self._renderer.apply([{"role": "user", "content": _PROBE}], self._schemas, True)
            missing = [name for name in names if name not in shown]
            if missing:
                raise _unfit(f"does not show the tool {missing[0]}")
            told = self.answers([(names[0] if names else _PROBE, _PROBE)])
        except REFUSALS as error:
            raise _unfit(f"refuses tools: {str(error)[:200]}") from error
        if _PROBE not in str(self._tokenizer.decode(told)):
            raise _unfit("does not show what a tool answers")

    def prompt(self, prompt: Prompt, observation: str | None) -> str:
        """A prompt with the tools, an observation at the end of its last turn. Raises FtcliError as
        :meth:`Renderer.prompt`.
        """
        messages = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        chat = replace(prompt, messages=tuple(messages), text=None, tools=self._schemas)
        return self._renderer.prompt(chat.followed_by(observation or ""))

    def turn(self, tokens: Sequence[int], before: Sequence[int]) -> Turn:
        """What a turn says, which stands behind the tokens ``before``."""
        if self._parser is None:
            return _hermes(str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)))
        from trl.chat_template_utils import parse_response

        said = parse_response(self._parser, list(tokens), prefix=list(before), tools=list(self._schemas))
        return _turn(said.get("tool_calls") or ())

    def answers(self, said: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens that stand between a turn's last one and the next turn's first: what tools have said, by name.

        Source: GRPOTrainer._get_tool_suffix_ids of TRL 1.16.

        Raises FtcliError FT473 where what comes before changes with what comes behind.
        """
        call = {"type": "function", "function": {"name": said[0][0], "arguments": {}}}
        begun: list[Any] = [
            {"role": "user", "content": _PROBE[:5]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        tools = [{"role": "tool", "name": name, "content": text} for name, text in said]
        before, whole = (self._ids(begun, False), self._ids([*begun, *tools], True))
        ends = [at for at, token in enumerate(before) if token in self._stops]
        if ends:  # some templates write a line break behind it, which the model does not
            before = before[: ends[-1] + 1]
        if whole[: len(before)] != before:
            raise _unfit("writes what was said before a tool's answer otherwise when the answer is there")
        return whole[len(before) :]

    def _ids(self, messages: Sequence[Any], generation_prompt: bool) -> list[int]:
        text = self._renderer.apply(messages, None, generation_prompt)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _parser_of(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """A tokenizer that can parse answers: one that says how itself, or whose template TRL knows; None otherwise."""
    from trl.chat_template_utils import add_response_schema

    if getattr(tokenizer, "response_template", None) is not None:
        return tokenizer
    try:
        found: PreTrainedTokenizerBase = add_response_schema(copy.copy(tokenizer))
    except ValueError:
        return None
    return found


def _hermes(text: str) -> Turn:
    calls: list[Any] = []
    for body in _CALL.findall(text):
        try:
            calls.append({"function": json.loads(body)})
        except (ValueError, RecursionError):
            return Turn((), (body,))
    return _turn(calls)


def _turn(calls: Sequence[Any]) -> Turn:
    found, broken = [], []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = (function.get("arguments") or {}) if isinstance(function, Mapping) else None
        if isinstance(name, str) and isinstance(arguments, Mapping) and all(isinstance(key, str) for key in arguments):
            found.append((name, dict(arguments)))
        else:
            broken.append(str(call)[:200])
    return Turn(tuple(found), tuple(broken))


def _unfit(why: str) -> FtcliError:
    return FtcliError.single(
        "FT473",
        f"the chat template {why}, which grpo.environment needs",
        exit_code=ExitCode.RECIPE,
        help="use a model that was trained to call tools, or name a template that shows them with data.chat_template",
    )
