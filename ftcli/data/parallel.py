"""Encodes chunks of rows in several processes; results come back in order, so their number changes nothing.

Each worker has a pipe of its own and one chunk at a time. When this process goes away, however it does, the pipe closes
and the worker ends.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol

from ftcli.data.encode import EncodedRows
from ftcli.errors import ExitCode, FtcliError
from ftcli.ranks import ignore, start_deaf
from ftcli.rows.row import Row, text_size

#: Rows that are sent to a worker at a time.
CHUNK_ROWS = 256
#: A chunk of less rows is sent as soon as it holds so much text: its tokens take many times that memory.
CHUNK_CHARACTERS = 4 * 2**20
#: A terminal and batch systems signal every process of a group; when to stop is the parent's decision.
_OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Encodes(Protocol):
    """The work of a worker, sent to it once."""

    def batch(self, rows: Sequence[Row]) -> EncodedRows:
        """Tokenizes a few rows."""
        ...


def encode_all(
    encoder: Encodes, rows: Iterable[Row], processes: int, chunk_rows: int = CHUNK_ROWS
) -> Iterator[EncodedRows]:
    """A batch for each ``chunk_rows`` rows, in order; less rows where they are long.

    Raises FtcliError: what the encoder raises; FT436 when a process ends by itself.
    """
    chunks = _chunks(rows, chunk_rows)
    if processes <= 1:
        yield from (encoder.batch(chunk) for chunk in chunks)
        return
    workers: list[_Worker] = []
    try:
        # Results are fetched in the order in which chunks were given out: worker 0, 1, ..., 0, 1, ...
        for chunk in islice(chunks, processes):
            workers.append(_Worker(encoder))
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


class _Worker:
    def __init__(self, encoder: Encodes) -> None:
        # A fresh interpreter: forking one that holds threads (torch, tokenizers) can deadlock.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(theirs,), daemon=True)
        start_deaf(self._process, _OF_PARENT)
        theirs.close()
        self._send(encoder)  # not with the start, which would wait until it has imported what an encoder needs

    def give(self, chunk: list[Row]) -> None:
        """Hands over a chunk."""
        self._send(chunk)

    def _send(self, content: Encodes | list[Row]) -> None:
        try:
            self._pipe.send(content)
        except OSError as error:
            raise self._gone() from error

    def take(self) -> EncodedRows:
        """The result of the chunk that was given."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(answer, EncodedRows):
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
        return FtcliError.single(
            "FT436",
            f"a tokenizing process ended unexpectedly (exit code {self._process.exitcode})",
            exit_code=ExitCode.DATA,
            help="a negative code is a signal; -9 usually means that memory ran out: set data.num_proc: 1",
        )


def _work(pipe: Connection) -> None:
    ignore(_OF_PARENT)
    try:
        encoder: Encodes = pipe.recv()
    except (EOFError, OSError):
        return
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = encoder.batch(chunk)
        except FtcliError as error:
            answer = (error.findings, error.exit_code)
        except Exception:  # noqa: BLE001 - raised again in the parent, with the traceback
            answer = traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return
