"""What a server of rollouts is asked, what its answers have to be, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.sampling import Sampling

from ftcli.errors import FtcliError
from ftcli.generation.requests import GenerationRequest, StopCheck, StopConditions
from ftcli.judges import JudgeAccess, endpoint
from ftcli.methods.grpo.served import ServedGenerator, uses_adapter
from ftcli.methods.grpo.settings import ServerConfig
from tests.chat_server import ChatServer, chat_server

PROMPT, STOP = [5, 6, 7], 9


class Scripted:
    """Answers completions with ``answer``, a change of what is right, or a status."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | int = {}

    def __call__(self, number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if isinstance(self.answer, int):
            return self.answer, {}, b"down"
        seed = body.get("seed", 0)
        choice = {"token_ids": [seed, 2, STOP], "prompt_token_ids": PROMPT, "finish_reason": "stop"}
        choice |= {"logprobs": {"token_logprobs": [-1.0, -2.0, -0.5]}}
        said = {"model": body.get("model"), "choices": [choice | self.answer]} | self.answer
        return 200, {}, json.dumps(said).encode()


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def server(script: Scripted) -> Iterator[ChatServer]:
    with chat_server(script) as served:
        yield served


@pytest.fixture
def generator(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedGenerator:
    """One whose adapter has been pushed."""
    monkeypatch.setattr(ServedGenerator, "_asked", lambda *_: [])  # the models that it lists
    made = ServedGenerator(ServerConfig(url=server.url, retries=1), JudgeAccess(), tmp_path, 64)
    monkeypatch.undo()
    monkeypatch.setattr(endpoint.time, "sleep", lambda _: None)
    made._names, made._usable = ["mine"], True
    return made


def completed(generator: ServedGenerator, limit: int = 8) -> list[list[Any]]:
    requests = [GenerationRequest(tuple(PROMPT), limit, (1, 4)), GenerationRequest(tuple(PROMPT), limit, (3,))]
    return generator.complete(requests, Sampling(0.7), StopCheck(StopConditions(frozenset({STOP, 8})), None))


def test_each_completion_has_a_request_with_all_that_vllm_would_take_from_elsewhere(
    generator: ServedGenerator, server: ChatServer
) -> None:
    found = completed(generator)
    assert [[one.tokens for one in each] for each in found] == [[[1, 2, STOP], [4, 2, STOP]], [[3, 2, STOP]]]
    assert (found[0][0].logprobs, found[0][0].ended) == ([-1.0, -2.0, -0.5], "stop")
    path, _, sent = min(server.requests, key=lambda one: one[2]["seed"])
    assert path == "/v1/completions"
    assert sent == {
        "model": "mine", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "seed": 1, "logprobs": 0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": [8, STOP],
        "stop": [], "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip


def test_what_stands_behind_a_stop_is_no_part_of_a_completion(generator: ServedGenerator, script: Scripted) -> None:
    script.answer = {"token_ids": [1, 8, 2], "logprobs": {"token_logprobs": [-1.0, -2.0, -3.0]}}
    assert [(one.tokens, one.logprobs) for one in completed(generator, 3)[1]] == [([1, 8], [-1.0, -2.0])]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"model": "base"}, "did not answer as vLLM's server does, and so in 1 further tries"),
        ({"prompt_token_ids": [5, 6]}, "did not answer as"),
        ({"token_ids": [1, 2, 3]}, "did not answer as"),  # an end that is none, before the limit
        ({"token_ids": []}, "did not answer as"),
        ({"token_ids": [1, STOP]}, "did not answer as"),  # of other length than log-probabilities
        ({"logprobs": {"token_logprobs": [-1.0, None, -2.0]}}, "did not answer as"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan"), -2.0]}}, "did not answer as"),
        ({"logprobs": None}, "did not answer as"),
        (503, "answered 503, and so in 1 further tries"),
        (404, "answered 404"),
        (400, "answered 400"),
    ],
)
def test_answers_that_are_none_end_the_run(
    answer: dict[str, Any] | int, said: str, generator: ServedGenerator, script: Scripted
) -> None:
    script.answer = answer
    with pytest.raises(FtcliError) as error:
        completed(generator)
    found = error.value.findings[0]
    assert (found.code, error.value.exit_code) == ("FT716", 3)
    assert said in found.message
    assert isinstance(generator.later([], Sampling(1.0), StopCheck(StopConditions(), None)).result(), list)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_answers_tell_whose_they_are_as_soon_as_that_can_be_told(noise: float) -> None:
    generator = torch.Generator().manual_seed(3)
    base = -5 * torch.rand(4096, generator=generator)
    moved, errors = torch.randn(4096, generator=generator), noise * torch.randn(4096, generator=generator)
    for size in (0.0, 1e-4, 0.01, 0.3):
        adapted = base + size * moved
        found = uses_adapter(adapted + errors, adapted, base), uses_adapter(base + errors, adapted, base)
        certain = size >= (0.01 if noise else 1e-4)
        assert found == ((True, False) if certain else (None, None)), size
    assert uses_adapter(base[:0], base[:0], base[:0]) is None


def test_a_server_of_neither_is_not_taken_for_one_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.zeros(64)
    assert uses_adapter(base + 1.0, base + 0.01 * torch.randn(64, generator=generator), base) is None
