"""The user's functions can do anything but end the command, hold it up, or be left behind."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.evaluation import RewardConfig
from ftcli.errors import FtcliError, Origin
from ftcli.judges import CompletionBatch, Judge, JudgeScores, open_judge
from tests.e2e.drill import Server


def opened(tmp_path: Path, body: str, head: str = "", **options: Any) -> Judge:
    """The judge ``score`` with this body."""
    file = tmp_path / "mine.py"
    file.write_text(f"import os, sys, time\n{head}\ndef score(completions, prompts, **columns):\n    {body}\n")
    return open_judge(RewardConfig.model_validate({"file": f"{file}:score", **options}))


def judged(tmp_path: Path, body: str, head: str = "") -> list[float | None]:
    """What ``score`` with this body gives for two completions."""
    head = "".join(f"import {name}\n" for name in ("signal", "numpy") if name in body) + head
    return opened(tmp_path, body, head).scores(CompletionBatch(["a", "bb"], ["p", "q"])).values


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(0)", r"tried to end the program \(exit status 0\)"),
        ("os._exit(0)", r"tried to end the program \(exit status 0\)"),
        ("os.kill(os.getpid(), 9)", "was ended by the signal SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "was ended by the signal SIGSEGV"),
        ("raise BaseException('mine')", "raised BaseException: mine"),
        ("raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})", "its text raises ZeroDivisionError"),
        ("return [10**400, 0]", "returned an integer beyond every float, .* for completion 1: 'a'"),
        ("return [float('inf'), 0]", "returned inf, .* for completion 1"),
        (
            "return [0, type('F', (float,), {'__float__': lambda s: 1 / 0})(1)]",
            "a number that raised ZeroDivisionError",
        ),
        ("return [type('R', (), {'__repr__': lambda s: sys.exit(0)})(), 0]", "an object of type R"),
        ("return [1.0]", "returned a list of 1 value, a list of 2 numbers was expected"),
        ("return []", "returned a list of 0 values, a list of 2 numbers was expected"),
        ("return [[1.0, 2.0]]", "returned a list of 1 value, 1 of which is a list, a list of 2 numbers was expected"),
        ("return ([1.0], [2.0], 3.0)", "returned a tuple of 3 values, 2 of which are lists, a list of 2 numbers"),
        ("return {'a': 1}", "returned dict, a list of 2 numbers was expected"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 3)", "was ended by the signal 37"),
        ("return [1, 1e13]", r"returned 10000000000000.0, where a number up to 1e12 in size .* for completion 2"),
        ("return [-3e38, 1]", r"returned -3e\+38, "),
        ("return numpy.ones((2, 1))", r"returned ndarray of shape \(2, 1\), a list of 2 numbers"),
        ("return numpy.ones(3)", r"returned ndarray of shape \(3,\), a list of 2 numbers"),
        ("return numpy.float64(1)", r"returned float64 of shape \(\)"),
        ("return numpy.array([1, numpy.nan])", "returned nan, "),
        ("return [numpy.ones(2), 1]", r"returned array\(\[1., 1.\]\), "),
        ("return numpy.array(['a', 'b'])", "returned 'a', "),
    ],
)
def test_a_function_that_ends_the_program_is_a_coded_error(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(FtcliError, match=said) as caught:
        judged(tmp_path, body)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT455", 4)


@pytest.mark.parametrize("line", ["sys.exit(0)", "os._exit(0)", "raise BaseException", "1/0"])
def test_a_file_that_ends_the_program_when_loaded_is_a_coded_error(tmp_path: Path, line: str) -> None:
    with pytest.raises(FtcliError) as caught:
        judged(tmp_path, "return [0, 0]", head=line)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT452", 2)


def test_dataclasses_with_future_annotations_can_be_defined(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, KW_ONLY\n"
        "@dataclass\n"
        "class Point:\n"
        "    value: float\n"
        "    _: KW_ONLY\n"
        "    more: int = 0\n"
        "if True:\n"
        "    def score(completions, prompts, **columns):\n"
        "        return [Point(1.0).value for _ in completions]\n"
    )
    judge = open_judge(RewardConfig(file=f"{file}:score"))
    assert judge.scores(CompletionBatch(["a"], ["b"])).values == [1.0]


def test_what_a_function_does_to_its_process_is_not_done_to_this_one(tmp_path: Path) -> None:
    here = Path.cwd()
    body = "os.chdir('/'); os.environ['FTCLI_MINE'] = 'x'; print('noise'); return [1, 2]"
    assert judged(tmp_path, body) == [1.0, 2.0]
    assert Path.cwd() == here
    assert "FTCLI_MINE" not in os.environ


@pytest.mark.parametrize(
    ("body", "shown", "said"),
    [
        ("for n in range(5000): print(n, file=sys.stderr if n % 2 else sys.stdout)", 100, "4,900 more lines"),
        ("print('x' * 10**6, end='')", 0, "1 more line"),
        ("for n in range(200): print('y' * 999)", 16, "184 more lines"),
        ("for n in range(100): print(n)", 100, ""),
        ("os.write(2, b'half a mark ' + bytes(1) + b'ftcli-'); print()", 1, ""),
        ("os.system('seq 150')", 100, "50 more lines"),
    ],
)
def test_a_flood_of_prints_is_cut_and_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, shown: int, said: str
) -> None:
    """Of each call, and on stderr: stdout may be a JSON document."""
    judge = opened(tmp_path, f"{body}\n    return [1 for _ in completions]")
    for _ in range(2):
        assert judge.scores(CompletionBatch(["a"], ["p"])).values == [1.0]
    del judge
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err) < 2 * (1 << 14) + 1000
    lines = err.splitlines()
    told = [line for line in lines if line.startswith("... ")]
    assert told == [f"... {said} that {tmp_path}/mine.py:score printed in this call"] * 2 * bool(said)
    whole = [line for line in lines if line not in told and not line.startswith("x") and line != "y" * 384]
    assert len(whole) == 2 * shown


def test_what_a_call_printed_before_it_was_killed_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge = opened(tmp_path, "print('looking'); time.sleep(600)", timeout=0.5)
    with pytest.raises(FtcliError, match=r"no answer within 0\.5 seconds"):
        judge.scores(CompletionBatch(["a"], ["p"]))
    assert capfd.readouterr().err.startswith("looking\n")


def test_a_function_keeps_its_state_from_call_to_call(tmp_path: Path) -> None:
    judge = opened(tmp_path, "seen.extend(completions); return [len(seen)]", head="seen = []")
    assert [judge.scores(CompletionBatch(["a"], ["p"])).values for _ in range(3)] == [[1.0], [2.0], [3.0]]


#: Fails on some words, alone or among others.
_PICKY = (
    "if 'raise' in completions: raise ValueError('no')\n"
    "    if 'hang' in completions: time.sleep(600)\n"
    "    if 'die' in completions: os._exit(3)\n"
    "    return [float('nan') if text == 'nan' else len(completions) for text in completions]"
)


@pytest.mark.parametrize(
    ("on_error", "completions", "wanted"),
    [
        # What is left is judged together: its number is that of completions in a call.
        ("skip", ["a", "raise", "b", "nan"], [3.0, None, 3.0, None]),
        (-1, ["a", "die", "raise", "b"], [2.0, -1.0, -1.0, 2.0]),
        (0.5, ["hang", "a"], [0.5, 1.0]),
    ],
)
def test_only_completions_that_fail_are_left_out(
    tmp_path: Path, on_error: str | float, completions: list[str], wanted: list[float | None]
) -> None:
    for seconds in (0.5, 8.0) if "hang" in completions else (600.0,):
        judge = opened(tmp_path, _PICKY, on_error=on_error, timeout=seconds)
        scores = judge.scores(CompletionBatch(completions, completions))
        if scores.values == wanted:
            break  # else the machine is too slow for the others
    assert scores.values == wanted
    assert scores.failed == tuple(at for at, text in enumerate(completions) if len(text) > 1)


def test_the_error_names_file_function_row_and_completion(tmp_path: Path) -> None:
    judge = opened(tmp_path, _PICKY)
    origins = [Origin("train.jsonl", row) for row in (7, 8, 9)]
    with pytest.raises(FtcliError) as caught:
        judge.scores(CompletionBatch(["a", "b", "raise"], ["p"] * 3, origins=origins))
    said = caught.value.findings[0].message
    assert said == (
        f"the reward {judge.name} raised ValueError: no ({judge.name.rpartition(':')[0]}:4) for completion 3 to "
        "train.jsonl:9: 'raise'"
    )
    assert judge.name.endswith("mine.py:score")


def test_a_failure_of_the_batch_alone_fails_all_of_it(tmp_path: Path) -> None:
    body = "assert len(completions) == 1; return [1]"
    scores = opened(tmp_path, body, on_error="skip").scores(CompletionBatch(["a", "b"], ["p", "p"]))
    assert scores == JudgeScores([None, None], (0, 1), scores.example)
    assert "though for none of 2 completions alone" in str(scores.example)


def test_a_batch_of_hanging_completions_takes_four_timeouts_at_most(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    body = f"with open({str(calls)!r}, 'a') as file: file.write('x')\n    time.sleep(600)"
    judge = opened(tmp_path, body, on_error="skip", timeout=0.1)
    assert judge.scores(CompletionBatch(["a"] * 50, ["p"] * 50)).values == [None] * 50
    assert len(calls.read_text()) <= 6  # all together, each alone until four timeouts are over


def _hanging(path: Path, session: str) -> str:
    """A function that starts a process, which holds a pipe open, and hangs, whatever is raised in it."""
    return (
        "inner, outer = os.pipe()\n"
        "    if os.fork() == 0:\n"
        f"        {session}\n"
        f"        os.write(os.open({str(path)!r}, os.O_WRONLY), b'x'); os.write(outer, b'x'); time.sleep(600)\n"
        "    os.read(inner, 1)\n"
        "    while True:\n"
        "        try: time.sleep(60)\n"
        "        except BaseException: pass"
    )


#: In the group of the function; in a session of its own; and a daemon, whose parent has ended.
_SESSIONS = ("pass", "os.setsid()", "os.setsid(); os.fork() and os._exit(0)")


@pytest.mark.parametrize("session", _SESSIONS, ids=["child", "session", "daemon"])
def test_a_late_function_and_what_it_started_are_killed(tmp_path: Path, session: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    body = _hanging(path, session)
    try:
        for seconds in (0.2, 4.0, 16.0):
            judge = opened(tmp_path, body, on_error="skip", timeout=seconds)
            assert judge.scores(CompletionBatch(["a"], ["p"])).values == [None]
            if os.read(pipe, 1) == b"x":  # else its time was up before it had started anything
                break
        else:
            pytest.fail("nothing has been started")
        assert select.select([pipe], [], [], 30)[0], "it is left behind"
        while os.read(pipe, 1) == b"x":  # the function was called more than once
            assert select.select([pipe], [], [], 30)[0], "one of them is left behind"
    finally:
        os.close(pipe)


@pytest.mark.parametrize("session", _SESSIONS, ids=["child", "session", "daemon"])
def test_nothing_that_a_function_started_outlives_a_command_that_is_killed(tmp_path: Path, session: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = os.fork()
    if command == 0:
        try:
            opened(tmp_path, _hanging(path, session)).scores(CompletionBatch(["a"], ["p"]))
        finally:
            os._exit(1)
    try:
        assert select.select([pipe], [], [], 30)[0], "it was not started"
        os.kill(command, signal.SIGKILL)
        os.waitpid(command, 0)
        assert os.read(pipe, 1) == b"x"
        assert select.select([pipe], [], [], 30)[0], "it is left behind"
        assert os.read(pipe, 1) == b""
    finally:
        os.close(pipe)


def test_its_process_ends_with_the_judge(tmp_path: Path) -> None:
    judge = opened(tmp_path, "return [os.getpid()]")
    (pid,) = judge.scores(CompletionBatch(["a"], ["p"])).values
    assert pid is not None
    os.kill(int(pid), 0)
    del judge
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)"])
def test_no_command_exits_0_without_its_result(tmp_path: Path, ending: str, drill_server: Server) -> None:
    (tmp_path / "mine.py").write_text(f"import os, sys\ndef score(completions, prompts, **kw):\n    {ending}\n")
    recipe: dict[str, Any] = {
        "model": "{name_or_path: 'bundled:tiny-gemma2', dtype: float32}",
        "data": "{train: ['bundled:smoke-train'], eval: [{path: 'bundled:smoke-eval', max_rows: 2}], max_seq_len: 64}",
        "eval": "{generate: {max_new_tokens: 2}, tasks: [{file: 'mine.py:score'}]}",
    }
    (tmp_path / "r.yaml").write_text("version: 1\n" + "".join(f"{k}: {v}\n" for k, v in recipe.items()))
    ran = drill_server.start("eval", "r.yaml", "--offline", cwd=tmp_path)
    assert ran.wait() == 4, ran.said
    assert "error[FT765]" in ran.said


def test_a_function_may_be_async(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import asyncio\n"
        "async def score(completions, prompts):\n"
        "    await asyncio.sleep(0)\n"
        "    if completions == ['bad']: raise KeyError('gone')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    judge = open_judge(RewardConfig(file=f"{file}:score"))
    assert judge.scores(CompletionBatch(["a", "bc"], ["p", "p"])).values == [1.0, 2.0]
    with pytest.raises(FtcliError, match="raised KeyError: 'gone'"):
        judge.scores(CompletionBatch(["bad"], ["p"]))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return numpy.array([1, 0.5])", [1.0, 0.5]),
        ("return numpy.array([True, False])", [1.0, 0.0]),
        ("return numpy.array([1, None], dtype=object)", [1.0, None]),
        ("return [numpy.float32(0.5), numpy.int64(3)]", [0.5, 3.0]),
        ("return (numpy.bool_(True), numpy.array(2.0))", [1.0, 2.0]),
        ("return type('Tensor', (), {'shape': (2,), 'tolist': lambda self: [1.5, 2.0]})()", [1.5, 2.0]),
        ("return [type('Tensor', (), {'item': lambda self: 1.5})(), 2]", [1.5, 2.0]),
    ],
)
def test_arrays_and_tensors_are_numbers(tmp_path: Path, body: str, wanted: list[float | None]) -> None:
    assert judged(tmp_path, body) == wanted


#: The descriptor that ftcli's socket has in the process.
_FOUND = (
    "def found():\n"
    "    import stat\n"
    "    for at in range(3, 100):\n"
    "        try:\n"
    "            if stat.S_ISSOCK(os.fstat(at).st_mode): return at\n"
    "        except OSError: pass\n"
)


@pytest.mark.parametrize(
    "written",
    [
        "b'\\x00\\x00\\xff\\xff'",  # the beginning of a long message, as multiprocessing writes them
        "b'{}'",
        "b'x' * 5000",
        "b'ftcli-judge:' + (1 << 62).to_bytes(8)",
        "b'ftcli-judge:' + (2).to_bytes(8) + b'[]'",
        "b'ftcli-judge:' + (14).to_bytes(8) + b'{\"scores\": [1]}'[:14]",
        "b'ftcli-judge:' + (13).to_bytes(8) + b'{\"scores\": 3}'",
        "b'ftcli-judge:' + (2).to_bytes(8) + b'{}'",
        "b'ftcli-judge:' + (13).to_bytes(8) + b'{\"raised\": 3}'",
        "b'ftcli-judge:' + (2).to_bytes(8) + b'\\xff\\xff'",
        "b'ftcli-judge:' + (200000).to_bytes(8) + b'[' * 200000",
    ],
)
def test_what_a_function_writes_into_the_socket_is_no_answer(tmp_path: Path, written: str) -> None:
    """It is told at once: what comes of an answer that is late would say how late."""
    judge = opened(tmp_path, f"os.write(found(), {written}); return [len(c) for c in completions]", _FOUND, timeout=600)
    with pytest.raises(FtcliError, match=r"FT455.*wrote into the socket that ftcli reads its answers from"):
        judge.scores(CompletionBatch(["a"], ["p"]))


def test_half_a_message_is_late_in_time(tmp_path: Path) -> None:
    body = "os.write(found(), b'ftcli-judge:' + (99).to_bytes(8) + b'{}'); time.sleep(60)"
    with pytest.raises(FtcliError, match=r"gave no answer within 0.5 seconds"):
        opened(tmp_path, body, _FOUND, timeout=0.5).scores(CompletionBatch(["a"], ["p"]))


def test_a_function_that_closes_the_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="closed the socket that ftcli reads its answers from"):
        opened(tmp_path, "os.close(found()); time.sleep(600)", _FOUND, timeout=600).scores(
            CompletionBatch(["a"], ["p"])
        )


def test_a_copy_of_the_process_answers_nothing(tmp_path: Path) -> None:
    judge = opened(tmp_path, "here = os.fork() != 0; return [float(here)]")
    assert [judge.scores(CompletionBatch(["a"], ["p"])).values for _ in range(5)] == [[1.0]] * 5


def test_a_call_that_nobody_takes_is_late(tmp_path: Path) -> None:
    body, long = "os.kill(os.getpid(), 19) if completions == ['stop'] else 0; return [1]", {"long": ["x" * 10**7]}
    for seconds in (0.5, 8.0):
        judge = opened(tmp_path, body, on_error="skip", timeout=seconds)
        late = judge.scores(CompletionBatch(["stop"], ["p"], columns=long))
        assert late.values == [None]
        assert f"gave no answer within {seconds:g} seconds" in str(late.example)
        after = judge.scores(CompletionBatch(["a"], ["p"], columns=long)).values
        if after == [1.0]:
            break  # else the machine is too slow for the others
    assert after == [1.0]


def test_an_exception_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def fails():\n\n    raise KeyError('gold')\n")
    head = f"sys.path.insert(0, {str(tmp_path)!r})\nimport helper"
    with pytest.raises(FtcliError) as caught:
        judged(tmp_path, "\n    helper.fails()", head)
    said = caught.value.findings[0].message
    assert f"raised KeyError: 'gold' ({tmp_path}/mine.py:6, in {tmp_path}/helper.py:3)" in said
    with pytest.raises(FtcliError, match=rf"FT452.*raised ZeroDivisionError: .* \({tmp_path}/mine.py:3\)"):
        opened(tmp_path, "return [1]", "\n1 / 0")


def test_reasoning_is_given_to_those_who_take_it(tmp_path: Path) -> None:
    batch = CompletionBatch(["a", "b"], ["p", "q"], reasoning=["so", None])
    seen = opened(tmp_path, "return [1.0 if r == 'so' else 0.0 for r in columns['completion_reasoning']]")
    assert seen.scores(batch).values == [1.0, 0.0]
    file = tmp_path / "mine.py"
    file.write_text("def score(completions, prompts):\n    return [2.0, 2.0]\n")
    assert open_judge(RewardConfig(file=f"{file}:score")).scores(batch).values == [2.0, 2.0]
    file.write_text(
        "def score(completion_reasoning, completions, prompts):\n"
        "    return [len(r or '') for r in completion_reasoning]\n"
    )
    assert open_judge(RewardConfig(file=f"{file}:score")).scores(batch).values == [2.0, 0.0]
    assert open_judge(RewardConfig(file=f"{file}:score")).scores(CompletionBatch(["a"], ["p"])).values == [0.0]
