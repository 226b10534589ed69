"""The judge behind an address: what it sends, what it makes of answers, retries, the budget and the cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.evaluation import RewardConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.judges import CompletionBatch, Judge, JudgeAccess, JudgeScores, endpoint, open_judge
from tests.chat_server import ChatServer, chat_server, raw_server

PROMPT = "Q {prompt} A {completion} K {answer} {topic} {unknown} {0}"


def judge(server: ChatServer, access: JudgeAccess | None = None, extract: str | None = None, **options: Any) -> Judge:
    given = {"url": server.url, "model": "m", "prompt": PROMPT, **options}
    config = {"use": "llm_judge", "endpoint": given, **({} if extract is None else {"extract": extract})}
    return open_judge(RewardConfig.model_validate(config), access or JudgeAccess())


def scores(of: Judge, *completions: str) -> JudgeScores:
    count = len(completions)
    columns = {"answer": [str(at) for at in range(count)], "topic": ["sums"] * count}
    return of.scores(CompletionBatch(completions, ["p"] * count, columns=columns))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(endpoint, "time", type("Time", (), {"sleep": waits.append, "time": time.time}))
    return waits


def test_it_is_asked_for_each_completion_and_its_number_is_the_score() -> None:
    with chat_server(lambda _, body: (200, {}, "I say " + body["messages"][0]["content"].split()[3])) as server:
        of = judge(server, JudgeAccess({"KEY": "s3cret"}.get), api_key_env="KEY", request={"temperature": 0})
        assert scores(of, "7", "-2.5", "x{prompt}").values[:2] == [7.0, -2.5]
    sent = {body["messages"][0]["content"] for _, _, body in server.requests}
    assert sent == {
        "Q p A 7 K 0 sums {unknown} {0}", "Q p A -2.5 K 1 sums {unknown} {0}", "Q p A x{prompt} K 2 sums {unknown} {0}",
    }  # fmt: skip
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer s3cret"
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert of.measured() == {"requests": 3.0, "cached": 0.0, "retries": 0.0}
    assert of.measured() == {"requests": 0.0, "cached": 0.0, "retries": 0.0}


def test_no_key_no_header() -> None:
    with chat_server(lambda *_: (200, {}, "1")) as server:
        scores(judge(server), "a")
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize(
    ("reply", "extract", "score"),
    [
        ("7/10. All in all: 8", None, 8.0),
        ("score=4, of 10", r"score=(\d+)", 4.0),
        ("none", None, None),
        ("", None, None),
        ("1e999 or " + "9" * 400, None, None),
        ("no mark", r"score=(\d+)", None),
    ],
)
def test_the_number_of_a_reply(reply: str, extract: str | None, score: float | None) -> None:
    with chat_server(lambda *_: (200, {}, reply)) as server:
        found = scores(judge(server, extract=extract), "a")
    assert found.values == [score]
    assert bool(found.failed) == (score is None)


def test_a_busy_server_is_asked_again_when_it_says(no_waiting: list[float]) -> None:
    answers = [(429, {"Retry-After": "3"}, b"busy"), (503, {}, b""), (200, {}, "5")]
    with chat_server(lambda number, _: answers[number]) as server:
        of = judge(server)
        assert scores(of, "a").values == [5.0]
    assert no_waiting == [3.0, 1.0]
    assert of.measured()["retries"] == 2.0


def test_one_that_stays_busy_is_a_failure_of_the_completion() -> None:
    with chat_server(lambda *_: (500, {}, b"")) as server:
        found = scores(judge(server, retries=2), "a", "b")
    assert found.values == [None, None]
    assert len(server.requests) == 6
    assert found.example is not None
    assert "answered 500, and so in 2 further tries" in found.example


@pytest.mark.parametrize("said", ["nan", "inf", "-1", "Fri, 31 Dec 9999 23:59:59 -9999"])
def test_a_wait_that_nobody_could_mean_is_not_waited_for(said: str, no_waiting: list[float]) -> None:
    answers = [(429, {"Retry-After": said}, b"busy"), (200, {}, "5")]
    with chat_server(lambda number, _: answers[number]) as server:
        assert scores(judge(server), "a").values == [5.0]
    assert no_waiting[0] in (0.5, 60.0)


#: A server that keeps the connection with a byte now and then has no answer, wherever it does so.
DRIPS = {"in its headers": b"HTTP/1.1 200 OK\r\nX: ", "in its answer": b"HTTP/1.1 200 OK\r\n\r\n"}


@pytest.mark.parametrize("begin", DRIPS.values(), ids=DRIPS)
def test_the_limit_is_that_of_the_whole_answer(begin: bytes) -> None:
    with raw_server(begin, b" ") as url:
        found = scores(judge(ChatServer(url), retries=0, timeout=0.4), "a")
    assert "no whole answer within 0.4 s" in str(found.example)


def test_an_error_that_is_cut_off_is_tried_again() -> None:
    with raw_server(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n") as url:
        found = scores(judge(ChatServer(url), retries=1), "a")
    assert "and so in 1 further tries" in str(found.example)


def test_an_address_where_nobody_is_is_a_failure_too() -> None:
    with chat_server(lambda *_: (200, {}, "1")) as server:
        pass
    assert "could not be reached" in str(scores(judge(server, retries=1), "a").example)


@pytest.mark.parametrize(("status", "body"), [(401, b"bad key"), (404, b"no model"), (200, b"[]"), (200, b"<html>")])
def test_what_no_further_try_helps_ends_the_run(status: int, body: bytes) -> None:
    with chat_server(lambda *_: (status, {}, body)) as server, pytest.raises(FtcliError) as error:
        scores(judge(server), *"abcdefgh")
    assert error.value.findings[0].code == "FT470"
    assert error.value.exit_code == ExitCode.DATA


@pytest.mark.parametrize(
    ("status", "body", "tries", "said"),
    [
        (200, b"<html>bad gateway</html>", 3, "chat completions do, and so in 2 further tries"),
        (200, b'{"choices": []}', 3, "did not answer as"),
        (400, b"longer than the context", 1, "answered 400: longer than the context"),
    ],
)  # fmt: skip
def test_a_server_that_has_answered_before_fails_on_a_completion(
    status: int, body: bytes, tries: int, said: str
) -> None:
    """A proxy's page, or a completion that is too long for the judge, does not end a run of days."""
    answers: list[tuple[int, bytes | str]] = [(200, "4"), *[(status, body)] * tries, (200, "5")]
    with chat_server(lambda number, _: (answers[number][0], {}, answers[number][1])) as server:
        of = judge(server, retries=2, concurrency=1)
        assert scores(of, "a").values == [4.0]
        found = scores(of, "b", "c")
    assert found.values == [None, 5.0]
    assert said in str(found.example)


