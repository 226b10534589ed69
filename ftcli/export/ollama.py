"""The format ``ollama``: a GGUF file of the first of ``export.gguf.types``, and a Modelfile for `ollama create`.

Ollama's chat templates are Go's. They are of a table of known forms, chosen by what training's template renders. A form
says what stands before and after the content of each role: Go's text and what it renders (:func:`expected`) are both
made of it, and a test runs the one in Go and compares it with the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.export.gguf.file import ExpectedFile, prepare_gguf
from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.vocabulary import vocabulary_of
from ftcli.export.gguf.write import write_type
from ftcli.export.source import ExportSource, not_verified, source_tokenizer
from ftcli.export.verify import Verified, not_asked
from ftcli.gguf import require_gguf_package
from ftcli.rows.limits import REFUSALS, limited_template
from ftcli.tables.gguf import TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELFILE = "Modelfile"
_TEMPLATE = re.compile(r'^TEMPLATE """(.*?)"""$', re.MULTILINE | re.DOTALL)
_STOP = re.compile(r'^PARAMETER stop "(.*)"$', re.MULTILINE)
#: A conversation: role and content of each turn.
Turns = tuple[tuple[str, str], ...]
_ODD = 'She said: "{{ .System }}" {% if x %}\n\n  and 100 % "}} – ¿qué? 数字'
_TALK: Turns = (("user", "Hello"), ("assistant", _ODD), ("user", _ODD), ("assistant", "Yes."), ("user", "Why?"))
_BLANK: Turns = (("user", " Hello\n"), ("assistant", "\n Yes. \n"), ("user", "\t Why?  "))
_REASONED, _PLAIN = (
    (("user", "Hello"), ("assistant", f"{thought}Yes."), ("user", "Why?"))
    for thought in ("<think>\nHm.\n</think>\n\n", "")
)


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A template's form of conversations; ``{eos}`` stands for the tokenizer's.

    Attributes:
        user, assistant: What stands before and after the content of a turn.
        system: The same of a system turn; None where it has none.
        joint: What stands between the system's text and the first user's, where they share a turn.
        bos: It begins with the tokenizer's bos, which whoever cuts the prompt into tokens puts there.
        opening: What it begins with where there is no system turn.
        no_thoughts: What follows the cue where no reasoning is wanted, of templates that drop that of earlier turns.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    cue: str
    system: tuple[str, str] | None = None
    joint: str | None = None
    bos: bool = False
    opening: str = ""
    no_thoughts: str = ""


def _alike(before: str, after: str, roles: tuple[str, str, str] = ("system", "user", "assistant")) -> ChatForm:
    """A form whose turns differ in the role's name alone."""
    system, user, assistant = ((before.replace("ROLE", role), after) for role in roles)
    return ChatForm(user, assistant, assistant[0], system)


