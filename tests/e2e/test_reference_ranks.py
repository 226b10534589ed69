"""The reference ahead of training on ranks that hold shards or share rows: kept once, and found by the others."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_kto import FLATTENED as LABELLED
from tests.e2e.test_kto import LOSS as LABEL_LOSS
from tests.e2e.test_preference import LOSS
from tests.e2e.test_preference_ranks import FULL, PAIRS, TWICE, lines, require_close_run, stopped_on_second
from tests.tiers import further, telling

METHODS: dict[str, tuple[dict[str, Any], str]] = {"dpo": (PAIRS, LOSS), "kto": (LABELLED, LABEL_LOSS)}
FSDP: dict[str, Any] = {"launch": {"engine": "fsdp"}}
SHARED: dict[str, Any] = {"launch": {"engine": "ddp", "context_parallel_size": 2}}
BOTH: dict[str, Any] = {"launch": {"engine": "fsdp", "context_parallel_size": 2}}
_TOLD = re.compile(r"reference: scored ahead, (\d+) of (\d+) (?:pairs|rows) found in \S+, (\d+) computed")


def told(said: str) -> tuple[int, int]:
    """How many were found, and how many computed."""
    found = _TOLD.search(said)
    assert found, said
    assert int(found[1]) + int(found[3]) == int(found[2])
    return int(found[1]), int(found[3])


def kept_in(folder: Path) -> dict[str, bytes]:
    """The entries of a cache, by reference and number."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("pairs.bin"))}


def keeping(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    return merged(recipe, {"preference": {"reference_cache": str(folder)}})


@pytest.mark.parametrize("method", ["kto", *further("dpo")])
@pytest.mark.parametrize("base", telling({"NF4": {"quantization": {"method": "nf4"}}, "plain": {}}, "plain"))
def test_two_ranks_with_shards_keep_what_one_process_does(method: str, base: dict[str, Any], drills: Drills) -> None:
    """The same key, the same bits, the same run: whichever of them fills the cache, the other finds it."""
    recipe = merged(METHODS[method][0], base)
    alone = drills.recipe("one", **keeping(merged(recipe, TWICE), drills.folder / "of-one"))
    found, computed = told(drills.run(alone))
    assert (found, computed > 20) == (0, True)
    said = run_ranks(drills, drills.recipe("two", **keeping(merged(recipe, FSDP), drills.folder / "of-two")), 2).said
    assert told(said) == (0, computed)
    assert lines(drills, "two") == lines(drills, "one")
    require_same_weights(drills.folder / "two/adapter", drills.folder / "one/adapter")
    assert kept_in(drills.folder / "of-two") == kept_in(drills.folder / "of-one")
    assert len(kept_in(drills.folder / "of-one")) == 1
    again = drills.recipe("again", **keeping(merged(recipe, FSDP), drills.folder / "of-one"))
    assert told(run_ranks(drills, again, 2).said) == (computed, 0)
    assert lines(drills, "again") == lines(drills, "one")


@pytest.mark.long
def test_a_batch_that_does_not_fit_one_rank_is_halved_on_all_of_them(drills: Drills) -> None:
    recipe = keeping(merged(PAIRS, FSDP), drills.folder / "kept")
    ranks = start_ranks(drills, drills.recipe("two", **recipe), 2, prepared={0: (("scarce", "evaluation", 4),)})
    assert ranks.ended() == [0, 0], ranks.said
    assert "out of memory in the reference with 4 rows at a time: going on with 2" in ranks.said
    alone = drills.recipe("one", **keeping(merged(PAIRS, TWICE), drills.folder / "of-one"))
    drills.run(alone)
    require_close_run(drills, "two", drills.folder / "one")


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", *further("kto")])
def test_all_weights_are_scored_before_they_change_also_when_stopped(method: str, drills: Drills) -> None:
    """There is no second model. What is resumed finds all that it began with, and ends in the same bits."""
    recipe = merged(merged(METHODS[method][0], FSDP), FULL)
    whole = drills.recipe("whole", **keeping(recipe, drills.folder / "kept"))
    said = run_ranks(drills, whole, 2).said
    assert "compared with the model as it starts" in said
    found, computed = told(said)
    assert (found, computed > 20) == (0, True)
    halves = drills.recipe("halves", **keeping(recipe, drills.folder / "of-halves"))
    assert told(stopped_in(METHODS[method][1], drills, halves)) == (0, computed)
    assert told(run_ranks(drills, halves, 2).said) == (computed, 0)
    assert lines(drills, "halves") == lines(drills, "whole")
    require_same_weights(drills.folder / "halves/model", drills.folder / "whole/model")
    alone = merged(recipe, {"launch": {"engine": "single"}})
    drills.run(drills.recipe("one", **keeping(merged(alone, TWICE), drills.folder / "of-one")))
    assert kept_in(drills.folder / "kept") == kept_in(drills.folder / "of-one")
    require_close_run(drills, "whole", drills.folder / "one")


def stopped_in(loss: str, drills: Drills, recipe: str) -> str:
    """What two ranks have said that a signal to the second has stopped in its third micro-batch."""
    if loss == LOSS:
        return stopped_on_second(drills, recipe, 2, 3).said
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", loss, 3),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    return ranks.said


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", *further("kto")])
@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "LoRA"))
def test_ranks_that_share_rows_keep_their_own_and_go_on_alike(method: str, lora: Any, drills: Drills) -> None:
    """Held-out rows are measured whole, so these are found by a process of its own, and training rows are not."""
    change = {} if lora else FULL
    recipe = merged(METHODS[method][0], change)
    whole = drills.recipe("whole", **keeping(merged(recipe, SHARED), drills.folder / "kept"))
    found, computed = told(run_ranks(drills, whole, 2).said)
    assert (found, computed > 20) == (0, True)
    assert len(kept_in(drills.folder / "kept")) == 2
    halves = drills.recipe("halves", **keeping(merged(recipe, SHARED), drills.folder / "of-halves"))
    assert told(stopped_in(METHODS[method][1], drills, halves)) == (0, computed)
    assert told(run_ranks(drills, halves, 2).said) == (computed, 0)
    assert lines(drills, "halves") == lines(drills, "whole")
    assert kept_in(drills.folder / "of-halves") == kept_in(drills.folder / "kept")
    alone = drills.recipe("one", **keeping(recipe, drills.folder / "kept"))
    of_held_out, anew = told(drills.run(alone))
    assert of_held_out == computed - anew
    assert 0 < of_held_out < anew
    require_close_run(drills, "whole", drills.folder / "one")


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", *further("kto")])
def test_four_ranks_with_shards_that_share_rows_are_one_process(method: str, drills: Drills) -> None:
    recipe = merged(merged(METHODS[method][0], FULL), {"train": {"max_steps": 3}, "eval": {"samples": 0}})
    run_ranks(drills, drills.recipe("four", **keeping(merged(recipe, BOTH), drills.folder / "kept")), 4)
    drills.run(drills.recipe("one", **keeping(merged(recipe, TWICE), drills.folder / "of-one")))
    require_close_run(drills, "four", drills.folder / "one")


