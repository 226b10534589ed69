"""A chat template of Jinja as one of Ollama's, which are Go's: found by rendering conversations, not by reading it.

Most templates put the same text before and after each turn of a role. What those texts are shows when made-up turns are
rendered; whether they are all that there is, shows when other conversations are (``ftcli.export.ollama.write``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.data.bounded import REFUSALS, limited_template
from ftcli.errors import ExitCode, FtcliError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A conversation: role and content of each turn.
Turns = tuple[tuple[str, str], ...]
_SYSTEM, _USER, _ANSWER, _AGAIN = "Be0brief", "Ask1this", "Say2that", "Ask3more"


@dataclass(frozen=True, slots=True)
class TurnText:
    """What stands before and after the content of a role's turns."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """What a template is made of.

    Attributes:
        bos: It begins with the tokenizer's bos, which whoever cuts the prompt into tokens puts there.
        opening: What it begins with where there is no system turn.
        system: The system turn; None where it has none, or where it opens the first user's turn.
        joint: What stands between the system's text and the first user's, where they share a turn.
        cue: What the answer is asked for with.
    """

    bos: bool
    opening: str
    user: TurnText
    assistant: TurnText
    system: TurnText | None
    joint: str | None
    cue: str

    @property
    def takes_system(self) -> bool:
        """Whether a system turn is rendered at all."""
        return self.system is not None or self.joint is not None


def rendered(tokenizer: PreTrainedTokenizerBase, turns: Turns, *, cue: bool = True) -> str | None:
    """A conversation as training rendered it; None where the template refuses it."""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        with limited_template():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=cue))
    except REFUSALS:
        return None


def template_parts(tokenizer: PreTrainedTokenizerBase) -> TemplateParts:
    """What the tokenizer's template is made of.

    Raises:
        FtcliError: FT759 when it is made of something else.
    """
    if "strftime_now" in str(tokenizer.chat_template):
        raise cannot("it renders the day")
    user, answer, again = ("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN)
    one = _needed(rendered(tokenizer, (user,), cue=False))
    cue = _rest(_needed(rendered(tokenizer, (user,))), one)
    two = _needed(rendered(tokenizer, (user, answer), cue=False))
    assistant = _around(_rest(two, one), _ANSWER)
    turn = _around(_rest(_needed(rendered(tokenizer, (user, answer, again), cue=False)), two), _AGAIN)
    first = _around(one, _USER)
    if not first.before.endswith(turn.before) or first.after != turn.after:
        raise cannot("the first user turn is written differently from later ones")
    opening = first.before.removesuffix(turn.before)
    bos = bool(tokenizer.bos_token) and opening.startswith(str(tokenizer.bos_token))
    mark = str(tokenizer.bos_token) if bos else ""
    system, joint = _system(rendered(tokenizer, (("system", _SYSTEM), user), cue=False), turn, mark)
    return TemplateParts(bos, opening.removeprefix(mark), turn, assistant, system, joint, cue)


def _system(text: str | None, user: TurnText, mark: str) -> tuple[TurnText | None, str | None]:
    if text is None or _SYSTEM not in text:
        return None, None
    around = _around(text, _SYSTEM)
    between, _, after = around.after.partition(_USER)
    if after != user.after or not around.before.startswith(mark):
        raise cannot("its system turn changes the user's")
    before = around.before.removeprefix(mark)
    if before == user.before:
        return None, between
    if not between.endswith(user.before):
        raise cannot("its system turn changes the user's")
    return TurnText(before, between.removesuffix(user.before)), None


def _needed(text: str | None) -> str:
    if text is None:
        raise cannot("it refuses a plain conversation")
    return text


def _rest(text: str, start: str) -> str:
    if not text.startswith(start):
        raise cannot("what it writes of a turn depends on later ones")
    return text.removeprefix(start)


def _around(text: str, content: str) -> TurnText:
    before, found, after = text.partition(content)
    if not found or content in after:
        raise cannot("it does not write each content once")
    return TurnText(before, after)


def go_template(parts: TemplateParts) -> str:
    """``parts`` as a template of Ollama's: strings, contents and conditions, and no text between them."""
    user = f"{_text(parts.user.before)}{_joint(parts)}{{{{ $m.Content }}}}{_text(parts.user.after)}"
    turns = f'{{{{ if eq $m.Role "user" }}}}{user}'
    turns += f'{{{{ else if eq $m.Role "assistant" }}}}{_turn(parts.assistant)}'
    if parts.system is not None:
        turns += f'{{{{ else if eq $m.Role "system" }}}}{_turn(parts.system)}'
    opening = _text(parts.opening)
    if opening and parts.takes_system:
        opening = f"{{{{ if not $.System }}}}{opening}{{{{ end }}}}"
    return f"{opening}{{{{ range $i, $m := .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{_text(parts.cue)}"


def _turn(turn: TurnText) -> str:
    return f"{_text(turn.before)}{{{{ $m.Content }}}}{_text(turn.after)}"


def _joint(parts: TemplateParts) -> str:
    if parts.joint is None:
        return ""
    return f"{{{{ if $.System }}}}{{{{ if eq $i 1 }}}}{{{{ $.System }}}}{_text(parts.joint)}{{{{ end }}}}{{{{ end }}}}"


def _text(text: str) -> str:
    """A string of Go's, without braces and quotes that the files around it would read."""
    if not text:
        return ""
    quoted = (
        json.dumps(text, ensure_ascii=False).replace("{", "\\u007b").replace("}", "\\u007d").replace('\\"', "\\u0022")
    )
    return f"{{{{ {quoted} }}}}"


def cannot(reason: str) -> FtcliError:
    """FT759: a chat template that Ollama's kind cannot say."""
    return FtcliError.single(
        "FT759",
        f"the chat template cannot be written as one of Ollama's: {reason}",
        exit_code=ExitCode.PREFLIGHT,
        help="export gguf: llama.cpp's server renders the chat template itself (`--jinja`)",
    )
