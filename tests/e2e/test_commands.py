"""`ftcli eval`, `export`, `grpo` and `bench` on what `train` leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftcli.config.data import DatasetConfig
from tests.e2e.conftest import RECIPE, User
from tests.rows import read_rows
from tests.small_models import build


@pytest.fixture
def user(stored: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return stored


@pytest.fixture
def trained(user: User) -> str:
    """A recipe with a finished run of two steps."""
    recipe = user.recipe(eval={"tasks": [{"use": "exact_match"}]}, train={"max_steps": 2})
    user.done("train", recipe)
    return recipe


def test_eval_sets_the_run_beside_the_base(user: User, trained: str) -> None:
    result = user.done("eval", trained, "--run", str(user.folder / "r"))
    base, run = result["base"], result["run"]
    assert base["tokens"] == run["tokens"] > 0
    assert base["loss"] != run["loss"]
    assert run["tasks"]["exact_match"]["rows"] == 6
    assert user.done("eval", trained)["base"]["loss"] == pytest.approx(base["loss"], rel=1e-6)
    written = json.loads((user.folder / "r" / "eval.json").read_text())
    assert written["run"]["loss"] == pytest.approx(run["loss"])
    assert written["base"]["datasets"] == {"bundled:smoke-eval": base["datasets"]["bundled:smoke-eval"]}
    user.done("eval", trained, "--run", str(user.folder / "r"), "--set", "eval.tasks=[]")
    again = json.loads((user.folder / "r" / "eval.json").read_text())
    assert again["run"]["tasks"] == written["run"]["tasks"]
    tasks = [row for row in again["samples"] if row["task"]]
    assert tasks == [row for row in written["samples"] if row["task"]] != []


def test_eval_loss_does_not_depend_on_the_batch(user: User) -> None:
    recipe = user.recipe()
    whole, *others = (
        user.done("eval", recipe, "--set", f"eval.per_device_eval_batch_size={batch}")["base"]["loss"]
        for batch in (6, 1, 2, 5)
    )
    assert others == pytest.approx([whole] * 3, rel=1e-5)


def test_eval_with_every_kind_of_judge(user: User) -> None:
    judge = user.folder / "judges.py"
    judge.write_text(
        "def brief(completions, prompts, answer, limit, **columns):\n"
        "    return [float(len(c) <= limit) if a is not None else None for c, a in zip(completions, answer)]\n"
    )
    tasks = [
        {"use": "contains"},
        {"use": "regex", "pattern": ".", "max_rows": 3},
        {"use": "json_valid", "name": "json"},
        {"file": f"{judge}:brief", "args": {"limit": 1000}},
    ]
    recipe = user.recipe(eval={"tasks": tasks, "per_device_eval_batch_size": 4}, model={"kernels": "reference"})
    result = user.done("eval", recipe)["base"]
    assert {name: task["rows"] for name, task in result["tasks"].items()} == {
        "contains": 6, "regex": 3, "json": 6, "brief": 6,
    }  # fmt: skip
    assert result["tasks"]["brief"]["score"] == 1.0
    assert all(0 <= task["score"] <= 1 for task in result["tasks"].values())
    plain = user.done("eval", user.recipe("plain", model={"kernels": "off"}))["base"]
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert result["token_accuracy"] == plain["token_accuracy"]


def test_eval_of_packed_rows_and_of_several_files(user: User) -> None:
    files = [{"path": "bundled:smoke-eval", "max_rows": 5}, {"path": "bundled:smoke-train", "max_rows": 3}]
    plain = user.done("eval", user.recipe(data={"eval": files}))["base"]
    packed = user.done("eval", user.recipe("packed", data={"eval": files, "packing": True}))["base"]
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert {name: part["rows"] for name, part in plain["datasets"].items()} == {
        "bundled:smoke-eval": 5, "bundled:smoke-train": 3,
    }  # fmt: skip
    for name, part in plain["datasets"].items():
        assert packed["datasets"][name]["loss"] == pytest.approx(part["loss"], rel=1e-5)


def test_eval_says_what_it_cannot_do(user: User) -> None:
    bad = {"use": "contains", "file": "nowhere.py:f"}
    status, document = user.run("eval", user.recipe(eval={"tasks": [bad, {"args": {"a": 1}}]}))
    assert status == 2
    assert [finding["code"] for finding in document["findings"]] == ["FT767", "FT451", "FT767"]
    judge = user.folder / "judges.py"
    judge.write_text("def broken(completions, prompts, **columns):\n    return 'fine'\n")
    tasks = [{"file": f"{judge}:broken", "max_rows": 1}]
    status, document = user.run("eval", user.recipe("broken", eval={"tasks": tasks}))
    assert (status, document["findings"][-1]["code"]) == (4, "FT765")


def test_eval_of_what_is_not_there(user: User) -> None:
    recipe = user.recipe()
    unfinished = user.folder / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text(Path(recipe).read_text())
    status, document = user.run("eval", recipe, "--run", str(unfinished))
    assert (status, document["findings"][-1]["code"]) == (2, "FT763")
    status, document = user.run("eval", user.recipe(data={"eval": []}))
    assert (status, document["findings"][-1]["code"]) == (2, "FT255")


def test_export_is_verified_and_loads_without_ftcli(user: User, trained: str) -> None:
    result = user.done("export", str(user.folder / "r"))
    assert [entry["format"] for entry in result["exports"]] == ["adapter", "safetensors"]
    merged = AutoModelForCausalLM.from_pretrained(result["exports"][1]["path"])
    assert torch.isfinite(merged(input_ids=torch.tensor([[5, 6, 7]])).logits).all()
    assert user.done("export", trained)["exports"][0]["format"] == "adapter"
    elsewhere = user.folder / "elsewhere"
    (only,) = user.done("export", trained, "--format", "adapter", "--output", str(elsewhere), "--no-verify")["exports"]
    assert only["path"] == str(elsewhere / "adapter")
    assert [warning["code"] for warning in only["warnings"]] == ["FT754"]
    status, document = user.run("export", trained, "--format", "adapter", "--output", str(elsewhere))
    assert (status, document["findings"][-1]["code"]) == (2, "FT743")
    user.done("export", trained, "--format", "adapter", "--output", str(elsewhere), "--force")
    status, document = user.run("export", trained, "--format", "nonsense")
    assert (status, document["findings"][-1]["code"][:3]) == (2, "FT2")


def prompts(folder: Path) -> list[str]:
    """Sixteen questions of the GRPO smoke data."""
    rows = read_rows(DatasetConfig(path="bundled:smoke-grpo-train", max_rows=16))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row.fields) for row in rows))
    return [str(path)]


def test_grpo_with_a_users_reward(user: User) -> None:
    reward = user.folder / "mine.py"
    reward.write_text("def short(completions, prompts, **kw):\n    return [-float(len(c)) for c in completions]\n")
    recipe = user.recipe(
        data={"train": prompts(user.folder), "eval": []},
        train={"max_steps": 2, "per_device_train_batch_size": 8},
        grpo={
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 8,
            "rewards": [{"file": f"{reward}:short"}, {"use": "regex", "pattern": "[0-9]", "weight": 0.5}],
        },
    )
    result = user.done("grpo", recipe)
    assert result["steps"] == 2
    lines = user.metrics("r")
    assert all("rewards/short/mean" in line and "rewards/regex/mean" in line for line in lines)
    assert lines[0]["reward"] == pytest.approx(
        lines[0]["rewards/short/mean"] + 0.5 * lines[0]["rewards/regex/mean"], rel=1e-4
    )
    assert (user.folder / "r" / "adapter" / "adapter_model.safetensors").exists()


def test_liger_1082_the_ratio_of_a_policy_to_itself_is_one(user: User) -> None:
    """Then the loss of an on-policy step is minus the sum of group-normalised advantages: nothing.

    Of completions of one length, as those of the bundled model are.
    """
    user = replace(user, model=RECIPE["model"])
    recipe = user.recipe(
        data={"train": prompts(user.folder), "eval": []},
        train={"max_steps": 2, "per_device_train_batch_size": 8},
        grpo={
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 4,
            "temperature": 0.7,
            "rewards": [{"use": "regex", "pattern": "[0-4]"}],
        },
    )
    user.done("grpo", recipe)
    lines = user.metrics("r")
    assert any(line["reward_std"] > 0 for line in lines)
    assert all(abs(line["loss"]) < 1e-5 for line in lines)


def test_grpo_names_a_failing_reward_and_its_completion(user: User) -> None:
    reward = user.folder / "mine.py"
    reward.write_text("def broken(completions, prompts, **kw):\n    return [1 / 0]\n")
    recipe = user.recipe(
        data={"train": prompts(user.folder), "eval": []},
        train={"max_steps": 1, "per_device_train_batch_size": 4},
        grpo={
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 4,
            "rewards": [{"file": f"{reward}:broken"}],
        },
    )
    status, document = user.run("grpo", recipe)
    assert (status, document["findings"][-1]["code"]) == (4, "FT455")
    assert "ZeroDivisionError" in document["findings"][-1]["message"]


def test_grpo_refuses_long_prompts_and_recipes_without_rewards(user: User) -> None:
    settings = {"num_generations": 4, "max_prompt_length": 4, "max_completion_length": 4}
    recipe = user.recipe(
        data={"train": prompts(user.folder), "eval": []},
        train={"per_device_train_batch_size": 4},
        grpo={**settings, "rewards": [{"use": "regex", "pattern": "1"}]},
    )
    status, document = user.run("grpo", recipe)
    assert (status, document["findings"][-1]["code"]) == (4, "FT781")
    status, document = user.run("grpo", user.recipe("plain"))
    assert status == 2


def test_bench_measures_the_real_step(user: User) -> None:
    result = user.done("bench", user.recipe(), "--batch", "2", "--seq", "32", "--layers", "1", "--steps", "2")
    assert result["gradient_checkpointing"] is False, "the policy that `auto` came to"
    assert result["steps"] == 2
    for name in ("tokens_per_second", "step_ms", "peak_memory_bytes", "matmul_tflops", "share_of_bound"):
        assert result[name] > 0, name
    assert result["share_of_bound"] < 1
    assert not result["first_step_only"]


def test_bench_of_the_first_step_alone(user: User) -> None:
    """`--steps 0`, longer than the model's positions: a warning, and the first step is what is reported."""
    shape = ("--batch", "1", "--seq", "1100", "--layers", "1", "--steps", "0")
    status, document = user.run("bench", user.recipe(), *shape)
    assert status == 0
    assert ("FT301", "warning") in [(finding["code"], finding["severity"]) for finding in document["findings"]]
    result = document["result"]
    assert (result["steps"], result["first_step_only"]) == (0, True)
    assert result["step_ms"] == pytest.approx(1000 * result["first_step_seconds"])
    assert result["tokens_per_second"] == pytest.approx(1100 / result["first_step_seconds"])


