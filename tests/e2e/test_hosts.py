"""Several hosts: a torchrun for each, on this machine, with folders of its own but for the run's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.resilience import STEP, Drills, require_same_weights

pytestmark = pytest.mark.long

CHANGE: dict[str, Any] = {
    "train": {"max_steps": 5, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
    "checkpoint": {"every_steps": 2},
}
FLATTENED: dict[str, Any] = {
    "model": {"kernels": "reference"},
    "quantization": {"method": "nf4"},
    "launch": {"engine": "fsdp"},
}
TWICE: dict[str, Any] = {"train": {"gradient_accumulation_steps": 2}}


class Host:
    """One host: its torchrun and its rank, with temporary files and a cache of their own. On one with a ``pause`` the
    rank waits in a training step.

    The torchruns are the real ones; a rank is a drill, which has imported everything: eight would do so for 40 s.
    """

    def __init__(self, drills: Drills, number: int, port: int, recipe: str, pause: Path | None = None) -> None:
        own = drills.folder / f"host-{number}"
        own.mkdir(exist_ok=True)
        prepared = [] if pause is None else [["pause", STEP, 4, str(pause)]]
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run1")
        self.log = own / "log"
        with self.log.open("wb") as log:
            self.torchrun = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                    *(*rendezvous, "--no-python", *drills.server.client, "train", recipe, "--offline"),
                ],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TRITON_INTERPRET": "0",
                    "TMPDIR": str(own),
                    "FTCLI_CACHE": str(own / "cache"),
                    "DRILL_PREPARATIONS": json.dumps(prepared),
                },
            )

    def kill(self) -> None:
        """The host is gone, with all its processes at once."""
        for pid in (*self._ranks(), self.torchrun.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.torchrun.wait()

    def _ranks(self) -> list[int]:
        children = Path(f"/proc/{self.torchrun.pid}/task/{self.torchrun.pid}/children")
        return [int(pid) for pid in children.read_text().split()] if children.exists() else []

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")


def until(happened: Callable[[], bool], hosts: list[Host]) -> None:
    """Waits, for as long as all hosts run."""
    while not happened():
        assert all(host.torchrun.poll() is None for host in hosts), "\n".join(host.said for host in hosts)
        time.sleep(0.02)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


def started(drills: Drills, recipe: str, pause: Path | None = None) -> list[Host]:
    """Two hosts; the first one has the meeting point and rank 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first = Host(drills, 0, port, recipe)
    until(lambda: listens(port), [first])
    return [first, Host(drills, 1, port, recipe, pause)]


@pytest.mark.parametrize("engine", [CHANGE, merged(CHANGE, FLATTENED)], ids=["ddp", "fsdp"])
def test_a_host_that_is_gone_ends_the_run_and_the_same_command_goes_on_with_it(
    engine: dict[str, Any], drills: Drills, tmp_path: Path
) -> None:
    """The other host says so and saves the finished steps; the result is that of one process that was never stopped."""
    recipe, pause = drills.recipe("r", **engine), tmp_path / "pause"
    pause.mkdir()
    first, second = hosts = started(drills, recipe, pause)
    try:
        until((pause / "reached").exists, hosts)
        second.kill()
        assert first.torchrun.wait(600) == 1, first.said
        assert "error[FT710]: rank 1 " in first.said
        assert drills.status("r")["exit_code"] == 75
        assert drills.checkpoints("r") == ["step-00000002", "step-00000003"]
        hosts += started(drills, recipe)
        for host in hosts[2:]:
            assert host.torchrun.wait(600) == 0, host.said
    finally:
        for host in hosts:
            host.kill()
    assert f"resuming from {drills.folder}/r/checkpoints/step-00000003" in hosts[2].said
    assert "train 5/5" not in hosts[3].said
    whole = drills.whole(**merged(engine, TWICE))
    assert drills.metrics("r") == drills.metrics(whole)
    require_same_weights(drills.folder / "r" / "adapter", whole / "adapter")
