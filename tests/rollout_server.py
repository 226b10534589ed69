"""A stand-in for vLLM's server: its protocol for adapters and completions, answered by transformers and PEFT."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.chat_server import served

#: The name of the base model.
BASE = "base"


@dataclass
class RolloutServer:
    """The requests that came, and how they are answered.

    Attributes:
        fault: ``base``: adapters are passed over; ``raw``: log-probabilities are those before the temperature;
            ``stale``: the second adapter answers for later ones.
        max_model_len: Tokens that it takes.
    """

    model: Any
    fault: str | None = None
    max_model_len: int = 64
    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: Two calls may differ in last bits, by where their tensors lie.
    _answers: dict[str, Any] = field(default_factory=dict)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self.requests.append((path, body))
            if path == "/v1/models":
                cards = [{"id": BASE, "max_model_len": self.max_model_len}, *({"id": name} for name in self.loaded)]
                return 200, {"data": cards}
            if path == "/v1/load_lora_adapter":
                return self._load(body["lora_name"], body["lora_path"])
            if path == "/v1/unload_lora_adapter":
                found = self.loaded.pop(body["lora_name"], None)
                return (200, "Success") if found else (404, {"error": {"message": "cannot be found"}})
            if path != "/v1/completions" or body["model"] not in self.loaded:
                return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist."}}
            key = json.dumps(body, sort_keys=True)
            if key not in self._answers:
                self._answers[key] = self._completion(body)
            return 200, self._answers[key]

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if name in self.loaded:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name).eval()
        elif name not in self.model.peft_config:
            self.model.load_adapter(path, adapter_name=name)
        self.loaded[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    @torch.no_grad()
    def _completion(self, body: Any) -> Any:
        names = list(self.model.peft_config)
        self.model.set_adapter(names[1] if self.fault == "stale" and len(names) > 1 else body["model"])
        generator, tokens, told = torch.Generator().manual_seed(body["seed"] % 2**63), list[int](), list[float]()
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
            ids = torch.tensor([[*body["prompt"], *tokens]])
            if self.fault == "base":
                with self.model.disable_adapter():
                    logits = self.model(ids).logits[0, -1].float()
            else:
                logits = self.model(ids).logits[0, -1].float()
            log_probs = torch.log_softmax(logits / body["temperature"], -1)
            tokens.append(int(torch.multinomial(log_probs.exp(), 1, generator=generator)))
            told.append(
                float(torch.log_softmax(logits, -1)[tokens[-1]] if self.fault == "raw" else log_probs[tokens[-1]])
            )
        choice = {
            "token_ids": tokens, "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": told},
            "finish_reason": "stop" if tokens[-1] in body["stop_token_ids"] else "length",
        }  # fmt: skip
        return {"model": body["model"], "choices": [choice]}


@contextmanager
def rollout_server(folder: Any, **settings: Any) -> Iterator[RolloutServer]:
    """Serves the model of a folder on this machine while the block runs."""
    said = RolloutServer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), **settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*said.answer(self.path, {}))

        def do_POST(self) -> None:
            self._send(*said.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, content: Any) -> None:
            sent = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            return

    with served(Handler) as said.url:
        yield said
