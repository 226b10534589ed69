"""The smoke recipe of pictures teaches what cannot be told without looking; a run that was stopped is the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from ftcli.assets import asset
from ftcli.cli.app import main
from tests.e2e.drill import Server
from tests.tiers import further

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-vision.yaml")
#: Of twelve steps, for what needs no good answers.
SHORT = ("--set=train.max_steps=8", "--set=train.warmup_steps=2", "--set=eval.tasks=[]")

QKV = "model.visual.blocks.0.attn.qkv"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def done(capture: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The result of a command that succeeds."""
    capture.readouterr()
    status = main([*words, "--json", "--quiet", "--offline"])
    document = json.loads(capture.readouterr().out)
    assert status == 0, document
    result: dict[str, Any] = document["result"]
    return result


def swapped(folder: Path) -> str:
    """The held-out rows, each with a picture of another one, of any colour."""
    rows = [json.loads(line) for line in asset("data", "smoke-vision-eval.jsonl").read_text().splitlines()]
    images = [row["images"] for row in rows]
    made = [{**row, "images": images[(n + 17) % len(images)]} for n, row in enumerate(rows)]
    path = folder / "swapped.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return str(path)


def test_colours_are_told_by_looking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With other pictures the same model is as good as chance; the export sees as it did."""
    run = str(tmp_path / "run")
    done(capsys, "train", RECIPE, "--output-dir", run)
    found = done(capsys, "eval", RECIPE, "--run", run)
    scores = {name: found[name]["tasks"]["exact_match"]["score"] for name in ("base", "run")}
    assert scores["base"] < 0.1
    assert scores["run"] >= 0.9
    other = done(capsys, "eval", RECIPE, "--run", run, "--set", f"data.eval=['{swapped(tmp_path)}']")
    assert other["run"]["tasks"]["exact_match"]["score"] < 0.45
    exported = done(capsys, "export", run)
    verified = json.loads((Path(run) / "export" / "safetensors" / "ftcli_export.json").read_text())
    assert verified["verification"]["image_relative_error"] < 1e-4, exported
    assert (Path(run) / "export" / "safetensors" / "preprocessor_config.json").is_file()
    assert (Path(run) / "model" / "preprocessor_config.json").is_file()


def based(folder: Path) -> Path:
    """A folder with the small model's weights, which merging needs."""
    shutil.copytree(asset("models", "tiny-qwen3-vl"), folder)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters on all parts, packed, on the kernels' reference form, layers run again; images are read ahead by several
    threads. PEFT loads what was trained, and the export has it in its weights.
    """
    words = [*SHORT, "--set=lora={r: 4, alpha: 8}", "--set=data.packing=true", "--set=model.kernels=reference"]
    words += ["--set=checkpoint.every_steps=3", "--set=train.per_device_train_batch_size=8"]
    words += ["--set=model.train=[language, projector, vision]", "--set=train.gradient_checkpointing=selective"]
    folder = based(tmp_path / "base")
    words += [f"--set=model.name_or_path={folder}", "--set=model.init=pretrained"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    done(capsys, "train", RECIPE, "--output-dir", str(whole), *words)
    step = str(whole / "checkpoints" / "step-00000003")
    done(capsys, "train", RECIPE, "--output-dir", str(again), "--resume", step, *words)
    weights = [(run / "adapter" / "adapter_model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]
    adapted = load_file(whole / "adapter" / "adapter_model.safetensors")
    for part in (QKV, "model.visual.merger.linear_fc1", "model.visual.deepstack_merger_list.0.linear_fc2"):
        assert float(adapted[f"base_model.model.{part}.lora_B.weight"].abs().max()) > 0, part
    done(capsys, "export", str(whole), "--format", "safetensors")
    exported = whole / "export" / "safetensors"
    verified = json.loads((exported / "ftcli_export.json").read_text())["verification"]
    assert verified["image_relative_error"] < 1e-4
    merged = load_file(exported / "model.safetensors")
    base = AutoModelForImageTextToText.from_pretrained(folder)
    assert not torch.equal(merged[f"{QKV}.weight"], base.get_submodule(QKV).weight)
    found = PeftModel.from_pretrained(base, str(whole / "adapter")).merge_and_unload().state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_packed_rows_have_the_held_out_loss_of_rows_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for number, packing in enumerate(("false", "true")):
        words = [*SHORT, f"--set=data.packing={packing}", "--set=model.kernels=reference", "--set=train.max_steps=1"]
        run = str(tmp_path / str(number))
        losses.append(done(capsys, "train", RECIPE, "--output-dir", run, *words, "--set=train.learning_rate=1e-12"))
    first, second = (one["eval"]["loss"] for one in losses)
    assert first == pytest.approx(second, rel=1e-5)


def test_the_report_shows_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that ask the same of other pictures are told apart; the page loads nothing."""
    run = tmp_path / "run"
    done(capsys, "train", RECIPE, "--output-dir", str(run), *SHORT, "--set=lora={r: 4, alpha: 8}")
    rows = json.loads((run / "eval.json").read_text())["samples"]
    assert rows
    assert len({row["prompt"] for row in rows}) == 1
    assert len({row["images"][0]["id"] for row in rows}) == len(rows)
    assert all(row["before"] is not None and row["after"] is not None for row in rows)
    page = (run / "report.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == len(rows)
    assert "img-src data:" in page


@pytest.mark.parametrize("engine", further("ddp", "fsdp with adapters"))
def test_two_processes_train_what_one_does_in_two_micro_batches(
    tmp_path: Path, engine: str, drill_server: Server
) -> None:
    """Weights of a tower that is trained whole are no shards."""
    launch, _, adapters = engine.partition(" with ")
    runs = {"one": "train.gradient_accumulation_steps=2", "two": f"launch={{engine: {launch}, num_processes: 2}}"}
    for name, setting in runs.items():
        words = [*SHORT, "--set=train.max_steps=3", "--set=train.per_device_train_batch_size=8", f"--set={setting}"]
        words += [f"--set=model.train=[language{'' if engine == 'fsdp' else ', projector, vision'}]"]
        words += ["--set=lora={r: 4}"] if adapters else []
        words += ["--output-dir", str(tmp_path / name), "--offline", "--quiet"]
        drill = drill_server.start("train", RECIPE, *words, cwd=tmp_path, preparations=(("forked_ranks", 600.0),))
        assert drill.wait() == 0, drill.said
    file = "adapter/adapter_model.safetensors" if adapters else "model/model.safetensors"
    one, two = (load_file(tmp_path / name / file) for name in runs)
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor) if launch == "ddp" else torch.allclose(two[name], tensor, atol=1e-6), name
