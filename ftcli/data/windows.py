"""Windows of streamed sources as token ids, made one after the other by a process beside the one that trains.

A window is a small data set: tokens of so many rows of each source, in files of its own. What a window holds follows
from the places where its sources' streams go on, so it can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.data import DataConfig, DatasetConfig, StreamPlace
from ftcli.data.cache import write_store
from ftcli.data.prepare import SourceReader, Worker, serve
from ftcli.data.vision import Vision
from ftcli.errors import FtcliError
from ftcli.plain import JsonObject
from ftcli.reporting import SilentReporter
from ftcli.rows.reading import rows_of
from ftcli.rows.stream import RowStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class WindowStart:
    """Where a window begins: its number, the place of each source's stream, and the layouts of their rows, which are
    those of the first window; none before it.
    """

    number: int = 0
    places: tuple[StreamPlace, ...] = ()
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeWindow:
    """A window whose tokens lie in ``folder``, a folder for each source, and where it began."""

    folder: Path
    start: WindowStart


class WindowMaker:
    """Makes the windows of a recipe's streamed sources; can be sent to another process before it has made one."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[int],
        vision: Vision | str,
        start: WindowStart,
        *,
        offline: bool,
    ) -> None:
        self._data, self._tokenizer, self._stops = data, tokenizer, tuple(stops)
        self._vision, self._start, self._offline = vision, start, offline
        self._streams: list[RowStream] = []

    def make(self, folder: Path) -> MadeWindow:
        """Tokenizes the next window into ``folder``. Raises FtcliError as :func:`ftcli.data.prepare.prepare`."""
        start, sources = self._start, self._data.train
        if not self._streams:
            self._streams = [RowStream(self._at(source, n), offline=self._offline) for n, source in enumerate(sources)]
        folder.mkdir()
        rows = self._data.rows_of_window(start.number)
        facts = [self._tokenized(n, rows[n], folder / str(n)) for n in range(len(sources))]
        layouts = tuple(str(one["ledger"]["layout"]) for one in facts)
        places = tuple(stream.place for stream in self._streams)
        self._start = WindowStart(start.number + 1, places, start.layouts or layouts)
        return MadeWindow(folder, start)

    def going_on(self) -> WindowMaker:
        """The same, for another process."""
        rest = (self._data, self._tokenizer, self._stops, self._vision, self._start)
        return WindowMaker(*rest, offline=self._offline)

    def _at(self, source: DatasetConfig, number: int) -> DatasetConfig:
        assert source.window is not None
        places = self._start.places
        return source.with_window(replace(source.window, place=places[number])) if places else source

    def _tokenized(self, number: int, rows: int, folder: Path) -> JsonObject:
        """The tokens of a source's rows. What is left of a pass, or all of one source's rows in a window, may be held
        out or unfit; the following rows take their place, up to a whole pass.
        """
        source, stream = self._data.train[number], self._streams[number]
        layouts = self._start.layouts
        data = self._data.model_copy(update={"format": layouts[number]}) if layouts else self._data
        began = stream.place.over
        while True:
            reader = SourceReader(
                data, self._tokenizer, self._stops, self._offline, SilentReporter(), None, self._vision
            )
            values = partial(rows_of, source, stream.take(rows))
            try:
                folder.mkdir(exist_ok=True)
                return write_store(folder, partial(reader.tokenize, source, read=values))
            except FtcliError as error:
                if error.findings[0].code != "FT404" or stream.place.over > began + 1:
                    raise


@dataclass(slots=True)
class WindowProcess:
    """Makes windows below ``folder``: the first one here, and where there is to be a process ``beside`` this one, the
    others there, one ahead of the one that is asked for.
    """

    maker: WindowMaker
    folder: Path
    beside: bool
    _made: int = 0
    _worker: Worker[MadeWindow] | None = field(default=None, repr=False)

    def next(self) -> MadeWindow:
        """The next window. Raises FtcliError as :meth:`WindowMaker.make`."""
        found = self.maker.make(self._place()) if self._worker is None else self._worker.take()
        if self.beside:
            self._worker = self._worker or Worker(self.maker.going_on(), MadeWindow, make_windows)
            self._worker.give(self._place())
        return found

    def _place(self) -> Path:
        self._made += 1
        return self.folder / f"window-{self._made}"

    def end(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.end()


def make_windows(pipe: Connection) -> None:
    """Answers each folder that comes with the next window, in a process of its own."""
    serve(pipe, WindowMaker.make)
