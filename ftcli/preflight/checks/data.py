"""Looks at the first rows of every source: does it exist, can it be read, and do its rows make sense for the recipe?

Rows are read and understood by the code that training uses (`ftcli.rows`); only rendering and tokenizing are left out.
:func:`check_sources` and :func:`check_files` need the recipe alone.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ftcli.assets import asset, is_template_file, template_path
from ftcli.config.data import DatasetConfig
from ftcli.config.evaluation import JudgeConfig, RewardConfig
from ftcli.errors import Finding, FtcliError, Severity
from ftcli.facts.model import ModelFacts
from ftcli.facts.tokenizer import no_template_finding
from ftcli.paths import expanded, is_file, is_folder
from ftcli.plan.execution import takes_rows
from ftcli.preflight.checks.context import Context, Findings, Found, NotMade
from ftcli.rows.columns import UnreadColumns, unread_note
from ftcli.rows.layouts import layout_of, misfit_finding, understand
from ftcli.rows.layouts.prompted import as_chat, is_bare
from ftcli.rows.places import DataFile, files_of, is_away, is_hub, local_sources, resolve_path
from ftcli.rows.prompts import prompt_maker
from ftcli.rows.readers import unpacks_beyond
from ftcli.rows.reading import iterate
from ftcli.rows.remote import missing_package
from ftcli.rows.row import NO_ROWS_HELP, Misfit, Row, text_size
from ftcli.tables import code_of, images, layouts, stores

SAMPLE_ROWS = 64
#: Larger .json files are not parsed just to see their first rows; nor are other files that have to be unpacked for it.
MAX_DOCUMENT = 64 * 2**20
#: No further rows are looked at once the first ones hold so many characters.
MAX_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of one source, columns renamed, by the recipe's key for it. ``layout`` is None for bare prompts;
    ``is_chat``: some of them are rendered by the chat template.
    """

    path: str
    rows: tuple[Row, ...]
    layout: str | None
    is_chat: bool


def check(context: Context, facts: ModelFacts, *, offline: bool) -> Found:
    """FT401 to FT407, FT411 to FT414, FT421, FT434, FT453 for the first rows of each source that the command reads.

    Faults of single rows are warnings where ``data.max_bad_rows`` may allow them.
    """
    for path, source in _sources(context):
        reason = _unread(source, offline=offline)
        if reason is not None:
            yield NotMade(f"rows of {source.path}", reason)
            continue
        try:
            yield from list(_source_findings(context, facts, path, source, offline=offline))
        except FtcliError as error:
            for finding in error.findings:  # one about a row keeps its place
                of_row = finding.origin is not None and finding.origin.line is not None
                yield finding if of_row else replace(finding, origin=context.origins.at(path))
        except OSError as error:
            message = f"{source.path} cannot be read: {error}"
            yield context.error("FT403", path, message, help="check its permissions, and that it is whole")


def rows_have_images(context: Context, facts: ModelFacts) -> bool:
    """True if the first row of a local source that is trained on has images, and the model sees."""
    if not context.method.sees or facts.raw.get("model_type") not in images.TABLE:
        return False
    for source in local_sources(context.recipe.data.train):
        if _unread(source, offline=True) is not None:
            continue
        with contextlib.suppress(FtcliError, Misfit, OSError):
            row = next((item for item in iterate(source, offline=True) if isinstance(item, Row)), None)
            if row is None:
                continue
            form = context.recipe.data.format
            if context.from_prompts and prompt_maker(row, form)(row).images:
                return True
            if not context.from_prompts and understand(row, layout_of(row, form)).images:
                return True
    return False


def _unread(source: DatasetConfig, *, offline: bool) -> str | None:
    """The reason why a source is not looked at, or None."""
    if is_hub(source):
        return "no network may be used" if offline else None
    if is_away(source):
        return "it is large and elsewhere; the run fetches it"
    try:
        large = [file for file in files_of(source) if _is_large_document(file)]
    except (FtcliError, OSError, EOFError, zlib.error):
        return None  # said by the reading
    if not large:
        return None
    file = large[0]
    advice = "; use .jsonl" if file.kind == ".json" else ""
    return f"{file.name} is a {file.kind} file over {MAX_DOCUMENT >> 20} MiB{' unpacked' * file.compressed}{advice}"


