"""`ftcli recipes new`: four answers, from options or a terminal, become a recipe that passes preflight."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.cli.app import main
from ftcli.config.load import load_recipe

PROGRAM = "import sys; from ftcli.cli.app import main; sys.exit(main())"
TINY, GEMMA = "bundled:tiny-gemma2", "google/gemma-2-2b"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(model: str, gpu: str, method: str, *more: str) -> list[str]:
    data = "bundled:sample-math" if method == "grpo" else "bundled:sample-chat"
    said = ["--model", model, "--data", data, "--gpu", gpu, "--method", method, "--offline"]
    return ["recipes", "new", *said, *more]


@pytest.mark.parametrize(
    ("model", "gpu", "method"),
    [
        *((TINY, "cpu", method) for method in ("lora", "qlora", "full", "grpo")),
        *((GEMMA, "24GiB", method) for method in ("lora", "qlora", "grpo")),
        (GEMMA, "t4", "qlora"),
        (GEMMA, "h100", "full"),
        ("meta-llama/Llama-3.1-8B", "rtx4090", "qlora"),
        ("meta-llama/Llama-3.1-8B", "80GiB", "lora"),
    ],
)
def test_the_recipe_passes_check_for_its_gpu(
    model: str, gpu: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(model, gpu, method, "--output", "mine.yaml")) == 0, capsys.readouterr().err
    assert "ftcli check mine.yaml" in capsys.readouterr().out
    assert main(["check", "mine.yaml", "--as", gpu, "--offline"]) == 0, capsys.readouterr().err
    recipe = load_recipe(Path("mine.yaml")).recipe
    assert recipe.model.name_or_path == model
    assert (recipe.lora is None) == (method == "full")
    assert (recipe.quantization.method == "nf4") == (method == "qlora")
    assert (recipe.grpo is not None) == (method == "grpo")


def test_it_names_the_file_itself_and_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(TINY, "cpu", "lora")) == 0
    assert Path("tiny-gemma2-lora.yaml").read_text().startswith("# bundled:tiny-gemma2: adapters")
    assert main(words(TINY, "cpu", "lora")) == 2
    assert "FT153" in capsys.readouterr().err
    assert main(words(TINY, "cpu", "lora", "--force")) == 0


def test_held_out_rows_are_measured_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(TINY, "cpu", "lora", "--eval", "bundled:sample-chat-eval")) == 0
    recipe = load_recipe(Path("tiny-gemma2-lora.yaml")).recipe
    assert [source.path for source in recipe.data.eval] == ["bundled:sample-chat-eval"]
    assert (recipe.eval.every_steps, recipe.checkpoint.keep_best) == (50, True)


@pytest.mark.parametrize(
    ("argv", "status", "code", "help"),
    [
        (["recipes", "new"], 2, "FT150", "ftcli recipes new --help"),
        (["recipes", "new", "--model", TINY, "--gpu", "cpu"], 2, "FT150", "--help"),
        (words(TINY, "cpu", "dpo"), 2, "FT150", "lora, qlora, full, grpo"),
        (words(TINY, "gtx9", "lora"), 2, "FT506", "24GiB"),
        (words(GEMMA, "24GiB", "full"), 3, "FT601", "--method lora or qlora"),
        (words("no/such-model", "cpu", "lora"), 3, "FT306", "--offline"),
        (
            ["recipes", "new", "--model", TINY, "--gpu", "cpu", "--method", "lora", "--data", "none.jsonl"],
            4,
            "FT401",
            "",
        ),
    ],
)
def test_what_cannot_work_is_refused_and_writes_nothing(
    argv: list[str], status: int, code: str, help: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    err = capsys.readouterr().err
    assert f"error[{code}]" in err
    assert help in err
    assert list(folder.iterdir()) == []


def asked(answers: str, *argv: str) -> tuple[int, str]:
    """Status and stderr of the command with its stdin on a terminal, where ``answers`` are typed."""
    owner, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "recipes", "new", "--offline", *argv],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(owner, answers.encode())
        _, err = process.communicate(timeout=600)
        return process.returncode, err
    finally:
        os.close(owner)
        os.close(terminal)


def test_four_questions_on_a_terminal() -> None:
    status, err = asked(f"{TINY}\nbundled:sample-chat, bundled:sample-chat-eval\ncpu\n\n")
    assert status == 0, err
    assert err.count("? ") >= 4
    recipe = load_recipe(Path("tiny-gemma2-auto.yaml")).recipe
    assert [source.path for source in recipe.data.train] == ["bundled:sample-chat", "bundled:sample-chat-eval"]


def test_only_what_the_options_leave_open_is_asked() -> None:
    status, err = asked("qlora\n", "--model", TINY, "--data", "bundled:sample-chat", "--gpu", "cpu")
    assert status == 0, err
    assert Path("tiny-gemma2-qlora.yaml").is_file()
    assert "Which model" not in err


def test_the_end_of_input_is_a_usage_error() -> None:
    status, err = asked("\x04")
    assert (status, "FT150" in err) == (2, True)
    status, err = asked("\x04", "--json")
    assert status == 2


@pytest.mark.parametrize(
    ("model", "gpu", "quantized"), [(GEMMA, "24GiB", False), ("google/gemma-2-9b", "t4", True), (TINY, "here", False)]
)
def test_it_takes_what_fits(model: str, gpu: str, quantized: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(model, gpu, "auto", "--output", "mine.yaml")) == 0, capsys.readouterr().err
    recipe = load_recipe(Path("mine.yaml")).recipe
    assert (recipe.quantization.method == "nf4") is quantized
    text = Path("mine.yaml").read_text()
    assert ("--as" in text) is (gpu != "here")


def test_for_a_gpu_that_is_too_small_the_smallest_form_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("google/gemma-2-9b", "1GiB", "auto", "--output", "mine.yaml")) == 3
    assert "FT601" in capsys.readouterr().err
