"""`lora.start_from`: training goes on from an adapter, whichever tool has written it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import User
from tests.e2e.test_preference import pairs


def trained(user: User, **change: Any) -> Path:
    """A run of a few steps at a rate that is felt, and its adapter."""
    train = {"max_steps": 4, "learning_rate": 1e-2}
    user.done("train", user.recipe("a", eval={"every_steps": 4, "samples": 0}, train=train, **change))
    return user.folder / "a"


def losses(run: Path) -> dict[str, float]:
    said = json.loads((run / "eval.json").read_text())
    return {side: said[side]["loss"] for side in ("base", "run")}


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_it_begins_where_the_adapter_ended(lora: dict[str, Any], stored: User) -> None:
    user = stored
    run = trained(user, lora={"r": 4, **lora})
    before = losses(run)
    assert before["run"] < before["base"] - 0.01
    change = {"eval": {"every_steps": 4, "samples": 0}, "train": {"max_steps": 2, "learning_rate": 1e-8}}
    user.done("train", user.recipe("b", lora={"r": 4, **lora, "start_from": str(run)}, **change))
    after = losses(user.folder / "b")
    assert after["base"] == pytest.approx(before["run"], rel=1e-5)
    assert after["run"] == pytest.approx(before["run"], rel=1e-3)


def test_an_adapter_of_peft_itself_is_taken_and_a_changed_one_refuses_a_resume(stored: User) -> None:
    """In bfloat16, with a config as peft writes it, under a random draw that is no zero."""
    import peft
    from transformers import AutoModelForCausalLM

    user = stored
    model = AutoModelForCausalLM.from_pretrained(user.model["name_or_path"])
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, alpha_pattern={"q_proj": 2}
    )
    torch.manual_seed(1)
    folder = user.folder / "theirs"
    peft.get_peft_model(model, config).to(torch.bfloat16).save_pretrained(folder)
    lora = {"r": 4, "alpha": 8, "alpha_pattern": {"self_attn.q_proj": 2}, "start_from": str(folder)}
    recipe = user.recipe("b", lora=lora, train={"max_steps": 2}, checkpoint={"every_steps": 1})
    user.done("train", recipe)
    theirs, ours = (load_file(each / "adapter_model.safetensors") for each in (folder, user.folder / "b" / "adapter"))
    assert theirs.keys() == ours.keys()
    assert all((theirs[name].float() - ours[name]).abs().max() < 0.01 for name in ours)
    user.cut_off("b")
    save_file({name: tensor * 2 for name, tensor in theirs.items()}, folder / "adapter_model.safetensors")
    status, document = user.run("train", recipe)
    assert (status, document["findings"][-1]["code"]) == (2, "FT731")


_UNFIT = "rank alpha alphas base part nothing kind tensor targets damaged nan"


def test_what_does_not_fit_is_refused(stored: User) -> None:
    user = stored
    run = trained(user, lora={"r": 4})
    for what in _UNFIT.split():
        folder = user.folder / f"copy-{what}"
        shutil.copytree(run / "adapter", folder)
        lora = {"r": 4, "start_from": str(folder), **unfit(what, folder)}
        status, document = user.run("train", user.recipe(f"b-{what}", lora=lora, train={"max_steps": 1}))
        (finding,) = (f for f in document["findings"] if f["severity"] == "error")
        assert (status, finding["code"]) == (3, "FT334"), what
        assert finding["help"]


def unfit(what: str, folder: Path) -> dict[str, Any]:
    """Changes the adapter so that it does not fit, or gives the settings of `lora` that it does not fit."""
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    settings: dict[str, dict[str, Any]] = {
        "rank": {"r": 8},
        "alpha": {"alpha": 4.0},
        "targets": {"target_modules": ["q_proj"]},
    }
    # With these the tensors fit, and would mean something else.
    configs: dict[str, dict[str, Any]] = {
        "alphas": {"alpha_pattern": {"q_proj": 2}},
        "base": {"init_lora_weights": "pissa_niter_4"},
        "part": {"alora_invocation_tokens": [5]},
        "kind": {"peft_type": "LOHA"},
    }
    if what == "nothing":
        shutil.rmtree(folder)
    elif what in configs:
        config.write_text(json.dumps({**json.loads(config.read_text()), **configs[what]}))
    elif what == "tensor":
        save_file(dict(list(load_file(weights).items())[1:]), weights)
    elif what == "nan":
        save_file({name: tensor * float("nan") for name, tensor in load_file(weights).items()}, weights)
    elif what == "damaged":
        weights.write_bytes(b"no tensors")
    return settings.get(what, {})


@pytest.mark.parametrize("cached", [False, True], ids=["live", "cached"])
def test_pairs_are_compared_with_the_adapter_as_it_was_loaded(cached: bool, stored: User) -> None:
    """In each step or ahead of the first one, where a run goes on, and in `ftcli eval`, which holds it to its files."""
    user = stored
    first = trained(user, lora={"r": 4})
    change = pairs(lora={"r": 4, "start_from": str(first)}, preference={"reference_cache": "./kept"} if cached else {})
    recipe = user.recipe("b", **change)
    user.done("train", recipe)
    assert user.losses("b")[0] == pytest.approx(math.log(2), abs=1e-5)
    user.goes_on_alike("b", recipe)
    run = user.folder / "b"
    final = [line for line in user.metrics("b") if "eval_loss" in line][-1]
    told = user.done("eval", recipe, "--run", str(run))
    assert (told["base"]["margin"], told["base"]["loss"]) == (0, pytest.approx(math.log(2), abs=1e-6))
    assert told["run"]["margin"] == pytest.approx(final["eval_margin"], rel=1e-4)
    assert abs(final["eval_margin"]) > 1e-3
    weights = first / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(weights).items()}, weights)
    status, document = user.run("eval", recipe, "--run", str(run))
    assert (status, document["findings"][-1]["code"]) == (2, "FT735")


def test_where_there_is_nothing_to_go_on_from(stored: User) -> None:
    user = stored
    lora = {"r": 4, "start_from": str(trained(user, lora={"r": 4})), "init_lora_weights": "pissa"}
    status, document = user.run("train", user.recipe("b", lora=lora))
    errors = [f["code"] for f in document["findings"] if f["severity"] == "error"]
    assert (status, errors) == (3, ["FT250"])
