"""What the benchmark's bound is made of."""

from __future__ import annotations

import pytest
import torch

from ftcli.pipeline.bench_result import StoredRate, arithmetic_bound
from ftcli.train.bench import covered, measure_fp8_rate, measure_matmul_rate


def test_the_bound_counts_fp8_products_at_their_own_rate() -> None:
    plain = arithmetic_bound(35e9, 20_000.0, 700.0, StoredRate())
    assert plain.bound_tokens_per_second == pytest.approx(20_000.0)
    assert plain.share_of_bound == pytest.approx(1.0)
    mixed = arithmetic_bound(35e9, 20_000.0, 700.0, StoredRate("fp8", 1400.0, 0.8))
    assert mixed.bound_tokens_per_second == pytest.approx(20_000.0 / 0.6)
    assert mixed.share_of_bound == pytest.approx(0.6)


def test_rates_are_measured_where_there_is_no_gpu_too() -> None:
    assert measure_matmul_rate(torch.device("cpu"), torch.float32, repeats=1) > 1e6
    assert measure_fp8_rate(torch.device("cpu"), repeats=1) > 1e6


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0.0), ([(0, 2), (5, 6)], 3.0), ([(0, 4), (1, 2), (3, 7)], 7.0), ([(5, 6), (0, 1), (0, 1)], 2.0)],
    ids=["none", "apart", "overlapping", "unsorted and twice"],
)
def test_time_in_which_any_kernel_runs(intervals: list[tuple[float, float]], length: float) -> None:
    assert covered(intervals) == length
