"""What a server answers, which may be anything."""

from __future__ import annotations

import json

import pytest

from ftcli.errors import FtcliError
from ftcli.pipeline.server import Refused, Server
from tests.chat_server import chat_server, raw_server

MESSAGES = [{"role": "user", "content": "hi"}]
TOLD = [[2**70], [-1], [True, False], [1.0], ["a"], [None], [], {}, "x", None, 5, [[1]], [5] * 3 + [2**31]]


@pytest.mark.parametrize("told", TOLD, ids=str)
def test_token_ids_that_are_none(told: object) -> None:
    with chat_server(lambda *_: (200, {}, json.dumps({"tokens": told}).encode())) as server:
        assert Server(server.url).prompt_of("m", MESSAGES, {}) is None


def test_what_is_known_without_the_model_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.pipeline.server._AT_ONCE", 0.3)
    with (
        raw_server(b"HTTP/1.1 200 OK\r\n\r\n", b" ") as url,
        pytest.raises(FtcliError, match="no whole answer") as error,
    ):
        Server(url).model_named(None)
    assert error.value.findings[0].code == "FT790"


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"302 Found\r\nLocation: /\r\n\r\n", "nothing"), (b'500 No\r\n\r\n{"error": ["a"]}', "['a']")],
)
def test_the_words_of_a_refusal(answer: bytes, said: str) -> None:
    with raw_server(b"HTTP/1.1 " + answer) as url, pytest.raises(Refused, match=r"^" + "\\" * (said[0] == "[") + said):
        Server(url).chat("m", MESSAGES, 4, {})


def test_a_refusal_that_is_cut_off() -> None:
    with (
        raw_server(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n") as url,
        pytest.raises(FtcliError, match="cannot be reached"),
    ):
        Server(url).chat("m", MESSAGES, 4, {})
