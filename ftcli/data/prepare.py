"""From a recipe's sources to tokenized rows, with an account of every token; each source is tokenized once.

Chunks of rows are encoded in several processes; results come back in order, so their number changes nothing. Each
worker has a pipe of its own and one chunk at a time. When this process goes away, however it does, the pipe closes and
the worker ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.data.cache import TokenCache, contents_of, key_of, tokenizer_identity
from ftcli.data.encode import TEXT_ALONE, EncodedRows, Encoder, training_renderer
from ftcli.data.ledger import (
    DatasetLedger,
    chat_findings,
    quantiles,
    rendered_apart,
    skipped_finding,
)
from ftcli.data.tokens import TokenStore, TokenTable, TokenWriter
from ftcli.data.vision import Vision
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.facts.device import usable_cores
from ftcli.plain import JsonObject, plain_fields
from ftcli.ranks import ignore, start_deaf
from ftcli.reporting import Progress, Reporter, SilentReporter
from ftcli.rows.columns import UnreadColumns
from ftcli.rows.layouts import layout_of
from ftcli.rows.places import files_of, is_away
from ftcli.rows.reading import iterate, no_rows
from ftcli.rows.row import MAX_NAMED, Row, raise_findings, text_size
from ftcli.time_limit import TimeBudget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.order import Stream


__all__ = ["PreparedData", "prepare"]

#: From this size on, the time to start processes is small against the time that they save.
LARGE_BYTES = 32 * 2**20
#: Rows between two looks at a budget.
_FEW_ROWS = 16
#: A look that has a budget does not read larger sources just to find out whether they were tokenized before.
MOST_HASHED = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Tokenized sources in recipe order, and one ledger for each.

    ``findings`` are warnings; ``from_cache`` says of each source whether it was tokenized before. ``cache`` is held
    because rows that could not be cached lie in files that go away with it. ``stream``: they are a window of it.
    """

    sequences: TokenTable
    ledgers: list[DatasetLedger]
    findings: tuple[Finding, ...] = ()
    from_cache: tuple[bool, ...] = ()
    cache: TokenCache | None = field(default=None, repr=False)
    stream: Stream | None = field(default=None, repr=False)

    def digest(self) -> str | None:
        """What a run is held to; None for a window of a stream, which checkpoints hold."""
        return self.sequences.digest() if self.stream is None else None


def prepare(
    sources: Sequence[DatasetConfig],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    *,
    cache_dir: Path | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
    vision: Vision | str = TEXT_ALONE,
) -> PreparedData:
    """Reads, renders, tokenizes and masks all ``sources``, or finds them in the cache.

    Args:
        cache_dir: Where tokenized sources are kept; None keeps them for this process only.
        vision: As :class:`ftcli.data.encode.Encoder`.

    Raises FtcliError: exit 4, with what is wrong with all rows of all sources: FT401 to FT407 for files and rows,
    FT411, FT412 for layouts, FT421 to FT428 for templates, FT431 rows longer than max_seq_len under ``overlong:
    error``, FT432 rows without a supervised token, FT433 turns without a stop token, FT434 to FT436.
    """
    job = SourceReader(data, tokenizer, tuple(stops), offline, reporter or SilentReporter(), vision=vision)
    cache = TokenCache(cache_dir, job.reporter.warn)
    stores: list[TokenStore] = []
    cached: list[bool] = []
    failures: list[FtcliError] = []
    for source in sources:
        try:
            store, found = job.store(source, cache)
        except FtcliError as error:
            failures.append(error)
        else:
            stores.append(store)
            cached.append(found)
    raise_together(failures)
    ledgers, findings = accounts([(source.path, store) for source, store in zip(sources, stores, strict=True)], data)
    return PreparedData(TokenTable(stores), ledgers, tuple(findings), tuple(cached), cache)


def raise_together(failures: Sequence[FtcliError]) -> None:
    """Raises what is wrong with any of several sources, where anything is."""
    if failures:
        worst = next((e.exit_code for e in failures if e.exit_code != ExitCode.DATA), ExitCode.DATA)
        raise FtcliError(dict.fromkeys(finding for error in failures for finding in error.findings), worst)


def accounts(stores: Sequence[tuple[str, TokenStore]], data: DataConfig) -> tuple[list[DatasetLedger], list[Finding]]:
    """The ledger of each source, by its name, and what is to be told of them."""
    ledgers = [DatasetLedger(**{**store.facts["ledger"], "name": name}) for name, store in stores]
    findings = [
        skipped_finding(
            ledger.name, ledger.rows, ledger.bad_codes, [_finding(values) for values in store.facts["skipped"]]
        )
        for ledger, (_, store) in zip(ledgers, stores, strict=True)
        if ledger.bad_rows
    ]
    findings += [finding for ledger in ledgers for finding in chat_findings(ledger, data.history)]
    apart = rendered_apart(ledgers)
    findings += [apart] if apart is not None else []
    return ledgers, findings


