"""Data files in buckets and at web addresses: fetched whole into a bounded cache on this machine, complete or absent.

A file is known by its address and by what the storage says of its content (entity tag, digest, generation, or size and
date), so that a changed one is fetched anew. Processes of one machine fetch each file once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ftcli.config.data import DatasetConfig
from ftcli.errors import FtcliError, Origin, first_line
from ftcli.plain import JsonMap
from ftcli.reporting import Reporter
from ftcli.rows.places import MAX_ENTRIES, data_file
from ftcli.rows.row import data_error
from ftcli.tables import code_of, stores
from ftcli.units import size

#: What a storage may say of a file's content, the surest first.
_IDENTITIES = ("ETag", "etag", "sha256", "md5Hash", "blob_id", "crc32c", "generation")
_DATES = ("LastModified", "last_modified", "last_commit", "updated", "mtime")


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    """A file where it lies: its name in messages, its path there, its size, and what tells its content."""

    name: str
    path: str
    bytes: int | None
    identity: str

    @property
    def local_name(self) -> str:
        digest = hashlib.sha256(f"{self.name}\n{self.identity}".encode()).hexdigest()[:24]
        return f"{digest}-{PurePosixPath(self.path.partition('?')[0]).name[-100:]}"


class RemoteData:
    """Fetches sources of a recipe.

    Args:
        cache: The cache of this machine; without one nothing can be fetched.
        most_bytes: The most that its fetched files take; the longest unused go first.
        largest: Sources that take more are left where they are; None: none is.
    """

    def __init__(
        self, cache: Path | None, reporter: Reporter, *, offline: bool, most_bytes: int, largest: int | None = None
    ) -> None:
        self._folder = None if cache is None else cache / "remote"
        self._reporter, self._offline = reporter, offline
        self._most, self._largest = most_bytes, largest
        self._used: set[str] = set()

    def fetched(self, source: DatasetConfig) -> DatasetConfig:
        """The source with its files on this machine; as it is where it is no remote one, or too large to be looked at.

        Raises FtcliError FT410 (exit 4).
        """
        row = stores.of(source.path)
        if row is None or source.files is not None:
            return source
        if self._folder is None:
            help = "unset FTCLI_CACHE=off, or copy the files"
            raise data_error(
                "FT410", f"{source.path} is fetched into the cache, and there is none", Origin(source.path), help
            )
        known = self._folder / f"{hashlib.sha256(source.path.encode()).hexdigest()[:24]}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = self._listed_before(source, known) if self._offline else self._list(source, row)
            local = [(file.name, self._folder / file.local_name) for file in files]
            missing = [file for file, (_, path) in zip(files, local, strict=True) if not path.is_file()]
            wanted = sum(file.bytes or 0 for file in missing)
            if self._offline and missing:
                raise _not_cached(source)
            if self._largest is not None and wanted > self._largest:
                return source
            self._used |= {path.name for _, path in local}
            if missing:
                self._fetch(source, row, missing, wanted)
            known.write_text(json.dumps([[f.name, f.path, f.bytes, f.identity] for f in files]), encoding="utf-8")
        except OSError as error:
            raise _unreadable(source, row, error) from error
        for _, path in local:
            os.utime(path)
        return source.with_files(local)

    def listed(self, path: str) -> list[tuple[str, str, Any]]:
        """Name and identity of each file of a streamed source, and what :meth:`fetch` takes.

        Raises FtcliError FT407 or FT410 (exit 4).
        """
        source, row = DatasetConfig(path=path), stores.of(path)
        assert row is not None  # else it lies on this machine
        if self._offline or self._folder is None:
            raise _not_cached(source)
        self._folder.mkdir(parents=True, exist_ok=True)
        return [(file.name, file.identity, file) for file in self._list(source, row)]

    def fetch(self, path: str, file: Any) -> Path:
        """A file that was listed, on this machine; others go where there is no room. Raises FtcliError FT410."""
        source, row = DatasetConfig(path=path), stores.of(path)
        assert row is not None
        assert self._folder is not None
        target: Path = self._folder / file.local_name
        try:
            if not target.is_file():
                self._fetch(source, row, [file], file.bytes or 0)
            os.utime(target)
        except OSError as error:
            raise _unreadable(source, row, error) from error
        return target

    def _listed_before(self, source: DatasetConfig, known: Path) -> list[_RemoteFile]:
        try:
            return [_RemoteFile(*values) for values in json.loads(known.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError, RecursionError):
            raise _not_cached(source) from None

    def _list(self, source: DatasetConfig, row: stores.Store) -> list[_RemoteFile]:
        """The source's files in the order of their names."""
        with _errors_of(source, row):
            system, path = opened(source.path)
            base = source.path.rstrip("/")
            if row.folders and any(sign in path for sign in "*?["):
                root = path[: min(path.index(sign) for sign in "*?[" if sign in path)].rpartition("/")[0]
                base = source.path[: source.path.index(root) + len(root)]
                there: dict[str, JsonMap] = system.glob(path, detail=True)
            elif row.folders and system.isdir(path):
                root, there = path.rstrip("/"), system.find(path, detail=True)
            else:
                return [_described(source.path, path, system.info(path))]
            found = [(name, name[len(root) + 1 :]) for name in sorted(there)]
            shown = [(name, inner) for name, inner in found if not _is_hidden(inner)]
            shown = [(name, inner) for name, inner in shown if data_file(inner, Path(inner)) is not None]
            if not shown or len(there) > MAX_ENTRIES:
                what = f"more than {MAX_ENTRIES:,} files" if shown else "no file of data"
                raise data_error("FT407", f"{source.path} holds {what}", Origin(source.path), "name the right folder")
            return [_described(f"{base}/{inner}", name, there[name]) for name, inner in shown]

    def _fetch(self, source: DatasetConfig, row: stores.Store, files: Sequence[_RemoteFile], wanted: int) -> None:
        assert self._folder is not None  # else nothing is fetched
        self._make_room(source, wanted)
        system, _ = opened(source.path)
        with self._reporter.progress(len(files), f"fetching {source.path} ({size(wanted)})") as progress:
            for file in files:
                target = self._folder / file.local_name
                with _locked(self._folder / f".{file.local_name}.lock"), _errors_of(source, row):
                    if not target.is_file():  # another process has just fetched it
                        _download(system, file, target)
                progress.advance()

    def _make_room(self, source: DatasetConfig, wanted: int) -> None:
        """Removes the files that were not used for longest. Raises FtcliError FT410 where that is not enough."""
        assert self._folder is not None
        if wanted > self._most:
            message = f"{source.path} takes {size(wanted)}, and data.remote_cache_gib allows {size(self._most)}"
            raise data_error("FT410", message, Origin(source.path), "raise data.remote_cache_gib, or copy the files")
        kept = [path for path in self._folder.iterdir() if not path.name.startswith(".") and "-" in path.name]
        total = sum(path.stat().st_size for path in kept)
        for path in sorted(kept, key=lambda path: path.stat().st_mtime):
            if total + wanted <= self._most:
                return
            if path.name not in self._used:
                total -= path.stat().st_size
                path.unlink(missing_ok=True)