def small_grpo(user: User, name: str = "r", **change: Any) -> str:
    return user.recipe(
        name,
        data={"train": prompts(user.folder), "eval": ["bundled:smoke-grpo-eval"]},
        train={"max_steps": 2, "per_device_train_batch_size": 4},
        checkpoint={"every_steps": 1},
        grpo={
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 4,
            "rewards": [{"use": "regex", "pattern": "1"}],
        },
        **change,
    )


def test_grpo_scores_tasks_by_a_users_function(user: User) -> None:
    (user.folder / "judge.py").write_text(
        "def longer(completions, prompts, **kw):\n    return [1.0] * len(completions)\n"
    )
    task = {"name": "mine", "file": f"{user.folder}/judge.py:longer", "data": prompts(user.folder)}
    result = user.done("grpo", small_grpo(user, eval={"tasks": [task]}))
    assert (result["before"]["mine"], result["after"]["mine"]) == (1.0, 1.0)
    written = json.loads((user.folder / "r" / "eval.json").read_text())
    assert [written[side]["tasks"][0]["value"] for side in ("base", "run")] == [1.0, 1.0]
    assert all(None not in (row["before"], row["after"]) and row["task"] == "mine" for row in written["samples"])
    first = json.loads((user.folder / "r" / "eval.json").read_text())
    user.cut_off("r")  # a run that goes on still knows what it scored before training
    (user.folder / "r" / "eval.json").write_text(json.dumps({**first, "run": None}))
    shutil.rmtree(user.folder / "r" / "checkpoints" / "step-00000002", ignore_errors=True)
    assert user.done("grpo", small_grpo(user, eval={"tasks": [task]}))["before"]["mine"] == 1.0
    again = json.loads((user.folder / "r" / "eval.json").read_text())
    assert [row["before"] for row in again["samples"]] == [row["before"] for row in first["samples"]]