@pytest.mark.long
@pytest.mark.parametrize("method", ["kto", *further("dpo")])
def test_a_run_goes_on_with_another_number_of_ranks(method: str, drills: Drills) -> None:
    """The steps are those that it began with, so their mismatched rows are known."""
    recipe, loss = METHODS[method]
    recipe = merged(merged(recipe, TWICE), {"quantization": {"method": "nf4"}})
    drills.run(drills.recipe("whole", **keeping(recipe, drills.folder / "kept")))
    halves = drills.recipe("halves", **keeping(recipe, drills.folder / "kept"))
    assert told(drills.stopped(halves, loss, 3, signal.SIGTERM, 75))[1] == 0
    assert told(run_ranks(drills, halves, 2).said)[1] == 0
    assert lines(drills, "halves") == lines(drills, "whole")
    require_same_weights(drills.folder / "halves/adapter", drills.folder / "whole/adapter")


SCORE = "ftcli.methods.preference.pairs:AnswerScorer.score"


@pytest.mark.parametrize("launch", telling({"shards": FSDP, "rows shared": SHARED}, "shards"))
@pytest.mark.parametrize("method", ["dpo", *further("kto")])
def test_ranks_that_are_stopped_or_fail_while_they_score_end_together(
    method: str, launch: dict[str, Any], drills: Drills
) -> None:
    """And what they have not finished is scored when they are started again."""
    recipe = drills.recipe("two", **keeping(merged(METHODS[method][0], launch), drills.folder / "kept"))
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", SCORE, 2),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert "stopped by SIGTERM while scoring the reference" in ranks.said
    failed = start_ranks(drills, recipe, 2, prepared={1: (("fail", SCORE, "no more", 2),)})
    assert failed.ended() == [1, 1], failed.said
    assert kept_in(drills.folder / "kept") == {}
    assert told(run_ranks(drills, recipe, 2).said)[0] == 0