def missing_package(path: str) -> str | None:
    """How to install what reading from there needs; None where it is installed, or nothing is needed."""
    row = stores.of(path)
    if row is None or row.package is None or importlib.util.find_spec(row.package.name) is not None:
        return None
    return f"pip install '{row.package.install}'"


def opened(path: str) -> tuple[Any, str]:
    """The file system and the path in it. What it knows of a folder is asked anew each time."""
    import fsspec.core

    system, inner = fsspec.core.url_to_fs(path, use_listings_cache=False)
    return system, inner


def _described(name: str, path: str, info: JsonMap) -> _RemoteFile:
    length = info.get("size")
    told = next((str(info[key]) for key in _IDENTITIES if info.get(key)), None)
    dated = [str(info[key]) for key in _DATES if info.get(key)]
    return _RemoteFile(name, path, None if length is None else int(length), told or f"{length} {' '.join(dated)}")


def _is_hidden(inner: str) -> bool:
    return any(part.startswith((".", "_")) for part in inner.split("/"))


def _download(system: Any, file: _RemoteFile, target: Path) -> None:
    """Fetches a file aside, and renames it once it is whole."""
    descriptor, name = tempfile.mkstemp(prefix=".fetching-", dir=target.parent)
    os.close(descriptor)
    try:
        system.get_file(file.path, name)
        found = Path(name).stat().st_size
        if file.bytes is not None and found != file.bytes:
            raise OSError(f"{found:,} of {file.bytes:,} bytes arrived")
        Path(name).rename(target)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def client_errors(row: stores.Store) -> tuple[type[Exception], ...]:
    """Exceptions that a storage's client raises where something cannot be read or written."""
    kinds: list[type[Exception]] = [OSError, ValueError]
    for reference in row.errors:
        with contextlib.suppress(ImportError, AttributeError):
            kinds.append(code_of(reference))
    return tuple(kinds)


@contextmanager
def _errors_of(source: DatasetConfig, row: stores.Store) -> Iterator[None]:
    try:
        yield
    except client_errors(row) as error:
        raise _unreadable(source, row, error) from error


def _unreadable(source: DatasetConfig, row: stores.Store, error: BaseException) -> FtcliError:
    reason = first_line(error) or type(error).__name__
    message = f"{source.path} cannot be read from {row.title}: {reason}"
    help = "check the address, your rights (credentials of its own client are used), and the network"
    return data_error("FT410", message, Origin(source.path), help)


def _not_cached(source: DatasetConfig) -> FtcliError:
    message = f"{source.path} is not in this machine's cache, and ftcli was told to use no network"
    return data_error("FT410", message, Origin(source.path), "run once without --offline, or copy the files")
