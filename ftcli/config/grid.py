"""The grid of a sweep: ``--set KEY=V1,V2`` as axes, every combination of their values, and a folder name for each."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ftcli.config.load import Override, Settings
from ftcli.config.secrets import is_secret_key, mask
from ftcli.config.yaml import parse_value, plain_tree
from ftcli.errors import FtcliError, Origin

#: Where a run of the sweep lies, what it is called and how it starts is the sweep's to say.
PLACES = ("run.name", "run.output_dir", "run.resume")
#: More runs than this are a mistake, not a sweep.
_MOST = 1000
#: What every file system takes in a name, and no shell needs quotes for. Other characters are replaced.
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")
_LONGEST_NAME = 150


@dataclass(frozen=True, slots=True)
class Axis:
    """One key with the values that are tried: as they are written, and as YAML reads them."""

    key: str
    texts: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Combination:
    """One run of a sweep: its folder below the sweep's (``train.learning_rate=0.0001,lora.r=8``), the value of each
    axis, and everything that ``--set`` says for it, fixed values first.
    """

    name: str
    settings: Settings
    overrides: tuple[Override, ...]


def combinations(assignments: Sequence[str]) -> tuple[Combination, ...]:
    """Every combination of the values in ``KEY=V1,V2``, the last key changing fastest. A key of one value is fixed.

    Commas inside quotes, brackets and braces do not separate values: ``lora.target_modules=[q_proj],[q_proj,v_proj]``
    is two lists. Raises FtcliError FT156 (exit 2) for what is no grid; FT110 and its like for values that are no YAML.
    """
    fixed: list[Override] = []
    axes: list[Axis] = []
    for text in assignments:
        key, separator, rest = text.partition("=")
        values = split_values(rest)
        if not separator or len(values) == 1:
            fixed.append(Override(text=text, label=f"--set {text}"))
        else:
            axes.append(_axis(key.strip(), values, text))
    _require_grid(axes, fixed)
    return tuple(_combinations(axes, tuple(fixed)))


def split_values(text: str) -> list[str]:
    """``text`` at its commas, but for those inside quotes, brackets and braces."""
    parts, depth, quote, before = [""], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "'\"" and before in ("", ",", "[", "{", ":"):
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            before = char
            continue
        parts[-1] += char
        before = char if quote or not char.isspace() else before
    return [part.strip() for part in parts]


def value_text(value: Any) -> str:
    """A value as folder names and tables show it: ``0.0001`` however it was written."""
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "null"
    if isinstance(value, float) and math.isfinite(value):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value) if isinstance(value, str | int | float) else json.dumps(value, separators=(",", ":"))


def _axis(key: str, texts: Sequence[str], assignment: str) -> Axis:
    if is_secret_key(key.rpartition(".")[2]):
        raise _refused(f"`{key}` is a secret, which no recipe holds", assignment, "set it in the environment")
    if key in PLACES:
        raise _refused(f"`{key}` is what a sweep sets itself for each run", assignment, "name the folder: --output-dir")
    if "" in texts:
        help = "values are separated by commas; put quotes around a value that contains one"
        raise _refused(f"an empty value for `{key}`", assignment, help)
    values = tuple(plain_tree(parse_value(text, f"--set {assignment}").tree) for text in texts)
    shown = [value_text(value) for value in values]
    twice = next((text for text in shown if shown.count(text) > 1), None)
    if twice is not None:
        raise _refused(f"`{key}` has the value {twice} twice", assignment, "name each value once")
    return Axis(key, tuple(texts), values)


def _require_grid(axes: Sequence[Axis], fixed: Sequence[Override]) -> None:
    keys = [axis.key for axis in axes] + [override.text.partition("=")[0].strip() for override in fixed]
    twice = next((axis.key for axis in axes if keys.count(axis.key) > 1), None)
    if twice is not None:
        raise _refused(f"`{twice}` is set twice", twice, f"name all its values at once: --set {twice}=V1,V2")
    if not axes:
        help = "write two values or more for one key at least: --set train.learning_rate=1e-4,2e-4,4e-4"
        raise _refused("there is nothing to compare: no key has several values", None, help)
    count = math.prod(len(axis.texts) for axis in axes)
    if count > _MOST:
        raise _refused(f"{count:,} combinations are more than {_MOST:,}", None, "try fewer values, or fewer keys")


def _combinations(axes: Sequence[Axis], fixed: tuple[Override, ...]) -> Iterator[Combination]:
    made = []
    for chosen in product(*(range(len(axis.texts)) for axis in axes)):
        pairs = list(zip(axes, chosen, strict=True))
        settings = {axis.key: axis.values[i] for axis, i in pairs}
        texts = [f"{axis.key}={axis.texts[i]}" for axis, i in pairs]
        overrides = (*fixed, *(Override(text=text, label=f"--set {text}") for text in texts))
        made.append((",".join(f"{key}={value_text(value)}" for key, value in settings.items()), settings, overrides))
    safe = [_UNSAFE.sub("_", raw).rstrip(".") for raw, _, _ in made]  # Windows drops a dot at the end
    alike = [name.casefold() for name in safe]
    for (raw, settings, overrides), name, folded in zip(made, safe, alike, strict=True):
        plain_name = name == raw and len(name) <= _LONGEST_NAME and alike.count(folded) == 1
        yield Combination(name if plain_name else _distinct(raw, name), settings, overrides)


def _distinct(raw: str, name: str) -> str:
    """A name whose characters or length were changed, told from others that became the same by a digest."""
    return f"{name[: _LONGEST_NAME - 9].rstrip('.')}-{hashlib.sha256(raw.encode()).hexdigest()[:8]}"


def _refused(message: str, assignment: str | None, help: str) -> FtcliError:
    origin = Origin("command line" if assignment is None else mask(f"--set {assignment}"))
    return FtcliError.single("FT156", message, origin=origin, help=help)
