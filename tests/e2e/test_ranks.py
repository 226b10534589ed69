"""Several ranks are one run: the same numbers and exit codes, and nothing lost when one of them stops or fails."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import NO_EVAL, SAVE, STEP, Drills, require_same_weights
from tests.e2e.test_families import folder_of
from tests.tiers import telling

#: 40 rows are ten batches: four ranks take three steps an epoch, and two of them have no batch left in the third.
CHANGE: dict[str, Any] = {
    "train": {"max_steps": 4, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
    "checkpoint": {"every_steps": 2},
}
FOUR = {**CHANGE, "train": {**CHANGE["train"], "gradient_accumulation_steps": 4}}
UNTESTED = {**CHANGE, **NO_EVAL, "eval": {}}
TWO = {**CHANGE, "train": {**CHANGE["train"], "gradient_accumulation_steps": 2}}


def test_two_ranks_are_one_process_that_accumulates_twice_bit_for_bit(drills: Drills) -> None:
    alone = drills.whole(**TWO)
    ranks = start_ranks(drills, drills.recipe("two", **CHANGE), 2, cache=drills.folder / "cache")  # one fills it
    assert ranks.ended() == [0, 0], ranks.said
    assert drills.metrics("two") == drills.metrics(alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    assert drills.checkpoints("two") == drills.checkpoints(alone)


@pytest.mark.parametrize("full", telling({"adapters": False, "whole": True}, "whole"))
def test_two_ranks_train_delta_nets_as_one_process_that_accumulates(full: bool, drills: Drills, tmp_path: Path) -> None:
    """Qwen3.5 on its multimodal checkpoint, on packed rows: what learns in a delta net besides linear layers (filter,
    A_log, dt_bias, norm) has its gradient from both ranks too, and what takes images from none.
    """
    base = folder_of("qwen3_5", tmp_path / "base")
    recipe = merged(UNTESTED, {"model": {"name_or_path": str(base), "kernels": "reference"}, "data": {"packing": True}})
    recipe = merged(recipe, {"lora": None, "train": {"learning_rate": 1e-4}} if full else {})
    alone = drills.whole(**merged(recipe, {"train": {"gradient_accumulation_steps": 2}}))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    pairs = list(zip(drills.metrics("two"), drills.metrics(alone), strict=True))
    for line, other in pairs:  # the norm of all of a model's gradients is summed in another order, and clips them
        assert line == (pytest.approx(other, rel=1e-6) if full else other)
    result = "model/model.safetensors" if full else "adapter/adapter_model.safetensors"
    before = load_file(base / "model.safetensors")
    found, wanted = (load_file(run / result) for run in (drills.folder / "two", alone))
    assert found.keys() == wanted.keys()
    for name in wanted:  # a step moves a weight by 1e-4
        assert torch.allclose(found[name], wanted[name], rtol=0, atol=5e-6 if full else 0.0), name
    if full:
        learnt = {name for name in wanted if not torch.equal(wanted[name], before[name])}
        assert {name for name in before if ".visual." not in name} == learnt


def test_a_run_goes_on_with_other_numbers_of_ranks_and_its_steps_stay_what_they_were(drills: Drills) -> None:
    alone = drills.whole(**FOUR)
    recipe = drills.recipe("r", **CHANGE)
    for count, steps in ((4, 2), (2, 1)):
        # Stopped after its checkpoint, as by a scheduler.
        ranks = start_ranks(drills, recipe, count, prepared={count - 1: (("pause", STEP, steps),)})
        ranks.drills[-1].until_reached()
        for drill in ranks.drills:
            drill.signal(signal.SIGTERM)
        ranks.drills[-1].release()
        assert ranks.ended() == [75] * count, ranks.said
        assert "checkpoint written" in ranks.said
    said = drills.run(recipe)
    assert "a step of this run learns from 4 micro-batches: 1 x 4 accumulated" in said
    found, wanted = (load_file(run / "adapter/adapter_model.safetensors") for run in (drills.folder / "r", alone))
    for name in wanted:  # four gradients were added up in another order
        assert torch.allclose(found[name], wanted[name], rtol=1e-3, atol=1e-6), name
    for line, other in zip(drills.metrics("r"), drills.metrics(alone), strict=True):
        assert line["step"] == other["step"]
        assert line.get("tokens") == other.get("tokens")
        assert line.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)


def test_ranks_that_cannot_share_a_step_are_refused(drills: Drills) -> None:
    recipe = drills.recipe("r", **FOUR)
    drills.run(recipe, "--max-steps", "4", prepared=(("fail", STEP, "no more", 10),), status=1)
    ranks = start_ranks(drills, recipe, 3)
    assert ranks.ended()[0] == 2, ranks.said
    assert "FT737" in ranks.said
    assert "1 or 2 or 4 processes" in ranks.said


def test_a_run_on_two_ranks_that_is_interrupted_is_the_same_run(drills: Drills) -> None:
    dropping = {**CHANGE, "lora": {"dropout": 0.1}}
    whole, recipe = drills.recipe("whole", **dropping), drills.recipe("r", **dropping)
    run_ranks(drills, whole, 2)
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", STEP, 3),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGINT)  # only one of them is told
    ranks.drills[1].release()
    assert ranks.ended() == [130, 130], ranks.said
    assert "stopped by SIGINT after step 3" in ranks.said
    run_ranks(drills, recipe, 2)
    assert drills.metrics("r") == drills.metrics("whole")
    require_same_weights(drills.folder / "r" / "adapter", drills.folder / "whole" / "adapter")


@pytest.mark.parametrize(
    ("rank", "prepared", "status", "words"),
    [
        (1, ("spoil", STEP, 3), 6, ("FT702", "the loss of rank 1 is nan at step 3", "rows of that batch: ")),
        (
            1,
            ("starve", STEP, 4, 1 << 20),
            5,
            ("FT703", "rank 1: out of memory", "bundled:smoke-train:", "step-00000003"),
        ),
        (1, ("fail", STEP, "no such thing", 4), 1, ("FT190", "rank 1: this is a bug", "no such thing")),
        (0, ("small_files", 50_000), 3, ("FT724",)),
    ],
    ids=["NaN", "memory", "a bug", "disk"],
)
def test_what_fails_on_one_rank_ends_all_of_them_with_its_exit_code(
    rank: int, prepared: tuple[Any, ...], status: int, words: tuple[str, ...], drills: Drills
) -> None:
    ranks = start_ranks(drills, drills.recipe("r", **UNTESTED), 2, prepared={rank: (prepared,)})
    assert ranks.ended()[0] == status, ranks.said
    for word in words:
        assert word in ranks.said
    assert ranks.said.count("error[") == 1
    assert drills.status("r")["exit_code"] == status
    if status in (1, 5):  # the steps that all have finished are saved
        assert drills.checkpoints("r") == ["step-00000002", "step-00000003"]
        assert ranks.said.count("--resume") == (status == 5)


def test_a_rank_that_is_killed_is_named_and_the_steps_are_saved(drills: Drills) -> None:
    ranks = start_ranks(drills, drills.recipe("r", **UNTESTED), 2, prepared={1: (("pause", STEP, 4),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGKILL)
    assert ranks.drills[1].wait() == -9
    (ranks.folder / "lost-1").write_text("was killed by SIGKILL")  # as its launcher says
    assert ranks.drills[0].wait() == 75, ranks.said
    assert "rank 1 was killed by SIGKILL" in ranks.said, ranks.said[-2000:]
    assert drills.checkpoints("r") == ["step-00000002", "step-00000003"]
    assert drills.status("r")["state"] == "preempted"


def test_a_signal_while_a_checkpoint_is_written_ends_all_ranks_after_it(drills: Drills) -> None:
    ranks = start_ranks(drills, drills.recipe("r", **UNTESTED), 2, prepared={0: (("pause", SAVE, 1),)})
    ranks.drills[0].until_reached()
    (ranks.folder / "signal").write_text("SIGTERM")  # which the launcher passes on so that it cannot count twice
    for drill in ranks.drills:
        drill.signal(signal.SIGHUP)
    ranks.drills[0].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert "stopped by SIGTERM" in ranks.said
    assert drills.checkpoints("r")[0] == "step-00000002"


def test_a_rank_that_hangs_is_named_while_it_is_waited_for_and_given_up_in_the_end(drills: Drills) -> None:
    prepared = {0: (("hurried", 60.0),), 1: (("pause", STEP, 3),)}
    ranks = start_ranks(drills, drills.recipe("r", **UNTESTED), 2, prepared=prepared)
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGSTOP)
    ranks.drills[0].release()
    assert ranks.drills[0].wait() == 75, ranks.said
    assert ranks.drills[1].wait() == -9, "whoever waits for it ends it"
    assert "waiting for rank 1 (" in ranks.said
    assert "rank 1 has given no sign of life for 3 s" in ranks.said, ranks.said[-1500:]
    assert drills.checkpoints("r") == ["step-00000002"]


def test_ranks_of_torchrun_join_and_what_it_left_behind_does_not(drills: Drills) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "1"}
    ranks = start_ranks(drills, drills.recipe("r", train={"max_steps": 1}), 2, environment=launcher)
    assert ranks.ended() == [0, 0], ranks.said
    assert "x 2 processes" in ranks.said
    left = {**launcher, "RANK": "0", "WORLD_SIZE": "2"}
    drill = drills.server.start(
        *("train", drills.recipe("left", train={"max_steps": 1}), "--offline"), cwd=drills.folder, environment=left
    )
    assert drill.wait() == 0, drill.said
    assert "one process is used" in drill.said
