"""Reward models as a user meets them: trained, gone on with, evaluated, exported, and loaded by plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ftcli.assets import asset
from tests.e2e.conftest import User, merged

PAIRS: dict[str, Any] = {
    "data": {
        "train": [{"path": "bundled:smoke-dpo-train", "max_rows": 24}],
        "eval": [{"path": "bundled:smoke-dpo-eval", "max_rows": 6}],
        "max_seq_len": 64,
    },
    "train": {"method": "reward", "max_steps": 5, "learning_rate": 5e-3, "warmup_steps": 0},
    "eval": {"every_steps": 2, "samples": 0},
    "checkpoint": {"every_steps": 3},
}


@pytest.fixture
def user(stored: User) -> User:
    """What is asked here does not depend on what the model knows; plain libraries load its base."""
    return stored


def scored(model: Any, tokenizer: Any) -> list[float]:
    """Scores of the held-out pairs' answers, as somebody without ftcli computes them, in one padded batch."""
    lines = asset("data", "smoke-dpo-eval.jsonl").read_text("utf-8").splitlines()[:6]
    texts = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        for row in map(json.loads, lines)
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        found = model.eval().float()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return [float(score) for score in found.squeeze(-1)]


def require_told(told: dict[str, Any], scores: list[float], abs: float) -> None:
    """What `ftcli eval` said of the run is what plain transformers computes."""
    chosen, rejected = scores[0::2], scores[1::2]
    assert told["run"]["chosen_reward"] == pytest.approx(sum(chosen) / 6, abs=abs)
    assert told["run"]["rejected_reward"] == pytest.approx(sum(rejected) / 6, abs=abs)
    right = sum(one > other for one, other in zip(chosen, rejected, strict=True)) / 6
    assert told["run"]["accuracy"] == pytest.approx(right)


