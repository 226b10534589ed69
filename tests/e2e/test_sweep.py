"""`ftcli sweep` with real runs: stopped in the middle and repeated. tests/e2e/test_docs.py runs sweeps to their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import NARROW, RECIPE, merged
from tests.e2e.drill import Server

LONG = {"train": {"max_steps": 2000}, "checkpoint": {"every_steps": 5}, "data": {"eval": []}}
WORDS = ["sweep", "r.yaml", "--set", "train.learning_rate=1e-3,5e-3", "--offline", "--json"]
FIRST = Path("runs/r/train.learning_rate=0.001")


def started(server: Server, folder: Path, *more: str, shortcuts: Sequence[list[str]] = ()) -> subprocess.Popen[str]:
    """The sweep and its runs in forks of the server."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-of-test",
        "DRILL_PREPARATIONS": json.dumps([["warm_children", server.socket], *shortcuts]),
    }
    return subprocess.Popen(
        [*server.client, *WORDS, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], status: int) -> dict[str, Any]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, err
    assert "Traceback" not in err
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.slow
def test_a_sweep_is_stopped_and_goes_on(tmp_path: Path, drill_server: Server) -> None:
    values = merged({**RECIPE, "model": NARROW}, LONG)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    process = started(drill_server, tmp_path)
    deadline = time.monotonic() + 600
    while not list((tmp_path / FIRST / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    document = ended(process, 75)
    assert "0 of 2 runs are complete" in document["findings"][-1]["message"]
    status = json.loads((tmp_path / FIRST / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    stopped_at = max(path.name for path in (tmp_path / FIRST / "checkpoints").glob("step-*"))
    process = started(drill_server, tmp_path, "--gpus", "1", shortcuts=[["warm_check"]])
    while not (tmp_path / FIRST / "status.json").read_text().count('"running"'):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    resumed = json.loads((tmp_path / FIRST / "status.json").read_text())["resumed_from"]
    assert resumed is not None
    assert resumed.endswith(stopped_at)
    process.send_signal(signal.SIGINT)
    ended(process, 130)
