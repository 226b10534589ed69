"""Two ranks of a run, of which some are stopped, killed or asked to end at random moments, or their launcher is: the
command ends with a status that is promised, nothing is left, and the run goes on to the bytes of one never disturbed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.conftest import merged
from tests.e2e.resilience import NO_EVAL, Drills, require_same_weights
from tests.e2e.test_ranks_grpo import CHANGE as GRPO
from tests.e2e.test_ranks_silence import ranks_of, until_gone
from tests.fuzz.budget import examples

if TYPE_CHECKING:
    from tests.e2e.drill import Drill, Server

#: Starts a process in a session of its own at each call, and leaves it.
_REWARD = """
import subprocess
def score(completions, prompts, **columns):
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
    return [float(len(text)) for text in completions]
"""
_SFT: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep_last": 9}}
_TWO, _TWICE = {"launch": {"num_processes": 2}}, {"train": {"gradient_accumulation_steps": 2}}
#: Without a sign of life, before a rank counts as lost; on a machine that is busy with other things as well.
_SILENT = 3.0
_LIMIT = 60.0

_STOPPED = {-signal.SIGKILL, 0, 75, 130}
_signals = st.sampled_from([signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
#: What is sent, to which rank or (2) to the launcher, and how long after the start.
_faults = st.lists(st.tuples(_signals, st.integers(0, 2), st.floats(0, 4)), min_size=1, max_size=3)


@examples(1, 4)
@given(faults=_faults, command=st.sampled_from(["train", "grpo"]))
def test_ranks_that_are_disturbed(
    drill_server: Server, faults: list[tuple[signal.Signals, int, float]], command: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        drills = Drills(Path(name), drill_server)
        mark = f"6{time.monotonic_ns()}"
        change = _SFT
        if command == "grpo":
            (drills.folder / "mine.py").write_text(_REWARD.format(mark=mark), encoding="utf-8")
            change = merged(GRPO, {**NO_EVAL, "eval": {"every_steps": None, "tasks": []}})
            change["grpo"]["rewards"] = [{"file": f"{drills.folder}/mine.py:score"}]
        recipe, whole = drills.recipe("r", **merged(change, _TWO)), drills.recipe("whole", **merged(change, _TWICE))
        drills.run(whole, command=command)
        for number, member, seconds in faults:
            drill = drills.start(recipe, prepared=(("forked_ranks", _SILENT),), command=command)
            _disturb(drill, number, member, seconds)
            if not (member == 2 and number == signal.SIGKILL) and (drills.folder / "r" / "status.json").exists():
                assert drills.status("r")["state"] != "running", drill.said
            _nothing_is_left(mark)
        drill = drills.start(recipe, prepared=(("forked_ranks", _SILENT),), command=command)
        assert drill.wait() == 0, drill.said
        assert drills.metrics("r") == drills.metrics("whole")
        require_same_weights(drills.folder / "r" / "adapter", drills.folder / "whole" / "adapter")
        assert not list((drills.folder / "r").rglob("*.tmp*")), "something is left behind"


def _disturb(drill: Drill, number: signal.Signals, member: int, seconds: float) -> None:
    """Sends the signal and waits for the end, of the command and of its ranks."""
    drill.release()
    while not drill.said and drill.connection.fileno() >= 0 and not _over(drill):
        time.sleep(0.01)  # before its first word it may not have come to handle signals yet
    ranks = [] if _over(drill) else ranks_of(drill)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        if not _over(drill):
            os.kill([*ranks, drill.pid][member], number)
    if number == signal.SIGSTOP and member == 2:  # as by Ctrl-Z, and `fg`
        time.sleep(1.0)
        with contextlib.suppress(ProcessLookupError):  # it may have ended before it was stopped
            drill.signal(signal.SIGCONT)
    assert drill.wait(_LIMIT) in _STOPPED, drill.said
    until_gone(ranks, _LIMIT)
    assert "Traceback" not in drill.said, drill.said
    assert "FT190" not in drill.said, drill.said


def _over(drill: Drill) -> bool:
    try:
        return Path(f"/proc/{drill.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _nothing_is_left(mark: str) -> None:
    deadline = time.monotonic() + 600
    while found := [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _words(path)]:
        assert time.monotonic() < deadline, f"{found}: left behind by a reward"
        time.sleep(0.05)


def _words(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