def test_grpo_refuses_a_task_without_rows(user: User) -> None:
    recipe = small_grpo(user, eval={"tasks": [{"use": "exact_match"}]})
    status, document = user.run("grpo", recipe, "--set", "data.eval=[]")
    assert (status, document["findings"][-1]["code"]) == (2, "FT255")


def test_grpo_is_held_to_the_weights_it_began_with(user: User) -> None:
    model = user.folder / "model"
    shutil.copytree(user.model["name_or_path"], model)
    recipe = small_grpo(user, model={"name_or_path": str(model)})
    user.done("grpo", recipe)
    user.cut_off("r")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    status, document = user.run("grpo", recipe)
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")


def test_eval_and_export_are_held_to_the_base_that_the_run_was_trained_on(user: User) -> None:
    model, moved = user.folder / "model", user.folder / "moved"
    shutil.copytree(user.model["name_or_path"], model)
    recipe = user.recipe(model={"name_or_path": str(model)}, train={"max_steps": 1})
    user.done("train", recipe)
    shutil.copytree(model, moved)
    run = str(user.folder / "r")
    user.done("eval", recipe, "--run", run, "--set", f"model.name_or_path={moved}")  # the same weights
    other = user.folder / "other"
    build("llama").save_pretrained(other)
    words = ["--set", f"model.name_or_path={other}", "--set", "model.tokenizer=bytes"]
    status, document = user.run("eval", recipe, "--run", run, *words)
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")
    assert f"was trained on {model}, not on {other}" in document["findings"][-1]["message"]
    asked = (["eval", recipe, "--run", run], ["chat", run, "--prompt", "Hi"], ["export", run])
    weights, config = model / "model.safetensors", model / "config.json"
    good = weights.read_bytes(), config.read_text()
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    assert {refused(user, words, "FT735", "model.safetensors") for words in asked} == {2}
    weights.write_bytes(good[0])
    config.write_text(good[1].replace('"rms_norm_eps": ', '"rms_norm_eps": 1'))
    assert {refused(user, words, "FT735", "config.json") for words in asked} == {2}
    config.write_text(good[1])
    settings = Path(run, "adapter", "adapter_config.json")
    trained = settings.read_text()
    settings.write_text(json.dumps({**json.loads(trained), "lora_alpha": 999}))
    assert {refused(user, words, "FT771", "adapter_config.json") for words in asked} == {2}
    settings.write_text(trained)
    Path(run, "manifest.json").write_text("{")
    for words in asked[1:]:
        status, document = user.run(*words)
        assert status == 0
        assert "FT770" in [finding["code"] for finding in document["findings"]], words


