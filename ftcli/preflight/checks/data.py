"""Looks at the first rows of every source: is it there, can it be read, and do its rows make sense for the recipe.

Rows are read and understood by the code that training uses (`ftcli.rows`); only rendering and tokenizing are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ftcli.config import DatasetConfig
from ftcli.errors import Finding, FtcliError, Severity
from ftcli.facts.model import ModelFacts
from ftcli.preflight.checks.base import Context, Findings, NotMade
from ftcli.preflight.checks.crossfield import LOSS_ON
from ftcli.rows.formats import Layout, Misfit, asked, layout_of, understand
from ftcli.rows.places import DataFile, files_of, is_hub
from ftcli.rows.reading import iterate
from ftcli.rows.row import NO_ROWS_HELP, Row

SAMPLE_ROWS = 64
#: A larger .json file is not parsed for a look at its first rows, nor is a compressed one that may be larger.
MAX_DOCUMENT = 64 * 2**20
_CHATS = ("messages", "sharegpt", "alpaca", "prompt_answer")


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of one source, columns renamed. ``path`` is the recipe's key for it."""

    path: str
    source: DatasetConfig
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class DataReport:
    """Findings about the data, and what of it could not be looked at."""

    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]


def check(context: Context, facts: ModelFacts, *, offline: bool) -> DataReport:
    """FT401 to FT407, FT411 to FT414, FT421, FT434, FT453 for the first rows of each source that the command reads.

    Faults of single rows are warnings where ``data.max_bad_rows`` may allow them.
    """
    findings: list[Finding] = []
    not_made: list[NotMade] = []
    for path, source in _sources(context):
        reason = _unread(source, offline=offline)
        if reason is not None:
            not_made.append(NotMade(f"rows of {source.path}", reason))
            continue
        try:
            found = list(_source_findings(context, facts, path, source, offline=offline))
        except FtcliError as error:
            found = [_placed(context, path, finding) for finding in error.findings]
        except OSError as error:
            message = f"{source.path} cannot be read: {error}"
            found = [context.error("FT403", path, message, help="check its permissions, and that it is whole")]
        findings += found
    return DataReport(tuple(findings), tuple(not_made))


def _unread(source: DatasetConfig, *, offline: bool) -> str | None:
    """Why a source is not looked at, or None."""
    if is_hub(source):
        return "no network may be used" if offline else None
    try:
        large = [file.name for file in files_of(source) if file.kind == ".json" and _size(file) > MAX_DOCUMENT]
    except (FtcliError, OSError):
        return None  # said by the reading
    return f"{large[0]} is a .json file over {MAX_DOCUMENT >> 20} MiB; use .jsonl" if large else None


def _size(file: DataFile) -> int:
    return file.path.stat().st_size * (8 if file.compressed else 1)


def _placed(context: Context, path: str, finding: Finding) -> Finding:
    """A fault of a whole source is one of the recipe's value; a fault of a row keeps its place."""
    if finding.origin is not None and finding.origin.line is not None:
        return finding
    return replace(finding, origin=context.origins.at(path))


def _sources(context: Context) -> Iterator[tuple[str, DatasetConfig]]:
    recipe = context.recipe
    if context.trains:
        yield from ((f"data.train.{i}", source) for i, source in enumerate(recipe.data.train))
    yield from ((f"data.eval.{i}", source) for i, source in enumerate(recipe.data.eval))
    if context.command in ("eval", "check"):
        for number, task in enumerate(recipe.eval.tasks):
            yield from ((f"eval.tasks.{number}.data.{i}", source) for i, source in enumerate(task.data))


def _source_findings(
    context: Context, facts: ModelFacts, path: str, source: DatasetConfig, *, offline: bool
) -> Findings:
    limit = min(SAMPLE_ROWS, source.max_rows or SAMPLE_ROWS)
    # A look at the first rows of a Hub data set must not download all of it.
    looked_at = source.model_copy(update={"max_rows": limit, "streaming": is_hub(source)})
    items = list(iterate(looked_at, offline=offline))
    broken = [item for item in items if isinstance(item, Finding)]
    rows = tuple(item for item in items if isinstance(item, Row))
    if not items:
        yield context.error("FT404", path, f"{source.path} holds no rows", help=NO_ROWS_HELP)
    if rows:
        sample = FirstRows(path, source, rows)
        asks = context.work == "grpo" or path.startswith("eval.tasks.")  # prompts; the answer is the model's
        bare = asks and context.recipe.data.format == "auto" and _is_bare(rows[0])
        layout = None if bare else layout_of(rows[0], context.recipe.data.format)
        broken += [finding for row in rows if (finding := _misfit(row, layout)) is not None]
        yield from _meaning(context, facts, sample, layout)
    severity: Severity = "warning" if context.recipe.data.max_bad_rows > 0 else "error"
    yield from (replace(finding, severity=severity) for finding in broken)


def _is_bare(row: Row) -> bool:
    """Whether a row is a prompt without an answer."""
    return "prompt" in row.fields and not {"completion", "answer"} & set(row.fields)


def _misfit(row: Row, layout: Layout | None) -> Finding | None:
    try:
        if layout is None:
            asked(row.fields.get("prompt"))
        else:
            understand(row, layout)
    except Misfit as misfit:
        code, suffix = ("FT414", "") if layout is None else ("FT412", f" (format {layout})")
        return Finding(code, f"{misfit}{suffix}", row.origin)
    return None


def _no_loss(loss_on: str, layout: Layout, is_chat: bool) -> bool:
    return loss_on not in LOSS_ON[layout] or (loss_on == "assistant" and not is_chat)


def _meaning(context: Context, facts: ModelFacts, sample: FirstRows, layout: Layout | None) -> Findings:
    """What the rows are used for, against what they hold. ``layout`` None: GRPO's bare prompts."""
    origin, first = sample.rows[0].origin, sample.rows[0].fields
    loss_on = context.recipe.data.loss_on
    is_chat = layout is None or layout in _CHATS or isinstance(first.get("prompt"), list)
    if context.work == "grpo":
        if layout == "text":
            yield Finding("FT413", "plain text has no prompt to answer", origin, "use prompt and answer")
        yield from _answers(context, sample)
    elif layout is not None and not sample.path.startswith("eval.tasks.") and _no_loss(loss_on, layout, is_chat):
        message = f"loss_on: {loss_on} has no meaning for these rows of format {layout}"
        yield Finding("FT434", message, origin, "use loss_on: auto")
    templated = facts.tokenizer is None or facts.tokenizer.has_chat_template
    if is_chat and not templated and context.recipe.data.chat_template is None:
        yield Finding(
            "FT421",
            "the tokenizer has no chat template, so a conversation has no defined text",
            origin,
            "name one with data.chat_template, or train on rows of format prompt_completion or text",
        )


def _answers(context: Context, sample: FirstRows) -> Findings:
    grpo = context.recipe.grpo
    if grpo is None or not sample.path.startswith("data.train"):
        return
    columns = set.intersection(*(set(row.fields) for row in sample.rows))
    # Layouts with an answer of their own lend it to a column of that name (ftcli.trainers.grpo).
    answered = {"completion", "messages", "conversations", "output"} & columns
    derived = columns | {"answer"} if answered else columns
    for reward in grpo.rewards:
        if reward.use == "exact_match" and reward.answer not in derived:
            yield Finding(
                "FT453",
                f"the reward exact_match compares with column {reward.answer!r}, which the data does not have",
                sample.rows[0].origin,
                f"set the reward's `answer` to one of: {', '.join(sorted(columns))}",
            )
