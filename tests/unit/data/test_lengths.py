"""Lengths of rows for benchmarks: what is drawn, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ftcli.data.lengths import lengths_of
from ftcli.errors import ExitCode, FtcliError


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


@pytest.mark.parametrize("content", ["5\n 70\n\n900\n", "[5, 70, 900]", "\ufeff5\r\n70\r\n900", " [5,\n70, 900]\n"])
def test_measured_lengths_are_read_from_lines_and_lists(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content.encode())
    mix = lengths_of(str(path))
    drawn = mix(3000, 500, 0)
    assert set(drawn) == {5, 70, 500}
    assert all(900 < drawn.count(length) < 1100 for length in set(drawn))
    assert drawn == mix(3000, 500, 0) != mix(3000, 500, 1)


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "\n",
            "[]",
            "5\nsix\n",
            "5\n-6\n",
            "5\n1\n",
            "0",
            "5.5\n",
            "[5, true]",
            '[5, "6"]',
            "[5",
            "[[5]]",
            "9" * 30,
        ),
        *(json.dumps([5, None]), json.dumps({"a": 5}), "1" * 5000, "[" + "1" * 5000 + "]", "²", "٣", b"\xff\xfe\x00"),
    ],
)
def test_files_without_lengths_are_refused(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(FtcliError, match="FT157") as caught:
        lengths_of(str(path))
    assert caught.value.exit_code == ExitCode.RECIPE
    assert len(str(caught.value)) < 400


def test_the_place_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n\n7\nmany\n")
    with pytest.raises(FtcliError, match=r"lengths\.txt:4: 'many'"):
        lengths_of(str(path))
    path.write_text("[5, 7, 0]")
    with pytest.raises(FtcliError, match="number 3: '0'"):
        lengths_of(str(path))


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
            "\0",
            ".",
        ),
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(FtcliError, match="FT157"):
        lengths_of(text)
