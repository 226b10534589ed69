"""Products of quantized weights: tried where the machine is here, known by rules where it is only named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftcli.config.model import QuantizationConfig
from ftcli.facts.device import GPUS
from ftcli.plan.precision import DtypePlan
from ftcli.plan.quantization import why_dequantized, with_products_tried

FP8 = QuantizationConfig.model_validate({"method": "fp8"})
PLAN = DtypePlan("bfloat16", "float32", "bfloat16", True, "a test")


def test_a_named_gpu_is_judged_by_what_is_known() -> None:
    assert why_dequantized(FP8, PLAN, GPUS["h100"]) is None
    assert "have failed" in str(why_dequantized(FP8, PLAN, GPUS["rtx5090"]))


def test_this_machine_is_judged_by_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failing(capability: tuple[int, int]) -> str:
        asked.append(capability)
        return "they failed"

    monkeypatch.setattr("ftkernels.fp8_trial.why_no_rows_here", failing)
    here = replace(GPUS["rtx5090"], probed=True)
    assert why_dequantized(FP8, PLAN, here) is None  # nothing was tried yet
    tried = with_products_tried(here, FP8)
    assert why_dequantized(FP8, PLAN, tried) == "they failed"
    assert asked == [(12, 0)]


def test_nothing_is_tried_for_other_methods_older_gpus_and_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked(capability: tuple[int, int]) -> str:
        raise AssertionError(capability)

    monkeypatch.setattr("ftkernels.fp8_trial.why_no_rows_here", unasked)
    here = replace(GPUS["a100-80gb"], probed=True)
    assert with_products_tried(here, FP8) is here
    assert with_products_tried(GPUS["h100"], FP8) is GPUS["h100"]
    h100 = replace(GPUS["h100"], probed=True)
    assert with_products_tried(h100, QuantizationConfig()) is h100
