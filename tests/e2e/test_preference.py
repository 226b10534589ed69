"""Learning from pairs as a user meets it: trained, gone on with, evaluated and exported, on one rank and on several."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import User, merged
from tests.e2e.ranks import start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.tiers import further, in_turn, telling

LN2 = math.log(2)
DATA: dict[str, Any] = {
    "train": [{"path": "bundled:smoke-dpo-train", "max_rows": 24}],
    "eval": [{"path": "bundled:smoke-dpo-eval", "max_rows": 6}],
    "max_seq_len": 64,
}
TRAIN: dict[str, Any] = {"method": "dpo", "max_steps": 5, "learning_rate": 5e-3, "warmup_steps": 0}
PAIRS: dict[str, Any] = {
    "data": DATA,
    "train": TRAIN,
    "eval": {"every_steps": 2, "samples": 0},
    "checkpoint": {"every_steps": 3},
}


def pairs(**change: Any) -> dict[str, Any]:
    """PAIRS with other settings in its sections."""
    return merged(PAIRS, change)


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def trained(user: User, start: float = LN2, **change: Any) -> list[dict[str, Any]]:
    """The metrics of a run that began with this loss, learnt, was cut off and went on alike, and was evaluated."""
    recipe = user.recipe("r", **pairs(**change))
    user.done("train", recipe)
    losses = user.losses("r")
    assert losses[0] == pytest.approx(start, abs=1e-3)
    assert min(losses) < losses[0] - 0.005
    user.goes_on_alike("r", recipe)
    lines = user.metrics("r")
    final = [line for line in lines if "eval_loss" in line][-1]
    told = user.done("eval", recipe, "--run", str(user.folder / "r"))
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp"):
        assert told["run"][name] == pytest.approx(final[f"eval_{name}"], rel=1e-3, abs=1e-3), name
    if start == LN2:
        assert told["base"]["loss"] == pytest.approx(LN2, abs=1e-3)
        assert (told["base"]["accuracy"], told["base"]["margin"]) == (0.5, pytest.approx(0, abs=1e-3))
        assert abs(final["eval_margin"]) > 1e-3
    return lines


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "dropout": {"lora": {"dropout": 0.3}},
    "DoRA": {"lora": {"use_dora": True}},
    "PiSSA": {"lora": {"init_lora_weights": "pissa"}},
    "OLoRA": {"lora": {"init_lora_weights": "olora"}},
    "NF4": {"quantization": {"method": "nf4"}},
    "fp8": {"quantization": {"method": "fp8"}, "model": {"kernels": "reference"}},
    "our layers": {"model": {"kernels": "reference"}},
    "our layers without padding": {
        "model": {"kernels": "reference"}, "data": {"padding_free": True},
        "train": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    },
    "all weights": {"lora": None, "train": {"learning_rate": 1e-3}},
    "all weights beside a second model": {
        "lora": None, "train": {"learning_rate": 1e-3}, "preference": {"reference_cache": "off"},
    },
    "all weights on our layers": {"lora": None, "train": {"learning_rate": 1e-3}, "model": {"kernels": "reference"}},
    "checkpointed": {"train": {"gradient_checkpointing": True}},
}  # fmt: skip


@pytest.mark.parametrize("kind", telling(KINDS, "dropout", "NF4", "our layers without padding"))
def test_whatever_is_trained_begins_at_ln_2_and_goes_on_alike(user: User, kind: dict[str, Any]) -> None:
    lines = trained(user, **kind)
    first = lines[0]
    assert (first["step"], first["rewards/accuracies"]) == (1, 0.5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert first["chosen_fell"] == pytest.approx(0, abs=0.5)


@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_dropout_on_adapters_that_begin_as_a_part_of_the_weights_is_no_fault(user: User, kernels: str) -> None:
    """The run ended with FT714: the policy's dropout was taken for another reference. On the kernels it ended with a
    bug: the second look wrote over what backward needed.
    """
    lora = {"init_lora_weights": "pissa", "dropout": 0.3}
    recipe = user.recipe("r", **pairs(lora=lora, model={"kernels": kernels}))
    user.done("train", recipe)
    base = json.loads((user.folder / "r" / "eval.json").read_text())["base"]
    assert base["measures"]["margin"] == pytest.approx(0, abs=1e-4)


@pytest.mark.filterwarnings("ignore")  # bfloat16 on a CPU
@pytest.mark.parametrize(("kernels", "lora"), in_turn(["off", "reference"], ["LoRA", "all weights"]))
def test_in_bfloat16_policy_and_reference_begin_alike(user: User, kernels: str, lora: Any) -> None:
    lora = {"r": 4} if lora == "LoRA" else None
    rate = 5e-3 if lora else 1e-3
    recipe = user.recipe(
        "r", **pairs(lora=lora, model={"dtype": "bfloat16", "kernels": kernels}, train={"learning_rate": rate})
    )
    user.done("train", recipe)
    losses = user.losses("r")
    assert losses[0] == pytest.approx(LN2, abs=1e-2)
    assert losses[-1] < losses[0]


def test_several_held_out_files_are_measured_as_one(user: User) -> None:
    """Log-probabilities are means over tokens, and accuracy of like length one over such pairs: files whose answers
    differ in length do not add up by their pairs.
    """
    asked = [{"role": "user", "content": "q"}]
    for name, answers in (("short", [("a", "b")]), ("long", [("c" * 20, "d" * 20), ("e" * 15, "f")])):
        rows = (
            {
                "prompt": asked,
                **{k: [{"role": "assistant", "content": v}] for k, v in zip(("chosen", "rejected"), a, strict=True)},
            }
            for a in answers
        )
        (user.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = [str(user.folder / f"{name}.jsonl") for name in ("short", "long")]
    recipe = user.recipe("r", **pairs(data={"eval": held_out}, train={"max_steps": 2}))
    trained_with = user.done("train", recipe)["eval"]
    found = user.done("eval", recipe, "--run", str(user.folder / "r"))["run"]
    assert "accuracy_of_like_length" in trained_with
    for name, value in trained_with.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    change = {"beta": 0.7, "share_prompts": "off"}
    other = user.recipe("other", **pairs(data={"eval": held_out}, train={"max_steps": 2}, preference=change))
    told = [f for f in user.run("eval", other, "--run", str(user.folder / "r"))[1]["findings"] if f["code"] == "FT749"]
    assert [finding["severity"] for finding in told] == ["warning"]
    assert "other settings: preference" in told[0]["message"]


@pytest.mark.parametrize("method", ["orpo", *further("simpo")])
def test_methods_that_compare_with_nothing(user: User, method: str) -> None:
    recipe = user.recipe("r", **pairs(train={"method": method}))
    said = user.done("train", recipe)
    assert said["eval"]["accuracy"] >= 0
    assert user.losses("r")[-1] < user.losses("r")[0]
    user.goes_on_alike("r", recipe)
    full = user.recipe("full", **pairs(lora=None, train={"method": method, "learning_rate": 1e-3}))
    user.done("train", full)
    assert user.losses("full")[-1] < user.losses("full")[0]


def test_a_mixture_begins_at_the_sum_of_its_parts(user: User) -> None:
    settings = {"loss": [{"name": "sigmoid", "weight": 0.8}, {"name": "bco_pair", "weight": 0.2}], "sft_weight": 1.0}
    user.done("train", user.recipe("r", **pairs(preference=settings)))
    user.done("train", user.recipe("plain", **pairs()))
    first, plain = user.metrics("r")[0], user.metrics("plain")[0]
    assert first["logps/chosen"] == plain["logps/chosen"]
    assert first["loss"] == pytest.approx(0.8 * LN2 + 0.2 * 2 * LN2 - first["logps/chosen"], rel=1e-5)


def test_the_best_is_kept_and_training_ends_when_nothing_gets_better(user: User) -> None:
    """A rate at which held-out pairs get worse at once."""
    recipe = user.recipe(
        "r",
        **pairs(
            train={"learning_rate": 3.0, "lr_scheduler_type": "constant", "max_steps": 30}
            | {"early_stopping": {"patience": 2}},
            eval={"every_steps": 1, "samples": 0},
            checkpoint={"every_steps": 50, "keep_best": True},
        ),
    )
    result = user.done("train", recipe)
    losses = {line["step"]: line["eval_loss"] for line in user.metrics("r") if "eval_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert result["steps"] == best + 2 < 30
    assert (user.folder / "r" / "checkpoints" / f"step-{best:08}").is_dir()
    assert user.done("eval", recipe, "--run", str(user.folder / "r"), "--checkpoint", "best")["run"][
        "loss"
    ] == pytest.approx(losses[best], rel=1e-3)


def test_the_result_is_a_plain_adapter_that_is_exported(stored: User) -> None:
    recipe = stored.recipe("r", **pairs(), export={"formats": ["adapter", "safetensors"]})
    stored.done("train", recipe)
    assert len(stored.done("export", str(stored.folder / "r"))["exports"]) == 2


def test_pairs_and_other_rows_are_told_apart(user: User) -> None:
    for name, train, rows in (("chat", "dpo", "smoke"), ("pairs", "sft", "smoke-dpo")):
        data = {"train": [f"bundled:{rows}-train"], "eval": [f"bundled:{rows}-eval"]}
        recipe = user.recipe(name, **pairs(data=data, train={"method": train}, eval={}))
        for command in ("check", "train"):
            status, document = user.run(command, recipe)
            assert status == 4, document
            found = next(finding for finding in document["findings"] if finding["severity"] == "error")
            wanted = "`train.method: sft`" if train == "dpo" else "DPO is `train.method: dpo` of `ftcli train`"
            assert wanted in f"{found['message']} {found['help']}"


#: Dropout draws numbers in each step; lines are for four steps; an evaluation is due after every second one.
ODD = pairs(
    lora={"dropout": 0.2},
    data={"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 28}]},
    train={"max_steps": 7, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3},
    preference={"sft_weight": 0.2, "ld_alpha": 0.5},
    logging={"every_steps": 4},
    checkpoint={"every_steps": 6, "keep_last": 9},
)
LOSS = "ftcli.methods.preference.objective:PairObjective.loss"


@pytest.mark.parametrize(
    ("steps", "reference"),
    [
        (2, "off"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((5, "./kept"), (1, "auto"), (3, "auto"), (5, "off"))
        ),
    ],
)
def test_stopped_after_any_step_and_resumed_it_is_the_same_run(drills: Drills, steps: int, reference: str) -> None:
    """Also within a line of metrics, in the second epoch (from step 5 on), and where an evaluation is due; whether the
    reference is scored ahead (as of two epochs) or in each step.
    """
    kept = reference if reference in ("auto", "off") else str(drills.folder / reference)
    change = merged(ODD, {"preference": {"reference_cache": kept}})
    whole, recipe = drills.whole(**change), drills.recipe("halves", **change)
    drills.stopped(recipe, LOSS, 2 * steps - 1, signal.SIGTERM, 75)
    state = json.loads((drills.folder / f"halves/checkpoints/step-{steps:08}/ftcli_state.json").read_text())
    assert state["evaluation_due"] == (steps % 2 == 0)
    assert (sum(state["extra"]["pair_sums"]) != 0) == (steps not in (1, 4))  # the first step has a line of its own
    assert "resuming from" in drills.run(recipe)
    drills.require_same_run("halves", whole)


def test_a_run_that_failed_in_a_step_goes_on_as_if_it_had_not(drills: Drills) -> None:
    whole, recipe = drills.whole(**ODD), drills.recipe("failed", **ODD)
    drills.run(recipe, prepared=(("fail", LOSS, "no more", 8),), status=1)  # in the second half of the fourth step
    drills.run(recipe)
    drills.require_same_run("failed", whole)


#: 20 pairs are five micro-batches: two ranks take three turns an epoch, and one of them has none left in the third.
SHARED = pairs(
    data={"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 20}]},
    train={"max_steps": 4, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
    eval={"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
    checkpoint={"every_steps": 2},
    preference={"sft_weight": 0.2},
)


@pytest.mark.long
@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "LoRA"))
def test_two_ranks_are_one_process_that_accumulates_twice(drills: Drills, lora: Any, tmp_path: Path) -> None:
    change = {**SHARED, "lora": lora, "launch": {"engine": "ddp"}}
    alone = drills.whole(**{**change, "train": {**change["train"], "gradient_accumulation_steps": 2}})
    ranks = start_ranks(drills, drills.recipe("two", **change), 2, cache=drills.folder / "cache")
    assert ranks.ended() == [0, 0], ranks.said
    uneven = ("epoch", "tokens_computed")  # of an epoch one process makes five turns, and two make six
    found, wanted = (
        [{name: value for name, value in line.items() if name not in uneven} for line in drills.metrics(run)]
        for run in ("two", alone)
    )
    assert found == wanted
    result = "adapter" if lora else "model"
    require_same_weights(drills.folder / "two" / result, alone / result)


@pytest.mark.long
def test_the_best_checkpoint_by_accuracy_goes_on_alike(drills: Drills) -> None:
    """Of two held-out files: the share is of all their pairs. It stops early, and a cut-off run stops where it did."""
    held_out = [{"path": "bundled:smoke-dpo-eval", "max_rows": 6}, {"path": "bundled:smoke-dpo-train", "max_rows": 9}]
    change = pairs(
        data={"eval": held_out},
        train={"max_steps": 30, "metric_for_best_model": "accuracy", "early_stopping": {"patience": 2}},
        eval={"every_steps": 1, "samples": 0},
        checkpoint={"every_steps": 1, "keep_best": True, "keep_last": 1},
    )
    whole, recipe = drills.whole(**change), drills.recipe("halves", **change)
    found = {line["step"]: line["eval_accuracy"] for line in drills.metrics(whole) if "eval_accuracy" in line}
    steps = sorted(found)
    best = max(steps, key=lambda step: (found[step], -step))
    assert len(steps) == best + 2 < 30
    assert all(round(15 * value * 2) == pytest.approx(15 * value * 2) for value in found.values())
    drills.stopped(recipe, LOSS, best + 1, signal.SIGTERM, 75)
    drills.run(recipe)
    assert [line for line in drills.metrics("halves") if "eval_accuracy" in line] == [
        line for line in drills.metrics(whole) if "eval_accuracy" in line
    ]
    kept = sorted(path.name for path in (drills.folder / "halves/checkpoints").iterdir())
    assert f"step-{best:08}" in kept
