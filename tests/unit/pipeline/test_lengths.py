"""Lengths of rows for benchmarks: what is drawn, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ftcli.errors import ExitCode, FtcliError
from ftcli.pipeline.benchmark import lengths_of


def test_a_lognormal_mix_has_the_mean_and_the_spread_that_it_names() -> None:
    mix = lengths_of("lognormal:380,0.8")
    drawn = mix(200_000, 10**6, 0)
    assert np.mean(drawn) == pytest.approx(380, rel=0.02)
    assert np.std(np.log(drawn)) == pytest.approx(0.8, rel=0.02)
    cut = mix(200_000, 2048, 0)
    assert cut == [min(length, 2048) for length in drawn]
    assert min(cut) >= 2


def test_the_seed_decides_and_nothing_else() -> None:
    mix = lengths_of("lognormal:100,1")
    assert mix(50, 400, 3) == mix(50, 400, 3) != mix(50, 400, 4)
    assert set(lengths_of("lognormal:64,0")(9, 400, 0)) == {64}


@pytest.mark.parametrize(
    "text",
    [
        *("lognormal:", "lognormal:380", "lognormal:380,", "lognormal:380,1,2", "lognormal:a,b", "lognormal:-1,1"),
        *(
            "lognormal:0,1",
            "lognormal:inf,1",
            "lognormal:nan,nan",
            "lognormal:380,-1",
            "lognormal:380,9",
            "",
            "380,0.8",
            "lengths.txt",
        ),
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(FtcliError, match="FT157") as caught:
        lengths_of(text)
    assert caught.value.exit_code == ExitCode.RECIPE
