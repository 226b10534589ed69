"""Rollouts by vLLM's server: adapters are pushed to it; token ids go in, token ids and log-probabilities come out.

An adapter is named after its run and its content, so that a server that answers by that name has these weights: a name
that it does not hold is refused by it, and neither its cache of prefixes nor a resumed run can mix two of them up. What
a name cannot tell is whether the server uses the adapter: it passes over modules that it does not know.
:func:`uses_adapter` tells that from the answers.

The protocol is that of vLLM's OpenAI-compatible server as of 2026: ``/v1/completions`` with ``return_token_ids``,
``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from socket import gethostname
from threading import Thread
from typing import TYPE_CHECKING, Any

from ftkernels.sampling import GREEDY, Sampling
from safetensors import safe_open
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.adapter import judged
from ftcli.export.source import read_adapter_config
from ftcli.generation.requests import Completion, GenerationRequest, StopCheck, Turns, in_rounds
from ftcli.judges.endpoint import Address, JudgeAccess, Unanswered
from ftcli.methods.grpo.settings import ServerConfig
from ftcli.model.trained_weights import save_weights
from ftcli.paths import expanded
from ftcli.plain import JsonObject
from ftcli.tables.exports import ADAPTER_SERVERS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: Sampling settings that vLLM would take from the model's generation_config.json where a request is silent.
_PLAIN: JsonObject = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_WEIGHTS = "adapter_model.safetensors"
#: Deviations of what rounding does by which answers must be nearer to the adapter's than to the base's, or the reverse.
_SURE = 5.0


class ServedGenerator:
    """Completes requests on a server, by the adapter that was pushed last.

    Args:
        run: The run's directory. Adapters lie in one of its own unless the settings name a folder.
        longest: Most tokens of a prompt and its completion.

    Raises FtcliError FT520 (exit 3) where the server cannot be used.
    """

    def __init__(self, settings: ServerConfig, access: JudgeAccess, run: Path, longest: int) -> None:
        self._settings = settings
        self._folder = run / "served" if settings.adapters is None else expanded(settings.adapters)
        self._run = hashlib.sha256(f"{gethostname()}:{run.absolute()}".encode()).hexdigest()[:8]
        self._usable, self._option = False, ""
        self._address = Address(settings, access, "grpo.server", self._unusable, "vLLM's server does")
        self._names: list[str] = []
        cards = self._asked("/models", None, lambda answer: json.loads(answer)["data"])
        rooms = [card["max_model_len"] for card in cards if card.get("max_model_len")]
        if rooms and min(rooms) < longest:
            message = f"{self._address.url} takes {min(rooms):,} tokens of a prompt and its completion, not {longest:,}"
            raise self._unusable(message, f"start it with --max-model-len {longest}")

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"generation: the server at {self._address.url}, which gets the adapter before each rollout"

    # -- adapters --------------------------------------------------------------------------------------------

    def push(self, model: PreTrainedModel | PeftModel) -> None:
        """Has the server load the adapter as it is now, and forget the one before. Raises FT520 as the constructor."""
        fresh = self._folder / f"ftcli-{self._run}-next"
        shutil.rmtree(fresh, ignore_errors=True)
        save_weights(model, fresh)
        name = f"ftcli-{self._run}-{hashlib.sha256((fresh / _WEIGHTS).read_bytes()).hexdigest()[:24]}"
        if name in self._names[-1:]:
            return
        if not self._names:
            self._require_taken(fresh)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        fresh.rename(self._folder / name)
        if name not in self._asked("/models", None, lambda said: [card["id"] for card in json.loads(said)["data"]]):
            body = {"lora_name": name, "lora_path": str((self._folder / name).absolute())}
            self._asked("/load_lora_adapter", body, bytes)
        for before in self._names[-1:]:
            self._asked("/unload_lora_adapter", {"lora_name": before}, bytes)
        for old in self._names[:-1]:  # its files are looked for until its requests are forgotten, too
            shutil.rmtree(self._folder / old, ignore_errors=True)
        self._names, self._usable = [*self._names[-1:], name], True

    def _require_taken(self, adapter: Path) -> None:
        with safe_open(adapter / _WEIGHTS, framework="pt") as file:
            said, findings = judged(ADAPTER_SERVERS[0], read_adapter_config(adapter), file.keys())
        if findings:
            raise self._unusable(findings[0].message, "remove grpo.server, and rollouts are sampled here")
        self._option = said.removeprefix("takes it").partition(" (")[0]

    def close(self) -> None:
        """Has the server forget the adapter, whose files go."""
        with suppress(FtcliError):  # it is gone itself
            for name in self._names[-1:]:
                self._asked("/unload_lora_adapter", {"lora_name": name}, bytes)
        for name in (*self._names, f"ftcli-{self._run}-next"):
            shutil.rmtree(self._folder / name, ignore_errors=True)
        with suppress(OSError):  # others' files are in it
            self._folder.rmdir()

    # -- completions -----------------------------------------------------------------------------------------

    def complete(
        self, requests: Sequence[GenerationRequest], sampling: Sampling = GREEDY, stopping: StopCheck | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, in the order of its seeds. Raises FtcliError FT716 (exit 3)."""
        assert stopping is not None
        name = self._names[-1]
        with ThreadPoolExecutor(self._settings.concurrency) as threads:
            asked = [
                threads.submit(self._completed, name, one, seed, sampling, stopping)
                for one in requests
                for seed in one.seeds
            ]
            try:
                made = iter([one.result() for one in asked])
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [list(islice(made, len(one.seeds))) for one in requests]

    def later(self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck) -> Future[Any]:
        """The same, meanwhile."""
        found: Future[list[list[Completion]]] = Future()

        def run() -> None:
            try:
                found.set_result(self.complete(requests, sampling, stopping))
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                found.set_exception(error)

        Thread(target=run, daemon=True).start()
        return found

    def converse(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, stopping: StopCheck, turns: Turns
    ) -> list[list[Completion]]:
        """Those of several turns, which are requests of their own: the server's cache has their beginnings."""
        return in_rounds(self.complete, requests, sampling, stopping, turns)

    def _completed(
        self, name: str, request: GenerationRequest, seed: int, sampling: Sampling, stopping: StopCheck
    ) -> Completion:
        body = {
            **_PLAIN,
            "model": name,
            "prompt": list(request.prompt),
            "max_tokens": request.limit,
            "temperature": sampling.temperature,
            "seed": seed,
            "logprobs": 0,  # of the token that was sampled alone
            "return_token_ids": True,
            "ignore_eos": True,  # ends are those of training: its stop tokens, and strings
            "stop_token_ids": sorted(stopping.ids),
            "stop": list(stopping.strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }

        def read(answer: bytes) -> Completion:
            said = json.loads(answer)
            choice = said["choices"][0]
            tokens, told = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            known = [float(one) for one in told]
            right = said["model"] == name and choice.get("prompt_token_ids", body["prompt"]) == body["prompt"]
            right = right and all(type(one) is int for one in tokens) and all(map(math.isfinite, known))
            if not right or not 0 < len(tokens) == len(known) <= request.limit:
                raise ValueError
            end = next((at for at in range(1, len(tokens) + 1) if stopping.stopped(tokens[:at])), None)
            if end is None and len(tokens) < request.limit:
                raise ValueError
            return Completion(tokens[:end], known[:end], "limit" if end is None else "stop")

        made: Completion = self._asked("/completions", body, read)
        return made

    def _asked(self, path: str, body: JsonObject | None, read: Any) -> Any:
        try:
            return self._address.ask(path, None if body is None else json.dumps(body).encode(), read)
        except Unanswered as error:
            again = f", and so in {self._settings.retries} further tries" if error.again else ""
            raise self._unusable(f"{self._address.url}{path} {error}{again}") from error

    def _unusable(self, message: str, help: str | None = None, exit_code: ExitCode = ExitCode.PREFLIGHT) -> FtcliError:
        help = help or f"start vLLM{self._option} as docs/grpo.md says; the same command goes on from a checkpoint"
        return FtcliError.single("FT716" if self._usable else "FT520", message, exit_code=exit_code, help=help)


def uses_adapter(sampled: Tensor, adapted: Tensor, base: Tensor) -> bool | None:
    """Whether the log-probabilities that tokens were sampled with, s, are those of the model with its adapter, a, or of
    the base, b; None where the two are too near each other to be told apart.

    With d = a - b and errors of s of deviation e, sum (s - b)² - (s - a)² is ± sum d², with a deviation of
    2 e sqrt(sum d²). e is that of the nearer one.
    """
    sampled, adapted, base = (one.double() for one in (sampled, adapted, base))
    apart = float(((adapted - base) ** 2).sum())
    squares = [float(((sampled - one) ** 2).sum()) for one in (base, adapted)]
    error = max(math.sqrt(min(squares) / max(len(sampled), 1)), 1e-6)
    sure = (squares[0] - squares[1]) / (2 * error * math.sqrt(apart)) if apart else 0.0
    return None if abs(sure) < _SURE else sure > 0
