"""Environments by TRL's contract, an instance a process: tools, timeouts, deaths, and what comes back after them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from ftcli.errors import ExitCode, FtcliError
from ftcli.judges.environment import EnvironmentInstance, EnvironmentPool, ToolResult
from ftcli.judges.process import FunctionSource, Worker
from ftcli.judges.verdicts import FailedJudgement

SOURCE = '''
import asyncio, os, time

class Counter:
    """Counts."""

    def __init__(self):
        self.count = 0

    def reset(self, **row):
        self.count, self.row = row.get("start", 0), row
        if row.get("note") == "fails":
            raise KeyError("note")
        return row.get("note")

    def add(self, by: int) -> int:
        """Adds.

        Args:
            by: How much.
        """
        self.count += by
        return self.count

    async def later(self, seconds: float) -> str:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def sleep(self, seconds: float) -> str:
        """Sleeps.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    def fail(self) -> str:
        """Fails."""
        raise ValueError("no way")

    def die(self) -> str:
        """Ends the process."""
        os._exit(3)

    def half(self) -> str:
        """Says half of a pair."""
        return "a\\ud800b"

    def long(self) -> str:
        """Says much."""
        return "x" * 100

    @property
    def costly(self):
        raise RuntimeError("a property is no tool")

    def _hidden(self):
        return None

    def get_reward(self):
        return {98: [1, 2], 99: float("nan")}.get(self.count, self.count)
