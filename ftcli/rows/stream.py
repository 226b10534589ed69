"""Rows of a streamed source, shard after shard and pass after pass, from any place on.

Each pass takes the shards in an order of its own: by a hash of the seed, the pass and their names. So a shard that is
added moves no other one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.config.data import DatasetConfig, StreamPlace
from ftcli.errors import FtcliError, Origin
from ftcli.paths import samples_sha256
from ftcli.rows.hub import hub_commit, hub_rows
from ftcli.rows.places import DataFile, data_file, files_of, is_hub
from ftcli.rows.readers import read_file
from ftcli.rows.row import NO_ROWS_HELP, data_error

#: Name and folder of a row's file, the number of the row, and its value.
RawRow = tuple[str, str | None, int, Any]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of a source: one of this machine, or a ``remote`` one, which ``tells`` its content."""

    name: str
    file: DataFile | None = None
    remote: Any = None
    tells: str = ""


class RowStream:
    """The rows of a source that has a window, in turn; ``place`` is behind the last one that was taken.

    Raises FtcliError FT731 (exit 2) where a shard that was read before the window's place is another one now.
    """

    def __init__(self, source: DatasetConfig, *, offline: bool) -> None:
        assert source.window is not None  # else it is no stream
        self._source, self._window, self._offline = source, source.window, offline
        self.place = self._window.place
        self._rows = self._all()
        self._require_same()

    def take(self, rows: int) -> Iterator[RawRow]:
        """So many rows, less where a pass ends before and the window with it."""
        taken = 0
        while taken < rows:
            found = next(self._rows)
            if found is not None:
                taken += 1
                yield found
            elif self._window.ends and taken:
                return

    def _all(self) -> Iterator[RawRow | None]:
        """Rows without end, and None after the last row of each pass; nothing is read twice where none has a row."""
        while True:
            shards = {shard.name: shard for shard in self._shards()}
            over, some = self.place.over, bool(self.place.read)
            if self.place.shard is not None and self.place.shard not in shards:
                raise self._changed(self.place.shard, "it is not there")
            waiting = sorted(shards.keys() - self.place.read.keys(), key=self._turn)
            for name in sorted(waiting, key=lambda name: name != self.place.shard):
                read, after = self.place.read, self.place.row if name == self.place.shard else 0
                some = some or after > 0
                for number, folder, value in self._read(shards[name], after):
                    some = True
                    self.place = StreamPlace(over, read, name, number)
                    yield name, folder, number, value
                self.place = StreamPlace(over, {**read, name: self._tells(shards[name])})
            if not some:
                raise data_error("FT404", f"{self._source.path} holds no rows", Origin(self._source.path), NO_ROWS_HELP)
            self.place = StreamPlace(over + 1)
            yield None

    def _turn(self, name: str) -> bytes:
        return hashlib.sha256(f"{self._window.seed}\0{self.place.over}\0{name}".encode()).digest()

    def _shards(self) -> list[_Shard]:
        if is_hub(self._source):
            return [_Shard(self._source.path, tells=hub_commit(self._source, offline=self._offline) or "")]
        if self._window.remote is None:
            return [_Shard(file.name, file) for file in files_of(self._source)]
        return [_Shard(name, None, file, tells) for name, tells, file in self._window.remote.listed(self._source.path)]

    def _file(self, shard: _Shard) -> DataFile:
        if shard.file is not None:
            return shard.file
        assert self._window.remote is not None
        path = self._window.remote.fetch(self._source.path, shard.remote)
        found = data_file(shard.name, path)
        if found is None:
            raise data_error("FT402", f"{shard.name} is not a kind of file that ftcli reads", Origin(shard.name))
        return found

    def _read(self, shard: _Shard, after: int) -> Iterator[tuple[int, str | None, Any]]:
        if is_hub(self._source):
            rows = hub_rows(self._source.model_copy(update={"streaming": True}), offline=self._offline, after=after)
            yield from ((number, None, value) for number, value in rows)
            return
        file = self._file(shard)
        folder = str(file.path.parent.absolute())
        yield from ((number, folder, value) for number, value in read_file(file, after))

    def _tells(self, shard: _Shard) -> str:
        """What tells the content of a shard."""
        return shard.tells if shard.file is None else _content(shard.file.path)

    def _require_same(self) -> None:
        if not self.place.read:
            return
        now = {shard.name: shard for shard in self._shards()}
        for name, told in self.place.read.items():
            if name not in now:
                raise self._changed(name, "it is not there")
            if self._tells(now[name]) != told:
                raise self._changed(name, "its content is another one")

    @staticmethod
    def _changed(name: str, how: str) -> FtcliError:
        help = "restore it to continue; or start over with --resume never, which keeps the old run beside it"
        message = f"{name} has changed since this run has read it: {how}"
        return FtcliError.single("FT731", message, origin=Origin(name), help=help)


def _content(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes, samples' sha256 {samples_sha256(path, size)}"
