"""How micro-batches are laid out: the numbers of tokens that are computed, and the rule that chooses the layout."""

from __future__ import annotations

import math
from random import Random

import pytest

from ftcli.plan.batches import Batches, bucket, choose_batches, unpadded_shape


def test_buckets_are_few_and_none_is_far_above_what_it_holds() -> None:
    assert [bucket(tokens, 32_768) for tokens in (0, 1, 64, 65, 1024, 1025, 2048, 2049, 4097)] == [
        *(0, 64, 64, 128, 1024, 1088, 2048, 2176, 4352)
    ]
    for few_up_to in (1000, 4096, 20_000):
        for tokens in range(1, 40_000, 7):
            size = bucket(tokens, few_up_to)
            assert size >= tokens
            assert size % 64 == 0
            assert bucket(size, few_up_to) == size
            assert size >= bucket(tokens - 7, few_up_to)
            assert size - tokens < (max(64, tokens / 16 + 1) if size <= few_up_to else 64)
    most = (1024, 2048, 16384)
    assert [len({bucket(tokens, few) for tokens in range(1, few + 1)}) for few in most] == [16, 32, 80]
    for power in range(6, 20):
        assert bucket(2**power) == 2**power


@pytest.mark.parametrize(("few_up_to", "filler", "shapes"), [(32_768, (0.01, 0.025), 50), (4096, (0.005, 0.018), 100)])
def test_filler_is_small_on_lengths_of_chats(few_up_to: int, filler: tuple[float, float], shapes: int) -> None:
    """Micro-batches of 8 rows, lognormal with mean 380 and sigma 0.8, cut at 2048."""
    rng, mean, sigma = Random(0), 380.0, 0.8
    found, real = [], 0
    for _ in range(5000):
        drawn = (rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) for _ in range(8))
        lengths = [min(2048, max(2, round(length))) for length in drawn]
        real += sum(lengths)
        found.append(unpadded_shape(lengths, few_up_to))
    computed = sum(rows * width for rows, width in found)
    assert filler[0] < 1 - real / computed < filler[1]
    assert len(set(found)) <= shapes


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([512], (1, 512)),
        ([500], (1, 512)),
        ([4096, 4096], (2, 4096)),
        ([4096, 4095], (1, 8192)),
        ([65] * 8, (1, 576)),  # as rows of 128 they would take twice as much
        ([1], (1, 64)),
        ([3, 3], (1, 64)),
        ([1221] * 8, (8, 1224)),  # and many tokens are not rounded up as few are
        ([1221, 1222] * 4, (1, 9792)),
    ],
)
def test_rows_of_one_length_stay_rows_where_that_costs_nothing(lengths: list[int], shape: tuple[int, int]) -> None:
    assert unpadded_shape(lengths) == shape
    assert Batches("unpadded", "a test").shape(lengths) == shape


def test_no_mix_of_lengths_computes_more_than_full_rows() -> None:
    rng, layouts = Random(1), [Batches("unpadded", "a test"), Batches("padded", "a test")]
    for _ in range(2000):
        rows, longest = rng.randint(1, 9), rng.randint(1, 3000)
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, rows))]
        if rng.random() < 0.3:
            lengths = [rng.choice(lengths)] * len(lengths)
        for batches in (*layouts, Batches("unpadded", "a test", few_up_to=rng.choice([1, 9000]))):
            together, width = batches.shape(lengths)
            assert sum(lengths) <= together * width <= batches.most_tokens(rows, longest)


def test_the_layout_follows_from_attention_and_the_recipe() -> None:
    def layout(wanted: bool | str, rows: str | None = None, densely: str | None = None) -> tuple[str, str]:
        found = choose_batches(wanted, takes_rows=rows, masked_densely=densely)  # type: ignore[arg-type]
        return found.layout, found.reason

    assert layout("auto")[0] == "unpadded"
    assert layout("auto", densely="no kernel here") == ("padded", "no kernel here")
    assert layout(True, densely="no kernel here") == ("unpadded", "data.padding_free: true, although no kernel here")
    assert layout(False) == ("padded", "data.padding_free: false")
    assert layout(True, rows="GRPO pads") == ("padded", "GRPO pads")
