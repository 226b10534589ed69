"""Weights that are sharded over ranks (``launch.engine: fsdp``): the same run, however it ends."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftcli.model.fsdp import UNSHARDED_LAYERS
from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import NO_EVAL, SAVE, STEP, Drills, require_same_weights
from tests.e2e.test_families import folder_of
from tests.tiers import telling

#: 6 held-out rows are three batches: in the last round one of two ranks has none.
FSDP: dict[str, Any] = {
    "model": {"kernels": "reference"},
    "launch": {"engine": "fsdp"},
    "train": {"max_steps": 4, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 1, "generate": {"max_new_tokens": 2}},
    "checkpoint": {"every_steps": 2},
}
SAMPLED: dict[str, Any] = merged(FSDP, {"eval": {"samples": 3, "generate": {"max_new_tokens": 4}}})
#: Where nothing is asked of evaluation.
UNTESTED: dict[str, Any] = {**FSDP, **NO_EVAL, "eval": {}}
TWICE: dict[str, Any] = {"train": {"gradient_accumulation_steps": 2}}
FULL: dict[str, Any] = {"lora": None, "train": {"learning_rate": 1e-4}}
NF4: dict[str, Any] = {"quantization": {"method": "nf4"}}
#: So that there is a layer of each kind.
LAYERS = {"qwen3_5_text": 4}
NF4_AGAIN: dict[str, Any] = merged(NF4, {"train": {"gradient_checkpointing": True}})


def require_close(folder: Path, other: Path) -> None:
    """Weights of full fine-tuning: sums of squares and of gradients are added in another order."""
    (name,) = (path.name for path in other.glob("*.safetensors"))
    found, wanted = (load_file(each / name) for each in (folder, other))
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], rtol=1e-3, atol=2e-5), name


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(NF4_AGAIN, id="nf4, layers again"),
        pytest.param(
            {"quantization": {"method": "fp8"}, "train": {"gradient_checkpointing": "selective"}},
            id="fp8, selective",
            marks=pytest.mark.long,
        ),
        pytest.param({"train": {"gradient_checkpointing": "offload"}}, id="plain, offload", marks=pytest.mark.long),
    ],
)
def test_two_ranks_are_one_process_that_accumulates_twice_bit_for_bit(change: dict[str, Any], drills: Drills) -> None:
    recipe = merged(SAMPLED, change)
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert drills.metrics("two") == drills.metrics(alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    assert drills.checkpoints("two") == drills.checkpoints(alone)
    evaluations = [json.loads((run / "eval.json").read_text()) for run in (drills.folder / "two", alone)]
    assert len(evaluations[0]["samples"]) == 3
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("phi3", "none"),
        *(
            pytest.param(name, method, marks=pytest.mark.long)
            for name in ("phi3", "qwen3_5_text", "youtu")
            for method in ("nf4", "fp8")
        ),
    ],
)
def test_a_model_whose_projections_are_one_linear_is_sharded(
    model_type: str, method: str, drills: Drills, tmp_path: Path
) -> None:
    """Phi-3: nothing of a layer is joined, and its adapters' outputs are those of q, k and v together. Qwen3.5: four
    that enter a delta net are joined; Youtu: two that give latents. Each rank loads half of the layers from the third
    on.
    """
    base = folder_of(model_type, tmp_path / "base", num_hidden_layers=LAYERS.get(model_type, UNSHARDED_LAYERS + 1))
    recipe = merged(FSDP, {"model": {"name_or_path": str(base)}, "quantization": {"method": method}})
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert drills.metrics("two") == drills.metrics(alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        pytest.param(
            *(name, change),
            id=f"{name}-{kind}",
        )
        for name in ("cohere2", "qwen3_5_text", "starcoder2", "olmo2", "ministral3", "glm4", "youtu")
        for kind, change in (("adapters", {}), ("whole", FULL))
    ],
)
def test_layers_of_other_forms_are_sharded(
    model_type: str, change: dict[str, Any], drills: Drills, tmp_path: Path
) -> None:
    """LayerNorm before parallel halves, an MLP without a gate, norms over the width, queries scaled by position, four
    norms around joined projections, delta nets between layers that attend.
    """
    base = folder_of(model_type, tmp_path / "base", num_hidden_layers=LAYERS.get(model_type, UNSHARDED_LAYERS + 1))
    recipe = merged(merged(UNTESTED, {"model": {"name_or_path": str(base)}}), change)
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    if change:
        require_close(drills.folder / "two" / "model", alone / "model")
    else:
        assert drills.metrics("two") == drills.metrics(alone)
        require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [{}, {"launch": {"engine": "ddp"}}, {"launch": {"engine": "ddp", "context_parallel_size": 2}}],
    ids=["fsdp", "ddp", "rows shared"],
)
def test_a_mixture_with_latent_attention_on_two_ranks(change: dict[str, Any], drills: Drills, tmp_path: Path) -> None:
    """GLM-4.7-Flash: each rank has all experts, or half of each row's heads."""
    base = folder_of("glm4_moe_lite", tmp_path / "base", num_hidden_layers=UNSHARDED_LAYERS + 1)
    recipe = merged(merged(UNTESTED, {"model": {"name_or_path": str(base)}}), change)
    shared = "context_parallel_size" in change.get("launch", {})
    alone = drills.whole(
        **merged(recipe, {"launch": {"engine": "single", "context_parallel_size": 1}} | ({} if shared else TWICE))
    )
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    found, wanted = ([line["loss"] for line in drills.metrics(run)] for run in ("two", alone))
    assert found == pytest.approx(wanted, rel=1e-5)
    if not change:  # what is adapted as a parameter is not joined with its neighbour in shards: another order of sums
        require_close(drills.folder / "two" / "adapter", alone / "adapter")
    elif not shared:
        require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")


