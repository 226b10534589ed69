"""`data.padding_free` as a user sees it: the same training, and all that is computed counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import User

#: Three micro-batches of three rows a step, and an evaluation in between.
CHANGE: dict[str, Any] = {
    "model": {"kernels": "reference"},
    "train": {"max_steps": 3, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 4, "samples": 0},
}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def trained(user: User, name: str, **data: Any) -> list[dict[str, Any]]:
    user.done("train", user.recipe(name, **{**CHANGE, "data": data}))
    return user.metrics(name)


@pytest.mark.parametrize("packing", [False, True])
def test_it_trains_and_evaluates_what_padded_batches_do(user: User, packing: bool) -> None:
    padded = trained(user, "padded", padding_free=False, packing=packing)
    unpadded = trained(user, "unpadded", padding_free=True, packing=packing)
    assert len(padded) == len(unpadded)
    for wanted, found in zip(padded, unpadded, strict=True):
        assert found["step"] == wanted["step"]
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in wanted:
                assert found[name] == pytest.approx(wanted[name], rel=2e-6)
        for name in ("tokens", "eval_tokens", "eval_rows", "eval_token_accuracy"):
            assert found.get(name) == wanted.get(name)


def test_what_is_computed_is_counted(user: User) -> None:
    lines = [line for line in trained(user, "r", padding_free=True) if "loss" in line]
    computed = [line["tokens_computed"] for line in lines]
    assert all(count % 64 == 0 for count in computed)
    assert all(line["tokens_computed"] > line["tokens"] for line in lines)
    epoch = json.loads((user.folder / "r" / "tokens.json").read_text())["epoch"]
    assert epoch["layout"] == "unpadded"
    assert epoch["tokens_computed"] == epoch["tokens"] + epoch["tokens_padded"]
    assert epoch["tokens_computed"] % 64 == 0
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    batches = manifest["batches"]
    assert (batches["layout"], batches["tokens"], batches["filler"]) == (
        "unpadded",
        epoch["tokens"],
        epoch["tokens_padded"],
    )
    assert "data.padding_free: true" in batches["reason"]


def test_padding_is_counted_too(user: User) -> None:
    lines = [line for line in trained(user, "r") if "loss" in line]
    epoch = json.loads((user.folder / "r" / "tokens.json").read_text())["epoch"]
    assert epoch["layout"] == "padded"
    assert lines[-1]["tokens_computed"] > lines[-1]["tokens"]


def test_check_says_how_batches_are_laid_out_and_why(user: User) -> None:
    def row(*words: str) -> dict[str, str]:
        result = user.done("check", user.recipe(), *words)
        [found] = [row for row in result["kernel_table"] if row["part"] == "batches"]
        told = {"layout": found["runs"], "reason": found["reason"], "shares_prompts": False}
        assert result["batches"].pop("few_up_to") >= 4096
        assert result["batches"] == told
        return found

    assert row()["runs"] == "padded"
    assert "transformers' own attention" in row()["reason"]
    assert row("--as", "h200")["runs"] == "unpadded"
    assert row("--as", "h200", "--set", "data.padding_free=false")["reason"] == "data.padding_free: false"
    assert row("--as", "h200", "--set", "model.kernels=off")["runs"] == "padded"
    assert row("--as", "t4")["runs"] == "padded"
    assert row("--set", "data.padding_free=true")["runs"] == "unpadded"
    noisy = row("--as", "h200", "--set", "train.neftune_noise_alpha=5")
    assert (noisy["runs"], "noise" in noisy["reason"]) == ("padded", True)


def test_it_says_where_the_key_has_no_effect(user: User) -> None:
    recipe = user.recipe(data={"padding_free": True}, train={"neftune_noise_alpha": 5.0})
    findings = user.done("check", recipe)["findings"]
    assert [(f["code"], "padding_free" in f["message"]) for f in findings if f["code"] == "FT259"] == [("FT259", True)]