'''


def pool(folder: Path, source: str = SOURCE, seconds: float = 20.0, name: str = "Counter") -> EnvironmentPool:
    file = folder / "mine.py"
    file.write_text(source, encoding="utf-8")
    return EnvironmentPool(f"{file}:{name}", seconds)


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentPool:
    return pool(tmp_path_factory.mktemp("environments"))


def alone(folder: Path, source: str = SOURCE, seconds: float = 20.0, **row: Any) -> EnvironmentInstance:
    """An instance that has begun, without a pool, which asks for its tools: that takes a second of imports."""
    file = folder / "mine.py"
    file.write_text(source, encoding="utf-8")
    one = EnvironmentInstance(Worker(FunctionSource(file, "Counter")), seconds)
    one.reset(row)
    return one


def begun(counters: EnvironmentPool, *rows: dict[str, Any]) -> list[EnvironmentInstance]:
    return counters.begin(list(rows), [f"row {at}" for at in range(len(rows))])[0]


def test_its_tools_are_its_public_methods(counters: EnvironmentPool) -> None:
    facts = counters.facts
    assert (facts.name, facts.rewards) == ("Counter", True)
    assert [schema["function"]["name"] for schema in facts.schemas] == [
        "add",
        "die",
        "fail",
        "half",
        "later",
        "long",
        "sleep",
    ]
    assert facts.schemas[0]["function"]["parameters"]["properties"]["by"] == {
        "type": "integer", "description": "How much.",
    }  # fmt: skip


def test_each_rollout_has_an_instance_and_its_row(counters: EnvironmentPool) -> None:
    rows = [{"start": 5, "note": "hello"}, {"start": 7}]
    instances, said = counters.begin(rows, ["a", "b"])
    assert said == ["hello", None]
    assert [one.call([("add", {"by": 1})], None)[0].content for one in instances] == ["6", "8"]
    assert [one.reward() for one in instances] == [6.0, 8.0]
    again, _ = counters.begin(rows, ["a", "b"])
    assert [one.reward() for one in again] == [5.0, 7.0], "reset begins anew"
    assert again[0] is instances[0], "made once, reset often"


def test_calls_of_a_turn_and_their_failures_are_told_as_trl_tells_them(counters: EnvironmentPool) -> None:
    (one,) = begun(counters, {"start": 1})
    calls: list[tuple[str, dict[str, Any]]] = [
        ("add", {"by": 2}), ("later", {"seconds": 0.02}), ("nowhere", {}), ("fail", {}), ("later", {"seconds": 0.01}),
        ("add", {}), ("_hidden", {}),
    ]  # fmt: skip
    said = one.call(calls, None)
    assert [(result.name, result.content) for result in said] == trls(calls)
    assert [result.failed for result in said] == [False, False, True, True, False, True, True]


def trls(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """What TRL's loop tells the model, in the order of the calls: there coroutines come last."""
    import asyncio
    import inspect

    space: dict[str, Any] = {}
    exec(SOURCE, space)
    made = space["Counter"]()
    made.reset(start=1)
    assert inspect.isfunction(GRPOTrainer._tool_call_loop)
    found = []
    for name, arguments in calls:
        try:
            tools = {n for n, _ in inspect.getmembers(type(made), inspect.isfunction) if not n.startswith("_")}
            if name not in tools - {"reset", "get_reward"}:
                raise ValueError(f"Tool {name} not found.")
            result = getattr(made, name)(**arguments)
            found.append((name, str(asyncio.run(result) if inspect.iscoroutine(result) else result)))
        except Exception as error:  # noqa: BLE001
            found.append((name, str({"error": str(error)})))
    return found


def test_its_state_is_its_public_attributes(counters: EnvironmentPool) -> None:
    (one,) = begun(counters, {"start": 1, "odd": {1, 2}})
    one.call([("add", {"by": 2})], None)
    assert one.state() == {"count": 3}, "the row holds a set, which is no JSON value"
    one.worker.end()
    assert one.state()["count"] == 3


def test_coroutines_of_a_turn_run_together(counters: EnvironmentPool) -> None:
    (one,) = begun(counters, {})
    one.call([("later", {"seconds": 0.0})], None)  # asyncio is imported now
    began = time.monotonic()
    one.call([("later", {"seconds": 0.5})] * 6, None)
    assert time.monotonic() - began < 2.5
    assert one.tool_seconds > 0.5


def test_what_ends_the_process_does_not_end_the_rollout(counters: EnvironmentPool) -> None:
    (one,) = begun(counters, {"start": 1})
    one.call([("add", {"by": 2})], None)
    (died,) = one.call([("die", {})], None)
    assert died.failed
    assert "exit status 3" in died.content
    assert one.call([("add", {"by": 4})], None) == [ToolResult("add", "7", failed=False)], "what was done is done again"
    one.worker.end()
    assert one.reward() == 7.0
    os.kill(one.worker._process.pid, signal.SIGKILL)  # as when the machine runs out of memory
    one.worker._process.wait()
    assert one.call([("add", {"by": 1})], None)[0].content == "8"


def test_processes_that_are_killed_while_they_are_brought_back_lose_nothing(
    counters: EnvironmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is short of memory kills the next one as well: of what makes, resets and calls each is cut off."""
    do, left = Worker.do, {"make": 1, "reset": 1, "call": 1, "describe": 1}

    def killed(worker: Worker, what: str, *given: Any, seconds: float) -> Any:
        if left.get(what) and worker._process.poll() is None:
            left[what] -= 1
            os.kill(worker._process.pid, signal.SIGKILL)
            worker._process.wait()
        return do(worker, what, *given, seconds=seconds)

    monkeypatch.setattr(Worker, "do", killed)
    (one,) = begun(counters, {"start": 1})
    assert one.call([("add", {"by": 2})], None) == [ToolResult("add", "3", failed=False)]
    assert one.facts().name == "Counter"
    left.update(make=1, reset=1, call=1, reward=1)
    one.reset({"start": 1})
    one.call([("add", {"by": 2})], None)
    left.update(make=1, reset=1, call=1)
    one.worker.end()
    assert one.reward() == 3.0


def test_a_late_call_is_killed_and_the_rollout_goes_on(tmp_path: Path) -> None:
    one = alone(tmp_path, seconds=1.5, start=1)
    one.call([("add", {"by": 2})], None)
    (late,) = one.call([("sleep", {"seconds": 60})], None)
    assert late == ToolResult("sleep", str({"error": "no answer within 1.5 seconds"}), failed=True)
    assert one.reward() == 3.0


def test_a_call_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Threads that wait for a process are waited for when the program ends."""
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    ending = pool(tmp_path, seconds=900.0)
    instances, _ = ending.begin([{}, {}], ["a", "b"])
    late = ending.submit(instances[0].call, [("sleep", {"seconds": 900})], None)
    while not late.running():
        time.sleep(0.01)
    ending.close()
    (said,) = late.result(60)
    assert said.failed
    assert instances[1].call([("add", {"by": 1})], None)[0].failed, "none is made anew"


def test_an_answer_is_cut_where_the_recipe_says(counters: EnvironmentPool) -> None:
    (one,) = begun(counters, {})
    assert one.call([("long", {})], 10)[0].content == "xxxxxxxxxx\n(90 characters more)"
    assert one.call([("long", {})], 100)[0].content == "x" * 100


@pytest.mark.parametrize(
    ("start", "said"), [(99, "returned nan, where a number"), (98, "returned a list, where a number")]
)
def test_a_reward_that_is_no_number_is_a_failure(counters: EnvironmentPool, start: int, said: str) -> None:
    (one,) = begun(counters, {"start": start})
    found = one.reward()
    assert isinstance(found, FailedJudgement)
    assert said in found.reason


def test_halves_of_surrogate_pairs_are_replaced(counters: EnvironmentPool) -> None:
    (one,), said = counters.begin([{"note": "\ud800", "start": 1}], ["a"])
    assert said == ["\ufffd"]
    assert one.call([("half", {})], None)[0].content == "a\ufffdb"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Counter:\n    def tool(self): ...\n", "has no method reset"),
        ("class Counter:\n    def __init__(self): raise OSError('no disk')\n    def reset(self): ...\n", "no disk"),
        ("class Counter:\n    def reset(self): ...\n    def tool(self, a): ...\n", "tool"),
        ("raise OSError('not here')\n", "cannot be loaded: it raised OSError: not here"),
        ("class Other: ...\n", "cannot be loaded: it is no class or function; the file has: Other"),
    ],
)
def test_what_is_no_environment_is_refused(source: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match=said) as error:
        pool(tmp_path, source)
    assert (error.value.findings[0].code, error.value.exit_code) == ("FT472", ExitCode.DATA)


def test_a_reset_that_fails_names_its_row(counters: EnvironmentPool) -> None:
    with pytest.raises(FtcliError, match=r"KeyError.*row 1") as error:
        begun(counters, {"note": "a"}, {"note": "fails"})
    assert error.value.findings[0].code == "FT472"


def test_messages_of_another_form_are_not_taken(tmp_path: Path) -> None:
    """The user's code may write into the socket that answers are read from."""
    forged = SOURCE.replace(
        'raise ValueError("no way")',
        "import json, socket\n"
        "        for fd in range(3, 40):\n"
        "            try:\n"
        "                body = json.dumps({'results': [['forged', 1]]}).encode()\n"
        "                body = b'ftcli-judge:' + len(body).to_bytes(8, 'big') + body\n"
        "                socket.socket(fileno=os.dup(fd)).sendall(body)\n"
        "            except OSError:\n"
        "                pass\n"
        "        return 'x'",
    )
    one = alone(tmp_path, forged, start=1)
    (said,) = one.call([("fail", {})], None)
    assert said.failed
    assert one.reward() == 1.0