def test_adapters_and_their_score_are_loaded_by_plain_peft(user: User) -> None:
    recipe = user.recipe("r", **PAIRS)
    user.done("train", recipe)
    losses = user.losses("r")
    assert min(losses) < losses[0] - 0.02
    user.goes_on_alike("r", recipe)
    run = user.folder / "r"
    told = user.done("eval", recipe, "--run", str(run))
    assert told["base"]["accuracy"] != told["run"]["accuracy"] or told["base"]["margin"] != told["run"]["margin"]
    config = json.loads((run / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert (config["task_type"], sorted(set(config["modules_to_save"]))) == ("SEQ_CLS", ["classifier", "score"])
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    told_to_use = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    name = config["base_model_name_or_path"]
    base = AutoModelForSequenceClassification.from_pretrained(name, **told_to_use, dtype=torch.float32)
    require_told(told, scored(PeftModel.from_pretrained(base, run / "adapter"), tokenizer), 1e-3)
    assert "num_labels=1, pad_token_id=tokenizer.pad_token_id" in (run / "adapter" / "README.md").read_text("utf-8")
    as_the_card_says = AutoPeftModelForSequenceClassification.from_pretrained(run / "adapter", **told_to_use)
    require_told(told, scored(as_the_card_says, tokenizer), 1e-3)
    require_a_report(run / "report.html")

    done = user.done("export", str(run), "--format", "adapter", "--format", "safetensors")
    assert [one["format"] for one in done["exports"]] == ["adapter", "safetensors"]
    folder = run / "export" / "safetensors"
    merged_model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    require_told(told, scored(merged_model, AutoTokenizer.from_pretrained(folder)), 0.05)

    require_rewards(user, folder, merged_model, AutoTokenizer.from_pretrained(folder))


def require_a_report(page: Path) -> None:
    """Charts and results are those of scores; there is nothing of answers, tokens or perplexity."""
    text = page.read_text("utf-8")
    for title in ("Pairs in the right order", "Score", "Margin", "Reward of chosen answers"):
        assert title in text
    assert "Perplexity" not in text
    assert "nats per token" not in text


def require_rewards(user: User, folder: Path, model: Any, tokenizer: Any) -> None:
    """GRPO's rewards are the scores that plain transformers gives the prompts' messages with each completion."""
    grpo = {
        "num_generations": 2, "max_prompt_length": 40, "max_completion_length": 4,
        "rewards": [{"use": "reward_model", "model": str(folder)}],
    }  # fmt: skip
    rows = user.folder / "asked.jsonl"
    question = [{"role": "user", "content": "pick: 3 7 5 1"}]
    rows.write_text(json.dumps({"prompt": question, "answer": "7"}) + "\n", encoding="utf-8")
    data = {"train": [str(rows)], "eval": []}
    recipe = user.recipe("g", data=data, train={"max_steps": 1, "per_device_train_batch_size": 2}, grpo=grpo)
    user.done("grpo", recipe)
    said = pq.read_table(next((user.folder / "g" / "completions").iterdir())).to_pylist()
    texts = [
        tokenizer.apply_chat_template([*question, {"role": "assistant", "content": one["completion"]}], tokenize=False)
        for one in said
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    assert [one["rewards/reward_model"] for one in said] == pytest.approx(wanted.tolist(), abs=1e-4)
    manifest = json.loads((user.folder / "g" / "manifest.json").read_text("utf-8"))
    assert str(folder / "model.safetensors") in json.dumps(manifest)

    # Without a template of its own the prompts' messages would be scored as another model writes them.
    (folder / "chat_template.jinja").unlink()
    status, document = user.run("grpo", recipe, "--dry-rewards")
    assert (status, [one["code"] for one in document["findings"] if one["severity"] == "error"]) == (2, ["FT469"])


@pytest.mark.parametrize("what", ["nothing", "adapter", "language model"])
def test_a_reward_that_is_no_reward_model_is_refused(user: User, what: str) -> None:
    folder = user.folder / "other"
    folder.mkdir()
    if what == "adapter":
        (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    elif what == "language model":
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', encoding="utf-8")
    rewards = [{"use": "reward_model", "model": str(folder)}]
    status, document = user.run("check", user.recipe("g", grpo={"rewards": rewards}))
    assert status == 2
    assert "FT469" in [one["code"] for one in document["findings"]]


def test_a_model_that_is_trained_whole_is_a_classifier(user: User) -> None:
    recipe = user.recipe("r", **merged(PAIRS, {"lora": None, "train": {"learning_rate": 1e-3}}))
    user.done("train", recipe)
    user.goes_on_alike("r", recipe)
    run = user.folder / "r"
    told = user.done("eval", recipe, "--run", str(run))
    model, info = AutoModelForSequenceClassification.from_pretrained(
        run / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    require_told(told, scored(model, AutoTokenizer.from_pretrained(run / "model")), 1e-3)
    done = user.done("export", str(run), "--format", "safetensors")
    assert done["exports"][0]["verification"]["compared"].startswith("every weight bit for bit")
    halved = user.folder / "halved"
    wanted = ("--set", "export.dtype=bfloat16", "--output", str(halved))
    user.done("export", str(run), "--format", "safetensors", *wanted)
    stored = AutoModelForSequenceClassification.from_pretrained(halved / "safetensors", dtype="auto").state_dict()
    whole = model.state_dict()
    assert all(torch.equal(stored[name], whole[name].bfloat16()) for name in whole)


@pytest.mark.parametrize(
    ("command", "change", "code"),
    [
        ("chat", {}, "FT351"),
        ("train", {"reward": {"margin": True}}, "FT462"),
        ("check", {"reward": {"margin": True}}, "FT462"),
        ("train", {"eval": {"tasks": [{"use": "exact_match"}]}}, "FT250"),
        ("train", {"preference": {"beta": 0.1}}, "FT250"),
    ],
)
def test_what_a_reward_model_is_not_for_is_refused(user: User, command: str, change: dict[str, Any], code: str) -> None:
    recipe = user.recipe("r", **merged(PAIRS, change))
    more = ("--prompt", "hello", "--base") if command == "chat" else ()
    status, document = user.run(command, recipe, *more)
    assert status in (2, 3, 4)
    assert [one["code"] for one in document["findings"] if one["severity"] == "error"] == [code]
