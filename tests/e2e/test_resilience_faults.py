"""Disks, files, numbers and memory that give out: each is provoked for real, and nothing already written is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.assets import asset
from tests.e2e.conftest import RECIPE, merged
from tests.e2e.resilience import (
    NO_EVAL,
    SAVE,
    SAVE_RESULT,
    STEP,
    Drills,
    read_only,
    require_same_weights,
    small_disk,
)
from tests.tiers import further, telling

EVERY_STEP: dict[str, Any] = {"checkpoint": {"every_steps": 1, "keep_last": 9}, **NO_EVAL}


def test_a_full_disk_stops_with_exit_3_and_what_was_complete_is_resumed_from(drills: Drills) -> None:
    whole = drills.whole(**EVERY_STEP)
    disk = drills.folder / "disk"
    disk.mkdir()
    recipe = drills.recipe("r", run={"output_dir": str(disk / "r")}, **EVERY_STEP)
    try:
        mounted = small_disk(disk, 400)
        mounted.__enter__()
    except OSError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        drill = drills.paused(recipe, SAVE, 3)
        ballast = disk / "ballast"
        with ballast.open("wb") as file:
            file.write(bytes(shutil.disk_usage(disk).free - 60_000))
        drill.release()
        assert drill.wait() == 3, drill.said
        assert "error[FT724]: no space left while writing" in drill.said
        assert "step-00000003" in drill.said
        assert sorted(p.name for p in (disk / "r/checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
        ballast.unlink()
        assert "step-00000002" in drills.run(recipe)
        shutil.copytree(disk / "r", drills.folder / "r")
    finally:
        mounted.__exit__(None, None, None)
    drills.require_same_run("r", whole)


@pytest.mark.parametrize(
    ("limit", "what"), telling({"safetensors": (200_000, "safetensors"), "torch": (400_000, "torch")}, "torch")
)
def test_a_write_that_the_system_refuses_is_told_as_such_whichever_library_writes(
    drills: Drills, limit: int, what: str
) -> None:
    recipe = drills.recipe("r", model=RECIPE["model"], checkpoint={"every_steps": 2}, **NO_EVAL)
    said = drills.run(recipe, status=3, prepared=(("small_files", limit),))
    assert "error[FT724]" in said
    assert "File too large" in said
    assert drills.checkpoints("r") == []
    assert drills.status("r")["exit_code"] == 3
    assert [line["step"] for line in drills.metrics("r")] == [1, 2]
    drills.run(recipe)


def test_a_read_only_output_directory_is_found_before_anything_is_loaded(drills: Drills) -> None:
    folder = drills.folder / "runs"
    folder.mkdir()
    try:
        refusing = read_only(folder)
        refusing.__enter__()
    except OSError as error:
        pytest.skip(f"nothing can be made read-only here: {error}")
    try:
        said = drills.run(drills.recipe("r", run={"output_dir": str(folder / "r")}), status=3)
    finally:
        refusing.__exit__(None, None, None)
    assert "error[FT613]" in said
    assert "data.train" not in said


def test_a_folder_that_becomes_read_only_stops_the_run_and_it_goes_on_later(drills: Drills) -> None:
    whole = drills.whole(**EVERY_STEP)
    recipe = drills.recipe("r", **EVERY_STEP)
    drill = drills.paused(recipe, STEP, 3)
    try:
        refusing = read_only(drills.folder / "r/checkpoints")
        refusing.__enter__()
    except OSError as error:
        pytest.skip(f"nothing can be made read-only here: {error}")
    try:
        drill.release()
        assert drill.wait() == 3, drill.said
    finally:
        refusing.__exit__(None, None, None)
    assert "error[FT723]" in drill.said
    assert "Traceback" not in drill.said
    assert drills.checkpoints("r") == ["step-00000001", "step-00000002"]
    drills.run(recipe)
    drills.require_same_run("r", whole)


def test_a_vanished_directory_is_noticed_at_the_next_line_and_not_half_made_again(drills: Drills) -> None:
    drill = drills.paused(drills.recipe("r", **EVERY_STEP), STEP, 3)
    shutil.rmtree(drills.folder / "r")
    drill.release()
    assert drill.wait() == 3, drill.said
    assert "error[FT723]" in drill.said
    assert "the run directory has vanished while the run was going on" in drill.said
    assert "Traceback" not in drill.said
    assert not (drills.folder / "r").exists()


def test_a_result_that_cannot_be_written_leaves_a_checkpoint_of_the_last_step(drills: Drills) -> None:
    whole = drills.whole()
    recipe = drills.recipe("r")
    broken = ("fail", "transformers:PreTrainedTokenizerBase.save_pretrained", "no words left")
    drill = drills.start(recipe, prepared=(broken,))
    assert drill.wait() == 1
    assert "no words left" in drill.said
    assert drills.checkpoints("r") == ["step-00000006"]
    assert not (drills.folder / "r/adapter").exists()
    said = drills.run(recipe)
    assert "train 1/6" not in said
    require_same_weights(drills.folder / "r/adapter", whole / "adapter")
    assert drills.metrics("r") == drills.metrics(whole)
    assert drills.status("r")["trained"]["summary"] == drills.status(whole)["trained"]["summary"]


@pytest.mark.parametrize("how", ["another bit", *further("cut short")])
def test_a_damaged_checkpoint_is_passed_over_by_name(drills: Drills, how: str) -> None:
    """The damaged file has megabytes: only reading all of it shows the changed bit."""
    change = {"model": RECIPE["model"], "lora": None, "train": {"max_steps": 4, "optim": "sgd"}, **EVERY_STEP}
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    drills.stopped(recipe, STEP, 3, signal.SIGTERM, 75)
    weights = drills.folder / "r/checkpoints/step-00000003/model.safetensors"
    size = weights.stat().st_size
    assert size > 1 << 20
    with weights.open("r+b") as file:
        if how == "cut short":
            file.truncate(size - 1)
        else:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))
    said = drills.run(recipe)
    assert "warning[FT726]" in said
    assert f"{weights.parent} is damaged and is skipped: model.safetensors" in said
    assert f"resuming from {weights.parent.with_name('step-00000002')}" in said
    drills.require_same_run("r", whole)


def test_without_a_usable_checkpoint_the_run_says_that_it_starts_again(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 3}, **NO_EVAL)
    drills.stopped(recipe, STEP, 1, signal.SIGTERM, 75)
    (drills.folder / "r/checkpoints/step-00000001/optimizer.pt").unlink()
    said = drills.run(recipe)
    assert "warning[FT726]" in said
    assert "warning[FT733]" in said
    assert [line["step"] for line in drills.metrics("r")] == [1, 2, 3]


@pytest.mark.parametrize("where", ["head", "middle"])
def test_a_damaged_base_model_is_told_and_is_no_bug(drills: Drills, where: str) -> None:
    model = drills.folder / "model"
    shutil.copytree(asset("models", "tiny-gemma2"), model)
    weights = model / "model.safetensors"
    os.truncate(weights, 100 if where == "head" else weights.stat().st_size // 2)
    said = drills.run(drills.recipe("r", model={"name_or_path": str(model)}), status=3)
    assert f"error[FT323]: a weight file of {model} is damaged" in said
    assert "help: download or copy it again" in said


def test_a_nan_names_the_rows_of_its_batch_and_checkpoints_stay_finite(drills: Drills) -> None:
    """One token's embedding is NaN; it occurs in one row."""
    lines = [f"row {number}" for number in range(1, 25)]
    lines[16] += " ~"
    (drills.folder / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    model = drills.folder / "model"
    shutil.copytree(asset("models", "tiny-gemma2"), model)
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(str(model))("~", add_special_tokens=False)["input_ids"][-1]
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # else every row would have its NaN
    tensors["model.embed_tokens.weight"][token] = float("nan")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    recipe = drills.recipe(
        "r",
        model={"name_or_path": str(model)},
        train={"max_steps": 6, "per_device_train_batch_size": 4},
        **merged(EVERY_STEP, {"data": {"train": ["rows.jsonl"]}}),
    )
    said = drills.run(recipe, status=6)
    message = said.split("error[FT702]: ")[1].splitlines()[0]
    assert "the loss is nan at step" in message
    rows = [int(number) for number in message.split("rows.jsonl:")[1].split(", ")]
    assert 17 in rows
    assert len(rows) == 4
    step = int(message.split("at step ")[1].split(":")[0])
    for name in drills.checkpoints("r"):
        weights = load_file(drills.folder / "r/checkpoints" / name / "adapter_model.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert len(drills.checkpoints("r")) == step - 1
    assert drills.status("r")["exit_code"] == 6


def test_out_of_memory_says_where_what_and_what_would_help_and_loses_no_step(drills: Drills) -> None:
    change = {
        "model": RECIPE["model"],
        "lora": {"dropout": 0.2},
        "train": {"max_steps": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        "data": {"eval": []},
        "logging": {"every_steps": 3},
    }
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    said = drills.run(recipe, status=5, prepared=(("starve", STEP, 5, 6 << 20),))
    message = said.split("error[FT703]: ")[1]
    assert message.startswith("out of memory in the forward pass of step 3 (a batch of 16 rows of ")
    assert "more were asked for; the process held" in message
    assert "weights 9.52 MiB, gradients 0.25 MiB, optimizer 0.50 MiB, activations" in message
    help = message.split("help: ")[1]
    assert "--set train.per_device_train_batch_size=8 --set train.gradient_accumulation_steps=4 (saves about" in help
    assert "--set train.gradient_checkpointing=true (saves about" in help
    assert f"`--resume {drills.folder}/r/checkpoints/step-00000002` continues from them" in help
    assert drills.checkpoints("r") == ["step-00000002"]
    assert drills.status("r")["exit_code"] == 5
    drills.run(recipe)
    require_same_weights(drills.folder / "r/adapter", whole / "adapter")
    assert drills.metrics("r") == drills.metrics(whole)


def test_after_out_of_memory_the_smaller_batch_goes_on_from_the_saved_step(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 4}, **NO_EVAL)
    drills.stopped(recipe, STEP, 2, signal.SIGTERM, 75)
    checkpoint = "r/checkpoints/step-00000002"
    smaller = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=2"]
    said = drills.run(recipe, "--resume", checkpoint, *(word for text in smaller for word in ("--set", text)))
    assert said.count("warning[FT732]") == 2
    assert [line["step"] for line in drills.metrics("r")] == [1, 2, 3, 4]


def test_out_of_memory_while_loading_is_exit_5_too(drills: Drills) -> None:
    recipe = drills.recipe("r", model={**RECIPE["model"], "init": "random"})
    said = drills.run(recipe, status=5, prepared=(("starve", "ftcli.model.load:_random_model", 1, 4 << 20),))
    assert "error[FT703]: out of memory while loading the model: " in said
    assert "help: the weights alone take 9.27 MiB: " in said


def test_the_second_run_in_a_directory_is_refused_and_a_killed_one_leaves_no_lock(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 3}, **NO_EVAL)
    first = drills.paused(recipe, STEP, 2)
    said = drills.run(recipe, status=2)
    assert f"error[FT720]: {drills.folder / 'r'} is in use by process {first.pid} on " in said
    assert drills.status("r")["pid"] == first.pid
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    drills.run(recipe)


def test_leftovers_of_a_kill_are_cleared(drills: Drills) -> None:
    recipe = drills.recipe("r", train={"max_steps": 2}, **NO_EVAL)
    drill = drills.paused(recipe, SAVE_RESULT)  # in the middle of writing the result
    drill.signal(signal.SIGKILL)
    drill.wait()
    run = drills.folder / "r"
    assert (run / ".writing-adapter").is_dir()
    (run / ".tmp-status.json.1").touch()
    (run / ".trash-adapter.1").mkdir()
    drills.run(recipe)
    assert sorted(p.name for p in Path(run).iterdir() if p.name.startswith(".")) == [".lock"]


def test_killed_at_random_moments_a_run_that_saves_in_every_step_is_the_same_run(drills: Drills) -> None:
    change: dict[str, Any] = {
        "lora": {"dropout": 0.1},
        "train": {"max_steps": 9},
        "checkpoint": {"every_steps": 1, "keep_last": 1},
        "logging": {"every_steps": 3},
    }
    whole = drills.whole(**change)
    recipe = drills.recipe("r", **change)
    chance, killed = random.Random(11), 0
    for kill in range(3):
        drill = drills.start(recipe)
        drill.until_step(drills.folder / "r", 2 * kill + 1)
        time.sleep(chance.uniform(0, 0.1) if kill else 0)  # the first is surely in time
        with contextlib.suppress(ProcessLookupError):  # it may have ended on a quick machine
            drill.signal(signal.SIGKILL)
        killed += drill.wait() == -signal.SIGKILL
    assert killed, "it was too quick for this drill"
    drills.run(recipe)
    drills.require_same_run("r", whole)
