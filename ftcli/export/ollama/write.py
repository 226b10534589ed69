"""The format ``ollama``: a GGUF file of the first of ``export.gguf.types``, and a Modelfile for `ollama create`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.vocabulary import Vocabulary, vocabulary_of
from ftcli.export.gguf.write import PreparedGguf, prepare_gguf, write_type
from ftcli.export.loading import not_verified, source_tokenizer
from ftcli.export.ollama.template import cannot, differences, form_of, go_template
from ftcli.export.resolve import ExportSource
from ftcli.export.verify import Verified, not_asked
from ftcli.gguf.file import require_gguf_package
from ftcli.tables.gguf import TYPES

MODELFILE = "Modelfile"
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
    form = form_of(tokenizer)
    told = differences(form, tokenizer)
    prepared = _with_bos(prepare_gguf(source, offline=offline, say=say), form.bos)
    kind = source.settings.gguf.types[0]
    path = folder / f"{prepared.name}-{TYPES[kind].ggml}.gguf"
    say(f"writing {path.name}")
    write_type(prepared, path, kind)
    write_modelfile(folder / MODELFILE, path.name, go_template(form), prepared)
    if not source.verify:
        return not_asked(prepared.merged_with)
    say(f"verifying {path.name}")
    report = verify_file(path, kind, prepared.wanted)
    problems = [*report.problems, *check_modelfile(folder / MODELFILE, path.name, go_template(form), prepared)]
    if problems:
        raise not_verified(folder, problems)
    return Verified(
        "every weight, logits of the model that the file describes, tokenizer, stop tokens, conversations",
        {"type": kind, **prepared.facts, **report.facts("")},
        (*told, *prepared.description.warnings, *report.warnings(path, kind)),
        prepared.merged_with,
    )


def require_served(tokenizer: Any, stops: Sequence[int], vocab_size: int) -> None:
    """Raises FtcliError FT756 or FT759 for a tokenizer or a chat template that Ollama cannot have."""
    vocabulary_of(tokenizer, stops, vocab_size)
    form_of(tokenizer)


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


def check_modelfile(path: Path, file: str, template: str, prepared: PreparedGguf) -> list[str]:
    """Problems with a Modelfile: what its template is, where it stops, and which file it is of."""
    text = path.read_text(encoding="utf-8")
    written = _TEMPLATE.search(text)
    problems = [] if text.startswith(f"FROM ./{file}\n") else [f"the Modelfile is not of {file}"]
    missing = set(_stops(prepared)) - set(_STOP.findall(text))
    problems += [f"the Modelfile does not stop at {stop}" for stop in sorted(missing)]
    return problems if written and written[1] == template else [*problems, "the Modelfile has another template"]
