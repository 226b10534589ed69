"""Another model as the reference, as a user meets it: trained, gone on with, held to its files, on ranks."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.assets import asset
from ftcli.config.load import load_recipe
from tests.e2e.conftest import NARROW, User, merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_kto import FLATTENED as LABELLED
from tests.e2e.test_kto import LOSS as LABEL_LOSS
from tests.e2e.test_preference import LN2, LOSS, pairs
from tests.e2e.test_preference_ranks import PAIRS, TWICE, lines, require_close_run
from tests.tiers import further, telling

METHODS: dict[str, tuple[dict[str, Any], str]] = {"dpo": (PAIRS, LOSS), "kto": (LABELLED, LABEL_LOSS)}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the narrow model's shape and tokenizer, of other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(NARROW["name_or_path"]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.5
    folder = tmp_path_factory.mktemp("models") / "other"
    model.save_pretrained(folder)
    shutil.copytree(asset("tokenizers", "bytes"), folder, dirs_exist_ok=True)
    return folder


def compared(recipe: dict[str, Any], other: Path, **more: Any) -> dict[str, Any]:
    return merged(recipe, {"preference": {"reference": str(other), **more}})


@pytest.mark.parametrize(
    ("method", "lora"),
    [
        pytest.param("dpo", {"r": 4}, id="dpo-LoRA"),
        pytest.param("kto", None, id="kto-all weights", marks=pytest.mark.long),
        pytest.param("dpo", None, id="dpo-all weights", marks=pytest.mark.long),
        pytest.param("kto", {"r": 4}, id="kto-LoRA", marks=pytest.mark.long),
    ],
)
def test_a_run_is_compared_with_it_goes_on_alike_and_is_evaluated_so(
    narrow: User, other: Path, method: str, lora: Any
) -> None:
    change = {"lora": lora, "train": {"learning_rate": 1e-3}, "checkpoint": {"every_steps": 3}, "eval": {"samples": 0}}
    recipe = narrow.recipe("r", **compared(merged(METHODS[method][0], change), other))
    narrow.done("train", recipe)
    first = narrow.metrics("r")[0]
    assert abs(first["rewards/margins"]) > 1e-3
    if method == "dpo":
        assert first["loss"] != pytest.approx(LN2, abs=1e-4)
    manifest = json.loads((narrow.folder / "r/manifest.json").read_text())
    asked = manifest["inputs"]["asked"]
    assert [file["name"] for file in asked["weights"]] == ["model.safetensors"]
    assert asked["weights"] != manifest["inputs"]["weights"]
    narrow.goes_on_alike("r", recipe)
    final = [line for line in narrow.metrics("r") if "eval_loss" in line][-1]
    told = narrow.done("eval", recipe, "--run", str(narrow.folder / "r"))
    for name in ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "stop_logp"):
        assert told["run"][name] == pytest.approx(final[f"eval_{name}"], rel=1e-3, abs=1e-3), name
    assert abs(told["base"]["margin"]) > 1e-3, "the base is no reference of itself"
    assert "stop_change" not in told["run"]


def test_its_card_names_it_without_its_place(narrow: User, other: Path) -> None:
    recipe = narrow.recipe(
        "r", **compared(pairs(train={"max_steps": 1}, data={"eval": []}, eval={"every_steps": None}), other)
    )
    narrow.done("train", recipe)
    card = (narrow.folder / "r/adapter/README.md").read_text()
    assert "| compared with | other |" in card
    assert str(other.parent) not in card


def test_a_run_that_was_stopped_goes_on_to_the_last_bit_also_without_its_cache(drills: Drills, other: Path) -> None:
    change = compared(pairs(train={"max_steps": 6}, checkpoint={"every_steps": 5}), other)
    kept = drills.folder / "kept"
    whole, recipe = (
        drills.whole(**change),
        drills.recipe("halves", **merged(change, {"preference": {"reference_cache": str(kept)}})),
    )
    drills.stopped(recipe, LOSS, 3, signal.SIGTERM, 75)
    shutil.rmtree(kept)
    said = drills.run(recipe)
    assert "resuming from" in said
    assert "gives the first answers" not in said, "it was said before"
    drills.require_same_run("halves", whole)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_run_is_held_to_its_files(narrow: User, other: Path, tmp_path: Path, file: str) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(other, mine)
    change = pairs(train={"max_steps": 2}, checkpoint={"every_steps": 1}, eval={"every_steps": None, "samples": 0})
    recipe = narrow.recipe("r", **compared(change, mine))
    narrow.done("train", recipe)
    if file.endswith(".json"):
        (mine / file).write_text((mine / file).read_text() + "\n")
    else:
        weights = load_file(mine / file)
        next(iter(weights.values())).view(-1)[0] += 1e-3
        save_file(weights, mine / file, {"format": "pt"})
    status, said = narrow.run("eval", recipe, "--run", str(narrow.folder / "r"))
    assert (status, [one["code"] for one in said["findings"] if one["severity"] == "error"]) == (2, ["FT735"])
    narrow.cut_off("r")
    status, said = narrow.run("train", recipe)
    assert status == 2
    (finding,) = (one for one in said["findings"] if one["severity"] == "error")
    assert finding["code"] == "FT735"
    assert finding["message"].startswith("the reference has changed since this run began")
    assert file in finding["message"]


def test_another_name_is_another_recipe(narrow: User, other: Path, tmp_path: Path) -> None:
    change = pairs(train={"max_steps": 1}, checkpoint={"every_steps": 1}, data={"eval": []}, eval={"every_steps": None})
    narrow.done("train", narrow.recipe("r", **compared(change, other)))
    shutil.copytree(other, tmp_path / "copy")
    status, said = narrow.run("train", narrow.recipe("r", **compared(change, tmp_path / "copy")))
    assert (status, said["findings"][-1]["code"]) == (2, "FT721")


def test_a_run_shares_its_cache_with_others_and_never_with_other_weights(
    narrow: User, other: Path, tmp_path: Path
) -> None:
    """Whatever the folder is called: a copy is the same reference, and one bit more is none."""
    kept = {"reference_cache": str(tmp_path / "kept")}
    change = pairs(train={"max_steps": 1}, data={"eval": []}, eval={"every_steps": None})

    def entries() -> int:
        return len(list((tmp_path / "kept").rglob("pairs.bin")))

    narrow.done("train", narrow.recipe("one", **compared(change, other, **kept)))
    assert entries() == 1
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    narrow.done("train", narrow.recipe("two", **compared(change, copy, beta=0.3, **kept)))
    assert entries() == 1
    weights = load_file(copy / "model.safetensors")
    next(iter(weights.values())).view(torch.int32).view(-1)[0] ^= 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    narrow.done("train", narrow.recipe("three", **compared(change, copy, **kept)))
    assert entries() == 2
    assert narrow.losses("three") == pytest.approx(narrow.losses("one"), rel=1e-3)


def test_one_that_answers_with_no_numbers_is_named_before_anything_is_trained(
    narrow: User, other: Path, tmp_path: Path
) -> None:
    """The rows and the learning rate were blamed for the first loss."""
    damaged = tmp_path / "damaged"
    shutil.copytree(other, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    status, document = narrow.run("train", narrow.recipe("r", **compared(pairs(train={"max_steps": 1}), damaged)))
    told = document["findings"][-1]
    assert (status, told["code"]) == (6, "FT702")
    assert "that the reference gives" in told["message"]
    assert narrow.metrics("r") == []


def test_a_folder_has_no_revision(narrow: User, other: Path) -> None:
    change = compared(pairs(train={"max_steps": 1}), other, reference_revision="main")
    for key, recipe in (
        ("preference.reference_revision", narrow.recipe("r", **change)),
        ("model.revision", narrow.recipe("other", model={"revision": "main"})),
    ):
        status, document = narrow.run("check", recipe)
        told = [each["message"] for each in document["findings"] if each["code"] == "FT259"]
        assert status == 0
        assert sum(message.startswith(f"{key} has no effect") for message in told) == 1


def test_a_row_with_a_token_that_it_does_not_know_is_refused(narrow: User, other: Path, tmp_path: Path) -> None:
    less = tmp_path / "less"
    shutil.copytree(other, less)
    tokenizer = json.loads((less / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["p"]  # "pick: 3 7 5 1"
    (less / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = narrow.recipe("r", **compared(pairs(train={"max_steps": 1}), less))
    assert narrow.run("check", recipe)[0] == 0
    status, said = narrow.run("train", recipe)
    assert (status, said["findings"][-1]["code"]) == (3, "FT326")
    assert "is no token there and 'p' here" in said["findings"][-1]["message"]


def test_a_quantized_run_holds_both_so(narrow: User, other: Path) -> None:
    change = pairs(
        quantization={"method": "nf4"}, train={"max_steps": 2}, data={"eval": []}, eval={"every_steps": None}
    )
    for name, method in (("packed", "nf4"), ("plain", "none")):
        narrow.done(
            "train", narrow.recipe(name, **compared(merged(change, {"quantization": {"method": method}}), other))
        )
    packed, plain = (narrow.metrics(name)[0] for name in ("packed", "plain"))
    assert packed["rewards/margins"] != plain["rewards/margins"]
    assert math.isfinite(packed["loss"])


LAUNCHES: dict[str, dict[str, Any]] = {
    "ddp": {"launch": {"engine": "ddp"}},
    "fsdp": {"launch": {"engine": "fsdp"}},
    "all weights, fsdp": {"launch": {"engine": "fsdp"}, "lora": None, "train": {"learning_rate": 1e-3}},
    "NF4, fsdp": {"launch": {"engine": "fsdp"}, "quantization": {"method": "nf4"}},
    "shared rows": {"launch": {"engine": "ddp", "context_parallel_size": 2}},
    "shared rows, fsdp": {"launch": {"engine": "fsdp", "context_parallel_size": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", *further("kto")])
@pytest.mark.parametrize("change", telling(LAUNCHES, "fsdp"))
def test_two_ranks_are_one_process(drills: Drills, other: Path, method: str, change: dict[str, Any]) -> None:
    recipe = compared(merged(METHODS[method][0], change), other)
    shared = "context_parallel_size" in change["launch"]
    alone = merged(recipe, {"launch": {"engine": "single", "context_parallel_size": 1}})
    whole = drills.whole(**(alone if shared else merged(alone, TWICE)))
    said = run_ranks(drills, drills.recipe("two", **recipe), 2).said
    assert f"{other} gives the first answers" in said
    if shared or "lora" in change:
        require_close_run(drills, "two", whole)
        return
    assert lines(drills, "two") == lines(drills, whole)
    require_same_weights(drills.folder / "two/adapter", whole / "adapter")


def test_a_bench_times_a_reference_that_is_known(narrow: User, tmp_path: Path) -> None:
    """It is not loaded, so it need not be here."""
    recipe = narrow.recipe("r", **compared(pairs(), tmp_path / "nowhere"))
    assert load_recipe(Path(recipe), ()).recipe.preference is not None
    assert narrow.done("bench", recipe, "--steps", "1")["pairs_per_second"] > 0
