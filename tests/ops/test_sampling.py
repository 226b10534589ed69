"""Tokens are drawn with the probabilities that they have, by random numbers that belong to a row alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ftkernels.sampling import GREEDY, NOT_FINITE, Sampling, choose, row_seed, uniforms

DRAWS = 20_000


def draws(logits: list[float], sampling: Sampling) -> torch.Tensor:
    """Shares of each token among many draws."""
    rows = torch.tensor([logits]).expand(DRAWS, -1)
    seeds = torch.arange(DRAWS) * 7919
    tokens, _ = choose(rows, sampling, seeds, torch.zeros(DRAWS, dtype=torch.int64))
    return torch.bincount(tokens, minlength=len(logits)) / DRAWS


def test_the_generator_is_splitmix64() -> None:
    """The first numbers of seed 1234567, as published with the algorithm's reference code."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniforms(torch.full((4,), 1234567), torch.arange(4))
    assert found.tolist() == [(number >> 40) / 2**24 for number in expected]


def test_numbers_are_uniform_and_rows_are_unlike() -> None:
    seeds = torch.tensor([row_seed(3, step, row) for step in range(20) for row in range(500)])
    numbers = torch.stack([uniforms(seeds, torch.full_like(seeds, at)) for at in range(10)])
    counts = torch.histc(numbers, bins=16, min=0.0, max=1.0)
    assert float(((counts - 6250) ** 2 / 6250).sum()) < 45  # chi-squared, 15 degrees of freedom: p = 1e-4
    assert abs(float(torch.corrcoef(numbers)[0, 1])) < 0.05
    assert len(set(seeds.tolist())) == len(seeds)
    assert row_seed(1, 2) != row_seed(2, 1)
    assert -(2**63) <= row_seed(5) < 2**63


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_are_the_probabilities(temperature: float) -> None:
    logits = [2.0, -1.0, 0.5, 1.0, -math.inf]
    expected = torch.softmax(torch.tensor(logits) / temperature, 0)
    assert (draws(logits, Sampling(temperature)) - expected).abs().max() < 0.015


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(1.0, top_k=2), [0, 3]),
        (Sampling(1.0, top_p=0.6), [0, 3]),
        (Sampling(1.0, top_p=0.5), [0]),
        (Sampling(1.0, top_p=1e-9), [0]),
        (Sampling(1.0, min_p=0.4), [0, 3]),
        (Sampling(1.0, top_k=3, top_p=0.9), [0, 2, 3]),
        (Sampling(1.0, top_k=3, top_p=0.8), [0, 3]),
        (Sampling(1.0, top_k=100), [0, 1, 2, 3]),
    ],
)
def test_filters_leave_what_they_say(sampling: Sampling, left: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.1, 0.15, 0.25])
    kept = torch.zeros(4)
    kept[left] = probabilities[left]
    found = draws(probabilities.log().tolist(), sampling)
    assert (found - kept / kept.sum()).abs().max() < 0.015
    assert found.nonzero().flatten().tolist() == left


def test_the_draw_is_the_inverse_of_the_cumulative_probability() -> None:
    """Over a vocabulary of many blocks, the last one short, most tokens impossible in some rows."""
    logits = torch.randn(300, 1000) * 3
    logits[::3, 5:] = -math.inf
    logits[1::3, :900] = -math.inf
    seeds, at = torch.arange(300) * 31, torch.arange(300)
    tokens, _ = choose(logits, Sampling(1.0), seeds, at)
    reached = torch.softmax(logits.double(), -1).cumsum(-1)
    exact = torch.searchsorted(reached, uniforms(seeds, at).double()[:, None], right=True)[:, 0]
    assert int((tokens != exact).sum()) <= 2  # where u lies within a rounding of a bound
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    logits, seeds = torch.randn(6, 50), torch.tensor([row_seed(1, row) for row in range(6)])
    at = torch.arange(6)
    for sampling in (Sampling(1.0), Sampling(0.7, 20, 0.9, 0.01)):
        whole, _ = choose(logits, sampling, seeds, at)
        for row in range(6):
            alone, _ = choose(logits[row : row + 1], sampling, seeds[row : row + 1], at[row : row + 1])
            assert int(alone) == int(whole[row])


