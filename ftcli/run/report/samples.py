"""Samples of the report: prompt, reference and answers with their differences; failures first."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ftcli.plain import JsonMap, JsonObject, maps, number_or_none
from ftcli.run.completions import Completions, ScoredCompletion
from ftcli.units import number

#: Characters of one text that are shown.
SHOWN_CHARACTERS = 2000
#: Rows that are shown; the others are in eval.json.
SHOWN_ROWS = 24
#: Longer texts are compared by words instead of characters.
_BY_CHARACTER = 80
#: Texts that share less than this are marked as a whole: marks in between would be noise. Letters are shared by chance.
_LEAST_ALIKE, _LEAST_ALIKE_BY_CHARACTER = 0.4, 0.7
#: More pieces than this are not compared: it takes time by their square.
_MOST_PIECES = 1200
#: What is shown of a row's images: nothing that a page would load, or run.
_IMAGE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+")
_PIECE = re.compile(r"\s+|\w+|[^\w\s]")

#: ``extra`` was not expected, ``missing`` was expected and is not there.
Kind = Literal["same", "extra", "missing"]


@dataclass(frozen=True, slots=True)
class ClippedText:
    """The beginning of a text in pieces, and how many characters are left out."""

    pieces: Sequence[tuple[Kind, str]]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's answer; ``right`` is None where nobody can tell, ``reasoning`` where there was none."""

    text: ClippedText
    right: bool | None
    score: str = ""
    reasoning: ClippedText | None = None


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One held-out row as it was asked and answered; ``images`` are data URLs of JPEG files."""

    task: str
    prompt: ClippedText
    reference: ClippedText | None
    before: ModelAnswer | None
    after: ModelAnswer | None
    images: tuple[str, ...] = ()

    @property
    def right(self) -> bool | None:
        """True if the newest answer is right."""
        newest = self.after or self.before
        return None if newest is None else newest.right


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows to show, failures first, with ``more`` others in eval.json, answered after ``step`` (None: at the end);
    ``has``: which of ``reference``, ``before``, ``after`` any row has, and ``task`` where there are several.
    """

    rows: Sequence[ShownRow]
    more: int
    step: int | None
    has: frozenset[str]


def samples(evaluation: JsonMap) -> Samples | None:
    """The answered rows of eval.json."""
    rows = [_row(row) for row in maps(evaluation.get("samples"))]
    if not rows:
        return None
    # What went wrong first, then what nobody judged, then what is right; among them as they came.
    ordered = sorted(rows, key=lambda row: {False: 0, None: 1, True: 2}[row.right])[:SHOWN_ROWS]
    has = {name for name in ("reference", "before", "after") if any(getattr(row, name) for row in ordered)}
    has |= {"task"} if len({row.task for row in ordered}) > 1 else set()
    step = evaluation.get("step")
    return Samples(ordered, len(rows) - len(ordered), step if isinstance(step, int) else None, frozenset(has))


def _row(row: JsonMap) -> ShownRow:
    reference = row.get("reference")
    return ShownRow(
        str(row["task"]) if row.get("task") else "",
        clipped(str(row.get("prompt") or "")),
        None if reference is None else clipped(str(reference)),
        _answer(row, "before"),
        _answer(row, "after"),
        tuple(url for image in maps(row.get("images")) if _IMAGE.fullmatch(url := str(image.get("url"))) is not None),
    )


def _answer(row: JsonMap, key: str) -> ModelAnswer | None:
    said, reference = row.get(key), row.get("reference")
    if said is None:
        return None
    text, value = str(said), number_or_none(row.get(f"{key}_score"))
    expected = reference if isinstance(reference, str) else None
    if value is not None:  # the task's own judge has the say
        right: bool | None = value >= 1
    else:
        right = None if expected is None else text.strip() == expected.strip()
    shown = clipped(text) if expected is None or right else compared(expected, text)
    partly = value is not None and value not in (0.0, 1.0)
    score = number(value) if value is not None and partly else ""
    return ModelAnswer(shown, right, score, _reasoning(row.get(f"{key}_reasoning")))


def _reasoning(said: Any) -> ClippedText | None:
    return clipped(said) if isinstance(said, str) and said else None


def clipped(text: str, left_out: int = 0) -> ClippedText:
    """The beginning of a text, of which ``left_out`` characters are missing already."""
    missing = left_out + max(0, len(text) - SHOWN_CHARACTERS)
    return ClippedText([("same", text[:SHOWN_CHARACTERS])] if text else [], missing)


def compared(expected: str, got: str) -> ClippedText:
    """``got`` with what is wrong about it: pieces that were not expected, and those that are missing."""
    wanted, found = expected.strip()[:SHOWN_CHARACTERS], got.strip()[:SHOWN_CHARACTERS]
    left_out = max(0, len(got.strip()) - SHOWN_CHARACTERS)
    if not found:
        return ClippedText([])
    by_character = max(len(wanted), len(found)) <= _BY_CHARACTER
    a, b = (list(text) if by_character else _PIECE.findall(text) for text in (wanted, found))
    if len(a) > _MOST_PIECES or len(b) > _MOST_PIECES:
        return ClippedText([("same", found)], left_out)
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < (_LEAST_ALIKE_BY_CHARACTER if by_character else _LEAST_ALIKE):
        return ClippedText([("extra", found)], left_out)
    pieces: list[tuple[Kind, str]] = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(b[b0:b1])))
            continue
        if b1 > b0:
            pieces.append(("extra", "".join(b[b0:b1])))
        if a1 > a0:
            pieces.append(("missing", "".join(a[a0:a1])))
    return ClippedText(pieces, left_out)


def sampled(completions: Completions, rows: int = 4) -> dict[str, list[JsonObject]]:
    """Completions early and late in training by title, of different prompts where there are, the lowest rewards first:
    ``prompt``, ``reasoning`` and ``text``, and ``rewards`` as text.
    """
    steps = completions.steps()
    chosen = {"Early": steps[0], "Late": steps[-1]} if len(steps) > 1 else {"": steps[0]} if steps else {}
    batches = {}
    for when, step in chosen.items():
        found = _different(completions.read(step), rows)
        if found:
            title = f"{when}: step {step:,}" if when else f"Step {step:,}"
            batches[title] = [_sampled(one) for one in sorted(found, key=lambda one: one.reward)]
    return batches


def _different(found: Sequence[ScoredCompletion], rows: int) -> list[ScoredCompletion]:
    first: dict[str, ScoredCompletion] = {}
    for one in found:
        first.setdefault(one.prompt, one)
    others = [one for one in found if one is not first[one.prompt]]
    return [*first.values(), *others][:rows]


def _sampled(one: ScoredCompletion) -> JsonObject:
    rewards = [(name, "none" if value is None else number(value)) for name, value in one.rewards.items()]
    said = {"prompt": clipped(one.prompt), "text": clipped(one.text), "reasoning": _reasoning(one.reasoning)}
    return {**said, "rewards": rewards}
