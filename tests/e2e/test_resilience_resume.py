"""A run that was stopped and goes on is, to the last bit, the run that was never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ftcli.run.completions import Completions
from tests.e2e.conftest import RECIPE, merged
from tests.e2e.resilience import NO_EVAL, STEP, Drills
from tests.tiers import telling

#: 7 batches an epoch in steps of 3, 3 and 1; dropout draws random numbers in every step; the run is stopped in the
#: second epoch, between two lines of metrics, at a step after which an evaluation is due.
ODD: dict[str, Any] = {
    "lora": {"dropout": 0.2},
    "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 28}]},
    "train": {"max_steps": 8, "gradient_accumulation_steps": 3, "num_train_epochs": 3},
    "eval": {"every_steps": 2, "samples": 1},
    "checkpoint": {"every_steps": 7, "keep_last": 5},
    "logging": {"every_steps": 3},
}
PACKED: dict[str, Any] = {
    **ODD,
    "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 80}], "max_seq_len": 160, "packing": True},
    "train": {"max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}
UNPADDED: dict[str, Any] = {
    **ODD,
    "model": {"kernels": "reference"},
    "data": {**ODD["data"], "padding_free": True},
}
FULL: dict[str, Any] = {**ODD, "lora": None, "train": {**ODD["train"], "optim": "adafactor"}}


@pytest.mark.parametrize(
    ("change", "prepared", "batch"),
    telling(
        {
            "accumulation in the second epoch": (ODD, (), 10),
            "packing": (PACKED, (), 8),
            "unpadded on our layers": (UNPADDED, (), 10),
            "full fine-tuning": (FULL, (), 10),
        },
        *("packing", "full fine-tuning"),
    ),
)
def test_half_and_half_is_the_whole(
    drills: Drills, change: dict[str, Any], prepared: tuple[Any, ...], batch: int
) -> None:
    whole = drills.whole(**change)
    recipe = drills.recipe("halves", **change)
    drill = drills.paused(recipe, STEP, batch, also=prepared)
    drill.signal(signal.SIGTERM)
    drill.release()
    assert drill.wait() == 75, drill.said
    stopped = drills.checkpoints("halves")
    assert stopped == ["step-00000004"]
    state = json.loads((drills.folder / "halves/checkpoints/step-00000004/ftcli_state.json").read_text())
    assert state["logged_step"] == 3, "the drill is to stop between two lines"
    assert state["evaluation_due"], "the drill is to stop where an evaluation is due"
    assert "resuming from" in drills.run(recipe, prepared=prepared)
    drills.require_same_run("halves", whole)
    steps = [(line["step"], "loss" in line) for line in drills.metrics("halves")]
    assert steps == [(1, True), (2, False), (3, True), (4, False), (6, True), (6, False), (8, True), (8, False)]


#: Completions serve two steps, between two lines of metrics.
GRPO: dict[str, Any] = {
    "lora": {"dropout": 0.1},
    "data": {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 16}], "eval": []},
    "train": {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "grpo": {
        "num_generations": 4,
        "num_iterations": 2,
        "max_prompt_length": 48,
        "max_completion_length": 6,
        "temperature": 2.0,
        "rewards": [{"use": "regex", "pattern": "[5-9a-m]"}],
    },
    "checkpoint": {"every_steps": 5, "keep_last": 3},
    "logging": {"every_steps": 4},
}
LOSS = "ftcli.methods.grpo.objective:GrpoObjective.loss"


#: Two steps learn from a half each.
SPLIT = merged(GRPO, {"grpo": {"num_iterations": 1, "steps_per_generation": 4}})


def require_same_completions(drills: Drills, name: str, whole: Path, count: int = 8) -> None:
    """Each batch that a line of metrics met is there once, with the rewards and advantages that it had."""
    found, wanted = (Completions(drills.folder / run / "completions") for run in (name, whole))
    assert found.steps() == wanted.steps() == [1, 4, 6]
    for step in wanted.steps():
        said = wanted.read(step)
        assert len(said) == count
        assert any(one.advantage for one in said), "nothing is learnt, and nothing could differ"
        assert found.read(step) == said


@pytest.mark.parametrize(("change", "count"), telling({"two passes": (GRPO, 8), "two parts": (SPLIT, 16)}, "two parts"))
def test_grpo_goes_on_with_the_completions_it_was_in_the_middle_of(
    drills: Drills, change: dict[str, Any], count: int
) -> None:
    """The run is stopped after the first of the two steps."""
    whole = drills.whole("grpo", **change)
    recipe = drills.recipe("halves", **change)
    drill = drills.paused(recipe, LOSS, 6, command="grpo")
    drill.signal(signal.SIGTERM)
    drill.release()
    assert drill.wait() == 75, drill.said
    assert drills.checkpoints("halves") == ["step-00000003"]
    assert (drills.folder / "halves/checkpoints/step-00000003/completions.pt").exists()
    drills.run(recipe, command="grpo")
    assert "reward" in drills.metrics(whole)[-1]
    drills.require_same_run("halves", whole)
    require_same_completions(drills, "halves", whole, count)


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "step"), telling({"inside a batch": (8, 3), "with new completions": (10, 4)}, "inside a batch")
)
def test_grpo_goes_on_after_a_step_that_failed(drills: Drills, call: int, step: int) -> None:
    """The checkpoint is that of the step before; what the failed one has sampled and counted is undone."""
    change = {"model": RECIPE["model"], **GRPO}  # the narrow model's steps take too little memory to run out of it
    whole = drills.whole("grpo", **change)
    recipe = drills.recipe("failed", **change)
    drills.run(recipe, status=5, prepared=(("starve", LOSS, call, 6 << 20),), command="grpo")
    assert drills.checkpoints("failed") == [f"step-{step:08d}"]
    drills.run(recipe, command="grpo")
    drills.require_same_run("failed", whole)
    require_same_completions(drills, "failed", whole)


def test_stopped_in_every_step_it_is_still_the_same_run(drills: Drills) -> None:
    change = {"lora": {"dropout": 0.2}, "train": {"max_steps": 5}, "logging": {"every_steps": 4}}
    change |= {"checkpoint": {"every_steps": 4}, **NO_EVAL}
    whole = drills.whole(**change)
    recipe = drills.recipe("pieces", **change)
    for _ in range(3):
        drills.stopped(recipe, STEP, 1, signal.SIGTERM, 75)
    drills.run(recipe)
    drills.require_same_run("pieces", whole)


@pytest.fixture
def halted(drills: Drills) -> str:
    """The recipe of a run on own files that was stopped after its second step."""
    lines = [
        {"messages": [{"role": "user", "content": f"mirror: {word}"}, {"role": "assistant", "content": word[::-1]}]}
        for word in (f"{a}{b}ka" for a in "bdfgklmnpt" for b in "aeiou")
    ]
    (drills.folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * 10))
    (drills.folder / "own.jinja").write_text(
        "{{ bos_token }}{% for message in messages %}<start_of_turn>\n"
        "{{ message['role'] }}: {{ message['content'] }}<end_of_turn>\n{% endfor %}"
    )
    recipe = drills.recipe("r", data={"train": ["rows.jsonl"], "chat_template": "own.jinja"}, train={"max_steps": 4})
    drills.stopped(recipe, STEP, 2, signal.SIGTERM, 75)
    return recipe


def test_what_has_changed_between_is_refused_and_shown(drills: Drills, halted: str) -> None:
    rows, template = drills.folder / "rows.jsonl", drills.folder / "own.jinja"
    good = {path: path.read_text() for path in (rows, template)}
    status = drills.status("r")

    said = drills.run(halted, "--set", "train.learning_rate=3e-4", "--set", "lora.r=8", status=2)
    assert "error[FT721]" in said
    assert "lora.r: 4 -> 8" in said
    assert "train.learning_rate: 0.001 -> 0.0003" in said
    assert drills.status("r") == status

    lines = good[rows].splitlines(keepends=True)
    lines[300] = lines[300].replace("mirror", "mirrow")
    rows.write_text("".join(lines))
    said = drills.run(halted, status=2)
    assert "error[FT731]" in said
    place = said.split("the first difference is in line ")[1].split()
    assert int(place[0]) <= 301 <= int(place[2])
    assert int(place[2]) - int(place[0]) < 60
    rows.write_text(good[rows])

    template.write_text(good[template].replace("message['role'] }}:", "message['role'] }} says:"))
    said = drills.run(halted, status=2)
    assert "error[FT734]" in said
    assert "-{{ message['role'] }}: {{ message['content'] }}<end_of_turn>" in said
    assert "+{{ message['role'] }} says: {{ message['content'] }}<end_of_turn>" in said
    assert drills.run(halted, status=2).count("FT734") == 1, "refused once, it is refused again"
    template.write_text(good[template])

    drills.run(halted)
    assert drills.status("r")["state"] == "completed"


def test_what_a_damaged_manifest_cannot_hold_is_said(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 3}, **NO_EVAL)
    drills.stopped(recipe, STEP, 1, signal.SIGTERM, 75)
    (drills.folder / "r" / "manifest.json").write_text("{")
    assert "warning[FT770]" in drills.run(recipe)


def test_other_base_weights_are_refused(drills: Drills, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from ftcli.assets import asset

    model = tmp_path / "model"
    shutil.copytree(asset("models", "tiny-gemma2"), model)
    recipe = drills.recipe("r", model={"name_or_path": str(model)}, train={"max_steps": 3}, **NO_EVAL)
    drills.stopped(recipe, STEP, 1, signal.SIGTERM, 75)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    said = drills.run(recipe, status=2)
    assert "error[FT735]" in said
    assert "model.safetensors (4,8" in said