def test_the_log_probability_is_that_of_the_softmax() -> None:
    logits = torch.randn(4, 30).to(torch.bfloat16)
    seeds, at = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    for sampling in (GREEDY, Sampling(0.5, top_k=3)):
        tokens, logprobs = choose(logits, sampling, seeds, at)
        exact = torch.log_softmax(logits.double() / (sampling.temperature or 1.0), -1)
        assert torch.allclose(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    tokens, _ = choose(logits, GREEDY, seeds, at)
    assert tokens.tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-9])
def test_a_temperature_that_leaves_float32_takes_the_likeliest(temperature: float) -> None:
    logits, seeds, at = torch.randn(4, 30), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    for sampling in (Sampling(temperature), Sampling(temperature, 3, 0.5)):
        assert [each.tolist() for each in choose(logits, sampling, seeds, at)] == [
            each.tolist() for each in choose(logits, GREEDY, seeds, at)
        ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(1.0, 3, 0.5)])
def test_a_row_that_is_not_finite_says_so_and_its_neighbour_does_not(bad: float, sampling: Sampling) -> None:
    logits = torch.randn(2, 9)
    logits[0, 4] = bad
    tokens, _ = choose(logits, sampling, torch.arange(2), torch.zeros(2, dtype=torch.int64))
    assert tokens[0] == NOT_FINITE
    assert 0 <= tokens[1] < 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_kernels_choose_what_torch_chooses(temperature: float, dtype: torch.dtype, device: str) -> None:
    """Over several blocks, the last one short; rows that lie apart; impossible tokens."""
    wide = (torch.randn(14, 9100, device=device) * 3).to(dtype)
    logits = wide[:, :9001]
    logits[::3, 7:] = -math.inf
    logits[1::3, :8500] = -math.inf
    logits[5, :] = 2.0
    seeds, at = torch.arange(14, device=device) * 77, torch.arange(14, device=device)
    sampling = Sampling(temperature)
    tokens, logprobs = choose(logits, sampling, seeds, at, backend="triton")
    expected, exact = choose(logits, sampling, seeds, at, backend="torch")
    assert int((tokens != expected).sum()) <= 1  # where u lies within a rounding of a bound
    same = tokens == expected
    assert torch.allclose(logprobs[same], exact[same], atol=1e-5)
    assert torch.isfinite(logprobs).all()
    again, _ = choose(logits, sampling, seeds, at, backend="triton")
    assert torch.equal(again, tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_kernels_see_what_is_not_finite(temperature: float, bad: float, device: str) -> None:
    logits = torch.randn(2, 5000, device=device)
    logits[0, slice(None) if bad == -math.inf else 4321] = bad
    numbers = torch.arange(2, device=device)
    tokens, _ = choose(logits, Sampling(temperature), numbers, numbers, backend="triton")
    assert tokens[0] == NOT_FINITE
    assert 0 <= tokens[1] < 5000


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_greedy_takes_the_first_of_equally_likely_tokens(device: str, backend: Any) -> None:
    """Within a block of the vocabulary, in two blocks, and where all are equal."""
    if backend == "torch" and device == "cuda":
        pytest.skip("torch.argmax does not say which of equal values a GPU takes")
    logits = torch.zeros(4, 9001, device=device)
    for row, places in enumerate([(7, 8), (300, 9000), (4095, 4096)]):
        logits[row, list(places)] = 2.0
    seeds = torch.zeros(4, dtype=torch.int64, device=device)
    tokens, _ = choose(logits, GREEDY, seeds, seeds, backend=backend)
    assert tokens.tolist() == [7, 300, 4095, 0]
