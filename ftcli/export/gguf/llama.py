"""Runs a GGUF file in llama.cpp itself, where this machine has it, and compares it with what was trained.

The library (llama-cpp-python) gives the logits of all prompts; ``llama-server``, found by name, goes on with the first
prompt and gives the likeliest tokens of each position with their log-probabilities. Either cuts the texts into tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.export.clean.ask import sent
from ftcli.export.clean.request import LOGITS, ReloadRequest
from ftcli.export.gguf.server import ServerAnswer, ServerFailed, ServerTooOld, completed
from ftcli.export.probe import TEXTS, Probe, compare_logits
from ftcli.export.verify import check_greedy, logits_problems, same_greedy
from ftcli.tables.gguf import StoredType

if TYPE_CHECKING:
    from ftcli.export.gguf.verify import ExpectedFile

LIBRARY, SERVER = "llama-cpp-python", "llama-server"
ABSENT = f"llama.cpp is not on this machine ({LIBRARY}, or {SERVER} on the PATH), so the files are not run in it"
#: Relative error of the logits that passes at least: GELU is looked up in a table of float16 there, which makes 3e-4.
#: Of ternary types activations are rounded there, by token and block, which makes 2.4e-2.
_LEAST, _LEAST_TERNARY = 2e-3, 0.1


@dataclass(frozen=True, slots=True)
class LlamaReport:
    """What llama.cpp made of a file: problems, and what the record says."""

    problems: tuple[str, ...] = ()
    facts: dict[str, str | float] = field(default_factory=dict)


def installed_llama_cpp() -> str | None:
    """What there is of llama.cpp on this machine: the library's name, or the path of the server; None: nothing."""
    return LIBRARY if find_spec("llama_cpp") is not None else shutil.which(SERVER)


def run_in_llama_cpp(path: Path, row: StoredType, wanted: ExpectedFile, rounding: float) -> LlamaReport:
    """Ask what is there of llama.cpp about a file. A fault of llama.cpp's own that the table names is no problem.

    ``rounding`` of the weights is what moves the logits this far; llama.cpp also rounds the activations, as finely.
    """
    if wanted.llama_cpp is None:
        return LlamaReport(facts={"llama_cpp": "not on this machine"})
    if wanted.architecture.only_in is not None:
        return LlamaReport(facts={"llama_cpp": f"it does not build {wanted.architecture.name}"})
    ask = _in_library if wanted.llama_cpp == LIBRARY else _in_server
    least = _LEAST_TERNARY if row.ternary else _LEAST
    report = ask(path, max(row.logits, least, 2 * rounding), wanted)
    fault = wanted.architecture.fault
    if fault is None or not report.problems:
        return report
    return LlamaReport(facts={**report.facts, "llama_cpp": f"{report.problems[0]}: {fault}"})


def _in_library(path: Path, allowed: float, wanted: ExpectedFile) -> LlamaReport:
    context = _context(wanted)
    probe = Probe(wanted.probe.input_ids[:, :context], wanted.probe.attention_mask[:, :context])
    answer = wanted.reload(ReloadRequest("llama", str(path), texts=TEXTS), sent(probe))
    if answer.unavailable:
        return LlamaReport(facts={"llama_cpp": f"not asked: {answer.unavailable}"})
    said = [f"in llama.cpp {problem}" for problem in answer.problems]
    if said:
        return LlamaReport(tuple(said))
    found = answer.tensors[LOGITS]
    places = wanted.probe.attention_mask.bool().nonzero()[:, 1]
    compared = compare_logits(found, wanted.logits[places < context], allowed)
    problems = logits_problems(compared, allowed)
    version = next((name for name in answer.libraries.split(", ") if name.startswith("llama_cpp")), LIBRARY)
    facts: dict[str, str | float] = {"llama_cpp": version, "llama_cpp_error": compared.relative_error}
    if context >= wanted.probe.input_ids.shape[1]:
        chosen = found[wanted.probe.continued_at].argmax(-1)
        problems += check_greedy(chosen, wanted.logits, wanted.probe, (), allowed)
        facts["llama_cpp_greedy_tokens"] = same_greedy(found, wanted.probe)
    problems += _compare_tokens(answer.tokenizer["rendered"], wanted)
    ends = answer.stops[LIBRARY]
    problems += [f"generation does not end at the stop token {stop}" for stop in wanted.stops[:3] if stop not in ends]
    return LlamaReport(tuple(f"in llama.cpp {problem}" for problem in problems), facts)


