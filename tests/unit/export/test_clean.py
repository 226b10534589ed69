"""The process that loads exports again: what it finds comes back as data, and it is never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ftcli.errors import ExitCode
from ftcli.export import safetensors as merged_format
from ftcli.export import verify as verification
from ftcli.export.clean import process
from ftcli.export.clean.answering import answered
from ftcli.export.clean.process import CleanProcess
from ftcli.export.clean.request import ReloadRequest
from ftcli.export.verify import Probe, check_greedy, continued, logits, probe_batch
from ftcli.facts.device import cpu_device
from tests.unit.export.conftest import Trained, build, edit_json, tokenizer
from tests.unit.export.test_export import code, export, failure

ENDS = {
    "was ended by signal 9, as systems do that run out of memory": "import os; os.kill(os.getpid(), 9)",
    "ended with status 1: no torch here": "raise SystemExit('no torch here')",
    "ended with status 0": "print('something that is no answer')",
    "did not answer within 0 s": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("how", ENDS)
def test_however_it_ends_nothing_is_left_and_the_exit_status_is_1(
    how: str, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started, seconds = trained(), [], 0.0 if "did not answer" in how else 60.0

    class Short(CleanProcess):
        def start(self) -> None:
            super().start()
            started.append(self._running)

    monkeypatch.setattr(process, "_START", ENDS[how])
    monkeypatch.setattr("ftcli.export.writing.CleanProcess", lambda: Short(seconds))
    error = failure(made, "adapter")
    assert code(error) == "FT760"
    assert how in error.findings[0].message
    assert error.exit_code is ExitCode.BUG
    assert not list(made.run.export_dir.iterdir())
    assert all(each.poll() is not None for each in started if each is not None)


def test_the_program_is_found_and_ends_with_its_questions(tmp_path: Path) -> None:
    """As users start it; what it answers, a fork that has imported its libraries says to the other tests."""
    place = Path(process.__file__).parents[3]
    command = [sys.executable, "-P", "-c", process._START.format(place=str(place))]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_ended_with_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_START", "import time; time.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    asked = CleanProcess()
    asked.start()
    running = asked._running
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            asked.ask(ReloadRequest("model", str(tmp_path)), {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert running is not None
    assert running.poll() == -signal.SIGKILL


def test_what_is_no_model_is_a_problem_and_not_the_end(clean_process: CleanProcess, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    answer = clean_process.ask(ReloadRequest("model", str(tmp_path)), {})
    assert answer.problems[0].startswith("it cannot be loaded: ValueError")
    assert clean_process.ask(ReloadRequest("gguf", str(tmp_path / "config.json")), {}).problems


def test_ftclis_own_models_are_told_of(tmp_path: Path) -> None:
    """In this process they are there."""
    save_file({}, tmp_path / "sent")
    request = {"kind": "model", "folder": str(tmp_path)}
    said = answered(request, str(tmp_path / "sent"), str(tmp_path / "back"))
    assert "has imported ftcli." in said["problems"][-1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_memory_does_not_hold_is_read_layer_by_layer(
    dtype: str, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = replace(cpu_device(), free_bytes=verification._BESIDE)
    monkeypatch.setattr(verification, "cpu_device", lambda: scarce)
    asked: list[ReloadRequest] = []
    kept = CleanProcess.ask

    def heard(self: CleanProcess, request: ReloadRequest, sent: Any) -> Any:
        asked.append(request)
        return kept(self, request, sent)

    monkeypatch.setattr(CleanProcess, "ask", heard)
    (result,) = export(trained("llama", dtype), "safetensors")
    assert asked[0].from_disk
    assert result.verification.facts["relative_error"] < 1e-5
    assert result.verification.facts["greedy_tokens"] == "2 of 2"


@pytest.mark.parametrize("how", ["whole", "layer by layer"])
def test_a_generation_that_ends_elsewhere_is_caught(
    how: str, trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop token that nobody asked for cuts answers short, and no weight shows it."""
    made = trained()
    write = merged_format.write_merged
    if how != "whole":
        monkeypatch.setattr(verification, "cpu_device", lambda: replace(cpu_device(), free_bytes=1))

    def damaged(source: Any, folder: Path, *rest: Any) -> Any:
        plan = write(source, folder, *rest)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
        token = continued(model, probe_batch(tokenizer(), 264)).greedy[0]
        edit_json(folder / "generation_config.json", eos_token_id=[4, int(token)])
        return plan

    monkeypatch.setattr(merged_format, "write_merged", damaged)
    error = failure(made, "safetensors")
    assert "generation ends after token 1, which is no stop token" in error.findings[0].message


@pytest.fixture(scope="module")
def gone_on() -> tuple[Probe, torch.Tensor]:
    """A probe that a model goes on with, and its logits."""
    model = build("llama", "float32")
    ids = torch.tensor([[2, 100, 101, 102], [5, 6, 0, 0]])
    probe = continued(model, Probe(ids, (ids > 0).long()))
    return probe, logits(model, probe)


def test_going_on_with_the_likeliest_token(gone_on: tuple[Probe, torch.Tensor]) -> None:
    probe, answer = gone_on
    assert probe.prompt.tolist() == [[2, 100, 101, 102]]
    assert probe.input_ids[1, :2].tolist() == [5, 6]
    assert int(probe.attention_mask[1].sum()) == 2
    model: Any = build("llama", "float32")
    output = model.generate(probe.prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output[0, 4:].tolist() == probe.greedy.tolist()
    assert answer[probe.continued_at].argmax(-1).tolist() == probe.greedy.tolist()


def test_generated_tokens_are_held_to_those_of_training(gone_on: tuple[Probe, torch.Tensor]) -> None:
    probe, answer = gone_on
    greedy = probe.greedy
    other = greedy.clone()
    other[1] = (other[1] + 1) % 264
    assert check_greedy(greedy, answer, probe, (263,), 1e-4) == []
    assert check_greedy(other, answer, probe, (263,), 1e-4) == ["generated token 2 differs"]
    assert check_greedy(other, answer, probe, (263,), 10.0) == []
    assert check_greedy(greedy[:2], answer, probe, (int(greedy[1]),), 1e-4) == []
    assert check_greedy(greedy[:2], answer, probe, (263,), 1e-4) == [
        "generation ends after token 2, which is no stop token"
    ]
    assert check_greedy(greedy, answer, probe, (int(greedy[0]),), 1e-4) == ["generation does not end at a stop token"]
