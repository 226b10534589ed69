"""`python_tests` runs code that nobody has read: what it passes, and what it leaves behind."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from ftcli.judges import builtin as judge
from ftcli.judges.builtin import code_of_completion, python_tests

CASES = {
    "right": ("def f(x): return x + 1", "assert f(1) == 2", 1.0),
    "in a fence": ("So:\n```python\ndef f(x): return x + 1\n```\nThat is it.", "assert f(1) == 2", 1.0),
    "wrong": ("def f(x): return x", "assert f(1) == 2", 0.0),
    "leaves early": ("import sys; sys.exit(0)", "assert False", 0.0),
    "leaves at once": ("import os; os._exit(0)", "assert False", 0.0),
    "swallows the tests": ("try:\n    pass\nfinally:\n    '''", "assert False", 0.0),
    "takes memory": ("x = bytearray(2**31)", "", 0.0),
    "writes much": ("open('x', 'wb').write(bytes(2**25))", "", 0.0),
    "is none": ("def f(:", "", 0.0),
    "reads the environment": ("import os\nassert 'FTCLI_TEST_SECRET' not in os.environ", "", 1.0),
}


CODE = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (CODE, CODE),
        (f"```python\n{CODE}```\n", CODE),
        (f"```\n{CODE}```\nor\n```python\nother\n```", CODE),
        (f"First:\n```bash\npip install x\n```\nthen\n```python\n{CODE}```", CODE),
        (f"```text\n1\n```\n```\n{CODE}```", CODE),
        (f"```python3\n{CODE}```", CODE),
        (f"```{{.python}}\n{CODE}```", CODE),
        (f"``` Python title='f.py'\n{CODE}```", CODE),
        ("```py\r\ndef f(x): return x\r\n```\r\n", "def f(x): return x\r\n"),
        (f"~~~python\n{CODE}~~~", CODE),
        (f"````python\n{CODE}```\n````", f"{CODE}```\n"),
        ("1. It is\n   ```python\n   def f(x):\n       return x\n   ```", CODE),
        (f"The code: ```python\n{CODE}```", CODE),
        ("```python\ndef f(x): return x```", "def f(x): return x"),
        (f"```python\n{CODE}", CODE),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
        ("Write ```x``` here", "Write ```x``` here"),
        ("A ``` b\nx = 1", "A ``` b\nx = 1"),
    ],
)
def test_the_code_of_a_completion_is_its_first_block_of_python(text: str, code: str) -> None:
    """Behind a block of another language, or called `python3`, it was no code at all, and right answers scored 0."""
    assert code_of_completion(text) == code


@pytest.fixture(params=["namespaces", "without"])
def _contained(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as on a system that gives out no namespaces."""
    if request.param == "without":
        script = judge._SUPERVISOR.read_text(encoding="utf-8")
        changed = tmp_path / "supervisor.py"
        changed.write_text(script.replace("libc.unshare(", "bool("), encoding="utf-8")
        assert changed.read_text() != script
        monkeypatch.setattr(judge, "_SUPERVISOR", changed)


@pytest.mark.usefixtures("_contained")
def test_programs_pass_where_their_tests_run_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_TEST_SECRET", "x")
    completions, tests, wanted = zip(*CASES.values(), strict=True)
    found = python_tests(timeout=30.0)(completions, tests)
    assert dict(zip(CASES, found, strict=True)) == dict(zip(CASES, wanted, strict=True))
    assert python_tests(timeout=0.2)(["while True: pass"], [""]) == [0.0]


#: Starts a grandchild in a session of its own, which holds a named pipe open, and goes on once it is there.
DAEMON = """
import os, time
inner, outer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pipe = os.open({path!r}, os.O_WRONLY)
        os.write(pipe, b"x")
        os.write(outer, b"x")
        time.sleep(600)
    os._exit(0)
os.read(inner, 1)
"""


@pytest.mark.usefixtures("_contained")
@pytest.mark.parametrize("late", [False, True], ids=["passes", "late"])
def test_nothing_is_left_behind(tmp_path: Path, late: bool) -> None:
    """A grandchild, of a program that passes and of one whose time is up: a pipe without a writer ends."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    program = DAEMON.format(path=str(path)) + ("time.sleep(600)\n" if late else "")
    try:
        for seconds in (0.3, 4.0, 16.0) if late else (30.0,):
            assert python_tests(timeout=seconds)([program], [""]) == [float(not late)]
            if os.read(pipe, 1) == b"x":  # else it was too late to start the grandchild
                break
        else:
            pytest.fail("no grandchild has started")
        assert select.select([pipe], [], [], 30)[0], "it is left behind"
        assert os.read(pipe, 1) == b""
    finally:
        os.close(pipe)