def test_another_address_is_not_told_the_key() -> None:
    with (
        chat_server(lambda *_: (200, {}, "1")) as other,
        chat_server(lambda *_: (302, {"Location": f"{other.url}/chat/completions"}, b"")) as server,
        pytest.raises(FtcliError) as error,
    ):
        scores(judge(server), "a")
    assert "answered 302" in error.value.findings[0].message
    assert not other.requests


def test_a_key_that_is_not_there_is_told_when_the_judge_is_opened() -> None:
    with chat_server(lambda *_: (200, {}, "1")) as server, pytest.raises(FtcliError, match="KEY is not set") as error:
        judge(server, JudgeAccess({}.get), api_key_env="KEY")
    assert (error.value.findings[0].code, error.value.exit_code) == ("FT470", ExitCode.RECIPE)


def test_answers_are_kept_and_asked_for_once(tmp_path: Path) -> None:
    access = JudgeAccess(cache=tmp_path / "cache")
    with chat_server(lambda number, _: (200, {}, str(number))) as server:
        first = scores(judge(server, access), "a", "b").values
        again = judge(server, access)
        assert scores(again, "a", "b").values == first
        assert again.measured() == {"requests": 0.0, "cached": 2.0, "retries": 0.0}
        scores(judge(server, access, request={"temperature": 0}), "a")
        scores(judge(server, access, model="other"), "a")
    assert len(server.requests) == 4


def test_replies_that_cannot_be_kept_are_told(tmp_path: Path) -> None:
    with chat_server(lambda *_: (200, {}, "\ud800 7")) as server:
        assert scores(judge(server, JudgeAccess(cache=tmp_path)), "a").values == [7.0]  # of half a pair a mark is kept
        (tmp_path / "judges.sqlite").write_bytes(b"no database" * 100)
        with pytest.raises(FtcliError, match=r"judges\.sqlite, which keeps replies, cannot be used") as error:
            scores(judge(server, JudgeAccess(cache=tmp_path)), "a")
    assert (error.value.findings[0].code, error.value.exit_code) == ("FT470", ExitCode.DATA)


def test_the_budget_ends_the_run_and_what_was_paid_for_is_kept(tmp_path: Path) -> None:
    access = JudgeAccess(cache=tmp_path)
    with chat_server(lambda *_: (200, {}, "1")) as server:
        of = judge(server, access, max_requests=2, concurrency=1)
        assert scores(of, "a", "b").values == [1.0, 1.0]
        with pytest.raises(FtcliError) as error:
            scores(of, "a", "b", "c")
        assert error.value.findings[0].code == "FT471"
        assert scores(judge(server, access, max_requests=1), "a", "b", "c").values == [1.0] * 3
    assert len(server.requests) == 3


def test_requests_run_beside_each_other_but_not_too_many() -> None:
    def slow(*_: Any) -> tuple[int, dict[str, str], str]:
        time.sleep(0.05)
        return 200, {}, "1"

    with chat_server(slow) as server:
        scores(judge(server, concurrency=3), *"abcdefghi")
    assert 1 < server.at_a_time <= 3
