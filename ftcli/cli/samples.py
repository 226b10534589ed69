"""Shows rows as tokens. Trained text stands out by colour or, without colours, by marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ftcli.cli.render import Style, clean

if TYPE_CHECKING:
    from ftcli.data.sample import SampledRow

_TRAINED = "1;32"
_MASKED = "2"
#: Around trained text where there are no colours.
_MARKS = ("[[", "]]")


def samples_text(samples: Sequence[SampledRow], style: Style) -> str:
    """Each row under a line that names and counts it; line breaks of the text are shown as ``\\n`` and kept."""
    if not samples:
        return ""
    plain = style.paint("x", _TRAINED) == "x"
    key = f"trained text stands in {_MARKS[0]}double brackets{_MARKS[1]}" if plain else _legend(style)
    return "\n\n".join([key, *("\n".join(_row(sample, style, plain=plain)) for sample in samples)])


def _legend(style: Style) -> str:
    return f"{style.paint('trained', _TRAINED)}, {style.paint('masked', _MASKED)}"


def _row(sample: SampledRow, style: Style, *, plain: bool) -> Iterator[str]:
    fate = "" if sample.fate == "kept" else f", {sample.fate}"
    count = f"{sample.trained:,} of {len(sample.tokens):,} tokens trained"
    yield style.paint(f"{clean(str(sample.origin))}: {sample.layout}, {count}{fate}", "1")
    if sample.template is not None:
        yield f"rendered by {clean(sample.template)}"
    runs = groupby(sample.tokens, key=lambda token: token.trained)
    text = "".join(_run("".join(token.text for token in tokens), style, on, plain) for on, tokens in runs)
    yield text.rstrip("\n")


def _run(text: str, style: Style, trained: bool, plain: bool) -> str:
    """A stretch of tokens of one kind. Lines are coloured one by one, so that pagers keep up."""
    lines = [clean(line) for line in text.split("\n")]
    shown = [line + ("\\n" if number < len(lines) - 1 else "") for number, line in enumerate(lines)]
    if plain:
        joined = "\n".join(shown)
        return f"{_MARKS[0]}{joined}{_MARKS[1]}" if trained else joined
    return "\n".join(style.paint(line, _TRAINED if trained else _MASKED) for line in shown)
