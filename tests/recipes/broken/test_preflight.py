"""Recipes that are well formed and cannot work: settings against each other, the model, data, machine and disk.

All through ``ftcli check``. ``--as`` keeps torch out where the machine is beside the point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = "version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n"
DATA = "data: {train: [bundled:smoke-train], max_seq_len: 64}\n"
GRPO = "data: {train: [bundled:smoke-grpo-train], max_seq_len: 64}\n"

# (name, what follows HEAD, code, place, help, exit status)
CASES = [
    # settings that no code carries out, or that contradict one another
    ("split", "data: {train: [{path: bundled:smoke-train, split: test}]}\n", "FT257", "3:51", "remove split", 2),
    ("quantized whole", DATA + "quantization: {method: fp8}\n", "FT251", "4:24", "lora", 2),
    ("two processes", DATA + "launch: {engine: single, num_processes: 2}\n", "FT250", "4:41", "use 1", 2),
    ("no data", "lora: {}\n", "FT254", "r.yaml", "add one", 2),
    ("evaluation without data", DATA + "eval: {every_steps: 5}\n", "FT255", "4:21", "data.eval", 2),
    ("loss on nothing", "data: {train: [a], format: text, loss_on: assistant}\n", "FT256", "3:43", "auto, all", 2),
    ("warm-up too long", DATA + "train: {max_steps: 10, warmup_steps: 20}\n", "FT268", "4:38", "fraction", 2),
    ("adapter of nothing", DATA + "export: {formats: [adapter]}\n", "FT269", "4:20", "safetensors", 2),
    ("template", "data: {train: [bundled:smoke-train], chat_template: a.jinja}\n", "FT424", "3:53", ".jinja file", 2),
    ("checkpoint", DATA + "run: {resume: runs/gone}\n", "FT725", "4:15", "auto", 2),
    # GRPO
    ("group over batch", GRPO + "grpo: {num_generations: 8, rewards: [{use: exact_match}]}\n", "FT261", "4:25",
     "gradient_accumulation_steps: 8", 2),
    ("no rewards", GRPO + "grpo: {num_generations: 2}\n", "FT263", "4:7", "exact_match", 2),
    ("reward of two kinds", GRPO + "grpo: {rewards: [{use: regex, file: r.py:f}]}\n", "FT263", "4:18", "- use:", 2),
    ("bad expression", GRPO + 'grpo: {rewards: [{use: regex, pattern: "("}]}\n', "FT264", "4:40", "Python's re", 2),
    ("endless repetition", GRPO + "grpo: {rewards: [{use: regex, pattern: 'a{1,4294967295}'}]}\n",
     "FT264", "4:40", "Python's re", 2),
    ("endless brackets", GRPO + f"grpo: {{rewards: [{{use: regex, pattern: '{'(' * 5000}'}}]}}\n",
     "FT264", "4:40", "Python's re", 2),
    # the model
    ("too long", "data: {train: [bundled:smoke-train], max_seq_len: 4096}\n", "FT301", "3:51", "1024", 3),
    ("no module of that name", DATA + "lora: {target_modules: [q_prj]}\n", "FT311", "4:25", "q_proj", 3),
    ("an endless search for modules", DATA + "lora: {rank_pattern: {'(([a-z_.0-9]+)+)+!': 8}}\n", "FT264", "4:22",
     "end of a path", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "at", "help", "status"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_recipe_is_refused_before_anything_is_built(
    refused: Callable[..., object], text: str, code: str, at: str, help: str, status: int
) -> None:
    Path("r.yaml").write_text(HEAD + text)
    place = at if at == "r.yaml" else f"r.yaml:{at}"
    refused(["check", "r.yaml", "--as", "cpu", "--offline"], code=code, at=place, help=help, status=status)


ROWS = [
    ("missing file", "gone.jsonl", None, "FT401", "r.yaml:3:15", "current directory"),
    ("unknown bundled data", "bundled:gone", None, "FT401", "r.yaml:3:15", "smoke-train"),
    ("spreadsheet", "rows.xlsx", "a,b\n", "FT402", "r.yaml:3:15", ".jsonl"),
    ("unknown columns", "rows.jsonl", '{"question": "a", "reply": "b"}\n', "FT411", "rows.jsonl:1", "columns"),
]


@pytest.mark.parametrize(
    ("name", "content", "code", "at", "help"), [pytest.param(*case[1:], id=case[0]) for case in ROWS]
)
def test_data_is_refused(
    refused: Callable[..., object], name: str, content: str | None, code: str, at: str, help: str
) -> None:
    if content is not None:
        Path(name).write_text(content)
    Path("r.yaml").write_text(HEAD + f"data: {{train: [{name}], max_seq_len: 64}}\n")
    at = at.replace("3:15", "3:16")
    refused(["check", "r.yaml", "--as", "cpu", "--offline"], code=code, at=at, help=help, status=4)


def test_unknown_gpu(refused: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + DATA)
    refused(["check", "r.yaml", "--as", "h10"], code="FT506", at="--as h10", help="did you mean h100?")


def test_gpu_without_bfloat16_and_too_small(refused: Callable[..., object]) -> None:
    Path("r.yaml").write_text(
        "version: 1\nmodel:\n  name_or_path: google/gemma-2-9b\n  dtype: bfloat16\nlora: {r: 16}\n"
        "data: {train: [bundled:sample-chat], max_seq_len: 2048, chat_template: gemma}\n"
    )
    argv = ["check", "r.yaml", "--as", "t4", "--offline"]
    refused(argv, code="FT501", at="r.yaml:4:10", help="float32", status=3)
    refused(argv, code="FT601", at="r.yaml:3:17", help="GPU", status=3)


def test_output_below_a_file(refused: Callable[..., object]) -> None:
    Path("occupied").write_text("a file")
    Path("r.yaml").write_text(HEAD + DATA + "lora: {}\nrun: {output_dir: occupied/run}\n")
    refused(["check", "r.yaml", "--offline"], code="FT613", at="r.yaml:5:19", help="", status=3)


def test_check_that_cannot_be_made_is_said_so(ftcli: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + DATA + "lora: {}\n")
    outcome = ftcli("check", "r.yaml", "--as", "h100", "--offline")
    assert outcome.status == 0, outcome.stderr
    assert "not checked" in outcome.stdout
    assert "output directory" in outcome.stdout
