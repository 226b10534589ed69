"""Runs ``llama-server`` on a GGUF file, asks it one completion, and ends it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ftcli.export.clean.process import patience
from ftcli.ranks import hearing_its_end

_HOST = "127.0.0.1"
#: Room for the prompt and what is generated.
_CONTEXT = 512
#: Of how many of the likeliest tokens log-probabilities are asked for: of all of a vocabulary they are megabytes.
_LIKELIEST = 1000
_PAUSE = 0.1
#: Probabilities are float32 there: the logarithm of a smaller one tells nothing.
_SMALLEST = -80.0


class ServerFailed(Exception):
    """It did not come up, or did not answer; the message says which."""


class ServerTooOld(ServerFailed):
    """It does not know an option that it is started with."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What the server says.

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
    """What ``program`` goes on with behind ``prompt``: ``count`` times the likeliest token, and how it cuts ``texts``.

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
