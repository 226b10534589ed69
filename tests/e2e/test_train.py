"""`ftcli train`: what it leaves, that it is reproducible, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.cli.app import main
from tests.e2e.conftest import User, merged


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_run_leaves_everything_and_loads_without_ftcli(stored: User) -> None:
    result = stored.done("train", stored.recipe())  # weights that a file holds
    run = stored.folder / "r"
    for name in ("recipe.yaml", "manifest.json", "metrics.jsonl", "tokens.json", "eval.json", "report.html"):
        assert (run / name).stat().st_size > 0, name
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("completed", 0)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["seeds"] == {"seed": 3}
    assert manifest["dtype_plan"]["compute"] == "float32"
    assert {part["part"]: part["runs"] for part in manifest["parts"]} == {
        "layers": "transformers",
        "attention": "eager",
        "batches": "padded",
        "launches": "one by one",
    }
    activations = manifest["activations"]
    assert activations.pop("reason").startswith("the fastest that fits in 90% of ")
    assert activations == {
        "requested": "auto",
        "gradient_checkpointing": False,
        "uncheckpointed_layers": 0,
        "offloaded": None,
        "pinned_host_bytes": 0,
    }
    assert manifest["libraries"]["torch"].startswith(torch.__version__.split("+")[0])

    lines = stored.metrics("r")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for name in ("grad_norm", "learning_rate", "tokens", "tokens_per_second", "peak_memory_bytes"):
        assert all(line[name] > 0 for line in steps), name
    assert result["eval"]["tokens"] > 0

    model = AutoPeftModelForCausalLM.from_pretrained(str(run / "adapter"))
    tokenizer = AutoTokenizer.from_pretrained(str(run / "adapter"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "mirror: ab"}], return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_same_seed_same_bits_another_seed_others(stored: User) -> None:
    """On a model whose own weights are of no seed."""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        stored.done("train", stored.recipe(name, run={"seed": seed}))
    assert stored.losses("a") == stored.losses("b")
    assert stored.losses("a") != stored.losses("c")
    first, second = weights(stored.folder / "a"), weights(stored.folder / "b")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_accumulation_gives_the_loss_of_one_large_batch(user: User) -> None:
    user.done("train", user.recipe("whole", train={"per_device_train_batch_size": 8}))
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    user.done("train", user.recipe("split", train=split))
    assert user.losses("split") == pytest.approx(user.losses("whole"), rel=1e-5)


def test_full_fine_tuning_leaves_a_model(user: User) -> None:
    user.done("train", user.recipe(lora=None, train={"max_steps": 2}))
    model = AutoModelForCausalLM.from_pretrained(str(user.folder / "r" / "model"))
    assert model.config.model_type == "gemma2"
    assert not (user.folder / "r" / "adapter").exists()


def test_a_finished_run_is_not_repeated_and_never_overwritten(user: User) -> None:
    recipe = user.recipe(train={"max_steps": 2})
    user.done("train", recipe)
    before = weights(user.folder / "r")
    assert user.done("train", recipe)["already_complete"] is True
    user.done("train", recipe, "--resume", "never", "--set", "run.seed=9")
    kept = weights(user.folder / "r.previous-1")
    assert all(torch.equal(kept[key], before[key]) for key in before)
    status, document = user.run("train", recipe, "--max-steps", "3", "--set", "run.seed=9")
    assert status == 2
    assert "train.max_steps" in json.dumps(document["findings"])


def test_resuming_gives_the_bits_of_an_uninterrupted_run(user: User) -> None:
    recipe = user.recipe(checkpoint={"every_steps": 3})
    user.done("train", recipe)
    assert (user.folder / "r" / "checkpoints" / "step-00000003").is_dir()
    user.goes_on_alike("r", recipe)


def test_auto_says_in_one_line_what_it_came_to(user: User) -> None:
    for setting, told in ((None, 1), (True, 0)):
        train = {"max_steps": 1} if setting is None else {"max_steps": 1, "gradient_checkpointing": setting}
        recipe = user.recipe(f"said-{told}", train=train, data={"eval": []})
        assert main(["train", recipe, "--offline"]) == 0
        said = [line for line in user.capture.readouterr().err.splitlines() if "gradient_checkpointing" in line]
        assert len(said) == told
        assert all("gradient_checkpointing: false: the fastest that fits in 90% of" in line for line in said)


def test_a_run_goes_on_under_another_policy_with_the_same_bits(user: User) -> None:
    """On a machine with other memory `auto` comes to something else; older recipes spell a policy out."""
    change: dict[str, Any] = {"checkpoint": {"every_steps": 3}, "lora": {"dropout": 0.2}, "data": {"eval": []}}
    user.done("train", user.recipe("whole", **change))
    whole = weights(user.folder / "whole")
    for name, before in (("older", False), ("again", True)):
        user.done("train", user.recipe(name, **change, train={"gradient_checkpointing": before}))
        run = user.cut_off(name)
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
        user.done("train", user.recipe(name, **change))
        manifest = json.loads((run / "manifest.json").read_text())
        assert [process["from_step"] for process in manifest["processes"]] == [0, 3]
        assert manifest["activations"]["requested"] == "auto"
        assert manifest["activations"]["gradient_checkpointing"] is False
        assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["gradient_checkpointing"] == "auto"
        resumed = weights(run)
        assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items()), name


def test_divergence_stops_with_exit_6(user: User, narrow_files: Path) -> None:
    model = user.folder / "model"
    shutil.copytree(narrow_files, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    status, document = user.run("train", user.recipe(model={"name_or_path": str(model)}))
    assert status == 6
    assert document["findings"][-1]["code"] == "FT702"
    assert "step 1" in document["findings"][-1]["message"]
    assert json.loads((user.folder / "r" / "status.json").read_text())["state"] == "failed"


def test_bad_rows_stop_before_the_model_is_loaded(user: User) -> None:
    bad = user.folder / "bad.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad.write_text("\n".join([json.dumps(good)] * 300 + ['{"messages": []}', json.dumps(good)]))
    status, document = user.run("train", user.recipe(data={"train": [str(bad)]}))
    assert status == 4
    finding = document["findings"][-1]
    assert (finding["code"], finding["line"]) == ("FT412", 301)


def test_held_out_loss_is_measured_during_training(user: User) -> None:
    user.done("train", user.recipe(eval={"every_steps": 2, "samples": 0}))
    measured = {line["step"]: line["eval_loss"] for line in user.metrics("r") if "eval_loss" in line}
    assert sorted(measured) == [2, 4, 6]
    assert len(set(measured.values())) == 3


def test_grpo_has_the_same_bits_where_layers_run_again(user: User) -> None:
    """So `auto` may come to either, and a run may go on under the other."""
    change: dict[str, Any] = {
        "model": {"init": "random"},
        "lora": {"dropout": 0.1},
        "data": {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 16}], "eval": []},
        "train": {"max_steps": 2, "gradient_accumulation_steps": 2},
        "grpo": {
            "num_generations": 4,
            "max_prompt_length": 48,
            "max_completion_length": 6,
            "rewards": [{"use": "regex", "pattern": "[a-z]"}],
        },
    }
    for name, policy in (("open", "auto"), ("again", True)):
        user.done("grpo", user.recipe(name, **merged(change, {"train": {"gradient_checkpointing": policy}})))
    assert all(line["grad_norm"] > 0 for line in user.metrics("open") if "grad_norm" in line)
    kept, again = weights(user.folder / "open"), weights(user.folder / "again")
    assert all(torch.equal(kept[key], again[key]) for key in kept)
