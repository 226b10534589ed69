"""`python_tests` runs code that nobody has read: what it passes, and what it leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftcli.judges import python_tests as judge
from ftcli.judges.python_tests import python_tests

CASES = {
    "right": ("def f(x): return x + 1", "assert f(1) == 2", 1.0),
    "in a fence": ("So:\n```python\ndef f(x): return x + 1\n```\nThat is it.", "assert f(1) == 2", 1.0),
    "wrong": ("def f(x): return x", "assert f(1) == 2", 0.0),
    "leaves early": ("import sys; sys.exit(0)", "assert False", 0.0),
    "leaves at once": ("import os; os._exit(0)", "assert False", 0.0),
    "swallows the tests": ("try:\n    pass\nfinally:\n    '''", "assert False", 0.0),
    "never ends": ("while True: pass", "", 0.0),
    "takes memory": ("x = bytearray(2**31)", "", 0.0),
    "writes much": ("open('x', 'wb').write(bytes(2**25))", "", 0.0),
    "is none": ("def f(:", "", 0.0),
    "reads the environment": ("import os\nassert 'FTCLI_TEST_SECRET' not in os.environ", "", 1.0),
}


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
    found = python_tests(timeout=2.0)(completions, tests)
    assert dict(zip(CASES, found, strict=True)) == dict(zip(CASES, wanted, strict=True))


@pytest.mark.usefixtures("_contained")
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """A grandchild in a session of its own, of a program that passes and of one whose time is up."""
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(3)\n"
        "        open({path!r}, 'w').write('x')\n"
        "    os._exit(0)\n"
    )
    left = [tmp_path / "passes", tmp_path / "late"]
    programs = [daemon.format(path=str(path)) for path in left]
    assert python_tests(timeout=1.0)([programs[0], programs[1] + "time.sleep(60)\n"], ["", ""])[1] == 0.0
    time.sleep(3.5)
    assert not any(path.exists() for path in left)
