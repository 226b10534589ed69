"""Runs a GGUF file in llama.cpp itself, where this machine has it, and compares it with what was trained.

The library (llama-cpp-python) gives the logits of all prompts; ``llama-server``, found by name, goes on with the first
prompt and gives the likeliest tokens of each position with their log-probabilities. Either cuts the texts into tokens.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.export.clean.process import patience, sent
from ftcli.export.clean.request import LOGITS, ReloadRequest
from ftcli.export.probe import TEXTS, Probe, compare_logits
from ftcli.export.verify import check_greedy, logits_problems, same_greedy
from ftcli.ranks import hearing_its_end
from ftcli.tables.gguf import StoredType

if TYPE_CHECKING:
    from ftcli.export.gguf.expected import ExpectedFile

LIBRARY, SERVER = "llama-cpp-python", "llama-server"
ABSENT = f"llama.cpp is not on this machine ({LIBRARY}, or {SERVER} on the PATH), so the files are not run in it"
#: Relative error of the logits that passes at least: GELU is looked up in a table of float16 there, which makes 3e-4.
#: Of ternary types activations are rounded there, by token and block, which makes 2.4e-2.
_LEAST, _LEAST_TERNARY = 2e-3, 0.1
_HOST = "127.0.0.1"
#: Room for the prompt and what is generated.
_CONTEXT = 512
#: Of how many of the likeliest tokens log-probabilities are asked for: of all of a vocabulary they are megabytes.
_LIKELIEST = 1000
_PAUSE = 0.1
#: Probabilities are float32 there: the logarithm of a smaller one tells nothing.
_SMALLEST = -80.0


@dataclass(frozen=True, slots=True)
class LlamaReport:
    """The result of running llama.cpp on a file: problems, and the record."""

    problems: tuple[str, ...] = ()
    facts: dict[str, str | float] = field(default_factory=dict)


def installed_llama_cpp() -> str | None:
    """The llama.cpp of this machine: the library's name, or the path of the server; None: nothing."""
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
    """Number of tokens that llama.cpp takes: all of the probe, or as many as the file says."""
    said = wanted.description.values.get("context_length")
    longest = wanted.probe.input_ids.shape[1]
    return min(said, longest) if isinstance(said, int) else longest


def _likeliest_error(answer: ServerAnswer, reference: Tensor, greedy: Sequence[int]) -> float | None:
    """Relative error of log-probabilities against the reference's (positions, vocabulary), as in
    :func:`ftcli.export.probe.compare_logits`, over the tokens that are told; up to where another token is taken. None
    if none are told.
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


class ServerFailed(Exception):
    """It did not come up, or did not answer; the message says which."""


class ServerTooOld(ServerFailed):
    """It does not know an option that it is started with."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer of the server.

    Attributes:
        generated: The ids that it goes on with.
        likeliest: For each of these, log-probabilities by id; empty where it tells none.
        tokens: The ids of each text, without what comes before it.
        version: What it calls its build.
    """

    generated: list[int]
    likeliest: list[dict[int, float]]
    tokens: list[list[int]]
    version: str


def completed(
    program: Path, file: Path, prompt: Sequence[int], count: int, texts: Sequence[str], vocabulary: int
) -> ServerAnswer:
    """Asks ``program`` for ``count`` times the likeliest token behind ``prompt``, and how it cuts ``texts``.

    Raises:
        ServerFailed: it ends, or does not answer in time.
    """
    with _serving(program, file) as port:
        seconds = patience(file)
        generated: list[int] = []
        likeliest: list[dict[int, float]] = []
        try:
            for _ in range(count):
                # One by one: it leaves out probabilities where the text so far ends inside a character.
                asked = {"prompt": [*prompt, *generated], "n_predict": 1, "temperature": 0.0}
                asked |= {"n_probs": min(vocabulary, _LIKELIEST), "return_tokens": True}
                answer = _ask(port, "/completion", asked, seconds)
                (token,) = answer["tokens"]
                told = answer.get("completion_probabilities") or [{"top_logprobs": []}]
                generated.append(int(token))
                likeliest.append(_likeliest(told[0]["top_logprobs"]))
                if answer.get("stop_type") == "eos":
                    break
            cut = [_tokens(port, text, seconds) for text in texts]
            return ServerAnswer(
                generated, likeliest, cut, str(_ask(port, "/props", None, seconds).get("build_info", ""))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFailed(f"llama-server answered something other than was asked ({error!r})") from error


def _likeliest(told: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    found = {int(each["id"]): float(each["logprob"]) for each in told}
    return {token: value for token, value in found.items() if value > _SMALLEST}


def _tokens(port: int, text: str, seconds: float) -> list[int]:
    asked = {"content": text, "add_special": False, "parse_special": True}
    return [int(token) for token in _ask(port, "/tokenize", asked, seconds)["tokens"]]


@contextmanager
def _serving(program: Path, file: Path) -> Iterator[int]:
    """The port of a server that has loaded ``file``; it is ended with the block."""
    port = _free_port()
    words = [str(program), "-m", str(file), "--host", _HOST, "--port", str(port), "-c", str(_CONTEXT), "-np", "1"]
    # Repacked weights are other sums, made for larger matrices; flash attention is in float16.
    words += ["-ngl", "0", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-repack"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        running = subprocess.Popen(  # noqa: S603
            words,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=hearing_its_end(signal.SIGKILL),
        )
        try:
            _wait(running, port, patience(file), said)
            yield port
        finally:
            running.kill()
            running.wait()


def _wait(running: subprocess.Popen[bytes], port: int, seconds: float, said: IO[str]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if running.poll() is not None:
            said.seek(0)
            lines = said.read().strip().splitlines()
            last = lines[-1] if lines else f"exit status {running.returncode}"
            raise (ServerTooOld if "invalid argument" in last else ServerFailed)(f"it cannot be loaded: {last}")
        try:
            _ask(port, "/health", None, seconds)
        except ServerFailed:
            time.sleep(_PAUSE)
        else:
            return
    raise ServerFailed(f"llama-server was not ready within {seconds:,.0f} s")


def _ask(port: int, path: str, asked: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    connection = http.client.HTTPConnection(_HOST, port, timeout=seconds)
    try:
        body = None if asked is None else json.dumps(asked)
        connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        answer = json.loads(text) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerFailed(f"llama-server did not answer: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ServerFailed(f"llama-server answered with status {response.status} to {path}")
    return answer


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((_HOST, 0))
        return int(one.getsockname()[1])
