"""DoRA, PiSSA and OLoRA, LoRA+, and choices among layers: trained, gone on with, evaluated and exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file

from ftcli.run.checkpoint import COMPLETE_NAME, inventory
from tests.e2e.conftest import User
from tests.tiers import further

BASE: dict[str, Any] = {
    "train": {"max_steps": 5},
    "eval": {"every_steps": 2, "samples": 0},
    "checkpoint": {"every_steps": 3},
}
EXPORT: dict[str, Any] = {"formats": ["adapter", "safetensors"]}
CHOICE: dict[str, Any] = {
    "r": 4,
    "layers_to_transform": [1, 2],
    "exclude_modules": ["k_proj"],
    "rank_pattern": {"q_proj": 20, r"layers\.1\.mlp\.down_proj": 6},
    "alpha_pattern": {"q_proj": 5.0},
}


def trained(user: User, name: str, **change: Any) -> str:
    """A finished run that was cut off and went on alike, evaluated as it was trained, and exported."""
    recipe = user.recipe(name, **{**BASE, "export": EXPORT, **change})
    user.done("train", recipe)
    assert user.losses(name)[-1] < user.losses(name)[0]
    user.goes_on_alike(name, recipe)
    run = str(user.folder / name)
    held_out = [line["eval_loss"] for line in user.metrics(name) if "eval_loss" in line]
    told = user.done("eval", recipe, "--run", run)
    assert told["run"]["loss"] == pytest.approx(held_out[-1], rel=1e-4)
    exported = user.done("export", run)
    assert len(exported["exports"]) == 2
    return recipe


@pytest.mark.parametrize("lora", [{"r": 4, "use_rslora": True, "dropout": 0.1}, *further({"r": 4})])
def test_dora(lora: dict[str, Any], stored: User) -> None:
    recipe = trained(stored, "r", lora={**lora, "use_dora": True})
    told = stored.done("check", recipe)
    saved = load_file(stored.folder / "r" / "adapter" / "adapter_model.safetensors")
    assert told["adapters"]["parameters"] == sum(tensor.numel() for tensor in saved.values())
    assert sum(name.endswith("lora_magnitude_vector") for name in saved) == 2 * 7


def test_dora_runs_off_the_kernels_and_says_why(narrow: User) -> None:
    recipe = narrow.recipe("r", lora={"r": 4, "use_dora": True}, model={"kernels": "reference"}, train={"max_steps": 1})
    narrow.done("train", recipe)
    manifest = json.loads((narrow.folder / "r" / "manifest.json").read_text())
    layers = [entry for entry in manifest["kernels"] if entry["layer"].startswith("layers.")]
    assert not any(entry["on"] for entry in layers)
    assert all("DoRA scales the merged weight" in entry["reason"] for entry in layers)
    parts = narrow.done("check", recipe)["kernel_table"]
    assert (parts[0]["runs"], "DoRA" in parts[0]["reason"]) == ("transformers", True)


@pytest.mark.parametrize("kind", ["pissa_niter_2", *further("olora", "pissa")])
def test_adapters_that_begin_as_a_part_of_the_weights(kind: str, stored: User) -> None:
    trained(stored, "r", lora={"r": 4, "init_lora_weights": kind}, model={"kernels": "reference"})
    folder = stored.folder / "r" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 64.0, True)
    manifest = json.loads((stored.folder / "r" / "manifest.json").read_text())
    assert all(entry["on"] for entry in manifest["kernels"])  # plain LoRA to the kernels


def test_they_begin_with_the_base_model_and_its_answers_are_told_as_such(narrow: User) -> None:
    """At a rate of next to nothing the run answers what the base does, and learns from where LoRA does."""
    train = {"max_steps": 1, "learning_rate": 1e-12}
    for kind in ("pissa", True):
        lora = {"r": 4, "init_lora_weights": kind}
        narrow.done("train", narrow.recipe(str(kind), lora=lora, train=train))
    assert narrow.losses("pissa") == pytest.approx(narrow.losses("True"), rel=1e-5)
    samples = [json.loads((narrow.folder / kind / "eval.json").read_text())["samples"] for kind in ("pissa", "True")]
    assert [row["before"] for row in samples[0]] == [row["before"] for row in samples[1]]


def test_the_answers_before_training_are_the_bases_however_far_training_went(narrow: User) -> None:
    for kind in ("pissa", True):
        lora = {"r": 4, "init_lora_weights": kind}
        narrow.done("train", narrow.recipe(str(kind), lora=lora, train={"max_steps": 6, "learning_rate": 0.04}))
    samples = [json.loads((narrow.folder / kind / "eval.json").read_text())["samples"] for kind in ("pissa", "True")]
    assert [row["before"] for row in samples[0]] == [row["before"] for row in samples[1]]
    assert [row["after"] for row in samples[0]] != [row["before"] for row in samples[0]]


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")
def test_what_is_saved_of_pissa_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ftcli.assets import bundled
    from ftcli.model.initial_adapters import initial_of, remember_initial
    from ftcli.model.trained_weights import check_saved, save_weights

    def build() -> Any:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(bundled("bundled:tiny-gemma2", "models"), dtype=torch.float32)
        config = peft.LoraConfig(
            r=4, lora_alpha=6, init_lora_weights="pissa", target_modules=["q_proj", "down_proj"],
            rank_pattern={"q_proj": 3}, task_type="CAUSAL_LM",
        )  # fmt: skip
        return peft.get_peft_model(base, config)

    ours, theirs = build(), build()
    remember_initial(ours)
    assert initial_of(theirs) is None
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(str(tmp_path / "initial"))
    theirs.peft_config["default"].init_lora_weights = "pissa"
    for model in (ours, theirs):
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.arange(3, 20)[None]
    wanted = ours(input_ids=ids).logits
    (tmp_path / "ours").mkdir()
    save_weights(ours, tmp_path / "ours")
    check_saved(ours, tmp_path / "ours")
    theirs.save_pretrained(str(tmp_path / "theirs"), path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    keys = ("r", "lora_alpha", "rank_pattern", "init_lora_weights")
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs")]
    assert [configs[0][key] for key in keys] == [configs[1][key] for key in keys]
    base = AutoModelForCausalLM.from_pretrained(bundled("bundled:tiny-gemma2", "models"), dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours"))
    torch.testing.assert_close(plain(input_ids=ids).logits, wanted, atol=2e-4, rtol=1e-4)


def test_a_checkpoint_of_another_machine_keeps_its_own_beginning(narrow: User) -> None:
    """The singular vectors may come out differently there: the base weights follow those of the checkpoint."""
    lora = {"r": 4, "init_lora_weights": "pissa"}
    recipe = narrow.recipe("r", lora=lora, train={"max_steps": 4}, checkpoint={"every_steps": 2})
    narrow.done("train", recipe)
    losses, run = narrow.losses("r"), narrow.folder / "r"
    file = run / "checkpoints" / "step-00000002" / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in tensors:  # another sign of both, as another SVD may give
        if name.endswith("lora_A.weight"):
            other = name.replace("lora_A", "lora_B")
            tensors[name] = tensors[name].clone()
            tensors[other] = tensors[other].clone()
            tensors[name][4:] *= -1.5
            tensors[other][:, 4:] *= -1.5
    save_file(tensors, file, metadata={"format": "pt"})
    listed = file.parent / COMPLETE_NAME
    complete = json.loads(listed.read_text())
    listed.unlink()
    listed.write_text(json.dumps({**complete, "files": inventory(file.parent)}))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (run / "adapter" / name).unlink()
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
    narrow.done("train", recipe)
    # 1.25 times as much as before is taken out of the base, which the adapter does not know of: another model.
    assert narrow.losses("r")[:2] == losses[:2]
    assert narrow.losses("r")[2:] != losses[2:]
    told = narrow.done("eval", recipe, "--run", str(run))
    held_out = [line["eval_loss"] for line in narrow.metrics("r") if "eval_loss" in line]
    assert told["run"]["loss"] == pytest.approx(held_out[-1], rel=1e-4)


def test_other_random_beginnings(narrow: User) -> None:
    train = {"max_steps": 1, "learning_rate": 1e-12}
    narrow.done("train", narrow.recipe("plain", lora={"r": 4}, train=train))
    for kind in ("gaussian", "orthogonal"):
        narrow.done("train", narrow.recipe(kind, lora={"r": 4, "init_lora_weights": kind}, train=train))
        assert narrow.losses(kind) == pytest.approx(narrow.losses("plain"), rel=1e-5)
        files = [load_file(narrow.folder / n / "adapter" / "adapter_model.safetensors") for n in (kind, "plain")]
        name = next(name for name in files[0] if "lora_A" in name)
        assert not torch.allclose(files[0][name], files[1][name], atol=1e-3)


@pytest.fixture
def three_layers(stored: User) -> User:
    """Recipes of a model that has a layer more than the narrow one, for a choice among them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source, folder = Path(stored.model["name_or_path"]), stored.folder / "three-layers"
    config = AutoConfig.from_pretrained(source, num_hidden_layers=3, layer_types=["sliding_attention"] * 3)
    shutil.copytree(source, folder)  # for its tokenizer
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return replace(stored, model={**stored.model, "name_or_path": str(folder)})


