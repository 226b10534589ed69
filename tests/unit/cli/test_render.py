"""Findings, documents and results as text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.commands.bench import bench_text
from ftcli.cli.commands.check import check_text
from ftcli.cli.commands.evaluate import evaluation_text
from ftcli.cli.render import Style, document, findings_text, result_text
from ftcli.config.load import Override, load_recipe
from ftcli.errors import Finding, Origin
from ftcli.evaluate.loss import LossResult
from ftcli.evaluate.suite import ModelScores, TaskResult
from ftcli.facts.device import named_device
from ftcli.pipeline.bench_result import (
    ArithmeticBound,
    BenchResult,
    Measured,
    PredictedMemory,
    StoredRate,
    TimedTokens,
    Timing,
)
from ftcli.pipeline.checking import CheckResult
from ftcli.pipeline.evaluation import EvaluationResult
from ftcli.plain import NAMED, plain
from ftcli.preflight.checks.context import NotMade
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.train.bench import DeviceMemory
from ftcli.train.on_prompts import PromptsResult
from ftcli.units import size

PLAIN = Style(color=False)
RECIPES = Path(__file__).parents[3] / "recipes"


def test_the_block_of_the_contract() -> None:
    origin = Origin("recipes/gemma2-9b.yaml", 14, 16, "  max_seq_len: 16384", 5)
    message = "data.max_seq_len 16384 exceeds what google/gemma-2-9b can attend to (8192)"
    assert findings_text([Finding("FT301", message, origin, "use at most 8192")], PLAIN) == (
        "recipes/gemma2-9b.yaml:14:16: error[FT301]: data.max_seq_len 16384 exceeds what google/gemma-2-9b can attend "
        "to (8192)\n"
        "  14 |   max_seq_len: 16384\n"
        "     |                ^^^^^\n"
        "  help: use at most 8192"
    )


def test_an_option_stands_in_place_of_the_line() -> None:
    finding = Finding("FT206", "lora.r must be positive", Origin("--set lora.r=0"), "use at least 1")
    assert findings_text([finding], PLAIN) == (
        "--set lora.r=0: error[FT206]: lora.r must be positive\n  help: use at least 1"
    )


def test_help_of_several_lines_stays_in_its_block() -> None:
    text = findings_text([Finding("FT1", "m", None, "one\ntwo")], PLAIN)
    assert text == "ftcli: error[FT1]: m\n  help: one\n        two"


def test_many_rows_with_the_same_trouble_share_a_block() -> None:
    def row(line: int, message: str = "it ends without a stop token", file: str = "a.jsonl") -> Finding:
        return Finding("FT433", message, Origin(file, line), "use another template")

    rows = [row(line) for line in (1, 2, 3, 5, *range(7, 48, 2))]
    long = [Finding("FT431", f"{n} tokens, more than 64", Origin("a.jsonl", n), "drop it") for n in (90, 91, 92, 93)]
    text = findings_text([rows[0], long[0], *rows[1:], *long[1:], row(1, file="b.jsonl"), row(9, "other")], PLAIN)
    assert text == (
        "a.jsonl:1: error[FT433]: it ends without a stop token\n"
        "  likewise: 24 more rows: 2 to 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25 and 11 more\n"
        "a.jsonl:90: error[FT431]: 90 tokens, more than 64\n"
        "  likewise: 3 more rows: 91 to 93\n"
        "  help: drop it\n"
        "b.jsonl:1: error[FT433]: it ends without a stop token\n"
        "a.jsonl:9: error[FT433]: other\n"
        "  help: use another template"
    )
    few = findings_text(rows[:3], PLAIN, most=2)
    assert few.count("error[FT433]") == 2
    assert few.endswith("help: use another template\nftcli: 1 more; --json has them all")


def test_carets_stand_below_wide_characters() -> None:
    line = "run: {name: 漢字漢字, seed: x}"
    origin = Origin("r.yaml", 1, line.index("x}") + 1, line, 1)
    shown, carets = findings_text([Finding("FT204", "m", origin)], PLAIN).splitlines()[1:]
    assert carets.index("^") == shown.index("x}") + 4


def test_carets_never_pass_the_end_of_the_line() -> None:
    carets = findings_text([Finding("FT1", "m", Origin("r.yaml", 1, 4, "a: b", 99))], PLAIN).splitlines()[2]
    assert carets == "    |    ^"


def test_a_long_line_is_shown_around_its_place() -> None:
    line = "a" * 5000 + "HERE" + "b" * 5000
    shown, carets = findings_text([Finding("FT1", "m", Origin("r.yaml", 1, 5001, line, 4))], PLAIN).splitlines()[1:]
    assert len(shown) < 150
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "HERE"


def test_control_characters_never_reach_the_terminal() -> None:
    origin = Origin("r\x1b[2J.yaml", 1, 1, "a: \x1b]0;title\x07\u202e", 1)
    text = findings_text([Finding("FT1", "\x1b[31mred", origin, "\x08\x08")], PLAIN)
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert "\u202e" not in text


def test_colours_only_where_they_are_wanted() -> None:
    finding = Finding("FT1", "m", Origin("r.yaml", 1, 1, "a", 1), "h")
    assert "\x1b[" not in findings_text([finding], PLAIN)
    coloured = findings_text([finding], Style(color=True))
    assert "\x1b[1;31merror[FT1]\x1b[0m" in coloured


def test_document_of_a_failure_and_of_a_success() -> None:
    finding = Finding("FT1", "m", Origin("r.yaml", 2, 3, "x", 4), "h", "warning")
    failed = json.loads(document("check", 3, [finding], None))
    assert failed == {
        "ok": False,
        "exit_code": 3,
        "command": "check",
        "findings": [
            {
                "code": "FT1",
                "severity": "warning",
                "message": "m",
                "help": "h",
                "source": "r.yaml",
                "line": 2,
                "column": 3,
                "length": 4,
            }
        ],
    }
    done = json.loads(document("train", 0, [], {"loss": 1.5}))
    assert (done["ok"], done["result"]) == (True, {"loss": 1.5})


def test_results_are_aligned_and_carry_units() -> None:
    text = result_text(
        {
            "steps": 1200,
            "peak_memory_bytes": 3 * 2**30,
            "first_step_seconds": 1.25,
            "eval": {"loss": 0.12345},
            "x": None,
        }
    )
    assert text == ("steps        1,200\npeak memory  3.00 GiB\nfirst step   1.2 s\neval\n  loss  0.1235")


def test_names_of_others_keep_their_underscores_and_small_numbers_are_short() -> None:
    text = result_text({"files": {"q8_0": 1, "HF_HOME": "x"}, "train_loss": -3.725e-09})
    assert text == "files\n  q8_0     1\n  HF_HOME  x\ntrain loss  -3.725e-9"


@dataclass
class _Scored:
    eval_loss: float
    after: dict[str, float] = field(metadata=NAMED)


def test_names_of_tasks_are_shown_as_they_are() -> None:
    scores = _Scored(0.5, {"exact_match": 0.25, "answered_in_ms": 2.0, "size_bytes": 3})
    text = "eval loss  0.5\nafter\n  exact_match     0.25\n  answered_in_ms  2\n  size_bytes      3"
    assert result_text(scores) == text
    assert plain(scores)["after"] == scores.after


def test_the_result_of_grpo_names_its_tasks() -> None:
    marked = {each.name for each in fields(PromptsResult) if each.metadata == NAMED}
    assert marked == {"before", "after"}


def test_records_are_a_table() -> None:
    text = result_text({"rows": [{"name": "a", "on": True}, {"name": "long", "on": False}]})
    assert text == "rows\n  name  on\n  a     yes\n  long  no"


def test_records_that_hold_maps_are_no_table() -> None:
    """Issue 12, mend 9: the summary of `export` was 250 columns wide."""
    exports = [{"format": name, "bytes": 2048, "verification": {"tensors": 56}} for name in ("adapter", "safetensors")]
    assert result_text({"exports": exports}).splitlines() == [
        "exports",
        "  format  adapter",
        "  bytes   2.00 KiB",
        "  verification",
        "    tensors  56",
        "  format  safetensors",
        "  bytes   2.00 KiB",
        "  verification",
        "    tensors  56",
    ]


def test_evaluation_has_a_column_for_each_model() -> None:
    def scores(loss: float, share: float) -> ModelScores:
        task = TaskResult("exact_match", "exact_match", share, 20, ())
        return ModelScores(LossResult(loss, 2.0, 0.5, 10, 4), {}, {"exact_match": task}, {})

    base, run = scores(5.0, 0.05), scores(0.5, 0.9)
    lines = evaluation_text(EvaluationResult("r.yaml", base, run)).splitlines()
    assert lines[0].split() == ["measure", "base", "run"]
    assert lines[1].split() == ["loss", "5", "0.5"]
    assert lines[4].split() == ["tokens", "10", "10"]
    assert "5.0% of 20" in lines[5]
    assert "90.0% of 20" in lines[5]
    assert evaluation_text(EvaluationResult("r.yaml", base)).splitlines()[0].split() == ["measure", "base"]


def bench_result(tokens_per_second: float, step_ms: float, share: float | None = None, **known: Any) -> BenchResult:
    timing = Timing(5, known.get("first_step_only", False), tokens_per_second, step_ms, 1.0, 1.0, 1.0, 3 * 2**30)
    computing = TimedTokens(80, 100, tokens_per_second * 1.25, 0.2, 3, "unpadded", "a test")
    return BenchResult(
        recipe="r.yaml",
        model="m",
        device="cpu",
        dtype="float32",
        batch=1,
        seq=8,
        lengths=None,
        layers=None,
        gradient_checkpointing=False,
        uncheckpointed_layers=0,
        measured=Measured(timing, computing, DeviceMemory(), 1.0, None, None, "kernels: off", None, "on"),
        stored=StoredRate(),
        predicted=known.get("predicted", PredictedMemory()),
        bound=ArithmeticBound(1.0, 1.0, share),
    )


def test_bench_begins_with_the_numbers_that_count() -> None:
    text = bench_text(bench_result(12345.6, 8.04, 0.421))
    assert text.splitlines()[0] == "12,346 tokens/s, 8.0 ms a step, 42% of the arithmetic bound"
    first = bench_text(bench_result(9.0, 8.0, first_step_only=True))
    assert first.splitlines()[0] == "9 tokens/s, 8.0 ms in the first step, setup included"
    assert "bound" not in bench_text(bench_result(1.0, 1.0)).split("\n")[0]
    assert text.splitlines()[1] == "15,432 computed tokens/s, 20.0% of them filler; rows unpadded, 3 shapes"


def test_the_peak_stands_beside_the_prediction_of_the_same_thing() -> None:
    shown = bench_text(bench_result(1.0, 1.0, predicted=PredictedMemory(5 * 2**30))).split("\n")[2]
    assert shown == "3.00 GiB resident at the peak, 5.00 GiB predicted"
    on_gpu = bench_text(bench_result(1.0, 1.0, predicted=PredictedMemory(5 * 2**30, 4 * 2**30))).split("\n")[2]
    assert on_gpu.startswith("3.00 GiB allocated at the peak, 4.00 GiB predicted; 5.00 GiB with")
    assert "GiB predicted" not in bench_text(bench_result(1.0, 1.0))


def test_keys_of_stored_products_are_those_of_the_methods_that_have_them() -> None:
    assert plain(StoredRate()) == {"fp8_matmul_tflops": None, "fp8_share_of_operations": None}
    assert plain(StoredRate("fp8", 1400.0, 0.8)) == {"fp8_matmul_tflops": 1400.0, "fp8_share_of_operations": 0.8}


def report_of(name: str, gpu: str, *overrides: str) -> PreflightReport:
    loaded = load_recipe(RECIPES / f"{name}.yaml", [Override(text, "--set") for text in overrides])
    return preflight(loaded, command="check", device=named_device(gpu), offline=True)


def test_check_says_what_was_not_checked() -> None:
    report = report_of("gemma2-9b", "h100")
    assert report.verdict is not None
    assert report.memory is not None
    report = replace(report, verdict=replace(report.verdict, level="tight"), not_made=(NotMade("weights", "offline"),))
    text = check_text(CheckResult(report, None))
    assert text.splitlines()[0] == "fits, but only just on h100"
    assert "9.24 billion parameters" in text
    assert f"  weights               {size(report.memory.parts['weights']):>10}" in text
    assert text.endswith("not checked\n  weights: offline")


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ("h100", "false, the fastest that fits in 90% of 79.1 GiB (needed: false "),
        ("rtx4090", "offload but in the last 4 layers, the fastest that fits in 90% of 23.5 GiB (needed: false "),
    ],
)
def test_check_says_which_policy_was_chosen_and_why(gpu: str, told: str) -> None:
    def lines(*overrides: str) -> list[str]:
        text = check_text(CheckResult(report_of("llama3.1-8b", gpu, *overrides), None))
        return [line for line in text.splitlines() if line.startswith("recompute")]

    (line,) = lines()
    assert line.startswith(f"recompute  gradient_checkpointing: {told}")
    assert ("offload" in line, "selective" in line) == (gpu == "rtx4090",) * 2
    assert lines("train.gradient_checkpointing=offload") == []