def _finding(values: JsonObject) -> Finding:
    return Finding(values["code"], values["message"], Origin(values["source"], values["row"]))


@dataclass(slots=True)
class _Counts:
    """Counts of the batches of one source."""

    rows: int = 0
    bytes: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # a list would grow with the rows
    bad: list[Finding] = field(default_factory=list)
    bad_codes: Counter[str] = field(default_factory=Counter)
    overlong: list[Finding] = field(default_factory=list)
    overlong_codes: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)
    implicit: str = ""

    def fault(self, finding: Finding) -> None:
        """A row that is broken."""
        _kept(self.bad, self.bad_codes, finding)

    def add(self, batch: EncodedRows) -> None:
        """A batch of rows that could be read."""
        self.lengths.update(batch.lengths)
        for finding in batch.findings:
            self.fault(finding)
        for finding in batch.overlong:
            _kept(self.overlong, self.overlong_codes, finding)
        self.counts.update(batch.counts)
        self.implicit = self.implicit or batch.implicit
        spans, ids = batch.encoded.spans, batch.encoded.ids
        self.totals.update(
            kept_rows=len(batch.encoded.index),
            tokens=len(ids),
            supervised_tokens=int((spans[:, 1] - spans[:, 0]).sum()),
            **batch.totals,
        )

    def ledger(self, name: str, layout: str) -> DatasetLedger:
        """The account."""
        names = ("kept_rows", "dropped_rows", "truncated_rows", "tokens", "supervised_tokens", "cut_tokens")
        return DatasetLedger(
            name=name,
            layout=layout,
            rows=self.rows,
            dropped_tokens=self.totals["dropped_tokens"],
            length_quantiles=quantiles(self.lengths),
            bad_rows=self.bad_codes.total(),
            bad_codes=dict(self.bad_codes),
            columns_unread=self.unread,
            implicit=self.implicit,
            counts={name: count for name, count in sorted(self.counts.items()) if count},
            **{total: self.totals[total] for total in names},
        )


def _kept(findings: list[Finding], codes: Counter[str], finding: Finding) -> None:
    """Counts a finding, and keeps it while there are few."""
    codes[finding.code] += 1
    if len(findings) < MAX_NAMED:
        findings.append(finding)


class OutOfTime(Exception):
    """A budget was spent before the last row of a source; the first ``rows`` of it were looked at, and gave ``kept``
    rows of ``tokens``. ``share``: about so much of the source; None where nobody can say.
    """

    def __init__(self, rows: int, kept: int, tokens: int, share: float | None) -> None:
        self.rows, self.kept, self.tokens, self.share = rows, kept, tokens, share
        super().__init__(f"stopped after {rows} rows")