def test_a_choice_of_layers_and_ranks(three_layers: User) -> None:
    """Off the kernels and on them, which take modules of different ranks to the same losses."""
    user = three_layers
    for kernels in ("off", "reference"):
        change: dict[str, Any] = {"lora": CHOICE, "model": {"kernels": kernels}}
        if kernels == "off":
            recipe = user.recipe(kernels, **change, train=BASE["train"])
            user.done("train", recipe)
        else:
            recipe = trained(user, kernels, **change)
        saved = load_file(user.folder / kernels / "adapter" / "adapter_model.safetensors")
        told = user.done("check", recipe)
        assert told["adapters"]["parameters"] == sum(tensor.numel() for tensor in saved.values())
        assert told["adapters"]["layers"] == {
            "q_proj": 2, "v_proj": 2, "o_proj": 2, "gate_proj": 2, "up_proj": 2, "down_proj": 2,
        }  # fmt: skip
        ranks = {name.split("layers.")[1]: t.shape[0] for name, t in saved.items() if name.endswith("lora_A.weight")}
        assert ranks["1.self_attn.q_proj.lora_A.weight"] == ranks["2.self_attn.q_proj.lora_A.weight"] == 20
        assert ranks["1.mlp.down_proj.lora_A.weight"] == 6
        assert {rank for name, rank in ranks.items() if "q_proj" not in name and "1.mlp.down" not in name} == {4}
    assert user.losses("reference") == pytest.approx(user.losses("off"), rel=1e-4)
    manifest = json.loads((user.folder / "reference" / "manifest.json").read_text())
    assert all(entry["on"] for entry in manifest["kernels"])


