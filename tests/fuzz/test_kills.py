"""A short run that is killed at random moments and started again: in the end it has the same bytes as one that was not."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.resilience import Drills
from tests.fuzz.budget import examples

if TYPE_CHECKING:
    from tests.e2e.drill import Server

_SETTINGS: tuple[dict[str, Any], ...] = (
    {"checkpoint": {"every_steps": 1, "keep_last": 9}},
    {"checkpoint": {"every_steps": 2, "keep_last": 9, "keep_best": True}, "eval": {"every_steps": 2}},
)
#: Statuses of a command that was stopped: by SIGKILL, by a request, before or after it had something to save.
_STOPPED = {-signal.SIGKILL, 0, 75, 130}
_stops = st.lists(
    st.tuples(st.sampled_from([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]), st.floats(0, 2.5)),
    min_size=1,
    max_size=4,
)


@examples(1, 5)
@given(stops=_stops, change=st.sampled_from(_SETTINGS))
def test_killed_runs(drill_server: Server, stops: list[tuple[signal.Signals, float]], change: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        drills = Drills(Path(name), drill_server)
        whole = drills.whole(**change)
        recipe = drills.recipe("r", **change)
        for number, seconds in stops:
            drill = drills.start(recipe)
            while number != signal.SIGKILL and not drill.said:
                time.sleep(0.01)  # before its first word it may not have come to handle signals yet
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                drill.signal(number)
            if drill.wait() == -signal.SIGTERM:  # behind the end of a run nobody listens any more
                assert drills.status("r")["state"] == "completed", drill.said
            else:
                assert drill.status in _STOPPED, drill.said
            assert "Traceback" not in drill.said, drill.said
            assert "FT190" not in drill.said, drill.said
        drills.run(recipe)
        drills.require_same_run("r", whole)
        assert not list((drills.folder / "r").rglob("*.tmp*")), "something is left behind"
        shutil.rmtree(drills.folder / "r")


@pytest.mark.long
@examples(1, 5)
@given(stops=_stops)
def test_killed_sampling(drill_server: Server, stops: list[tuple[signal.Signals, float]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        drills = Drills(Path(name), drill_server)
        data = {"train": [{"path": "bundled:smoke-train", "max_rows": 12}], "eval": []}
        tasks = [{"use": "regex", "pattern": "[a-m]"}]
        evaluation = {"tasks": tasks, "per_device_eval_batch_size": 128, "generate": {"max_new_tokens": 6}}
        recipe = drills.recipe("r", data=data, eval=evaluation)
        words = ("sample", recipe, "--offline", "-n", "512", "--truncated", "keep", "--output")
        environment = {"FTCLI_CACHE": drill_server.cache}
        for number, seconds in [*stops, (None, 0.0)]:
            drill = drill_server.start(*words, "cut", cwd=drills.folder, environment=environment)
            while number not in (None, signal.SIGKILL) and not drill.said:
                time.sleep(0.01)
            time.sleep(seconds)
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    drill.signal(number)
            status = drill.wait()
            assert status in (_STOPPED if number is not None else {0}), drill.said
            assert "Traceback" not in drill.said, drill.said
        assert drill_server.start(*words, "whole", cwd=drills.folder, environment=environment).wait() == 0
        for file in ("answers.jsonl", "scores.jsonl", "sft.jsonl", "pairs.jsonl"):
            assert (drills.folder / "cut" / file).read_bytes() == (drills.folder / "whole" / file).read_bytes(), file
        assert not list((drills.folder / "cut").glob(".tmp*")), "something is left behind"
