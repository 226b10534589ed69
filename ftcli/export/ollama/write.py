"""The format ``ollama``: a GGUF file of the first of ``export.gguf.types``, and a Modelfile for `ollama create`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.vocabulary import Vocabulary
from ftcli.export.gguf.write import PreparedGguf, prepare_gguf, write_type
from ftcli.export.loading import not_verified, source_tokenizer
from ftcli.export.ollama.golang import render
from ftcli.export.ollama.template import Turns, cannot, go_template, rendered, template_parts
from ftcli.export.resolve import ExportSource
from ftcli.export.verify import Verified, not_asked
from ftcli.gguf.file import require_gguf_package
from ftcli.tables.gguf import TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELFILE = "Modelfile"
_ODD = 'She said: "{{ .System }}" {% if x %}\n\n  and 100 % "}} – ¿qué? 数字'
_TALK: Turns = (("user", "Hello"), ("assistant", _ODD), ("user", _ODD), ("assistant", "Yes."), ("user", "Why?"))
_INSTRUCTED: Turns = (("system", _ODD), *_TALK)
_TEMPLATE = re.compile(r'^TEMPLATE """(.*?)"""$', re.MULTILINE | re.DOTALL)
_STOP = re.compile(r'^PARAMETER stop "(.*)"$', re.MULTILINE)


def write(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Verified:
    """Write file and Modelfile into ``folder`` and verify both.

    Raises:
        FtcliError: FT759 for a chat template that Ollama's kind cannot say; otherwise as the format ``gguf``.
        OSError: it cannot be written.
    """
    require_gguf_package()
    tokenizer = source_tokenizer(source, offline=offline)
    if not tokenizer.chat_template:
        raise cannot("there is none")
    parts = template_parts(tokenizer)
    require_same(go_template(parts), tokenizer, with_bos=parts.bos)
    prepared = _with_bos(prepare_gguf(source, offline=offline, say=say), parts.bos)
    kind = source.settings.gguf.types[0]
    path = folder / f"{prepared.name}-{TYPES[kind].ggml}.gguf"
    say(f"writing {path.name}")
    write_type(prepared, path, kind)
    write_modelfile(folder / MODELFILE, path.name, go_template(parts), prepared)
    if not source.verify:
        return not_asked(prepared.merged_with)
    say(f"verifying {path.name}")
    report = verify_file(path, kind, prepared.wanted)
    problems = [*report.problems, *check_modelfile(folder / MODELFILE, path.name, prepared, with_bos=parts.bos)]
    if problems:
        raise not_verified(folder, problems)
    return Verified(
        "every weight, logits of the model that the file describes, tokenizer, stop tokens, conversations",
        {"type": kind, **prepared.facts, **report.facts("", kind)},
        prepared.description.warnings,
        prepared.merged_with,
    )


def _with_bos(prepared: PreparedGguf, bos: bool) -> PreparedGguf:
    """The tokenizer puts bos before a prompt exactly where the template of training did."""
    values = {**prepared.wanted.vocabulary.values, "tokenizer.ggml.add_bos_token": bos}
    return replace(prepared, wanted=replace(prepared.wanted, vocabulary=Vocabulary(values)))


def write_modelfile(path: Path, file: str, template: str, prepared: PreparedGguf) -> None:
    """Write the Modelfile.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in _stops(prepared)]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _stops(prepared: PreparedGguf) -> list[str]:
    tokens = [str(prepared.wanted.tokenizer.convert_ids_to_tokens(stop)) for stop in prepared.wanted.stops]
    if any('"' in token or "\n" in token for token in tokens):
        raise cannot(f"the stop tokens {json.dumps(tokens)} cannot be quoted")
    return tokens


def check_modelfile(path: Path, file: str, prepared: PreparedGguf, *, with_bos: bool) -> list[str]:
    """Problems with a Modelfile: what it renders, where it stops, and which file it is of."""
    text = path.read_text(encoding="utf-8")
    template = _TEMPLATE.search(text)
    problems = [] if text.startswith(f"FROM ./{file}\n") else [f"the Modelfile is not of {file}"]
    missing = set(_stops(prepared)) - set(_STOP.findall(text))
    problems += [f"the Modelfile does not stop at {stop}" for stop in sorted(missing)]
    difference = _difference(template[1] if template else "", prepared.wanted.tokenizer, with_bos=with_bos)
    return [*problems, f"the Modelfile's template renders {difference}"] if difference else problems


def require_same(template: str, tokenizer: PreTrainedTokenizerBase, *, with_bos: bool) -> None:
    """Raises FtcliError FT759 where ``template`` renders a conversation differently than training did."""
    difference = _difference(template, tokenizer, with_bos=with_bos)
    if difference:
        raise cannot(f"written as one, it renders {difference}")


def _difference(template: str, tokenizer: PreTrainedTokenizerBase, *, with_bos: bool) -> str | None:
    for talk in (_TALK, _INSTRUCTED):
        for length in range(1, len(talk) + 1):
            turns = talk[:length]
            wanted = rendered(tokenizer, turns) if turns[-1][0] == "user" else None
            if wanted is None:
                continue
            try:
                found = f"{tokenizer.bos_token if with_bos else ''}{render(template, turns)}"
            except ValueError as error:
                return f"nothing: {error}"
            if found != wanted:
                return f"{found[-80:]!r} where training had {wanted[-80:]!r}"
    return None
