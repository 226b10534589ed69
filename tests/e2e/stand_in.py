"""A server that speaks OpenAI's protocol as vLLM, SGLang, llama-server or Ollama do, with one fault planted.

It answers by a real model, which plain transformers and PEFT have loaded.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

FORMS = ("vllm", "sglang", "llama-server", "ollama")
OTHER_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}model:"


@dataclass
class StandIn:
    """What is served, and how.

    Attributes:
        model, tokenizer: As plain libraries load them.
        form: Whose dialect it speaks.
        fault: What is wrong with it, by the name that ftcli gives it; None: nothing.
        key: A bearer token that it wants.
        models: Names that it lists.
    """

    model: Any
    tokenizer: Any
    form: str = "vllm"
    fault: str | None = None
    key: str | None = None
    models: Sequence[str] = ("mine",)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def stops(self) -> set[int]:
        stops = self.model.generation_config.eos_token_id
        return set() if self.fault == "stop" else set(stops if isinstance(stops, list) else [stops])

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        template = OTHER_TEMPLATE if self.fault == "template" else None
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if self.fault == "doubled_bos":
            return [bos, *ids]
        return ids[1:] if self.fault == "missing_bos" else ids

    def answer(self, ids: list[int], limit: int, *, chat: bool) -> tuple[list[int], list[float], str]:
        """Greedy tokens, their log-probabilities, and why they ended."""
        penalty = 30.0 if self.fault == "chat" and chat else 0.0
        tokens, told = _continued(self.model, self.fault != "adapter", tuple(ids), limit, penalty)
        ends = [at for at, token in enumerate(tokens) if token in self.stops]
        count = min(2 if self.fault == "early_stop" else limit, ends[0] if ends else limit)
        return tokens[:count], told[: count + 1], "stop" if count < limit else "length"


@functools.cache
@torch.no_grad()
def _continued(
    model: Any, adapted: bool, ids: tuple[int, ...], limit: int, penalty: float
) -> tuple[list[int], list[float]]:
    """So many of the likeliest tokens after ``ids``, whatever they are: asked by many tests."""
    made: list[int] = []
    told: list[float] = []
    with nullcontext() if adapted else model.disable_adapter():
        for _ in range(limit):
            logits = model(torch.tensor([[*ids, *made]])).logits[0, -1].float()
            logits[made] -= penalty  # on what was said
            token = int(logits.argmax())
            told.append(float(logits.log_softmax(-1)[token]))
            made.append(token)
    return made, told


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Any) -> None:
        served = self.server.served
        served.asked.append((self.path, body))
        if served.key is not None and self.headers.get("Authorization") != f"Bearer {served.key}":
            return self._send(401, {"error": {"message": "Unauthorized"}})
        if self.path == "/v1/models":
            return self._send(
                200, {"object": "list", "data": [{"id": name, "object": "model"} for name in served.models]}
            )
        if self.path == "/v1/chat/completions":
            return self._completion(served, body, served.prompt(body["messages"]), chat=True)
        if self.path == "/v1/completions":
            if served.form == "ollama" and not isinstance(body["prompt"], str):
                return self._send(400, {"error": {"message": "json: cannot unmarshal array into Go struct field"}})
            prompt = body["prompt"]
            ids = served.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            return self._completion(served, body, ids, chat=False)
        if self.path == "/tokenize" and served.form == "vllm":
            ids = served.prompt(body["messages"])
            return self._send(200, {"count": len(ids), "max_model_len": 64, "tokens": ids})
        if self.path == "/apply-template" and served.form == "llama-server":
            return self._send(200, {"prompt": served.tokenizer.decode(served.prompt(body["messages"]))})
        if self.path == "/tokenize" and served.form == "llama-server":
            text = body.get("content", "")
            return self._send(200, {"tokens": served.tokenizer(text, add_special_tokens=False)["input_ids"]})
        return self._send(404, {"detail": "Not Found"})

    def _completion(self, served: StandIn, body: Any, ids: list[int], *, chat: bool) -> None:
        made, told, finish = served.answer(ids, body["max_tokens"], chat=chat)
        text = served.tokenizer.decode(made, skip_special_tokens=True)
        pieces = [served.tokenizer.decode([token]) for token in made]
        listed = [{"token": piece, "logprob": value} for piece, value in zip(pieces, told, strict=False)]
        logprobs: Any = {"content": listed}
        if not chat and served.form != "llama-server":
            logprobs = {"tokens": pieces, "token_logprobs": told[: len(made)]}
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("logprobs") and served.form != "ollama":
            choice["logprobs"] = logprobs
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(told)}
        self._send(200, {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage})

    def _send(self, status: int, content: Any) -> None:
        sent = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


class _Server(ThreadingHTTPServer):
    served: StandIn


@contextmanager
def serving(served: StandIn) -> Iterator[str]:
    """The address of a server of ``served``, for a block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.served = served
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