class SourceReader:
    """Reads and tokenizes sources; what is the same for all of them.

    With a ``budget``, a source of which rows are left when it is spent raises OutOfTime.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stops: tuple[int, ...],
        offline: bool,
        reporter: Reporter,
        budget: TimeBudget | None = None,
        vision: Vision | str = TEXT_ALONE,
    ) -> None:
        self.reporter = reporter
        self._vision = vision
        self._budget = budget
        self._data = data
        self._tokenizer = tokenizer
        self._stops = stops
        self._offline = offline
        self._identity: str | None = None

    def store(self, source: DatasetConfig, cache: TokenCache) -> tuple[TokenStore, bool]:
        """The source's tokens, and whether they came from the cache."""
        key = self._key(source)
        found = cache.find(key, sees=not isinstance(self._vision, str))
        if found is not None:
            return found, True
        return cache.make(key, lambda writer: self.tokenize(source, writer)), False

    def _key(self, source: DatasetConfig) -> str | None:
        if source.window is not None or (self._budget is not None and _bytes(source) > MOST_HASHED):
            return None
        try:
            contents = contents_of(source, offline=self._offline)
        except OSError:
            return None  # whoever reads the file says what is wrong with it
        if contents is None:
            return None
        if self._identity is None:
            self._identity = tokenizer_identity(self._tokenizer)
        template = training_renderer(self._tokenizer, self._data).identity
        vision = None if isinstance(self._vision, str) else self._vision
        return key_of(source, contents, self._data, template, self._identity, self._stops, vision)

    def tokenize(
        self, source: DatasetConfig, writer: TokenWriter, read: Callable[[], Iterable[Row | Finding]] | None = None
    ) -> JsonObject:
        """Writes the tokens of a source, or of the rows of it that ``read`` gives; returns what is known of them."""
        counts, given = _Counts(), iterate(source, offline=self._offline) if read is None else read()
        with _few_collected(), self.reporter.progress(None, f"tokenizing {source.path}") as progress:
            rows = self._good_rows(given, counts, progress)
            first = next(rows, None)
            if first is None:
                self._raise_bad(source, counts)
                raise no_rows(source)
            layout = layout_of(first, self._data.format)
            unread = UnreadColumns(source, layout)
            encoder = Encoder(self._tokenizer, self._stops, self._data, layout, self._vision)
            few = CHUNK_ROWS if self._budget is None else _FEW_ROWS
            for batch in encode_all(encoder, _seen(chain([first], rows), unread), self._processes(source), few):
                counts.add(batch)
                writer.append(batch.encoded)
                if self._budget is not None and self._budget.spent():
                    self._raise_bad(source, counts, whole=False)
                    raise OutOfTime(
                        counts.rows, counts.totals["kept_rows"], counts.totals["tokens"], self._share(source, counts)
                    )
        self._raise_bad(source, counts)
        counts.unread = list(unread.names)
        ledger = counts.ledger(source.path, layout)
        if not ledger.kept_rows:
            message = f"no row of {source.path} is left: {ledger.dropped_rows:,} too long, {ledger.bad_rows:,} broken"
            cut = "" if self._data.overlong == "truncate" else " or choose data.overlong: truncate"
            help = f"raise data.max_seq_len{cut}; fix the broken rows"
            raise FtcliError.single("FT404", message, exit_code=ExitCode.DATA, origin=Origin(source.path), help=help)
        facts = {"ledger": plain_fields(ledger), "skipped": [_plain(finding) for finding in counts.bad[:3]]}
        return facts if read is None else {**facts, "lengths": list(counts.lengths.items())}

    def _good_rows(self, given: Iterable[Row | Finding], counts: _Counts, progress: Progress) -> Iterator[Row]:
        for item in given:
            counts.rows += 1
            progress.advance()
            if isinstance(item, Row):
                if self._budget is not None:
                    counts.bytes += len(json.dumps(item.fields, ensure_ascii=False, default=str)) + 1
                yield item
            else:
                counts.fault(item)

    def _share(self, source: DatasetConfig, counts: _Counts) -> float | None:
        """About how much of a source was read: of its rows where that many are wanted, else of its files' text."""
        if source.max_rows is not None:
            return counts.rows / source.max_rows
        with contextlib.suppress(FtcliError, OSError):
            files = files_of(source)
            if all(file.kind in (".jsonl", ".json", ".csv", ".tsv") and not file.compressed for file in files):
                part = source.part  # of the source, about so much
                share = 1.0 if part is None else part.share if part.held_out else 1 - part.share
                return min(1.0, counts.bytes / share / max(1, sum(file.path.stat().st_size for file in files)))
        return None

    def _raise_bad(self, source: DatasetConfig, counts: _Counts, *, whole: bool = True) -> None:
        """Raises what is wrong with the rows, unless it is little enough to be skipped."""
        allowed = self._data.max_bad_rows
        limit = allowed_of(allowed, counts.rows, whole=whole)
        findings, uncounted = list(counts.overlong), counts.overlong_codes - Counter(f.code for f in counts.overlong)
        if counts.bad_codes.total() > limit:
            findings += counts.bad
            uncounted += counts.bad_codes - Counter(f.code for f in counts.bad)
        places: dict[str, list[Finding]] = {}
        for finding in findings:
            places.setdefault(finding.origin.source if finding.origin else source.path, []).append(finding)
        ordered = [
            f for group in places.values() for f in sorted(group, key=lambda f: (f.origin and f.origin.line) or 0)
        ]
        raise_findings(ordered, uncounted)

    def _processes(self, source: DatasetConfig) -> int:
        if self._budget is not None or source.window is not None:
            return 1
        if self._data.num_proc is not None:
            if self._data.num_proc > usable_cores():
                self.reporter.info(f"data.num_proc: {usable_cores()} processes, one for each processor that there is")
            return min(self._data.num_proc, usable_cores())
        return usable_cores() if _bytes(source) >= LARGE_BYTES and source.max_rows is None else 1


def allowed_of(allowed: float, rows: int, *, whole: bool) -> float:
    """Number of ``rows`` that ``data.max_bad_rows`` allows to be broken: a share is one of ``whole`` sources."""
    if allowed >= 1:
        return allowed
    return allowed * rows if whole or allowed == 0 else rows


def _bytes(source: DatasetConfig) -> int:
    """About how much text the files of a source hold; 0 for a dataset of the Hub, and for files that are not there."""
    if is_away(source):
        return 0
    with contextlib.suppress(FtcliError, OSError):  # whoever reads the files says what is wrong
        return sum(file.path.stat().st_size * (4 if file.compressed else 1) for file in files_of(source))
    return 0


