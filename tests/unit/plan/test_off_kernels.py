"""The estimate off the kernels against peaks that an H200 has shown: transformers' layers with PEFT's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_memory_estimate import GIB, TOO_HIGH, TOO_LOW, Case, prepared

LLAMA, GEMMA, QWEN = "meta-llama/Llama-3.1-8B", "google/gemma-2-9b", "Qwen/Qwen3-8B"
#: GiB allocated at the peak of the forward pass, of the backward pass, of the optimizer's step and of an evaluation, by
#: tests/gpu/test_memory_estimate.py on an H200 (2026-11-27; torch 2.11, transformers 5.17, PEFT 0.21).
MEASURED = {
    Case(LLAMA, 6, True, 2, 4096, False): (15.51, 15.17, 4.60, 5.81),
    Case(LLAMA, 12, True, 2, 4096, True): (8.97, 10.45, 7.13, 8.29),
    Case(LLAMA, 4, True, 1, 8192, False): (11.34, 11.00, 3.74, 4.97),
    Case(LLAMA, 3, False, 1, 4096, False): (33.65, 31.67, 31.76, 21.52),
    Case(LLAMA, 6, False, 2, 2048, True): (42.29, 37.87, 44.01, 30.12),
    Case(GEMMA, 6, True, 2, 2048, False): (16.01, 16.10, 4.07, 5.51),
    Case(GEMMA, 12, True, 2, 2048, True): (8.16, 9.24, 6.43, 7.83),
    Case(GEMMA, 4, True, 1, 4096, True): (6.10, 8.20, 3.28, 6.02),
    Case(QWEN, 6, True, 2, 2048, False): (10.11, 9.99, 4.61, 5.13),
    Case(LLAMA, 12, True, 2, 4096, "offload"): (8.35, 9.82, 7.13, 8.29),
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_peak_is_what_was_measured(case: Case, tmp_path: Path) -> None:
    """Of two it was 12 and 16% too high: the backward pass was given more than it takes, and the forward pass less."""
    _, estimate, _, _ = prepared(case, tmp_path)
    phases = ("forward", "backward", "optimizer step", "evaluation")
    predicted = [(estimate.phase_bytes(name) - estimate.parts["runtime"]) / GIB for name in phases]  # type: ignore[arg-type]
    measured = MEASURED[case]
    assert TOO_LOW <= max(predicted) / max(measured) <= TOO_HIGH
    assert TOO_LOW <= predicted[measured.index(max(measured))] / max(measured) <= TOO_HIGH
