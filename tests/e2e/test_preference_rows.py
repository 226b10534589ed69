"""Rows of preference methods end to end: plain text, a pad token that ends turns, and sources with weights."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ftcli.train.epochs import EpochObjective
from tests.e2e.conftest import User, merged
from tests.e2e.test_kto import LABELLED
from tests.e2e.test_preference import LN2, PAIRS
from tests.e2e.test_reward import PAIRS as SCORED
from tests.e2e.test_reward import require_told
from tests.tiers import further

METHODS = {"dpo": PAIRS, "kto": LABELLED, "reward": SCORED}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def file_of(user: User, name: str, rows: list[dict[str, Any]]) -> str:
    path = user.folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Pairs of plain text: the answer in capitals is the chosen one."""
    words = ("red", "green", "blue", "grey", "pink")
    return [
        {"prompt": f"{n} {words[n % 5]}: ", "chosen": words[n % 5].upper(), "rejected": words[(n + 1) % 5], **more}
        for n in range(first, first + count)
    ]


@pytest.mark.parametrize("method", ["kto", *further("dpo", "reward")])
def test_pairs_of_plain_text_are_trained_measured_and_gone_on_with(method: str, user: User) -> None:
    """No chat template is applied: what is computed are the bytes of the strings and a stop token."""
    files = file_of(user, "train.jsonl", texts(16)), file_of(user, "eval.jsonl", texts(6, first=50))
    recipe = user.recipe("r", **merged(METHODS[method], {"data": {"train": [files[0]], "eval": [files[1]]}}))
    shown = user.done("check", recipe, "--show-sample", "1")["samples"]
    written = ["".join(token["text"] for token in row["tokens"]) for row in shown]
    assert written == [f"<bos>0 red: {answer}<end_of_turn>" for answer in ("RED", "green")]
    assert [row["trained"] for row in shown] == [len("RED") + 1, len("green") + 1]
    user.done("train", recipe)
    losses = user.losses("r")
    assert min(losses) < losses[0]
    assert method == "reward" or losses[0] == pytest.approx({"dpo": LN2, "kto": 0.5}[method], abs=2e-3)
    user.goes_on_alike("r", recipe)
    final = [line for line in user.metrics("r") if "eval_loss" in line][-1]
    told = user.done("eval", recipe, "--run", str(user.folder / "r"))["run"]
    for name in ("loss", "accuracy", "margin"):
        assert told[name] == pytest.approx(final[f"eval_{name}"], rel=1e-3, abs=1e-3), name


