"""Sizes as people read them, the first line of an error, and names of what ships with ftcli."""

from __future__ import annotations

from pathlib import Path

from ftcli.assets import asset, bundled
from ftcli.errors import first_line
from ftcli.units import gib, size


def test_sizes() -> None:
    assert [size(count) for count in (0, 1023, 2048, 5 * 2**20, 3.5 * 2**30)] == [
        "0 B", "1023 B", "2.00 KiB", "5.00 MiB", "3.50 GiB",
    ]  # fmt: skip
    assert size(2**18, smallest="MiB") == "0.25 MiB"
    assert [gib(count) for count in (2**28, 2**30, 22.04 * 2**30)] == ["0.25", "1.0", "22.0"]


def test_the_first_line_of_an_error_or_its_type() -> None:
    assert first_line(ValueError("\n no such key\nsecond")) == "no such key"
    assert first_line(KeyError()) == "KeyError"


def test_bundled_names() -> None:
    assert bundled("bundled:tiny-gemma2", "models") == asset("models", "tiny-gemma2")
    assert bundled("tiny-gemma2", "models") is None
    assert Path(str(bundled("bundled:tiny-gemma2", "models"))).is_dir()
