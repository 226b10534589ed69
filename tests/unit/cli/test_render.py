"""Findings, documents and results as text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftcli.cli.render import Style, document, findings_text, jsonable, result_text
from ftcli.cli.views import bench_text, check_text, evaluation_text
from ftcli.config.load import Override, load_recipe
from ftcli.errors import ExitCode, Finding, Origin
from ftcli.facts.device import named_device
from ftcli.preflight.stages import preflight

PLAIN = Style(color=False)


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


@dataclass
class Record:
    path: Path
    value: float


def test_everything_a_result_may_hold_becomes_json() -> None:
    class Scalar:
        def item(self) -> float:
            return 2.5

    result = {"a": Record(Path("x"), math.nan), "b": (1, {2: math.inf}), "c": ExitCode.DATA, "d": Scalar(), "e": None}
    assert jsonable(result) == {"a": {"path": "x", "value": None}, "b": [1, {"2": None}], "c": 4, "d": 2.5, "e": None}


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
    base = {"loss": 5.0, "tokens": 10, "tasks": {"exact_match": {"score": 0.05, "rows": 20}}}
    run = {"loss": 0.5, "tokens": 10, "tasks": {"exact_match": {"score": 0.9, "rows": 20}}}
    lines = evaluation_text({"base": base, "run": run}).splitlines()
    assert lines[0].split() == ["measure", "base", "run"]
    assert lines[1].split() == ["loss", "5", "0.5"]
    assert "5.0% of 20" in lines[3]
    assert "90.0% of 20" in lines[3]
    assert evaluation_text({"base": base, "run": None}).splitlines()[0].split() == ["measure", "base"]


def test_bench_begins_with_the_numbers_that_count() -> None:
    text = bench_text({"tokens_per_second": 12345.6, "step_ms": 8.04, "share_of_bound": 0.421})
    assert text.splitlines()[0] == "12,346 tokens/s, 8.0 ms a step, 42% of the arithmetic bound"
    first = bench_text({"tokens_per_second": 9.0, "step_ms": 8.0, "share_of_bound": None, "first_step_only": True})
    assert first.splitlines()[0] == "9 tokens/s, 8.0 ms in the first step, with all that is set up in it"
    assert "bound" not in bench_text({"tokens_per_second": 1.0, "step_ms": 1.0, "share_of_bound": None}).split("\n")[0]


def test_the_peak_stands_beside_the_prediction_of_the_same_thing() -> None:
    result = {
        "tokens_per_second": 1.0,
        "step_ms": 1.0,
        "peak_memory_bytes": 3 * 2**30,
        "predicted_peak_bytes": 5 * 2**30,
    }
    assert bench_text(result).split("\n")[1] == "3.00 GiB resident at the peak, 5.00 GiB predicted"
    on_gpu = bench_text({**result, "predicted_allocated_bytes": 4 * 2**30}).split("\n")[1]
    assert on_gpu.startswith("3.00 GiB allocated at the peak, 4.00 GiB predicted; 5.00 GiB with")
    assert "predicted" not in bench_text({**result, "predicted_peak_bytes": None})


def test_check_says_what_was_not_checked() -> None:
    text = check_text(
        {
            "model": {"name": "m", "source": "s", "parameters": 9_241_705_984},
            "device": {"name": "h100"},
            "dtypes": {"compute": "bfloat16", "parameter": "bfloat16", "adapter": None, "reason": "why"},
            "attention": "sdpa",
            "memory": {"peak": "backward", "parts": {"weights": 2**30, "none": 0}, "pinned_host_bytes": 2**29},
            "verdict": {"level": "tight", "needed_bytes": 2**30, "available_bytes": None},
            "disk": None,
            "not_made": [{"check": "weights", "reason": "offline"}],
        }
    )
    assert text.splitlines()[0] == "fits, but only just on h100"
    assert "9.24 billion parameters" in text
    assert "1.00 GiB" in text
    assert text.endswith("not checked\n  weights: offline")


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ("h100", "false, the fastest that fits in 90% of 79.1 GiB (needed: false "),
        ("rtx4090", "offload but in the last 5 layers, the fastest that fits in 90% of 23.5 GiB (needed: false "),
    ],
)
def test_check_says_which_policy_was_chosen_and_why(gpu: str, told: str) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "llama3.1-8b.yaml"

    def lines(*overrides: str) -> list[str]:
        loaded = load_recipe(recipe, [Override(text, "--set") for text in overrides])
        report = preflight(loaded, command="check", device=named_device(gpu), offline=True)
        return [line for line in check_text(report.as_dict()).splitlines() if line.startswith("recompute")]

    (line,) = lines()
    assert line.startswith(f"recompute  gradient_checkpointing: {told}")
    assert ("offload" in line, "selective" in line) == (gpu == "rtx4090",) * 2
    assert lines("train.gradient_checkpointing=offload") == []