def _is_large_document(file: DataFile) -> bool:
    """True if the file has to be read as a whole, and is too large for a look at its first rows."""
    if file.compressed and file.kind in (".json", ".parquet", ".arrow"):
        return unpacks_beyond(file, MAX_DOCUMENT)
    return file.kind == ".json" and file.path.stat().st_size > MAX_DOCUMENT


def _sources(context: Context) -> Iterator[tuple[str, DatasetConfig]]:
    recipe = context.recipe
    if context.trains or context.command == "sample":
        yield from ((f"data.train.{i}", source) for i, source in enumerate(recipe.data.train))
    yield from ((f"data.eval.{i}", each) for i, each in enumerate(recipe.data.eval) if each.part is None)
    if context.command in ("eval", "check"):
        for number, task in enumerate(recipe.eval.tasks):
            yield from ((f"eval.tasks.{number}.data.{i}", source) for i, source in enumerate(task.data))


def _source_findings(
    context: Context, facts: ModelFacts, path: str, source: DatasetConfig, *, offline: bool
) -> Findings:
    limit = min(SAMPLE_ROWS, source.max_rows or SAMPLE_ROWS)
    # A look at the first rows of a Hub dataset must not download all of it.
    looked_at = source.model_copy(update={"max_rows": limit, "streaming": is_hub(source)})
    items = list(_first(iterate(looked_at, offline=offline)))
    broken = [item for item in items if isinstance(item, Finding)]
    rows = [item for item in items if isinstance(item, Row)]
    if not items and source.part is None:
        yield context.error("FT404", path, f"{source.path} holds no rows", help=NO_ROWS_HELP)
    if rows:
        first, misfits = _understood(context, path, rows)
        refusal, unread = _unread_columns(context, source, first)
        if refusal is not None:
            yield refusal
            return
        broken += misfits
        meant = list(_meaning(context, facts, first))
        yield from meant
        if not broken and not any(finding.severity == "error" for finding in meant):
            yield from unread
    severity: Severity = "warning" if context.recipe.data.max_bad_rows > 0 else "error"
    yield from (replace(finding, severity=severity) for finding in broken)


def _unread_columns(
    context: Context, source: DatasetConfig, first: FirstRows
) -> tuple[Finding | None, tuple[Finding, ...]]:
    """FT408 for columns that mean another method, and the note about those that nothing reads (FT409). A function of
    the user's is handed every column of what the model is asked.
    """
    asked = first.path.startswith("eval.tasks.") or context.from_prompts
    judges = _judges_of(context, first.path)
    lent = any(judge.file is not None for judge in judges)
    unread = UnreadColumns(source, first.layout, asked=asked)
    for row in first.rows:
        unread.look(row)
    compared = {judge.answer for judge in judges if isinstance(judge, RewardConfig)}
    names = [] if lent else [name for name in unread.names if name not in compared]
    return (
        None if asked and lent else unread.refusal(),
        (unread_note(source.path, names),) if names else (),
    )


def _judges_of(context: Context, path: str) -> Sequence[JudgeConfig]:
    """Judges of the model's answers to the rows of a source."""
    recipe = context.recipe
    if path.startswith("eval.tasks."):
        return (recipe.eval.tasks[int(path.split(".")[2])],)
    rewards = recipe.rewards if context.from_prompts else ()
    if context.command == "sample" and not rewards:
        return recipe.eval.tasks
    tasks = [task for task in recipe.eval.tasks if not task.data] if path.startswith("data.eval") else []
    return (*rewards, *tasks)


def _first(items: Iterator[Row | Finding]) -> Iterator[Row | Finding]:
    """Up to those whose text is :data:`MAX_CHARACTERS` long together."""
    held = 0
    for item in items:
        yield item
        held += text_size(item.fields) if isinstance(item, Row) else 0
        if held >= MAX_CHARACTERS:
            return