def test_batches_that_do_not_fit_one_rank_are_halved_on_all_of_them(drills: Drills) -> None:
    scarce = {0: (("scarce", "generation", 1),), 1: (("scarce", "evaluation", 1),)}
    recipe = merged(SAMPLED, NF4_AGAIN)
    ranks = start_ranks(drills, drills.recipe("r", **recipe), 2, prepared=scarce)
    assert ranks.ended() == [0, 0], ranks.said
    for what in ("evaluation", "generation"):
        assert f"out of memory in {what} with 2 rows at a time: going on with 1" in ranks.said
    alone = drills.whole(**merged(recipe, TWICE))
    found, wanted = (json.loads((run / "eval.json").read_text()) for run in (drills.folder / "r", alone))
    assert found["samples"] == wanted["samples"]
    assert found["run"]["loss"] == pytest.approx(wanted["run"]["loss"], rel=1e-6)
    require_same_weights(drills.folder / "r" / "adapter", alone / "adapter")


def test_a_row_that_does_not_fit_one_rank_ends_all_of_them(drills: Drills) -> None:
    scarce = {1: (("scarce", "evaluation", 0),)}
    ranks = start_ranks(drills, drills.recipe("r", **FSDP), 2, prepared=scarce)
    assert ranks.ended() == [5, 5], ranks.said
    assert "error[FT761]: rank 1: " in ranks.said
    assert "one row alone does not fit into memory in evaluation" in ranks.said
    assert ranks.said.count("error[") == 1


#: Two copies of the model, each sharded over two ranks.
COPIES: dict[str, Any] = {"launch": {"dp_replicate_size": 2}}


def accumulating(count: int) -> dict[str, Any]:
    return {"train": {"gradient_accumulation_steps": count}}


@pytest.mark.parametrize(("change", "accumulated"), telling({"adapters": (NF4, 1), "full": (FULL, 2)}, "adapters"))
def test_copies_of_shards_are_one_run(change: dict[str, Any], accumulated: int, drills: Drills) -> None:
    three = {"train": {"max_steps": 3}, "eval": {"every_steps": 3}}  # in the third, two ranks have no batch
    recipe = merged(merged(FSDP, change), three)
    alone = drills.whole(**merged(recipe, accumulating(4 * accumulated)))
    asked = merged(recipe, COPIES) if change is FULL else recipe  # on two hosts there is one on each
    hosts = 1 if change is FULL else 2
    ranks = run_ranks(drills, drills.recipe("four", **merged(asked, accumulating(accumulated))), 4, hosts=hosts)
    assert "weights: sharded over 2 processes, 2 copies of them" in ranks.said
    require_close_run(drills, "four", alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "change", telling({"adapters": merged(NF4, {"train": {"max_steps": 3}}), "full": FULL}, "full")
)
def test_ranks_that_share_rows_share_weights_too(change: dict[str, Any], drills: Drills) -> None:
    recipe = merged(FSDP, change)
    run_ranks(drills, drills.recipe("four", **merged(recipe, {"launch": {"context_parallel_size": 2}})), 4)
    require_close_run(drills, "four", drills.whole(**merged(recipe, TWICE)))


def require_close_run(drills: Drills, name: str, other: Path) -> None:
    for line, wanted in zip(drills.metrics(name), drills.metrics(other), strict=True):
        assert line["step"] == wanted["step"]
        assert line.get("tokens") == wanted.get("tokens")
        for key in ("loss", "eval_loss", "grad_norm"):
            assert line.get(key, 0) == pytest.approx(wanted.get(key, 0), rel=1e-5), key
    for result in (each.name for each in (other / "adapter", other / "model") if each.is_dir()):
        require_close(drills.folder / name / result, other / result)