@pytest.mark.parametrize("optim", ["muon", *further("adamw_torch")])
def test_lora_plus_goes_on_alike(optim: str, narrow: User) -> None:
    train = {"max_steps": 5, "loraplus_lr_ratio": 8.0, "optim": optim, "weight_decay": 0.01}
    recipe = narrow.recipe("r", train=train, checkpoint={"every_steps": 3}, eval={"every_steps": 2, "samples": 0})
    narrow.done("train", recipe)
    plain = {"eval": {"samples": 0}, "train": {**train, "loraplus_lr_ratio": None}}
    narrow.done("train", narrow.recipe("plain", **plain))
    assert narrow.losses("r")[0] == narrow.losses("plain")[0]
    assert narrow.losses("r")[2:] != narrow.losses("plain")[2:]
    assert narrow.metrics("r")[0]["learning_rate"] == 1e-3
    narrow.goes_on_alike("r", recipe)


def test_lora_plus_does_the_steps_of_pefts(narrow: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parameters at the same rates as in the optimizer that PEFT makes."""
    from ftcli.train import optimizer

    found: list[tuple[Any, Any]] = []
    plain: Callable[..., Any] = optimizer.make_optimizer

    def make(model: Any, *args: Any) -> Any:
        made = plain(model, *args)
        theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8.0)
        found.append((made, theirs))
        return made

    monkeypatch.setattr(optimizer, "make_optimizer", make)
    lora = {"r": 4, "modules_to_save": ["norm"]}
    narrow.done("train", narrow.recipe("r", lora=lora, train={"max_steps": 1, "loraplus_lr_ratio": 8.0}))
    (ours, theirs) = found[0]

    def rates(optimizer: Any) -> dict[int, float]:
        return {
            id(p): group.get("initial_lr", group["lr"]) for group in optimizer.param_groups for p in group["params"]
        }

    assert rates(ours) == rates(theirs)
    assert len(set(rates(ours).values())) == 2
