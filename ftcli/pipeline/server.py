"""A server that speaks OpenAI's protocol (vLLM, SGLang, llama-server, Ollama), asked for greedy answers."""

from __future__ import annotations

import http.client
import json
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from ftcli.errors import FtcliError, Origin, first_line
from ftcli.judges.endpoint import REFUSED, NoRedirect, answered
from ftcli.plain import JsonMap, JsonObject, is_number, map_in, maps
from ftcli.rows.row import Message, Switches

#: Seconds for a whole answer, for which a server on a CPU takes minutes, and for what a server knows without its model.
_TIMEOUT, _AT_ONCE = 600.0, 60.0
#: A number from here on is no token id.
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer as the protocol gives it, with what the server's parser took out as ``reasoning``, the
    ``finish_reason``, counts of tokens, and the answer's log-probabilities in nats; None or empty where it does not
    say.
    """

    text: str
    reasoning: str | None
    finish: str | None
    prompt_tokens: int | None
    tokens: int | None
    log_probs: tuple[float, ...]

    @property
    def whole(self) -> str:
        """Reasoning and text."""
        return f"{self.reasoning or ''}{self.text}"


class Refused(Exception):
    """The server answers a request with an error status; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server at an address, with ``/v1`` or without it; ``key`` is sent as a bearer token. Raises FtcliError FT790
    (exit 2) for what is no address.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            usable = usable and parts.username is None  # a key has its own way, and an address is printed
        except ValueError:
            usable = False
        if not usable:
            raise _unusable(url, f"{url} is no address of a server")
        self._root = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = f"{self._root}/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        # No proxies: what the environment says of them is about the network outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())

    def model_named(self, name: str | None) -> str:
        """The model to ask: that which is named, or the only one. Raises FtcliError FT790 as :meth:`chat`, FT791 (exit
        2) where there is no such model, or several and none named.
        """
        try:
            told = maps(self._ask(f"{self.url}/models").get("data"))
        except Refused as error:
            raise self.unusable(f"{self.url}/models answers {error.status}: {error}") from error
        names = tuple(str(model.get("id")) for model in told)
        if name is None and len(names) == 1:
            return names[0]
        # Ollama lists `mine:latest`, and is asked for `mine`.
        if name is not None and (name in names or f"{name}:latest" in names):
            return name
        listed = ", ".join(names) or "none"
        problem = f"serves no model {name}" if name is not None else "does not serve one model, and none is named"
        help = f"name one with --model: {listed}" if names else "start it with the exported model"
        origin = Origin("command line" if name is None else f"--model {name}")
        raise FtcliError.single("FT791", f"{self.url} {problem}; it has {listed}", origin=origin, help=help)

    def chat(self, model: str, messages: Sequence[Message], limit: int, switches: Switches) -> ServedAnswer:
        """The greedy answer to a conversation under the server's template. Raises Refused where the server refuses it;
        FtcliError FT790 (exit 2) where it cannot be reached or does not speak the protocol, FT791 (exit 2) where it
        wants a key.
        """
        body = {"model": model, "messages": list(messages), "max_tokens": limit, "temperature": 0}
        body |= {"chat_template_kwargs": dict(switches)} if switches else {}
        answer = self._with_log_probs(f"{self.url}/chat/completions", body, True)
        choice = self._choice(answer)
        message = map_in(choice, "message")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        return _answer(answer, choice, str(message.get("content") or ""), None if not reasoning else str(reasoning))

    def complete(self, model: str, prompt: Sequence[int] | str, limit: int) -> ServedAnswer:
        """The greedy completion of token ids or of a text. Raises as :meth:`chat`."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": model, "prompt": given, "max_tokens": limit, "temperature": 0}
        answer = self._with_log_probs(f"{self.url}/completions", body, 1)
        choice = self._choice(answer)
        return _answer(answer, choice, str(choice.get("text") or ""), None)

    def prompt_of(self, model: str, messages: Sequence[Message], switches: Switches) -> list[int] | None:
        """The token ids that the server makes of a conversation, as llama-server and vLLM tell; None of the others."""
        more = {"chat_template_kwargs": dict(switches)} if switches else {}
        asked = {"model": model, "messages": list(messages), "add_generation_prompt": True, **more}
        try:
            text = self._ask(f"{self._root}/apply-template", asked).get("prompt")
        except (Refused, FtcliError):
            text = None
        if isinstance(text, str):
            asked = {"content": text, "add_special": True, "parse_special": True}
        try:
            found = self._ask(f"{self._root}/tokenize", asked).get("tokens")
        except (Refused, FtcliError):
            return None
        told = found if isinstance(found, list) else []
        return told if told and all(type(token) is int and 0 <= token < _MOST_TOKENS for token in told) else None

    def unusable(self, message: str) -> FtcliError:
        """FT790 (exit 2), about this server."""
        return _unusable(self.url, message)

    def _with_log_probs(self, url: str, body: JsonObject, wanted: bool | int) -> JsonObject:
        """The answer, with log-probabilities where the server takes the question for them."""
        try:
            return self._ask(url, {**body, "logprobs": wanted})
        except Refused:
            return self._ask(url, body)

    def _choice(self, answer: JsonMap) -> JsonObject:
        choices = maps(answer.get("choices"))
        if not choices:
            raise self.unusable(f"{self.url} does not answer as OpenAI's protocol does: no choices")
        return choices[0]

    def _ask(self, url: str, body: JsonMap | None = None) -> JsonObject:
        sent = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, sent, self._headers)  # noqa: S310 - http(s), looked at above
        try:
            status, _, said = answered(self._opener, request, _TIMEOUT if url.endswith("/completions") else _AT_ONCE)
        except (OSError, http.client.HTTPException, ValueError) as error:  # also of a name or an address that is none
            raise self.unusable(f"{url} cannot be reached: {first_line(error)}") from error
        if status in (401, 403):
            message = f"{url} answers {status}: {_reason(said)}"
            help = "export the server's key as a variable, and name that with --api-key-env"
            raise FtcliError.single("FT791", message, origin=Origin("--api-key-env"), help=help)
        if status >= REFUSED:
            raise Refused(status, _reason(said))
        try:
            found = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise self.unusable(f"{url} does not answer with JSON: {first_line(error)}") from error
        return found if isinstance(found, dict) else {}


def _answer(whole: JsonMap, choice: JsonMap, text: str, reasoning: str | None) -> ServedAnswer:
    finish, usage = choice.get("finish_reason"), map_in(whole, "usage")
    counted = (usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
    prompt, made = (int(count) if is_number(count) and count > 0 else None for count in counted)
    return ServedAnswer(text, reasoning, None if finish is None else str(finish), prompt, made, _log_probs(choice))


def _log_probs(choice: JsonMap) -> tuple[float, ...]:
    """Of OpenAI's two forms: lists side by side, or a list of tokens."""
    told = map_in(choice, "logprobs")
    values = told.get("token_logprobs") or [token.get("logprob") for token in maps(told.get("content"))]
    known = isinstance(values, list) and all(is_number(value) for value in values)
    return tuple(float(value) for value in values) if known else ()


def _reason(body: bytes) -> str:
    """The words of an error's body, in any of the servers' forms."""
    text = body.decode("utf-8", "replace")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return first_line(ValueError(text.strip() or "nothing"))
    error = told.get("error", told) if isinstance(told, dict) else told
    found = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return first_line(ValueError(str(found or text)))


def _unusable(url: str, message: str) -> FtcliError:
    help = (
        "start the server, and name it as in --url http://localhost:8000; another machine must let you reach the port"
    )
    return FtcliError.single("FT790", message, origin=Origin(f"--url {url}"), help=help)
