"""`ftcli eval`, `export`, `grpo` and `bench` on what `train` leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ftcli.config import DatasetConfig
from ftcli.data.load import read_rows
from tests.e2e.conftest import User


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


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_eval_loss_does_not_depend_on_the_batch(user: User, batch: int) -> None:
    recipe = user.recipe(eval={"per_device_eval_batch_size": batch})
    reference = user.recipe("whole", eval={"per_device_eval_batch_size": 6})
    assert user.done("eval", recipe)["base"]["loss"] == pytest.approx(
        user.done("eval", reference)["base"]["loss"], rel=1e-5
    )


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
    assert result["steps"] == 2
    for name in ("tokens_per_second", "step_ms", "peak_memory_bytes", "matmul_tflops", "share_of_bound"):
        assert result[name] > 0, name
    assert result["share_of_bound"] < 1