def _plain(finding: Finding) -> JsonObject:
    origin = finding.origin or Origin("")
    return {"code": finding.code, "message": finding.message, "source": origin.source, "row": origin.line}


def _seen(rows: Iterator[Row], unread: UnreadColumns) -> Iterator[Row]:
    """The rows. Raises FtcliError FT408 at the first one that says that it is not to be imitated."""
    for row in rows:
        unread.look(row)
        refusal = unread.refusal()
        if refusal is not None:
            raise FtcliError([refusal], ExitCode.DATA)
        yield row


@contextlib.contextmanager
def _few_collected() -> Iterator[None]:
    """A block in which Python's garbage collector passes over everything that is there before: a tenth of the time of
    tokenizing went into looking through libraries' objects for garbage again and again.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


#: Rows that are sent to a worker at a time.
CHUNK_ROWS = 256
#: A chunk of less rows is sent as soon as it holds so much text: its tokens take many times that memory.
CHUNK_CHARACTERS = 4 * 2**20
#: A terminal and batch systems signal every process of a group; when to stop is the parent's decision.
_OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def encode_all(
    encoder: Encoder, rows: Iterable[Row], processes: int, chunk_rows: int = CHUNK_ROWS
) -> Iterator[EncodedRows]:
    """A batch for each ``chunk_rows`` rows, in order; less rows where they are long.

    Raises FtcliError: what the encoder raises; FT436 when a process ends by itself.
    """
    chunks = _chunks(rows, chunk_rows)
    if processes <= 1:
        yield from (encoder.batch(chunk) for chunk in chunks)
        return
    workers: list[Worker[EncodedRows]] = []
    try:
        # Results are fetched in the order in which chunks were given out: worker 0, 1, ..., 0, 1, ...
        for chunk in islice(chunks, processes):
            workers.append(Worker(encoder, EncodedRows, _work))
            workers[-1].give(chunk)
        waiting = list(workers)
        while waiting:
            worker = waiting.pop(0)
            batch = worker.take()
            following = next(chunks, None)
            if following is not None:
                worker.give(following)
                waiting.append(worker)
            yield batch
    finally:
        for worker in workers:
            worker.end()


def _chunks(rows: Iterable[Row], most: int) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    held = 0
    for row in rows:
        chunk.append(row)
        held += text_size(row.fields)
        if len(chunk) == most or held >= CHUNK_CHARACTERS:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


_T = TypeVar("_T")


class Worker(Generic[_T]):
    """A process that runs ``target``, which is handed ``content`` and then something for each ``answer``."""

    def __init__(self, content: object, answer: type[_T], target: Callable[[Connection], None]) -> None:
        # A fresh interpreter: forking one that holds threads (torch, tokenizers) can deadlock.
        context = multiprocessing.get_context("spawn")
        self._answer = answer
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=target, args=(theirs,), daemon=True)
        start_deaf(self._process, _OF_PARENT)
        theirs.close()
        self.give(content)  # not with the start, which would wait until it has imported what an encoder needs

    def give(self, content: object) -> None:
        """Hands over what the process works with, or on."""
        try:
            self._pipe.send(content)
        except OSError as error:
            raise self._gone() from error

    def take(self) -> _T:
        """The answer to what was given."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(answer, self._answer):
            return answer
        if isinstance(answer, tuple):
            raise FtcliError(*answer)
        raise RuntimeError(f"a tokenizing process failed:\n{answer}")

    def end(self) -> None:
        """Ends the process, which has nothing to put in order."""
        self._pipe.close()
        self._process.kill()
        self._process.join()

    def _gone(self) -> FtcliError:
        self._process.join(timeout=10)
        message = f"a tokenizing process ended unexpectedly (exit code {self._process.exitcode})"
        help = "a negative code is a signal; -9 usually means that memory ran out: set data.num_proc: 1"
        return FtcliError.single("FT436", message, help=help)


def _work(pipe: Connection) -> None:
    serve(pipe, lambda encoder, rows: encoder.batch(rows))


def serve(pipe: Connection, work: Callable[[Any, Any], object]) -> None:
    """Answers what comes through a pipe with ``work`` of what came first and this, until nobody is there any more."""
    ignore(_OF_PARENT)
    try:
        first = pipe.recv()
    except (EOFError, OSError):
        return
    gc.freeze()
    while True:
        try:
            given = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = work(first, given)
        except FtcliError as error:
            answer = (error.findings, error.exit_code)
        except Exception:  # noqa: BLE001 - raised again in the parent, with the traceback
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return