_GEMMA = replace(_alike("<start_of_turn>ROLE\n", "<end_of_turn>\n", ("", "user", "model")), system=None)
#: What is known: ChatML (Qwen and many others), Phi-4, Llama 3, Phi-3, Gemma without and with a system's text,
#: Mistral's of its third tokenizer and of Tekken, Zephyr.
FORMS = (
    _alike("<|im_start|>ROLE\n", "<|im_end|>\n"),
    _alike("<|im_start|>ROLE<|im_sep|>", "<|im_end|>"),
    _alike("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    _alike("<|ROLE|>\n", "<|end|>\n"),
    replace(_GEMMA, joint="\n\n"),
    _GEMMA,
    ChatForm(("[INST] ", "[/INST]"), (" ", "{eos}"), ""),
    ChatForm(("[INST]", "[/INST]"), ("", "{eos}"), ""),
    _alike("<|ROLE|>\n", "{eos}\n"),
)


def rendered(tokenizer: PreTrainedTokenizerBase, turns: Turns, **options: Any) -> str | None:
    """A conversation up to where the answer begins, as training rendered it; None where the template refuses it."""
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        with limited_template():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except REFUSALS:
        return None


def form_of(tokenizer: PreTrainedTokenizerBase) -> ChatForm:
    """The form of the tokenizer's template, which renders to the byte what the template does for what Ollama can ask.

    Raises FtcliError FT759 when it has none of those in the table.
    """
    if not tokenizer.chat_template:
        raise cannot("there is none")
    if "strftime_now" in str(tokenizer.chat_template):
        raise cannot("it renders the day")
    first = rendered(tokenizer, _TALK[:1])
    if first is None:
        raise cannot("it refuses a plain conversation")
    bos = str(tokenizer.bos_token or "")
    for row in FORMS:
        form = replace(_with_eos(row, str(tokenizer.eos_token)), bos=bool(bos) and first.startswith(bos))
        begin, found, _ = first.removeprefix(bos if form.bos else "").partition(f"{form.user[0]}Hello")
        form = replace(form, opening=begin)
        if found and all(_same(form, tokenizer, turns) for turns in _conversations()):
            return replace(form, no_thoughts=_no_thoughts(tokenizer, first))
    raise cannot("it is none of the forms that ftcli knows (ChatML, Llama 3, Gemma, Mistral, Phi, Zephyr)")


def _with_eos(row: ChatForm, eos: str) -> ChatForm:
    user, assistant = ((before, after.replace("{eos}", eos)) for before, after in (row.user, row.assistant))
    return replace(
        row, user=user, assistant=assistant, system=row.system and (row.system[0], row.system[1].replace("{eos}", eos))
    )


def _conversations() -> Iterator[Turns]:
    for talk in (_TALK, (("system", _ODD), *_TALK)):
        yield from (talk[: n + 1] for n, (role, _) in enumerate(talk) if role == "user")


def _same(form: ChatForm, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> bool:
    wanted = rendered(tokenizer, turns)
    return wanted is None or f"{tokenizer.bos_token if form.bos else ''}{expected(form, turns)}" == wanted


def _no_thoughts(tokenizer: PreTrainedTokenizerBase, first: str) -> str:
    if rendered(tokenizer, _REASONED) != rendered(tokenizer, _PLAIN):
        return ""
    silent = rendered(tokenizer, _TALK[:1], enable_thinking=False) or ""
    return silent.removeprefix(first) if silent.startswith(f"{first}<think>") else ""


def differences(form: ChatForm, tokenizer: PreTrainedTokenizerBase) -> tuple[Finding, ...]:
    """FT757 for what Ollama can ask and the form renders otherwise than the tokenizer's template."""
    found = []
    if not _same(form, tokenizer, _BLANK):
        found.append("the chat template strips blanks at the ends of contents, and Ollama's templates cannot")
    if rendered(tokenizer, (("system", "Be brief."), *_TALK[:1])) is None:
        found.append("the chat template refuses system turns, and Ollama's cannot: it leaves them out")
    help = "send contents as training had them"
    return tuple(Finding("FT757", message, help=help, severity="warning") for message in found)


def expected(form: ChatForm, turns: Turns, *, think: bool | None = None) -> str:
    """The text that :func:`go_template` of the form renders; bos aside."""
    system = "\n\n".join(content for role, content in turns if role == "system")
    text = "" if system and (form.system or form.joint) else form.opening
    for index, (role, content) in enumerate(turns):
        around = {"user": form.user, "assistant": form.assistant, "system": form.system}[role]
        if around is not None:
            joined = f"{system}{form.joint}" if form.joint and system and index == 1 and role == "user" else ""
            text += f"{around[0]}{joined}{content}{around[1]}"
    return f"{text}{form.cue}{form.no_thoughts if think is False else ''}"


def go_template(form: ChatForm) -> str:
    """A form as a template of Ollama's: strings, contents and conditions, and no text between them."""
    joint = ""
    if form.joint:
        joint = f"{{{{ if and $.System (eq $i 1) }}}}{{{{ $.System }}}}{_text(form.joint)}{{{{ end }}}}"
    turns = f'{{{{ if eq $m.Role "user" }}}}{_turn(form.user, joint)}'
    # Ollama learns from here how reasoning is marked, and keeps it out of contents; that of earlier turns is dropped.
    marks = "{{ if eq $i -1 }}<think>{{ .Thinking }}</think>{{ end }}" if form.no_thoughts else ""
    turns += f'{{{{ else if eq $m.Role "assistant" }}}}{marks}{_turn(form.assistant)}'
    if form.system is not None:
        turns += f'{{{{ else if eq $m.Role "system" }}}}{_turn(form.system)}'
    opening = _text(form.opening)
    if opening and (form.system or form.joint):
        opening = f"{{{{ if not $.System }}}}{opening}{{{{ end }}}}"
    cue = _text(form.cue)
    if form.no_thoughts:
        cue += f"{{{{ if and $.IsThinkSet (not $.Think) }}}}{_text(form.no_thoughts)}{{{{ end }}}}"
    return f"{opening}{{{{ range $i, $m := .Messages }}}}{turns}{{{{ end }}}}{{{{ end }}}}{cue}"


def _turn(around: tuple[str, str], joint: str = "") -> str:
    return f"{_text(around[0])}{joint}{{{{ $m.Content }}}}{_text(around[1])}"


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
    message = f"the chat template cannot be written as one of Ollama's: {reason}"
    help = "export gguf: llama.cpp's server renders the chat template itself (`--jinja`)"
    return FtcliError.single("FT759", message, exit_code=ExitCode.PREFLIGHT, help=help)


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write file and Modelfile into ``folder`` and verify both. Raises FtcliError FT759 for a chat template that
    Ollama's kind cannot say; otherwise as the format ``gguf``; OSError where it cannot be written.
    """
    require_gguf_package()
    tokenizer = source_tokenizer(source)
    form = form_of(tokenizer)
    told = differences(form, tokenizer)
    wanted = prepare_gguf(source, say)
    # The tokenizer puts bos before a prompt exactly where the template of training did.
    wanted = replace(wanted, vocabulary={**wanted.vocabulary, "tokenizer.ggml.add_bos_token": form.bos})
    kind = source.settings.gguf.types[0]
    path = folder / f"{wanted.name}-{TYPES[kind].ggml}.gguf"
    say(f"writing {path.name}")
    write_type(wanted, path, kind)
    write_modelfile(folder / MODELFILE, path.name, go_template(form), wanted)
    if not source.verify:
        return not_asked(wanted.merged_with)
    say(f"verifying {path.name}")
    report = verify_file(path, kind, wanted)
    problems = [*report.problems, *check_modelfile(folder / MODELFILE, path.name, go_template(form), wanted)]
    if problems:
        raise not_verified(folder, problems)
    return Verified(
        "every weight, logits of the model that the file describes, tokenizer, stop tokens, conversations",
        {"type": kind, **wanted.facts, **report.facts("")},
        (*told, *wanted.description.warnings, *report.warnings(path, kind)),
        wanted.merged_with,
    )


def require_served(tokenizer: Any, stops: Sequence[int], vocab_size: int) -> None:
    """Raises FtcliError FT756 or FT759 for a tokenizer or a chat template that Ollama cannot have."""
    vocabulary_of(tokenizer, stops, vocab_size)
    form_of(tokenizer)


def write_modelfile(path: Path, file: str, template: str, wanted: ExpectedFile) -> None:
    """Write the Modelfile. Raises OSError: it cannot be written."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in _stops(wanted)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _stops(wanted: ExpectedFile) -> list[str]:
    tokens = [str(wanted.tokenizer.convert_ids_to_tokens(stop)) for stop in wanted.stops]
    if any('"' in token or "\n" in token for token in tokens):
        raise cannot(f"the stop tokens {json.dumps(tokens)} cannot be quoted")
    return tokens


def check_modelfile(path: Path, file: str, template: str, wanted: ExpectedFile) -> list[str]:
    """Problems with a Modelfile: what its template is, where it stops, and which file it is of."""
    text = path.read_text(encoding="utf-8")
    written = _TEMPLATE.search(text)
    problems = [] if text.startswith(f"FROM ./{file}\n") else [f"the Modelfile is not of {file}"]
    missing = set(_stops(wanted)) - set(_STOP.findall(text))
    problems += [f"the Modelfile does not stop at {stop}" for stop in sorted(missing)]
    return problems if written and written[1] == template else [*problems, "the Modelfile has another template"]
