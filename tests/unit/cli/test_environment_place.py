"""Which rank a process is, and which GPU is its own, follows from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.cli import environment as module
from ftcli.cli.environment import own_gpu, place_of, refuse_copies
from ftcli.errors import FtcliError
from ftcli.ranks import Place

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_rank_of_torchrun_knows_its_place() -> None:
    found = place_of(TORCHRUN)
    assert found == Place(3, 4, 1, 2, "host0", 29500, None, hosted=True)
    assert found.local_leader == 2
    assert not found.leads


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"])
def test_what_is_not_complete_is_somebodys_leavings(missing: str) -> None:
    assert place_of({name: value for name, value in TORCHRUN.items() if name != missing}) is None
    assert place_of({**TORCHRUN, "RANK": "first"}) is None


def test_a_rank_of_ours_knows_its_place(tmp_path: Path) -> None:
    ours = {name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    assert place_of({**ours, "FTCLI_GROUP": str(tmp_path)}) == Place(3, 4, 1, 2, folder=tmp_path)


def test_a_rank_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = place_of(TORCHRUN)
    monkeypatch.setattr(module, "gpus_of_host", lambda: 2)
    assert own_gpu({}, rank) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert own_gpu({"CUDA_VISIBLE_DEVICES": "4, 6"}, rank) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert own_gpu({"CUDA_VISIBLE_DEVICES": "4"}, rank) == {}  # its launcher has given it one
    assert own_gpu({}, None) == {}
    assert own_gpu({}, Place(1, 2, 1, 2, folder=tmp_path)) == {}  # ours has given it one
    monkeypatch.setattr(module, "gpus_of_host", lambda: None)
    assert own_gpu({}, rank) == {}


def test_copies_that_srun_has_started_are_refused() -> None:
    with pytest.raises(FtcliError, match="FT517"):
        refuse_copies({"SLURM_STEP_NUM_TASKS": "8"}, None)
    refuse_copies({"SLURM_STEP_NUM_TASKS": "8"}, place_of(TORCHRUN))
    refuse_copies({"SLURM_STEP_NUM_TASKS": "1"}, None)
    refuse_copies({}, None)