@pytest.mark.long
@pytest.mark.slow
def test_a_full_fine_tune_that_a_signal_stops_in_an_evaluation_goes_on_on_two_ranks_and_on_one(drills: Drills) -> None:
    change = merged(FSDP, FULL)
    alone = drills.whole(**merged(change, TWICE))
    whole, recipe = drills.recipe("whole", **change), drills.recipe("r", **change)
    run_ranks(drills, whole, 2)
    require_close(drills.folder / "whole" / "model", alone / "model")
    for line, other in zip(drills.metrics("whole"), drills.metrics(alone), strict=True):
        assert line.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-5)
        assert line.get("eval_loss", 0) == pytest.approx(other.get("eval_loss", 0), rel=1e-5)
    # The evaluation before training has two rounds of batches, and that after step 2 begins with the third.
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", "ftcli.evaluate.loss:try_forward", 3),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)  # one of them is told, between two batches: all stop there
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert drills.checkpoints("r") == ["step-00000002"]
    again = drills.folder / "again"
    (drills.folder / "r").rename(again)
    for name in ("two", "one"):  # from one checkpoint both ways
        _copied(again, drills.folder / name)
    run_ranks(drills, drills.recipe("two", **change), 2)
    require_same_weights(drills.folder / "two" / "model", drills.folder / "whole" / "model")
    assert drills.metrics("two") == drills.metrics("whole")
    said = drills.run(drills.recipe("one", **change))
    assert "1 x 2 accumulated" in said
    require_close(drills.folder / "one" / "model", drills.folder / "whole" / "model")


def _copied(run: Path, to: Path) -> None:
    shutil.copytree(run, to)
    recipe = to / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run.parent / "r"), str(to)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepared", "status", "words"),
    [
        (("spoil", STEP, 3), 6, ("FT702", "the loss of rank 1 is nan at step 3")),
        (("fail", STEP, "no such thing", 3), 1, ("FT190", "rank 1: this is a bug", "no such thing")),
    ],
    ids=["NaN", "a bug"],
)
def test_what_fails_on_one_rank_ends_all_of_them(
    prepared: tuple[Any, ...], status: int, words: tuple[str, ...], drills: Drills
) -> None:
    recipe = drills.recipe("r", **merged(UNTESTED, {"checkpoint": {"every_steps": 3}}))
    ranks = start_ranks(drills, recipe, 2, prepared={1: (prepared,)})
    assert ranks.ended()[0] == status, ranks.said
    for word in words:
        assert word in ranks.said
    assert ranks.said.count("error[") == 1
    if status == 1:  # adapters are on every rank
        assert drills.checkpoints("r") == ["step-00000002"]


@pytest.mark.parametrize(("change", "count"), telling({"adapters": ({}, 2), "full": (FULL, 3)}, "full"))
def test_a_rank_that_is_killed_in_the_middle_of_a_step_is_named(
    change: dict[str, Any], count: int, drills: Drills
) -> None:
    recipe = drills.recipe("r", **merged(UNTESTED, change))
    ranks = start_ranks(drills, recipe, count, prepared={1: (("pause", STEP, 4),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGKILL)
    assert ranks.drills[1].wait() == -9
    (ranks.folder / "lost-1").write_text("was killed by SIGKILL")
    others = [drill for rank, drill in enumerate(ranks.drills) if rank != 1]
    assert [drill.wait() for drill in others] == [75] * (count - 1), ranks.said
    assert "rank 1 was killed by SIGKILL" in ranks.said
    kept = ["step-00000002"] if change is FULL else ["step-00000002", "step-00000003"]
    assert drills.checkpoints("r") == kept
    assert drills.status("r")["state"] == "preempted"


def test_a_rank_that_hangs_while_weights_are_gathered_is_given_up(drills: Drills) -> None:
    prepared = {0: (("hurried", 4.0),), 1: (("pause", STEP, 3),)}
    ranks = start_ranks(drills, drills.recipe("r", **UNTESTED), 2, prepared=prepared)
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGSTOP)
    ranks.drills[0].release()
    assert ranks.drills[0].wait() == 75, ranks.said
    assert ranks.drills[1].wait() == -9, "whoever waits for it ends it"
    assert "error[FT710]" in ranks.said
    assert "rank 1 has" in ranks.said
    assert drills.checkpoints("r") == ["step-00000002"]


@pytest.mark.parametrize(
    "change", [pytest.param(NF4, id="adapters", marks=pytest.mark.long), pytest.param(FULL, id="full")]
)
def test_four_ranks_that_are_stopped_go_on_as_two_and_as_one(change: dict[str, Any], drills: Drills) -> None:
    whole = merged(merged(FSDP, change), {"train": {"max_steps": 5}})
    alone, recipe = drills.whole(**merged(whole, accumulating(4))), drills.recipe("r", **whole)
    ranks = start_ranks(drills, recipe, 4, prepared={0: (("pause", SAVE, 1),)})
    ranks.drills[0].until_reached()  # it writes, and the others have given their parts
    (ranks.folder / "signal").write_text("SIGTERM")
    for drill in ranks.drills:
        drill.signal(signal.SIGHUP)
    ranks.drills[0].release()
    assert ranks.ended() == [75] * 4, ranks.said
    assert drills.checkpoints("r") == ["step-00000002", "step-00000003"]
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", STEP, 1),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert drills.checkpoints("r")[-1] == "step-00000004"
    assert "1 x 4 accumulated" in drills.run(recipe)
    require_close_run(drills, "r", alone)


def test_what_does_not_go_with_sharded_weights_is_refused_by_name(drills: Drills) -> None:
    recipe = drills.recipe("r", **merged(FSDP, {"lora": {"use_dora": True}}))
    ranks = start_ranks(drills, recipe, 2)
    assert ranks.ended()[0] == 3, ranks.said
    assert "error[FT518]" in ranks.said
    assert "lora.use_dora" in ranks.said