def talks(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Pairs of messages, of many lengths."""
    return [
        {
            "prompt": [{"role": "user", "content": f"count {'on ' * (n % 3)}to {n}"}],
            "chosen": [{"role": "assistant", "content": "x" * (n % 4 + 1)}],
            "rejected": [{"role": "assistant", "content": "no" * (n % 5 + 1)}],
        }
        for n in range(first, first + count)
    ]


def with_pad_that_stops(user: User) -> dict[str, Any]:
    """The user's model, in another folder, with a tokenizer whose pad token ends turns, as many models have it."""
    folder = user.folder / "padded-with-stops"
    shutil.copytree(user.model["name_or_path"], folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.exists():
            values = json.loads(path.read_text("utf-8"))
            path.write_text(json.dumps({**values, "pad_token": values["eos_token"]}), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    return {"name_or_path": str(folder), "dtype": "float32"}


def numbers(user: User, name: str) -> list[dict[str, Any]]:
    timed = ("tokens_per_second", "peak_memory_bytes", "step_time", "seconds/", "throughput/")
    return [{key: v for key, v in line.items() if not key.startswith(timed)} for line in user.metrics(name)]


@pytest.mark.parametrize("method", ["dpo", *further("kto", "reward")])
def test_a_pad_token_that_ends_turns_changes_nothing(method: str, stored: User) -> None:
    """Rows of several lengths are padded with it, and their own last one is scored all the same."""
    stops = with_pad_that_stops(stored)
    files = file_of(stored, "train.jsonl", talks(24)), file_of(stored, "eval.jsonl", talks(6, first=50))
    recipe = merged(METHODS[method], {"data": {"train": [files[0]], "eval": [files[1]]}})
    for name, model in (("apart", stored.model), ("same", stops)):
        stored.done("train", stored.recipe(name, **merged(recipe, {"model": model})))
    assert numbers(stored, "same") == numbers(stored, "apart")
    found, wanted = (json.loads((stored.folder / name / "tokens.json").read_text()) for name in ("same", "apart"))
    assert found == wanted
    assert found["epoch"]["tokens_padded"] > 0


def test_plain_libraries_score_where_the_pad_token_ended_turns(stored: User) -> None:
    """The last token that is no padding has to be the row's own, so what is saved pads with another one."""
    held_out = talks(6, first=50)
    data = {"train": [file_of(stored, "train.jsonl", talks(24))], "eval": [file_of(stored, "eval.jsonl", held_out)]}
    recipe = stored.recipe("r", **merged(SCORED, {"model": with_pad_that_stops(stored), "data": data}))
    stored.done("train", recipe)
    run = stored.folder / "r"
    told = stored.done("eval", recipe, "--run", str(run))
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    base = AutoModelForSequenceClassification.from_pretrained(
        str(stored.folder / "padded-with-stops"), num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    model = PeftModel.from_pretrained(base, run / "adapter").eval()
    asked = [
        tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        for row in held_out
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
    assert int((batch["attention_mask"] == 0).sum()) > 0
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    require_told(told, found.squeeze(-1).tolist(), 1e-3)


class Drawn:
    """Takes note of the file of each row that a run's steps have drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        own = EpochObjective.micro_batches

        def noted(objective: EpochObjective, step: int, monitor: Any) -> Any:
            found = own(objective, step, monitor)
            units = [unit for batch in found for unit in batch.rows]
            self.files += [Path(objective._epochs.members(unit)[0].row.source).stem for unit in units]
            return found

        monkeypatch.setattr(EpochObjective, "micro_batches", noted)


@pytest.mark.parametrize("method", ["reward", *further("dpo", "kto")])
@pytest.mark.parametrize(("weights", "shares"), [((0.75, 0.25), (0.75, 0.25)), ((1, 3), (0.25, 0.75))], ids=str)
def test_sources_are_drawn_by_their_weights(
    method: str, weights: tuple[float, float], shares: tuple[float, float], user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their sizes: after each step to within one row of either kind, and over an epoch exactly."""
    answers = 2 if method == "kto" else 1  # of a pair each answer is a row
    files = [file_of(user, "a.jsonl", texts(6)), file_of(user, "b.jsonl", texts(8, first=20))]
    sources = [{"path": path, "weight": weight} for path, weight in zip(files, weights, strict=True)]
    counts = {(0.75, 0.25): (24, 8), (1, 3): (6, 18)}[weights]
    steps = sum(counts) * answers // 4
    drawn = Drawn(monkeypatch)
    change: dict[str, Any] = {
        "data": {"train": sources, "eval": []}, "eval": {"every_steps": None},
        "train": {"max_steps": steps, "per_device_train_batch_size": 4},
    }  # fmt: skip
    recipe = user.recipe("r", **merged(METHODS[method], change))
    for command in ("check", "train"):
        user.done(command, recipe)
    assert Counter(drawn.files) == {"a": counts[0] * answers, "b": counts[1] * answers}
    assert counts[0] / sum(counts) == shares[0]
    for done in range(4, len(drawn.files) + 1, 4):
        assert abs(drawn.files[:done].count("a") - done * shares[0]) <= answers
    tokens = json.loads((user.folder / "r" / "tokens.json").read_text())
    assert tokens["epoch"]["sequences"] == sum(counts) * answers