def refused(user: User, words: list[str], code: str, name: str) -> int:
    status, document = user.run(*words)
    assert document["findings"][-1]["code"] == code, words
    assert name in document["findings"][-1]["message"]
    return status


def test_a_run_of_random_weights_is_held_to_its_seed(user: User) -> None:
    recipe = user.recipe(model={"init": "random"}, train={"max_steps": 1})
    user.done("train", recipe)
    user.done("eval", recipe, "--run", str(user.folder / "r"))
    status, document = user.run("eval", recipe, "--run", str(user.folder / "r"), "--set", "run.seed=4")
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")
    assert "run.seed 3 -> 4" in document["findings"][-1]["message"]


def test_rubbish_that_a_checkpoint_was_written_with_is_refused(user: User) -> None:
    recipe = user.recipe(train={"max_steps": 2}, checkpoint={"every_steps": 1})
    user.done("train", recipe)
    run, whole = user.cut_off("r"), user.folder / "whole"
    shutil.copytree(run, whole)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "ftcli_state.json", "trainer_state.json"):
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        checkpoint = sorted((run / "checkpoints").iterdir())[0]
        assert (checkpoint / name).is_file()
        (checkpoint / name).write_bytes(b"rubbish")
        listed = json.loads((checkpoint / "complete.json").read_text())
        for entry in listed["files"]:
            if name in entry.values():
                entry.update({"bytes": 7, "sha256": hashlib.sha256(b"rubbish").hexdigest()})
        (checkpoint / "complete.json").write_text(json.dumps(listed))
        status, document = user.run("train", recipe, "--resume", str(checkpoint))
        assert (status, document["findings"][-1]["code"]) == (2, "FT725"), name
        assert "cannot be loaded" in document["findings"][-1]["message"], name


@pytest.mark.parametrize("column", ["completion_ids", "environments", "trainer_state"])
def test_grpo_columns_named_as_trls_own(user: User, column: str) -> None:
    recipe = small_grpo(user)
    path = Path(prompts(user.folder)[0])
    rows = [{**json.loads(line), column: "x"} for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    status, document = user.run("grpo", recipe)
    assert (status, document["findings"][-1]["code"]) == (4, "FT454")


def test_a_sample_of_more_rows_than_can_be_counted(user: User) -> None:
    status, document = user.run("check", user.recipe(), "--show-sample", "9" * 23)
    assert (status, document["findings"][-1]["code"]) == (2, "FT150")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_decides_who_reads_a_result(narrow: User, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        narrow.done("train", narrow.recipe(train={"max_steps": 1}))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (narrow.folder / "r" / "adapter").iterdir()} == {mode}
