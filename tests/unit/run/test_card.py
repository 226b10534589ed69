"""Model cards: filled, valid for the Hub, without a path of the machine, and never over somebody's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.config.recipe import Recipe
from ftcli.facts.weights import EXPORT_RECORD, MODEL_CARD
from ftcli.run.atomic import read_json_object, store_json, write_json
from ftcli.run.directory import RunDirectory
from ftcli.run.report.card import MARK, public_name, render_card, write_card
from ftcli.run.results import EvalScores, Evaluation, TaskScore

SHA = "ab" * 32


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make(tmp_path / "run", "google/gemma-2-9b")


def make(path: Path, base: str, **changes: Any) -> RunDirectory:
    directory = RunDirectory(path)
    directory.adapter_dir.mkdir(parents=True)
    (directory.adapter_dir / "adapter_config.json").write_text("{}")
    (directory.adapter_dir / "chat_template.jinja").write_text("x")
    raw: dict[str, Any] = {
        "version": 1,
        "run": {"name": "mine", "output_dir": str(path), "seed": 7},
        "model": {"name_or_path": base},
        "lora": {"r": 8, "alpha": 16},
        "data": {
            "train": [str(path.parent / "private" / "rows|1.jsonl"), "hub:someone/chats"],
            "chat_template": str(path.parent / "template.jinja"),
        },
        "train": {"learning_rate": 0.003, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
        **changes,
    }
    values = Recipe.model_validate(raw).model_dump(mode="json")
    directory.recipe_path.write_text(yaml.safe_dump(values))
    data = [{"name": raw["data"]["train"][0], "bytes": 3, "sha256": SHA}]
    licence = {"id": "gemma", "name": None, "link": "https://ai.google.dev/gemma/terms"}
    manifest = {"command": "train", "ftcli": "0.1.0", "python": "3.12", "libraries": {"torch": "2.13.0"}, "data": data}
    inputs = {"commit": "33c193028431c2fde6c6e51f29e6f17b60cbfac6"}
    device = {"name": "NVIDIA H200"}
    write_json(directory.manifest_path, {**manifest, "inputs": inputs, "device": device, "base": {"licence": licence}})
    counts = {"name": raw["data"]["train"][0], "split": "train", "rows_kept": 1234, "tokens_trained": 56789}
    write_json(directory.tokens_path, {"datasets": [counts]})
    scores = [
        EvalScores(loss, None, None, 50, (TaskScore("exact_match", v, 40),)) for loss, v in ((2.5, 0.05), (1.25, 0.9))
    ]
    store_json(directory.eval_path, Evaluation(*scores))
    write_json(directory.status_path, {"state": "completed", "trained": {"summary": {"steps": 100, "tokens": 9999}}})
    return directory


def head_and_text(card: str) -> tuple[dict[str, Any], str]:
    _, head, text = card.split("---\n", 2)
    values = yaml.safe_load(head)
    assert isinstance(values, dict)
    return values, text


def test_the_card_says_what_was_made_of_what_how_and_how_well(run: RunDirectory) -> None:
    head, text = head_and_text(render_card(run, run.adapter_dir))
    assert head == {
        "base_model": "google/gemma-2-9b", "library_name": "peft", "pipeline_tag": "text-generation",
        "license": "gemma", "license_link": "https://ai.google.dev/gemma/terms", "datasets": ["someone/chats"],
        "tags": ["base_model:adapter:google/gemma-2-9b", "ftcli", "lora", "sft"],
    }  # fmt: skip
    for expected in (
        "# mine",
        "LoRA adapter for [google/gemma-2-9b](https://huggingface.co/google/gemma-2-9b) at commit `33c193028431",
        "| Loss, nats per token | 2.5 | 1.25 |",
        "| exact_match, 40 rows | 5.0% | 90.0% |",
        "AutoPeftModelForCausalLM.from_pretrained(folder)",
        "apply_chat_template",
        "| effective batch | 32 = 4 x 8 micro-batches |",
        "| steps | 100, 9,999 tokens |",
        "| train.learning_rate | 0.003 |",
        "| lora.r | 8 |",
        "| seed | 7 |",
        "| device | NVIDIA H200 |",
        rf"| rows\|1.jsonl | 1,234 | 56,789 | {SHA} |",
        "torch 2.13.0",
        "[gemma](https://ai.google.dev/gemma/terms)",
    ):
        assert expected in text, expected
    assert "More Information Needed" not in text


@pytest.mark.parametrize("base", ["{}/private/my-model", "~/my-model", "./my-model", "bundled:tiny-gemma2"])
def test_no_path_of_the_machine_is_in_a_card(tmp_path: Path, base: str) -> None:
    directory = make(tmp_path / "run", base.format(tmp_path))
    card = render_card(directory, directory.adapter_dir)
    assert str(tmp_path) not in card
    assert "private" not in card
    assert "~" not in card
    assert "template.jinja" not in card
    head, text = head_and_text(card)
    assert "base_model" not in head  # it must be an id of the Hub
    assert "PeftModel.from_pretrained(base, folder)" in text
    assert ("my-model" in text) == (base != "bundled:tiny-gemma2")


def test_a_folder_of_the_hubs_cache_is_known_by_its_repository(tmp_path: Path) -> None:
    folder = "/home/someone/.cache/huggingface/hub/models--google--gemma-2-2b/snapshots/abc"
    card = render_card(make(tmp_path / "run", folder), tmp_path / "run" / "adapter")
    assert head_and_text(card)[0]["base_model"] == "google/gemma-2-2b"
    assert "someone/.cache" not in card


def test_rewards_are_named_without_their_files(tmp_path: Path) -> None:
    rewards = [{"file": f"{tmp_path}/secret/judge.py:polite", "weight": 0.5}, {"use": "json_valid"}]
    directory = make(tmp_path / "run", "a/b", grpo={"num_generations": 4, "rewards": rewards})
    card = render_card(directory, directory.adapter_dir)
    assert "| rewards | polite (weight 0.5), json_valid (weight 1) |" in card
    assert "secret" not in card


def test_what_is_not_known_is_said_to_be_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    head, text = head_and_text(render_card(RunDirectory(tmp_path), tmp_path))
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["ftcli"]}
    assert "The licence of the base model is not known here" in text
    assert "Held-out results" not in text
    assert "AutoModelForCausalLM" in text
    assert "apply_chat_template" not in text


@pytest.mark.parametrize(("command", "grpo"), [("train", {}), ("grpo", {"grpo": {}})])
def test_a_reward_model_is_loaded_as_a_classifier(command: str, grpo: dict[str, Any], tmp_path: Path) -> None:
    """Of a run of GRPO by the same recipe, `train.method` says nothing."""
    directory = make(tmp_path / "run", "google/gemma-2-9b", train={"method": "reward"}, **grpo)
    manifest = read_json_object(directory.manifest_path)
    write_json(directory.manifest_path, {**manifest, "command": command})
    head, text = head_and_text(render_card(directory, directory.adapter_dir))
    (tmp_path / "config.json").write_text("{}")
    _, merged = head_and_text(render_card(directory, tmp_path))
    if command == "grpo":
        assert head["pipeline_tag"] == "text-generation"
        assert "Classifi" not in text + merged
        return
    assert head["pipeline_tag"] == "text-classification"
    assert "reward" in head["tags"]
    assert "num_labels=1, pad_token_id=tokenizer.pad_token_id)" in text
    assert "| Loss | 2.5 | 1.25 |" in text
    assert "AutoModelForSequenceClassification.from_pretrained(folder" in merged
    assert "CausalLM" not in text + merged
    assert "generate" not in text + merged


def test_weights_of_a_checkpoint_have_no_results_and_steps_of_the_run(run: RunDirectory) -> None:
    card = render_card(run, run.adapter_dir, of_result=False)
    assert "Held-out results" not in card
    assert "| steps |" not in card
    assert "| weights | of a checkpoint" in card


def test_a_step_of_several_processes_is_counted_whole(run: RunDirectory) -> None:
    """Four of them with eight micro-batches each."""
    write_json(run.manifest_path, {**read_json_object(run.manifest_path), "micro_batches": 32})
    assert "| effective batch | 128 = 4 x 32 micro-batches |" in render_card(run, run.adapter_dir)


def test_results_that_are_of_something_else_are_said_to_be(run: RunDirectory, tmp_path: Path) -> None:
    assert "Measured" not in render_card(run, run.adapter_dir)
    store_json(run.eval_path, Evaluation(EvalScores(2.0), EvalScores(1.0), step=50))
    assert "Measured after step 50 of training, before its end." in render_card(run, run.adapter_dir)
    exported = tmp_path / "gguf"
    exported.mkdir()
    write_json(exported / EXPORT_RECORD, {"verification": {}})
    card = render_card(run, exported)
    assert "before its end and on the run's own result, before it was written in this format." in card
    write_json(run.adapter_dir / EXPORT_RECORD, {"verification": {}})  # an adapter is exported as it is
    assert "this format" not in render_card(run, run.adapter_dir)


def test_a_model_of_random_weights_is_not_made_from_the_base(tmp_path: Path) -> None:
    model = {"name_or_path": "google/gemma-2-9b", "init": "random"}
    directory = make(tmp_path / "run", "-", model=model, lora=None)
    (directory.adapter_dir / "adapter_config.json").rename(directory.adapter_dir / "config.json")
    head, text = head_and_text(render_card(directory, directory.adapter_dir))
    assert not {"base_model", "license", "license_link"} & set(head)
    assert head["tags"] == ["ftcli", "sft"]
    assert "Full fine-tune of random weights in the shape of [google/gemma-2-9b]" in text
    assert "terms" not in text


@pytest.mark.parametrize(("method", "lora"), [("nf4", True), ("fp8", True), ("none", True), ("bitnet", False)])
def test_how_the_base_was_stored_is_said(method: str, lora: bool, tmp_path: Path) -> None:
    changes = {"quantization": {"method": method}} | ({} if lora else {"lora": None})
    directory = make(tmp_path / "run", "a/b", **changes)
    plan = {"parameter": "bfloat16", "adapter": "float32" if lora else None, "compute": "bfloat16"}
    write_json(directory.manifest_path, {**read_json_object(directory.manifest_path), "dtype_plan": plan})
    card = render_card(directory, directory.adapter_dir)
    of_stored = (
        f"| method | LoRA on a base in {method} |",
        f"linear layers {method}, other parameters bfloat16, adapters float32, computed in bfloat16",
        f"Training had the base in {method}",
    )
    assert all((text in card) == (method in ("nf4", "fp8")) for text in of_stored)
    if method == "none":
        assert "| method | LoRA |" in card
        assert "| dtypes | parameters bfloat16, adapters float32, computed in bfloat16 |" in card
    if method == "bitnet":
        assert "| method | full fine-tuning, weights rounded in every product (bitnet) |" in card


def test_a_card_that_somebody_has_made_their_own_is_left_alone(run: RunDirectory) -> None:
    card = run.adapter_dir / MODEL_CARD
    write_card(run)
    assert MARK in card.read_text()
    store_json(run.eval_path, Evaluation(run=EvalScores(0.125)))
    write_card(run)
    assert "0.125" in card.read_text()
    own = card.read_text().replace(MARK, "").replace("# mine", "# My model")
    card.write_text(own)
    write_card(run)
    assert card.read_text() == own


def test_hostile_names_stay_in_their_cell(tmp_path: Path) -> None:
    assert public_name("data/<img src=x>|a.jsonl") == "<img src=x>|a.jsonl"
    raw = {"name": "d/<img src=x>|\nb.jsonl", "split": "train", "rows_kept": 1, "tokens_trained": 1}
    write_json(tmp_path / "tokens.json", {"datasets": [raw]})
    card = render_card(RunDirectory(tmp_path), tmp_path)
    assert r"| \<img src=x\>\| b.jsonl | 1 | 1 | – |" in card


def test_hub_front_matter_is_valid_for_the_hub(run: RunDirectory) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard(render_card(run, run.adapter_dir))
    assert card.data.base_model == "google/gemma-2-9b"
    assert card.data.library_name == "peft"
    assert card.data.license == "gemma"


def test_every_setting_that_a_card_names_is_one() -> None:
    """The card chooses by name what everybody looks for: a key that is renamed must not vanish from it in silence."""
    from ftcli.config.schema import RecipeSchema
    from ftcli.run.report import card
    from ftcli.tables import methods

    keys = list(RecipeSchema().keys())
    sections = {key.partition(".")[0] for key in keys}
    of_methods = {name for method in methods.TABLE.values() for name in method.told}
    told = {*card._SECTIONS, *methods.sections()}
    assert {*card._ALWAYS, *card._ELSEWHERE, *of_methods} <= set(keys)
    assert told <= sections
    assert {name.partition(".")[0] for name in (*card._ALWAYS, *of_methods)} <= told
    not_of_training = {"run", "model", "eval", "export", "checkpoint", "logging", "launch"}
    assert sections - {"version", "extends"} == told | not_of_training, "a new section: in the card?"


def test_a_card_of_an_export_says_what_was_measured_and_compared(run: RunDirectory, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    store_json(run.eval_path, Evaluation(EvalScores(loss=2.0), EvalScores(loss=1.0)))
    assert "before it was written in this format" not in render_card(run, run.adapter_dir)
    write_json(folder / EXPORT_RECORD, {"verification": {"compared": "nothing", "verified": "no"}})
    card = render_card(run, folder)
    assert "before it was written in this format" in card
    assert "--no-verify" in card
    write_json(folder / EXPORT_RECORD, {"verification": {"compared": "every weight"}})
    assert "--no-verify" not in render_card(run, folder)
