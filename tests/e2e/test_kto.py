"""Learning from labelled answers as a user meets it: trained, gone on with, evaluated, on one rank and on several."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.e2e.conftest import User, merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_preference_ranks import require_close_run
from tests.tiers import further, telling

DATA: dict[str, Any] = {
    "train": [{"path": "bundled:smoke-dpo-train", "max_rows": 12}],  # pairs, each of which is two answers
    "eval": [{"path": "bundled:smoke-dpo-eval", "max_rows": 6}],
    "max_seq_len": 64,
}
TRAIN: dict[str, Any] = {
    "method": "kto", "max_steps": 5, "learning_rate": 5e-3, "warmup_steps": 0, "per_device_train_batch_size": 8,
}  # fmt: skip
LABELLED: dict[str, Any] = {
    "data": DATA,
    "train": TRAIN,
    "eval": {"every_steps": 2, "samples": 0},
    "checkpoint": {"every_steps": 3},
}


def labelled(**change: Any) -> dict[str, Any]:
    """LABELLED with other settings in its sections."""
    return merged(LABELLED, change)


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "dropout": {"lora": {"dropout": 0.3}},
    "PiSSA": {"lora": {"init_lora_weights": "pissa"}},
    "NF4": {"quantization": {"method": "nf4"}},
    "fp8": {"quantization": {"method": "fp8"}, "model": {"kernels": "reference"}},
    "DoRA": {"lora": {"use_dora": True}},
    "our layers without padding": {
        "model": {"kernels": "reference"}, "data": {"padding_free": True},
        "train": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    },
    "all weights": {"lora": None, "train": {"learning_rate": 1e-3}},
    "all weights beside a second model": {
        "lora": None, "train": {"learning_rate": 1e-3}, "preference": {"reference_cache": "off"},
    },
    "LoRA, the reference in each step": {"preference": {"reference_cache": "off"}},
    "PiSSA, the reference in each step": {
        "lora": {"init_lora_weights": "pissa"}, "preference": {"reference_cache": "off"},
    },
    "all weights on our layers": {"lora": None, "train": {"learning_rate": 1e-3}, "model": {"kernels": "reference"}},
    "checkpointed": {"train": {"gradient_checkpointing": True}},
    "unpaired APO": {"preference": {"loss": "apo_zero_unpaired"}},
    "weights and few mismatched rows": {"preference": {"desirable_weight": 1.2, "kl_rows": 2}},
}  # fmt: skip


@pytest.mark.parametrize("kind", telling(KINDS, "all weights beside a second model", "unpaired APO"))
def test_whatever_is_trained_begins_at_one_half_and_goes_on_alike(user: User, kind: dict[str, Any]) -> None:
    recipe = user.recipe("r", **labelled(**kind))
    user.done("train", recipe)
    losses, lines = user.losses("r"), user.metrics("r")
    weight = (1 + kind.get("preference", {}).get("desirable_weight", 1.0)) / 2
    assert losses[0] == pytest.approx(weight / 2, abs=2e-3)
    assert min(losses) < losses[0] - 0.003
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert ("kl" in lines[0]) == ("loss" not in kind.get("preference", {}))
    assert all(line["kl"] >= 0 for line in lines if "kl" in line)
    user.goes_on_alike("r", recipe)
    final = [line for line in user.metrics("r") if "eval_loss" in line][-1]
    told = user.done("eval", recipe, "--run", str(user.folder / "r"))
    for name, value in final.items():
        if name.startswith("eval_") and name.removeprefix("eval_") in told["run"]:
            assert told["run"][name.removeprefix("eval_")] == pytest.approx(value, rel=1e-3, abs=1e-3), name
    base = told["base"]
    assert base["loss"] == pytest.approx(weight / 2, abs=1e-3)
    assert (base["accuracy"], base["margin"]) == (0.5, pytest.approx(0, abs=1e-3))
    assert abs(final["eval_margin"]) > 1e-3


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def file_of(user: User, name: str, rows: list[dict[str, Any]]) -> str:
    path = user.folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_several_held_out_files_are_measured_as_one(user: User) -> None:
    """With one KL, of all of their rows."""
    short = [{"messages": [*asked(f"q{n}"), {"role": "assistant", "content": "a" * n}], "label": n % 2} for n in (1, 2)]
    long = [{"prompt": f"text {n}", "completion": "b" * 5 * n, "label": n != 2} for n in (1, 2, 3)]
    held_out = [file_of(user, "short.jsonl", short), file_of(user, "long.jsonl", long)]
    recipe = user.recipe("r", **labelled(data={"eval": held_out}, train={"max_steps": 3}))
    trained_with = user.done("train", recipe)["eval"]
    found = user.done("eval", recipe, "--run", str(user.folder / "r"))
    assert found["run"]["rows"] == 5
    for name, value in trained_with.items():
        assert found["run"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    parts = found["run"]["datasets"].values()
    assert sum(part["loss"] * part["rows"] for part in parts) / 5 == pytest.approx(found["run"]["loss"], rel=1e-6)
    assert {part["kl"] for part in parts} == {found["run"]["kl"]}


def test_labelled_rows_and_other_rows_are_told_apart(user: User) -> None:
    rows = [{"prompt": "q", "completion": f"a{n}", "label": n % 2} for n in range(8)]
    file, plain = file_of(user, "d.jsonl", rows), file_of(user, "p.jsonl", [{"prompt": "q", "completion": "a"}])
    for name, method, path, code, said in (
        ("labels", "sft", file, "FT408", "KTO is `train.method: kto` of `ftcli train`"),
        ("plain", "kto", plain, "FT412", "rows with prompt and completion are for `train.method: sft`"),
        ("pairs", "dpo", file, "FT412", "rows with a label are for `train.method: kto`"),
    ):
        recipe = user.recipe(
            name, **labelled(data={"train": [path], "eval": []}, train={"method": method}, eval={"every_steps": None})
        )
        for command in ("check", "train"):
            status, document = user.run(command, recipe)
            assert status == 4, document
            found = next(finding for finding in document["findings"] if finding["severity"] == "error")
            assert found["code"] == code
            assert said in f"{found['message']} {found['help']}"


def test_one_label_alone_is_refused_before_a_model_is_loaded(user: User) -> None:
    rows = [{"prompt": f"q{n}", "completion": "a", "label": True} for n in range(8)]
    file = file_of(user, "d.jsonl", rows)
    recipe = user.recipe("r", **labelled(data={"train": [file]}))
    for command in ("check", "train"):
        status, document = user.run(command, recipe)
        assert status == 4
        assert [f["code"] for f in document["findings"] if f["severity"] == "error"] == ["FT465"]


def test_labels_out_of_balance_and_contradictions_are_told(user: User) -> None:
    rows = [{"prompt": f"q{n}", "completion": "a", "label": n > 0} for n in range(9)]
    rows.append({**rows[3], "label": False})
    recipe = user.recipe(
        "r", **labelled(data={"train": [file_of(user, "d.jsonl", rows)], "eval": []}, eval={"every_steps": None})
    )
    for command in ("check", "train"):
        status, document = user.run(command, recipe)
        assert status == 0
        found = {f["code"]: f for f in document["findings"]}
        assert "weigh 4 times as much as 2" in found["FT466"]["message"]
        assert "d.jsonl:4" in found["FT467"]["message"]
        assert "FT442" not in found


def test_the_result_says_what_made_it(stored: User) -> None:
    recipe = stored.recipe("r", **labelled(), export={"formats": ["adapter"]})
    stored.done("train", recipe)
    page = (stored.folder / "r" / "report.html").read_text()
    assert all(title in page for title in ("Answers on their side", "KL, nats", "Reward"))
    card = (stored.folder / "r" / "adapter" / "README.md").read_text()
    assert "made by KTO" in card
    assert "- kto" in card
    assert len(stored.done("export", str(stored.folder / "r"))["exports"]) == 1


#: Dropout draws numbers in each step; lines are for four steps; an evaluation is due after every second one.
ODD = labelled(
    lora={"dropout": 0.2},
    data={"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 14}]},
    train={"max_steps": 7, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3},
    preference={"sft_weight": 0.2, "kl_rows": 4},
    logging={"every_steps": 4},
    checkpoint={"every_steps": 6, "keep_last": 9},
)
LOSS = "ftcli.methods.kto.objective:LabelObjective.loss"


@pytest.mark.parametrize(
    ("steps", "reference"),
    [
        (3, "auto"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, "off"), (1, "auto"), (5, "off"), (5, "auto"))),
    ],
)
def test_stopped_after_any_step_and_resumed_it_is_the_same_run(drills: Drills, steps: int, reference: str) -> None:
    """Also within a line of metrics, in the second epoch (from step 5 on), and where an evaluation is due; whether the
    reference is scored ahead (as of two epochs) or in each step.
    """
    change = merged(ODD, {"preference": {"reference_cache": reference}})
    whole, recipe = drills.whole(**change), drills.recipe("halves", **change)
    drills.stopped(recipe, LOSS, 2 * steps - 1, signal.SIGTERM, 75)
    state = json.loads((drills.folder / f"halves/checkpoints/step-{steps:08}/ftcli_state.json").read_text())
    assert (sum(map(abs, state["extra"]["label_sums"])) != 0) == (steps not in (1, 4))
    assert "resuming from" in drills.run(recipe)
    drills.require_same_run("halves", whole)


@pytest.mark.long
def test_a_run_that_failed_in_a_step_goes_on_as_if_it_had_not(drills: Drills) -> None:
    whole, recipe = drills.whole(**ODD), drills.recipe("failed", **ODD)
    drills.run(recipe, prepared=(("fail", LOSS, "no more", 8),), status=1)  # in the second half of the fourth step
    drills.run(recipe)
    drills.require_same_run("failed", whole)


#: 20 answers are five micro-batches: two ranks take three turns an epoch, and one of them has none left in the third.
SHARED = labelled(
    data={"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 10}]},
    train={"max_steps": 4, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
    eval={"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
    checkpoint={"every_steps": 2},
    preference={"sft_weight": 0.2},
)


@pytest.mark.long
@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "all weights"))
@pytest.mark.parametrize("reference", ["auto", *further("off")])
def test_two_ranks_are_one_process_that_accumulates_twice(drills: Drills, lora: Any, reference: str) -> None:
    """To the last bit, the KL too."""
    # Sharded weights have a norm of gradients that is summed in another order.
    change = {**SHARED, "lora": lora, "launch": {"engine": "ddp"}}
    change["preference"] = {**SHARED["preference"], "reference_cache": reference}
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


#: As above, with one more held-out batch than two ranks have turns for.
FLATTENED = merged(
    SHARED,
    {
        "model": {"kernels": "reference"},
        "data": {"eval": [{"path": "bundled:smoke-dpo-eval", "max_rows": 3}]},
        "preference": {"kl_rows": 6},  # two batches: in a step of one micro-batch one rank has rows, and one has none
    },
)
FULL: dict[str, Any] = {"lora": None, "train": {"learning_rate": 1e-3}}
RANKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "shards of the base": ({"quantization": {"method": "nf4"}, "launch": {"engine": "fsdp"}}, 2, 2),
    "shards of all weights": ({**FULL, "launch": {"engine": "fsdp"}}, 2, 2),
    "rows shared": ({"launch": {"engine": "ddp", "context_parallel_size": 2}}, 2, 1),
    "shards, and rows shared": ({**FULL, "launch": {"engine": "fsdp", "context_parallel_size": 2}}, 4, 2),
}


@pytest.mark.long
@pytest.mark.parametrize(("change", "count", "apart"), telling(RANKS, "shards of the base"))
def test_ranks_with_shards_or_shared_rows_are_one_process(
    change: dict[str, Any], count: int, apart: int, drills: Drills
) -> None:
    recipe = merged(merged(FLATTENED, change), {"preference": {"reference_cache": "off"}})
    run_ranks(drills, drills.recipe("ranks", **recipe), count)
    alone = merged(recipe, {"launch": {"engine": "single", "context_parallel_size": 1}})
    require_close_run(drills, "ranks", drills.whole(**merged(alone, {"train": {"gradient_accumulation_steps": apart}})))


def test_sources_with_weights_are_drawn_by_them(user: User) -> None:
    """A few bad answers of their own file, as often as the good ones."""
    good = [{"prompt": f"q{n}", "completion": "a", "label": True} for n in range(8)]
    bad = [{"prompt": f"r{n}", "completion": "b", "label": False} for n in range(2)]
    files = [file_of(user, "good.jsonl", good), file_of(user, "bad.jsonl", bad)]
    sources = [{"path": path, "weight": 0.5} for path in files]
    recipe = user.recipe("r", **labelled(data={"train": sources, "eval": []}, eval={"every_steps": None}))
    status, document = user.run("train", recipe)
    assert status == 0, document
    assert not [f for f in document["findings"] if f["code"] == "FT466"]
    tokens = json.loads((user.folder / "r" / "tokens.json").read_text())
    assert (tokens["epoch"]["rows"], tokens["epoch"]["packed"]) == (16, False)


def test_samples_say_how_their_answers_are_called(user: User) -> None:
    recipe = user.recipe("r", **labelled())
    shown = user.done("check", recipe, "--show-sample", "1")["samples"]
    assert [(row["layout"], row["label"], row["trained"]) for row in shown] == [
        ("labelled", "desirable", 2),
        ("labelled", "undesirable", 2),
    ]
