"""A rank that is stopped or killed ends the command, with its exit status, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.e2e.drill import Drill
from tests.e2e.ranks import start_ranks
from tests.e2e.resilience import NO_EVAL, STEP, Drills, require_same_weights

CHANGE: dict[str, Any] = {
    **NO_EVAL,
    "train": {"max_steps": 4, "lr_scheduler_type": "constant"},
    "eval": {},
    "checkpoint": {"every_steps": 2, "keep_last": 9},
}
TWICE: dict[str, Any] = {**CHANGE, "train": {**CHANGE["train"], "gradient_accumulation_steps": 2}}
#: Without a sign of life, before a rank counts as lost.
SECONDS = 2.0
_TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "1"}


def launched(drills: Drills, *pauses: Any) -> Drill:
    """`ftcli train` with two ranks, each of which makes the pauses."""
    recipe = drills.recipe("r", **CHANGE, launch={"num_processes": 2})
    return drills.start(recipe, prepared=(("forked_ranks", SECONDS), *pauses))


def ranks_of(drill: Drill) -> list[int]:
    """The processes that a launcher has started, rank 0 first."""
    children = Path(f"/proc/{drill.pid}/task/{drill.pid}/children")
    while len(found := children.read_text().split()) < 2:
        time.sleep(0.01)
    return [int(pid) for pid in found]


def until_gone(pids: list[int], seconds: float = 30.0) -> None:
    """Waits until none of the processes runs."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_ends_the_command_which_then_goes_on(stopped: int, drills: Drills) -> None:
    drill = launched(drills, ("pause", STEP, 4))
    drill.until_reached()
    ranks = ranks_of(drill)
    os.kill(ranks[stopped], signal.SIGSTOP)
    drill.release()
    assert drill.wait() == 75, drill.said
    until_gone(ranks)
    assert f"rank {stopped} has given no sign of life for 2 s" in drill.said
    assert drill.said.count("error[FT710]") == 1
    status = drills.status("r")
    assert (status["state"], status["exit_code"], status["resumable"]) == ("preempted", 75, True)
    drills.run(f"{drills.folder}/r.yaml", "--set", "launch.num_processes=1")
    require_same_weights(drills.folder / "r" / "adapter", drills.whole(**TWICE) / "adapter")


def test_a_rank_that_is_stopped_before_it_has_met_the_others_ends_the_command(drills: Drills) -> None:
    drill = launched(drills, ("pause", "ftcli.run.process_group:meeting_point", 1))
    drill.until_reached()
    ranks = ranks_of(drill)
    os.kill(ranks[0], signal.SIGSTOP)
    drill.release()
    assert drill.wait() == 75, drill.said
    until_gone(ranks)
    assert "error[FT710]: rank 0 has given no sign of life" in drill.said


@pytest.mark.parametrize("stopped", [None, 0], ids=["all run", "rank 0 is stopped"])
def test_ranks_end_when_their_launcher_is_killed(stopped: int | None, drills: Drills) -> None:
    drill = launched(drills, ("pause", STEP, 3))
    drill.until_reached()
    ranks = ranks_of(drill)
    if stopped is not None:
        os.kill(ranks[stopped], signal.SIGSTOP)
    drill.signal(signal.SIGKILL)
    assert drill.wait() == -signal.SIGKILL  # under load it lives on for longer than the steps that are left take
    drill.release()
    until_gone(ranks)
    assert drills.status("r")["state"] == "preempted"
    assert drills.checkpoints("r")[0] == "step-00000002"


@pytest.fixture
def agent() -> Iterator[dict[str, str]]:
    """What torchrun sets where what ranks say to each other is in a store of its own."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield {**_TORCHRUN, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def test_a_rank_0_of_torchrun_that_is_stopped_is_ended_and_told_by_another_one(
    drills: Drills, agent: dict[str, str]
) -> None:
    prepared = dict.fromkeys(range(2), (("impatient", SECONDS), ("pause", STEP, 3)))
    ranks = start_ranks(drills, drills.recipe("r", **CHANGE), 2, environment=agent, prepared=prepared)
    for drill in ranks.drills:
        drill.until_reached()
    leader, other = ranks.drills
    leader.signal(signal.SIGSTOP)
    for drill in ranks.drills:
        drill.release()
    assert other.wait(30) == 75, other.said
    assert leader.wait(5) == -signal.SIGKILL
    assert "error[FT710]: rank 0 has given no sign of life for 2 s" in other.said
    status = json.loads((drills.folder / "r" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("preempted", 75)


def test_silence_of_the_rank_that_holds_what_all_say_is_told_as_its_own(drills: Drills) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = {**_TORCHRUN, "MASTER_PORT": str(port)}
    prepared = dict.fromkeys(range(3), (("impatient", SECONDS), ("pause", STEP, 2)))
    ranks = start_ranks(drills, drills.recipe("r", **CHANGE), 3, environment=launcher, prepared=prepared)
    for drill in ranks.drills:
        drill.until_reached()
    ranks.drills[0].signal(signal.SIGSTOP)
    for drill in ranks.drills:
        drill.release()
    assert [drill.wait(30) for drill in ranks.drills[1:]] == [75, 75]
    assert ranks.drills[0].wait(5) == -signal.SIGKILL
    assert drills.status("r")["state"] == "preempted"
