"""Commands on rows with images: what is not done is refused by name, and a chat shows a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from ftcli.assets import asset
from ftcli.cli.app import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-vision.yaml")
#: A model whose first step is enough.
ONE_STEP = ("--set=train.max_steps=1", "--set=train.warmup_steps=0", "--set=eval.tasks=[]", "--set=data.eval=[]")


def asked(capture: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capture.readouterr()
    status = main([*words, "--json", "--quiet", "--offline"])
    return status, json.loads(capture.readouterr().out)


def said(document: dict[str, Any], code: str) -> str:
    return next(finding["message"] for finding in document["findings"] if finding["code"] == code)


def test_shared_rows_take_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs are none of these rows' layouts: methods on pairs refuse them before images are looked at."""
    words = ["check", RECIPE, "--as", "h200", "--gpus", "2", "--set", "model.dtype=bfloat16"]
    status, document = asked(capsys, *words, "--set", "launch.context_parallel_size=2")
    assert status == 4, document
    assert "processes that share rows" in said(document, "FT412")
    words += ["--set", "model.train=[language, vision]"]
    status, document = asked(capsys, *words, "--set", "launch.engine=fsdp")
    assert status == 3, document
    assert "a tower has no gradient" in said(document, "FT518")
    status, document = asked(capsys, *words)  # auto
    assert status == 0, document


REWARD = """
def right(completions, images, answer, **_):
    assert all(isinstance(one, list) and one[0].startswith("data:image/png") for one in images), images
    return [float(text[:1] in "abcdefghijklm") for text in completions]
"""