def _understood(context: Context, path: str, rows: list[Row]) -> tuple[FirstRows, list[Finding]]:
    """Converts ``rows`` to examples, with findings about those that do not fit."""
    asks = context.from_prompts or path.startswith("eval.tasks.")  # prompts; the answer is the model's
    requested = context.recipe.data.format
    layout = None if asks and is_bare(rows[0], requested) else layout_of(rows[0], requested)
    chats: list[bool] = []
    misfits: list[Finding] = []
    for row in rows:
        try:
            if layout is None:
                chats.append(bool(as_chat(row.fields.get("prompt"))))
            else:
                chats.append(understand(row, layout).messages is not None)
        except Misfit as misfit:
            found = Finding("FT414", str(misfit), row.origin) if layout is None else misfit_finding(row, misfit, layout)
            misfits.append(found)
    return FirstRows(path, tuple(rows), layout, any(chats)), misfits


def _meaning(context: Context, facts: ModelFacts, first: FirstRows) -> Findings:
    """Checks that the rows hold what they are used for."""
    origin, loss_on = first.rows[0].origin, context.recipe.data.loss_on
    layout = layouts.row(first.layout) if first.layout is not None else None
    if context.from_prompts:
        if layout is not None and not layout.asks:
            message = f"rows of format {first.layout} have no prompt to answer"
            yield Finding("FT413", message, origin, "use prompt and answer")
    elif not first.path.startswith("eval.tasks.") and not _has_loss(first, loss_on):
        message = f"loss_on: {loss_on} does not apply to these rows of format {first.layout}"
        yield Finding("FT434", message, origin, "use loss_on: auto")
    asks = context.work == "train" or context.command == "sample"
    if asks and context.method.row_rules is not None and first.path.startswith("data.train"):
        yield from code_of(context.method.row_rules)(context, first)
    templated = facts.tokenizer is None or facts.tokenizer.has_chat_template
    if first.is_chat and not templated and context.recipe.data.chat_template is None:
        yield no_template_finding(origin)


def _has_loss(first: FirstRows, loss_on: str) -> bool:
    if first.layout is None:
        return True
    return layouts.row(first.layout).takes_loss_on(loss_on) and (loss_on != "assistant" or first.is_chat)


_HUB_ONLY = ("name", "revision", "streaming")


def check_sources(context: Context) -> Findings:
    """FT257 and FT258 for sources, FT259 for layouts of batches that have no effect."""
    recipe = context.recipe
    for section, sources in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval)):
        for index, source in enumerate(sources):
            yield from _options(context, f"{section}.{index}", source)
    for number, task in enumerate(recipe.eval.tasks):
        for index, source in enumerate(task.data):
            yield from _options(context, f"eval.tasks.{number}.data.{index}", source)
    yield from _weights(context, recipe.data.train)
    if context.work == "train":
        yield from _streaming(context)
    method = context.method
    if recipe.data.packing and not method.packs and context.command == method.command:
        yield context.no_effect("data.packing", f"in {method.command}: completions are generated")
    refusal = takes_rows(recipe, context.work)
    if recipe.data.padding_free is True and refusal is not None:
        yield context.warning("FT259", "data.padding_free", f"data.padding_free has no effect: {refusal}")


