"""Lengths of rows for benchmarks: drawn from a distribution, or from a file of measured ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.paths import expanded

#: A row of one token has none that is predicted.
SHORTEST = 2
_LOGNORMAL = "lognormal:"
_LARGEST_FILE = 64 * 2**20
_LONGEST = 10**9
_FORMS = (
    "write lognormal:MEAN,SIGMA, as in lognormal:380,0.8, or name a file of whole numbers, one a line or a JSON list"
)


#: Makes so many lengths in tokens, from 2 to the longest (longer ones are cut), of a seed: a function of these alone.
Lengths = Callable[[int, int, int], list[int]]


def lengths_of(text: str) -> Lengths:
    """``lognormal:MEAN,SIGMA``, or the path of a file.

    Raises FtcliError FT157 (exit 2) for everything else, naming the place in a file.
    """
    if text.startswith(_LOGNORMAL):
        mean, sigma = _lognormal(text)
        around = math.log(mean) - sigma**2 / 2  # the mean is that of the lengths before any cut
        return lambda count, longest, seed: _cut(np.random.default_rng(seed).lognormal(around, sigma, count), longest)
    measured = np.asarray(_read(text), dtype=np.int64)
    return lambda count, longest, seed: _cut(np.random.default_rng(seed).choice(measured, count), longest)


def _cut(drawn: NDArray[Any], longest: int) -> list[int]:
    return [int(length) for length in np.clip(np.rint(drawn), SHORTEST, longest)]


def _lognormal(text: str) -> tuple[float, float]:
    try:
        mean, sigma = (float(part) for part in text.removeprefix(_LOGNORMAL).split(","))
    except ValueError:
        raise _refused(f"{text!r} does not name a mean and a sigma") from None
    if not (SHORTEST <= mean <= _LONGEST and 0.0 <= sigma <= 4.0):  # NaN fails, too
        raise _refused(f"{text!r}: the mean is at least {SHORTEST} tokens, sigma from 0 to 4")
    return mean, sigma


def _read(text: str) -> Sequence[int]:
    path = expanded(text)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise _refused(f"{path} is larger than {_LARGEST_FILE // 2**20} MiB")
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _refused(f"{text!r} is neither lognormal:MEAN,SIGMA nor a file: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise _refused(f"{text!r} is not a text file: {error}") from error
    found = _listed(path, content) if content.lstrip().startswith("[") else _by_line(path, content)
    if not found:
        raise _refused(f"{path} holds no length")
    return found


def _listed(path: Path, content: str) -> list[int]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _refused(f"{path} is not a JSON list: {error}") from error
    return [_length(f"{path}: number {number}", value) for number, value in enumerate(values, start=1)]


def _by_line(path: Path, content: str) -> list[int]:
    lines = ((number, line.strip()) for number, line in enumerate(content.splitlines(), start=1))
    return [_length(f"{path}:{number}", int(line) if _is_number(line) else line) for number, line in lines if line]


def _is_number(line: str) -> bool:
    return line.isascii() and line.isdecimal() and len(line) < 20


def _length(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not SHORTEST <= value <= _LONGEST:
        raise _refused(f"{where}: {str(value)[:40]!r} is not a length; a row has at least {SHORTEST} tokens")
    return value


def _refused(message: str) -> FtcliError:
    return FtcliError.single("FT157", message, exit_code=ExitCode.RECIPE, origin=Origin("--lengths"), help=_FORMS)
