"""Looks at the first rows of every file: is it there, is it JSON, and do its columns make sense for the recipe.

Reading all rows is ``ftcli.data``'s work; the codes are its, so that one problem has one code.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ftcli.assets import asset
from ftcli.config import DatasetConfig
from ftcli.errors import Finding, Origin
from ftcli.preflight.checks.base import Context, Findings, NotMade
from ftcli.preflight.checks.crossfield import LOSS_ON
from ftcli.preflight.facts import ModelFacts

SAMPLE_ROWS = 64
_BUNDLED = "bundled:"
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_MAX_LINE = 64 * 2**20
_MAX_DOCUMENT = 256 * 2**20

#: Columns that each layout needs, in the order in which `format: auto` tries them (as ftcli.data.formats does).
LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "prompt_completion": ("prompt", "completion"),
        "prompt_answer": ("prompt", "answer"),
        "alpaca": ("instruction", "output"),
        "text": ("text",),
    }
)
_CHATS = ("messages", "sharegpt", "alpaca", "prompt_answer")


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of one source, columns renamed. ``path`` is the recipe's key for it."""

    path: str
    source: DatasetConfig
    rows: tuple[tuple[int, dict[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class DataReport:
    """Findings about the data, and what of it could not be looked at."""

    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]


def check(context: Context, facts: ModelFacts) -> DataReport:
    """FT401 to FT405, FT411 to FT413, FT421, FT434, FT453 for the first rows of each file that the command reads."""
    findings: list[Finding] = []
    not_made: list[NotMade] = []
    for path, source in _sources(context):
        try:
            sample = _read(context, path, source)
        except _Unreadable as problem:
            findings.append(problem.finding)
        except _TooLarge:
            not_made.append(
                NotMade(f"rows of {source.path}", f"a .json file over {_MAX_DOCUMENT >> 20} MiB; use .jsonl")
            )
        else:
            findings.extend(_sample_findings(context, facts, sample))
    return DataReport(tuple(findings), tuple(not_made))


def resolve(name: str) -> Path:
    """The file that a recipe's ``path`` means; ``bundled:NAME`` is ``assets/data/NAME.jsonl`` or ``.jsonl.gz``."""
    if not name.startswith(_BUNDLED):
        return Path(name).expanduser()
    stem = name.removeprefix(_BUNDLED)
    plain = asset("data", f"{stem}.jsonl")
    return plain if plain.exists() else asset("data", f"{stem}.jsonl.gz")


def _sources(context: Context) -> Iterator[tuple[str, DatasetConfig]]:
    recipe = context.recipe
    if context.trains:
        yield from ((f"data.train.{i}", source) for i, source in enumerate(recipe.data.train))
    yield from ((f"data.eval.{i}", source) for i, source in enumerate(recipe.data.eval))
    if context.command in ("eval", "check"):
        for number, task in enumerate(recipe.eval.tasks):
            yield from ((f"eval.tasks.{number}.data.{i}", source) for i, source in enumerate(task.data))


class _Unreadable(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class _TooLarge(Exception):
    pass


def _read(context: Context, path: str, source: DatasetConfig) -> Sample:
    file = resolve(source.path)
    if not file.is_file():
        bundled = sorted(p.name.split(".")[0] for p in asset("data").glob("*.jsonl*")) if asset("data").is_dir() else []
        is_bundled = source.path.startswith(_BUNDLED)
        message = f"ftcli bundles no data named {source.path}" if is_bundled else f"no data file at {file.absolute()}"
        hint = f"bundled are: {', '.join(bundled)}" if is_bundled else "paths start at the current directory"
        raise _Unreadable(context.error("FT401", path, message, hint))
    if not file.name.endswith(_SUFFIXES):
        names = ", ".join(_SUFFIXES)
        raise _Unreadable(
            context.error(
                "FT402", path, f"{file.name} is none of the layouts that ftcli reads", f"convert it to {names}"
            )
        )
    try:
        rows = tuple(_rows(context, path, file, source))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise _Unreadable(context.error("FT403", path, f"{source.path} cannot be read: {error}")) from error
    if not rows:
        raise _Unreadable(context.error("FT404", path, f"{source.path} holds no rows"))
    return Sample(path, source, rows)


def _rows(context: Context, path: str, file: Path, source: DatasetConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    limit = min(SAMPLE_ROWS, source.max_rows or SAMPLE_ROWS)
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as stream:
        values = _lines(stream, source) if ".jsonl" in file.suffixes else _document(stream, source)
        for count, (number, value) in enumerate(values):
            if count == limit:
                return
            if not isinstance(value, dict):
                raise _Unreadable(_at(source, number, "FT403", "a row must be a JSON object"))
            missing = [name for name in source.columns.values() if name not in value]
            if missing:
                raise _Unreadable(
                    _at(source, number, "FT405", f"column {missing[0]!r} is missing; this row has: {_names(value)}")
                )
            taken = set(source.columns.values())
            renamed = {new: value[old] for new, old in source.columns.items()}
            yield number, {**{k: v for k, v in value.items() if k not in taken}, **renamed}


def _lines(stream: Any, source: DatasetConfig) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := stream.readline(_MAX_LINE):
        number += 1
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _Unreadable(_at(source, number, "FT403", f"not JSON: {error}")) from error


def _document(stream: Any, source: DatasetConfig) -> Iterator[tuple[int, Any]]:
    text = stream.read(_MAX_DOCUMENT + 1)
    if len(text) > _MAX_DOCUMENT:
        raise _TooLarge
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        hint = "; one object a line wants the ending .jsonl"
        raise _Unreadable(_at(source, line, "FT403", f"not JSON: {error}{hint}")) from error
    if not isinstance(values, list):
        raise _Unreadable(_at(source, 1, "FT403", "a .json file must hold a list of rows"))
    yield from enumerate(values, 1)


def _sample_findings(context: Context, facts: ModelFacts, sample: Sample) -> Findings:
    recipe = context.recipe
    number, first = sample.rows[0]
    asked = recipe.data.format
    layout = next((name for name, needed in LAYOUTS.items() if set(needed) <= set(first)), None)
    if asked != "auto":
        layout = asked
    elif layout is None and not (context.work == "grpo" and "prompt" in first):
        expected = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in LAYOUTS.items())
        yield _at(
            sample.source,
            number,
            "FT411",
            f"the columns {_names(first)} fit no known layout",
            help=f"rename columns with `columns`; expected one of {expected}",
        )
        return
    for row_number, row in sample.rows:
        absent = [name for name in LAYOUTS.get(layout or "", ()) if name not in row]
        if absent:
            yield _at(sample.source, row_number, "FT412", f"column {absent[0]!r} is missing (format {layout})")
    yield from _meaning(context, facts, sample, layout)


def _meaning(context: Context, facts: ModelFacts, sample: Sample, layout: str | None) -> Findings:
    """What the rows are used for, against what they hold. ``layout`` None: GRPO's bare prompts."""
    number, first = sample.rows[0]
    loss_on = context.recipe.data.loss_on
    is_chat = layout is None or layout in _CHATS or isinstance(first.get("prompt"), list)
    if context.work == "grpo":
        if layout == "text":
            yield _at(
                sample.source, number, "FT413", "plain text has no prompt to answer", help="use prompt and answer"
            )
        yield from _answers(context, sample)
    elif layout is not None and (loss_on not in LOSS_ON[layout] or (loss_on == "assistant" and not is_chat)):
        yield _at(
            sample.source,
            number,
            "FT434",
            f"loss_on: {loss_on} has no meaning for these rows of format {layout}",
            help="use loss_on: auto",
        )
    templated = facts.tokenizer is None or facts.tokenizer.has_chat_template
    if is_chat and not templated and context.recipe.data.chat_template is None:
        yield _at(
            sample.source,
            number,
            "FT421",
            "the tokenizer has no chat template, so a conversation has no defined text",
            help="name one with data.chat_template, or train on rows of format prompt_completion or text",
        )


def _answers(context: Context, sample: Sample) -> Findings:
    grpo = context.recipe.grpo
    if grpo is None or not sample.path.startswith("data.train"):
        return
    columns = set.intersection(*(set(row) for _, row in sample.rows))
    # Layouts with an answer of their own lend it to a column of that name (ftcli.trainers.grpo).
    answered = {"completion", "messages", "conversations", "output"} & columns
    derived = columns | {"answer"} if answered else columns
    for reward in grpo.rewards:
        if reward.use == "exact_match" and reward.answer not in derived:
            yield _at(
                sample.source,
                sample.rows[0][0],
                "FT453",
                f"the reward exact_match compares with column {reward.answer!r}, which the data does not have",
                help=f"set the reward's `answer` to one of: {', '.join(sorted(columns))}",
            )


def _at(source: DatasetConfig, row: int, code: str, message: str, help: str | None = None) -> Finding:
    return Finding(code, message, Origin(source.path, row), help)


def _names(row: dict[str, Any]) -> str:
    return ", ".join(sorted(row)) or "none"