def test_reinforcement_sees_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that differ in their images alone are groups of their own; rewards get the row; a run that resumes amid
    uses of the same completions ends in the same bits, adapters of the tower included.
    """
    rows = [json.loads(line) for line in asset("data", "smoke-vision-eval.jsonl").read_text().splitlines()[:8]]
    lines = [{"images": row["images"], "prompt": row["messages"][:-1], "answer": "red"} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"{{file: '{tmp_path / 'reward.py'}:right'}}"
    grpo = "{num_generations: 4, max_prompt_length: 96, max_completion_length: 6, beta: 0.1, num_iterations: 2, "
    words = [RECIPE, "--set", f"grpo={grpo}rewards: [{reward}]}}", "--set", f"data.train=['{tmp_path / 'rows.jsonl'}']"]
    words += ["--set=lora={r: 4}", "--set=model.train=[language, projector, vision]", "--set=train.max_steps=4"]
    words += ["--set=train.per_device_train_batch_size=8", "--set=train.warmup_steps=0", "--set=eval.tasks=[]"]
    words += ["--set=model.kernels=reference", "--set=checkpoint.every_steps=3", "--set=data.eval=[]"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    status, document = asked(capsys, "grpo", *words, "--output-dir", str(whole))
    assert status == 0, document
    log_probs = json.loads((whole / "manifest.json").read_text())["log_probs"]
    assert log_probs["plain_max"] < 1e-4
    assert log_probs["sampler_max"] < 1e-4
    step = str(whole / "checkpoints" / "step-00000003")
    status, document = asked(capsys, "grpo", *words, "--output-dir", str(again), "--resume", step)
    assert status == 0, document
    kept = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (whole, again)]
    assert kept[0] == kept[1]
    trained = load_file(whole / "adapter" / "adapter_model.safetensors")
    assert any(float(t.abs().max()) > 0 for n, t in trained.items() if "visual" in n and "lora_B" in n)


def test_pairs_are_compared_with_their_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy begins where its reference is; rows whose images nobody would see are refused."""
    rows = [json.loads(line) for line in asset("data", "smoke-vision-eval.jsonl").read_text().splitlines()[:8]]
    said_by = {"chosen": "red", "rejected": "no"}.items()
    answers = {name: [{"role": "assistant", "content": text}] for name, text in said_by}
    pairs = [{"images": row["images"], "prompt": row["messages"][:-1], **answers} for row in rows]
    path, run = tmp_path / "rows.jsonl", tmp_path / "run"
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs))
    words = [RECIPE, "--set=train.method=dpo", f"--set=data.train=['{path}']", "--set=lora={r: 4}", *ONE_STEP]
    words += ["--set=model.train=[language, vision]", "--set=train.per_device_train_batch_size=4"]
    status, document = asked(capsys, "train", *words, "--output-dir", str(run))
    assert status == 0, document
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any(float(t.abs().max()) > 0 for n, t in trained.items() if "visual" in n and "lora_B" in n)
    path.write_text(json.dumps({"images": rows[0]["images"], "prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    status, document = asked(capsys, "check", *words)
    assert status == 4, document
    assert "a list of messages" in json.dumps(document)


def test_a_chat_shows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert asked(capsys, "train", RECIPE, "--output-dir", run, *ONE_STEP)[0] == 0
    image = tmp_path / "a.png"
    Image.new("RGB", (32, 32), "red").save(image)
    plain = asked(capsys, "chat", run, "--prompt", "colour?")[1]["result"]
    status, shown = asked(capsys, "chat", run, "--prompt", "colour?", "--image", str(image), "--image", str(image))
    assert status == 0, shown
    assert shown["result"]["prompt_tokens"] == plain["prompt_tokens"] + 2 * (4 + 2)  # and what stands around each
    for words, why in (
        (["--image", str(tmp_path / "none.png")], "cannot be shown"),
        (["--image", str(image), "--raw"], "--raw"),
    ):
        status, document = asked(capsys, "chat", run, "--prompt", "x", *words)
        assert status == 2
        assert why in said(document, "FT158")


@pytest.mark.parametrize("model", ["bundled:tiny-gemma2", "google/gemma-4-E4B-it"])
def test_a_size_that_nothing_reads_is_refused(capsys: pytest.CaptureFixture[str], model: str) -> None:
    words = ["--set", f"model.name_or_path={model}", "--set", "data.image_max_pixels=4096"]
    status, document = asked(capsys, "check", RECIPE, *words)
    assert status == 3, document
    assert "data.image_max_pixels" in said(document, "FT341")


def test_check_counts_images_and_says_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = asked(capsys, "check", RECIPE)
    assert status == 0, document
    assert "on text and images; vision: kept" in said(document, "FT310")
    assert document["result"]["memory"]["parts"]["images"] > 0


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (
            ["model.name_or_path=bundled:tiny-gemma2", "data.train=[bundled:smoke-train]"],
            3,
            "no model that ftcli trains",
        ),
        (["train.method=kto"], 3, "trains on text alone"),
        (["quantization.method=bitnet"], 3, "trains the language model"),
    ],
)
def test_parts_that_cannot_be_trained_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], status: int, why: str
) -> None:
    settings = [f"--set={word}" for word in (*words, "model.train=[language, vision]")]
    found, document = asked(capsys, "check", RECIPE, *settings)
    assert found == status, document
    assert why in said(document, "FT447")


def test_a_tower_without_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = [RECIPE, f"--set=data.train=['{path}']", "--set=model.train=[projector]"]
    for command in (["check"], ["train", "--output-dir", str(tmp_path / "run")]):
        status, document = asked(capsys, *command[:1], *words, *command[1:])
        assert status == 4, document
        assert "projector would learn" in said(document, "FT448")


@pytest.mark.parametrize("lora", ["null", "{r: 2}"])
def test_a_projector_is_trained_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], lora: str) -> None:
    """What is said to be trained is what changes; the rest is the base to the bit."""
    run = tmp_path / "run"
    words = [*ONE_STEP, "--set=model.train=[projector]", f"--set=lora={lora}", "--set=model.kernels=reference"]
    status, document = asked(capsys, "train", RECIPE, "--output-dir", str(run), *words)
    assert status == 0, document
    if lora != "null":
        names = load_file(run / "adapter" / "adapter_model.safetensors")
        assert names
        assert all(".merger" in name or ".deepstack_merger_list" in name for name in names)
        return
    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(asset("models", "tiny-qwen3-vl")))
    kept, trained = base.state_dict(), load_file(run / "model" / "model.safetensors")
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, kept[name])}
    assert changed
    assert all(".merger" in name or ".deepstack_merger_list" in name for name in changed)