def _options(context: Context, path: str, source: DatasetConfig) -> Findings:
    taken = sorted(set(source.remove_columns) & set(source.columns.values()))
    if taken:
        message = f"remove_columns takes {taken[0]!r} away, which columns reads"
        yield context.error("FT257", f"{path}.remove_columns", message, "remove it from one of the two")
    if not is_hub(source):
        for name in _HUB_ONLY:
            if getattr(source, name):
                message = f"{name} is for datasets of the Hub, but {source.path} is read from this machine"
                help = f"write the path as hub:ORG/NAME, or remove {name}"
                yield context.error("FT257", f"{path}.{name}", message, help)
        row = stores.of(source.path)
        install = None if row is None else missing_package(source.path)
        if row is not None and install is not None:
            message = f"{source.path} needs a package that reads from {row.title}, which is not installed"
            yield context.error("FT253", f"{path}.path", message, install)
        if source.split and row is None and is_file(resolve_path(source.path)):
            message = f"{source.path} is one file and has no splits"
            yield context.error("FT257", f"{path}.split", message, "remove split, or name a folder")
    elif source.streaming and source.max_rows is None and not context.recipe.data.streaming:
        message = f"{source.path} is streamed without a limit, but all rows are tokenized before training starts"
        help = "add max_rows, or remove streaming to download the whole split"
        yield context.error("FT258", f"{path}.streaming", message, help)
    for name in ("weight", "epochs"):
        if getattr(source, name) is not None and not path.startswith("data.train"):
            message = f"{name} is for training data; each held-out row counts once"
            yield context.error("FT257", f"{path}.{name}", message, f"remove {name}")


def _streaming(context: Context) -> Findings:
    """FT257 and FT258 for streams, FT259 for what has no effect without."""
    data = context.recipe.data
    if not data.streaming:
        return
    if context.recipe.train.max_steps is None:
        message = "data.streaming: nobody knows how many rows there are, and train.max_steps is not set"
        yield context.error("FT258", "data.streaming", message, "set train.max_steps, or --max-steps")
    for index, source in enumerate(data.train):
        if source.weight is None and len(data.train) > 1:
            message = f"{source.path} is one of several streamed sources, and has no weight"
            yield context.error("FT257", f"data.train.{index}", message, "give every source a weight: its share")
        for name in ("max_rows", "epochs"):
            if getattr(source, name) is not None:
                message = f"{name} of {source.path} needs all of its rows, and data.streaming reads windows of them"
                yield context.error("FT257", f"data.train.{index}.{name}", message, f"remove {name}")


def _weights(context: Context, sources: Sequence[DatasetConfig]) -> Findings:
    repeated = next((number for number, source in enumerate(sources) if source.epochs is not None), None)
    if repeated is not None:
        path = f"data.train.{repeated}.epochs"
        if any(source.weight is not None for source in sources):
            yield context.error("FT257", path, "a mixture has weights or epochs, not both", "remove one of them")
        elif context.work == "train" and not context.method.repeats:
            message = f"epochs of sources are not supported in {context.method.title}"
            yield context.error("FT257", path, message, "use weight, or repeat rows in the file")
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        message = f"{sources[index].path} has no weight, but another source has one"
        help = "give every source of data.train a weight, or none"
        yield context.error("FT257", f"data.train.{index}", message, help)
    elif any(weighted) and context.work == "train" and not context.method.mixes:
        message = f"weights of sources are not supported yet in {context.method.title}"
        yield context.error("FT257", "data.train.0.weight", message, "repeat rows in the file, or remove it")


def check_files(context: Context) -> Findings:
    """FT424 for a chat template that is not there, FT725 for a checkpoint that is not."""
    template = context.recipe.data.chat_template
    if template is not None:
        yield from _template(context, template)
    resume = context.recipe.run.resume
    if context.trains and context.recipe.run.resumes_elsewhere and not is_folder(expanded(resume)):
        help = "name a folder like runs/NAME/checkpoints/step-00000100, or use auto"
        yield context.error("FT725", "run.resume", f"cannot resume from {resume}: there is no such folder", help=help)


def _template(context: Context, name: str) -> Findings:
    of_file, path = is_template_file(name), template_path(name)
    if is_file(path):
        return
    bundled = sorted(p.stem for p in asset("templates").glob("*.jinja"))
    what = f"no file at {path.absolute()}" if of_file else f"no bundled template is called {name!r}"
    help = f"name a .jinja file, or one of: {', '.join(bundled) or 'none'}"
    yield context.error("FT424", "data.chat_template", f"data.chat_template: {what}", help=help)
