"""Full fine-tuning through `ftcli train`: on the kernels' torch form, in every precision and under every policy."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ftcli.model.fused import DecoderStack, StackCall
from tests.e2e.conftest import User
from tests.pairs import all_pairs

PRECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "masters": ({}, "F32"),
    "gradients": ({"bf16_gradients": True}, "F32"),
    "nearest": ({"pure_bf16": True}, "BF16"),
    "stochastic": ({"pure_bf16": True, "bf16_stochastic_round": True}, "BF16"),
}
POLICIES = [False, True, "selective", "offload"]
OPTIMIZERS = ["adamw_torch", "adamw_torch_fused"]
#: Each precision under each policy; `make test` takes each of them once or twice.
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if place % 4 == 0 else pytest.mark.long)
    for case in all_pairs(list(PRECISIONS), POLICIES, OPTIMIZERS)
    for place in [list(PRECISIONS).index(case[0]) + POLICIES.index(case[1])]
]


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


@pytest.mark.filterwarnings("ignore")  # bfloat16 on a CPU
@pytest.mark.parametrize(("precision", "policy", "optim"), CASES)
def test_a_run_learns_and_goes_on_to_the_last_bit(user: User, precision: str, policy: Any, optim: str) -> None:
    settings, stored = PRECISIONS[precision]
    recipe = user.recipe(
        "r",
        model={"dtype": "bfloat16", "kernels": "reference"},
        lora=None,
        data={"eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]},
        train={"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": optim}
        | {"gradient_checkpointing": policy, **settings},
        eval={"every_steps": 2, "samples": 0},
        checkpoint={"every_steps": 3},
    )
    user.done("train", recipe)
    losses = user.losses("r")
    assert losses[-1] < losses[0]
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    assert {entry["kernel"] for entry in manifest["kernels"]} == {"fused layer", "RMSNorm"}
    assert manifest["self_check"]["passed"]
    assert manifest["dtype_plan"]["rounding"] == (precision if "pure_bf16" in settings else None)
    assert manifest["dtype_plan"]["gradient"] == ("bfloat16" if settings else "float32")
    with safe_open(user.folder / "r" / "model" / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}  # noqa: SIM118  # no dict
    user.goes_on_alike("r", recipe)


@pytest.mark.filterwarnings("ignore")  # bfloat16 on a CPU
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "muon"])
def test_products_read_the_weights_as_they_are(user: User, monkeypatch: pytest.MonkeyPatch, optim: str) -> None:
    """In `ftcli bench`, too, which trains without the callbacks of a run."""
    seen = []
    run = DecoderStack.run

    def watched(stack: DecoderStack, call: StackCall) -> Tensor:
        out = run(stack, call)
        assert all(torch.equal(copy, weight.to(copy.dtype)) for weight, copy in stack.copies)
        seen.append(float(stack.copies[0][0].detach().abs().sum()))
        return out

    monkeypatch.setattr(DecoderStack, "run", watched)
    model = {"dtype": "bfloat16", "kernels": "reference"}
    recipe = user.recipe("r", model=model, lora=None, train={"optim": optim, "learning_rate": 0.1})
    user.done("bench", recipe, "--steps", "2", "--batch", "1")
    assert len(set(seen)) == 3  # each step has changed the weights


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"bf16_stochastic_round": True}}, "train.pure_bf16 is off"),
        ({"train": {"bf16_gradients": True}, "lora": {"r": 4}}, "is for full fine-tuning"),
        ({"train": {"bf16_gradients": True, "pure_bf16": True}}, "keeps parameters in float32"),
        ({"train": {"bf16_gradients": True}, "model": {"dtype": "float16"}}, "model.dtype is float16"),
        ({"train": {"bf16_gradients": True}, "model": {"dtype": "auto"}}, "computes in float32"),
        ({"train": {"bf16_gradients": True, "optim": "muon"}}, "muon cannot read gradients in bfloat16"),
        (
            {"train": {"bf16_gradients": True}, "quantization": {"method": "bitnet"}},
            "does not work with quantization.method: bitnet",
        ),
        ({"train": {"pure_bf16": True}, "lora": {"r": 4}}, "is for full fine-tuning"),
        ({"train": {"pure_bf16": True}, "model": {"dtype": "float16"}}, "model.dtype is float16"),
        ({"train": {"pure_bf16": True}, "model": {"dtype": "auto"}}, "computes in float32"),
        ({"train": {"pure_bf16": True, "optim": "muon"}}, "muon cannot round updates in bfloat16"),
        (
            {"train": {"pure_bf16": True, "bf16_stochastic_round": True, "optim": "adamw_8bit"}},
            "adamw_8bit cannot round updates stochastically",
        ),
    ],
    ids=[
        "alone",
        *(f"gradients, {name}" for name in ("lora", "both", "float16", "cpu", "optimizer", "bitnet")),
        *("lora", "float16", "cpu", "optimizer", "8 bits"),
    ],
)
def test_what_does_not_go_with_bfloat16_parameters_or_gradients_is_refused(
    user: User, changes: dict[str, Any], said: str
) -> None:
    given = {"lora": None, **changes}
    given["model"] = {"dtype": "bfloat16", **changes.get("model", {})}
    status, document = user.run("check", user.recipe("r", **given))
    assert status in (2, 3)
    assert any(finding["code"] == "FT275" and said in finding["message"] for finding in document["findings"])
