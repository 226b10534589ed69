"""Two ranks that share each row are one process: the same rows, losses and weights, to rounding."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.ranks import start_ranks
from tests.e2e.resilience import NO_EVAL, STEP, Drills

CHANGE: dict[str, Any] = {
    "model": {"kernels": "reference"},
    "train": {"max_steps": 4, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
    "checkpoint": {"every_steps": 2},
}
SHARED: dict[str, Any] = {**CHANGE, "launch": {"context_parallel_size": 2}}


def test_two_ranks_that_share_rows_are_one_process_also_when_interrupted(drills: Drills) -> None:
    alone = drills.whole(**CHANGE)
    recipe = drills.recipe("two", **SHARED)
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", STEP, 3),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert "x 1 accumulated, each row on 2 processes" in ranks.said
    ranks = start_ranks(drills, recipe, 2)
    assert ranks.ended() == [0, 0], ranks.said
    for line, other in zip(drills.metrics("two"), drills.metrics(alone), strict=True):
        assert line["step"] == other["step"]
        assert line.get("tokens") == other.get("tokens")
        for name in ("loss", "eval_loss", "grad_norm"):
            assert line.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-5), name
    found = load_file(drills.folder / "two" / "adapter" / "adapter_model.safetensors")
    wanted = load_file(alone / "adapter" / "adapter_model.safetensors")
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_a_rank_that_is_killed_in_an_exchange_ends_the_other(drills: Drills) -> None:
    ranks = start_ranks(
        drills, drills.recipe("r", **{**SHARED, **NO_EVAL, "eval": {}}), 2, prepared={1: (("pause", STEP, 3),)}
    )
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGKILL)
    (ranks.folder / "lost-1").write_text("was killed by SIGKILL")  # as its launcher says
    assert ranks.drills[0].wait() == 75, ranks.said
    assert "rank 1 was killed by SIGKILL" in ranks.said