def _in_server(path: Path, allowed: float, wanted: ExpectedFile) -> LlamaReport:
    assert wanted.llama_cpp is not None  # who asks has looked
    probe = _continuation(wanted)
    prompt, count = probe.prompt[0].tolist(), probe.new_tokens
    try:
        answer = completed(Path(wanted.llama_cpp), path, prompt, count, TEXTS, len(wanted.logits[0]))
    except ServerTooOld as error:
        return LlamaReport(facts={"llama_cpp": f"not asked: {error}"})
    except ServerFailed as error:
        return LlamaReport((f"in llama.cpp {error}",))
    reference = wanted.logits[: probe.input_ids.shape[1]]
    # llama.cpp also ends at tokens that it knows by their text, whatever the file says.
    ends = {*wanted.stops, *(answer.generated[-1:] if len(answer.generated) < count else ())}
    problems = check_greedy(torch.tensor(answer.generated), reference, probe, ends, allowed)
    off = _likeliest_error(answer, reference[probe.continued_at], probe.greedy.tolist())
    if off is not None and not off <= allowed:
        problems.append(f"the likeliest tokens' logits differ by {off:.3g} of their size; {allowed:.3g} is allowed")
    problems += _compare_tokens(answer.tokens, wanted)
    same = sum(one == other for one, other in zip(answer.generated, probe.greedy.tolist(), strict=False))
    facts: dict[str, str | float] = {
        "llama_cpp": f"{SERVER} {answer.version}".strip(),
        "llama_cpp_greedy_tokens": f"{same} of {count}",
        **({} if off is None else {"llama_cpp_error": off}),
    }
    return LlamaReport(tuple(f"in llama.cpp {problem}" for problem in problems), facts)


def _continuation(wanted: ExpectedFile) -> Probe:
    """The first prompt and what the trained model goes on with; where the file's context is too short for both, as much
    of the prompt as goes into it, and one token.
    """
    probe, context = wanted.probe, _context(wanted)
    whole = probe.prompt.shape[1] + probe.new_tokens
    ids, count = probe.input_ids[:1, :whole], probe.new_tokens
    if context < whole:
        last = wanted.logits[context - 2].argmax().reshape(1, 1)
        ids, count = torch.cat((ids[:, : context - 1], last), dim=1), 1
    return Probe(ids, torch.ones_like(ids), count)


def _context(wanted: ExpectedFile) -> int:
    """How many tokens llama.cpp takes: all of the probe, or as many as the file says."""
    said = wanted.said.get("context_length")
    longest = wanted.probe.input_ids.shape[1]
    return min(said, longest) if isinstance(said, int) else longest


def _likeliest_error(answer: ServerAnswer, reference: Tensor, greedy: Sequence[int]) -> float | None:
    """How far log-probabilities are from the reference's (positions, vocabulary), as
    :func:`ftcli.export.probe.compare_logits` has it, over the tokens that are told; up to where another token is taken.
    None where none are told.
    """
    centred = (reference - reference.mean(-1, keepdim=True)).double()
    squares = []
    for place, told in enumerate(answer.likeliest):
        if place and answer.generated[place - 1] != greedy[place - 1]:
            break
        if not told:
            continue
        ids = torch.tensor(list(told))
        found, wished = torch.tensor(list(told.values())).double(), centred[place, ids]
        squares.append(((found - found.mean()) - (wished - wished.mean())).square())
    return float(torch.cat(squares).mean().sqrt() / centred.square().mean().sqrt()) if squares else None


def _compare_tokens(found: Sequence[Sequence[int]], wanted: ExpectedFile) -> list[str]:
    return [
        f"{text[:20]!r} is cut into different tokens"
        for text, tokens in zip(TEXTS, found, strict=True)
        if list(tokens) != list(wanted.tokenizer(text, add_special_tokens=False)["input_ids"])
    ]
