"""A copy of a run in a bucket (``run.mirror``): complete or absent there too, verified by digest, and gone on from.

Checkpoints and results lie there under the names that they have in the run directory, all other files under
``.state/``, by digest. ``mirror.json``, written last, lists every file of one moment with size and digest: what it does
not list is no part of the copy. Each list names the one before it, so that a machine knows whether another one has gone
on since. Files are copied by a thread while training goes on, from a list that was made when a checkpoint was whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.plain import JsonMap, JsonObject, maps
from ftcli.reporting import Reporter
from ftcli.rows.remote import client_errors, opened
from ftcli.run import atomic
from ftcli.run.checkpoint import Checkpoints, difference, inventory
from ftcli.run.directory import LOCK_NAME, RunDirectory, holds_run, is_locked
from ftcli.tables import stores

#: The list that makes what lies in a bucket a copy.
INDEX = "mirror.json"
#: What this machine knows of it, in the run directory.
_KNOWN = ".mirror.json"
_STATE = ".state"
#: Folders whose files never change once they are there; export/ is written by another command and is no part of it.
_WHOLE = ("checkpoints", "adapter", "model")
#: Files of the run that are left out.
_LEFT_OUT = frozenset((LOCK_NAME, _KNOWN, "export", "tensorboard"))
_FORMAT = 1


class Mirror:
    """The copy of one run at ``url``, which one process at a time writes.

    Raises FtcliError FT776 (exit 3) where the storage does not answer as it should, FT777 (exit 2) where another
    process has written there since.
    """

    def __init__(self, url: str, run: RunDirectory, reporter: Reporter) -> None:
        self.url, self._run, self._reporter = url.rstrip("/"), run, reporter
        row = stores.of(url)
        assert row is not None  # preflight refuses such a recipe (FT250)
        self._row = row
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._pending: Future[None] | None = None

    def restore(self, resume: str) -> None:
        """Brings the copy onto this machine where it is ahead: the run is not here, or another machine has gone on.

        A run that is here and behind keeps its files as ``<path>.previous-N``.

        Raises FtcliError FT777 where ``resume`` is not `auto` and the copy is another run's.
        """
        path = self._run.path
        with self._answering("read"):
            index = self._index()
        if index is None or is_locked(path):  # a run that resumes here is refused by its lock
            return
        ours = self._is_ours(index)
        if resume == "never" or (resume != "auto" and not ours):
            help = "name another run.mirror, or remove what lies there"
            raise FtcliError.single("FT777", f"{self.url} holds the copy of another run", help=help)
        if ours:
            return
        aside = path.with_name(f"{atomic.TEMPORARY_PREFIX}{path.name}.{os.getpid()}")
        with atomic.storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.delete(aside)
            try:
                with self._answering("read"):
                    self._download(index, aside)
                atomic.write_json(aside / _KNOWN, {"id": index["id"]})
                atomic.fsync_tree(aside)
                if holds_run(self._run):
                    atomic.rename_directory(path, atomic.first_free(f"{path.name}.previous-{{n}}", path.parent))
                elif path.exists():
                    path.rmdir()
                atomic.rename_directory(aside, path)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        self._reporter.info(f"{path} goes on from {self.url}, as it was {index.get('written')}")

    def _is_ours(self, index: JsonMap) -> bool:
        """True if this run directory wrote the list, or was about to write the next one when it was killed."""
        known = atomic.read_json_object(self._run.path / _KNOWN)
        return index.get("id") in (known.get("id"), known.get("before"))

    def store(self) -> Checkpoints:
        """The run's checkpoints; each is copied once it is whole."""
        return _Mirrored(self._run.checkpoints_dir, self)

    def begin_copy(self) -> None:
        """Copies the run as it is now, while others go on; warns where the last copy has failed (FT776)."""
        self.wait()
        snapshot = self._snapshot()
        self._pending = self._thread.submit(self._upload, snapshot)

    def wait(self) -> None:
        """Waits for a copy that is being made. One that fails is told, and made again with the next."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except FtcliError as error:
            if error.findings[0].code == "FT777":
                raise
            for finding in error.findings:
                self._reporter.finding(Finding(finding.code, finding.message, None, finding.help, "warning"))

    def finish(self) -> None:
        """Copies the run as it ended. Raises FtcliError FT776 or FT777."""
        self.wait()
        self._upload(self._snapshot())

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=True)

    def _snapshot(self) -> list[_Copied]:
        """The run's files of now. Those that may change are read; the others keep their digest."""
        run = self._run
        usable = {path.name for path in run.checkpoints.scan().usable}
        found: list[_Copied] = []
        for folder in _WHOLE:
            if folder == "checkpoints":
                places = [run.checkpoints_dir / name for name in sorted(usable)]
            else:
                places = [run.path / folder] if (run.path / folder).is_dir() else []
            for place in places:
                base = place.relative_to(run.path).as_posix()
                found += [_Copied({**each, "name": f"{base}/{each['name']}"}, None) for each in inventory(place)]
        for path in sorted(run.path.rglob("*")):
            inner = path.relative_to(run.path)
            hidden = any(part.startswith(".") for part in inner.parts)
            if hidden or inner.parts[0] in _LEFT_OUT or inner.parts[0] in _WHOLE or not path.is_file():
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            identity = {"name": inner.as_posix(), "bytes": len(content), "sha256": digest}
            found.append(_Copied({**identity, "at": f"{_STATE}/{digest[:32]}"}, content))
        return found

    def _upload(self, files: Sequence[_Copied]) -> None:
        with self._answering("written"):
            before = self._index()
            if before is not None and not self._is_ours(before):
                message = f"another process has written to {self.url} since this one began"
                help = "one run at a time has a mirror: stop the other one, or name another run.mirror"
                raise FtcliError.single("FT777", message, help=help)
            there = {_place(each): each for each in maps((before or {}).get("files"))}
            system, root = opened(self.url)
            for file in files:
                held = there.get(_place(file.identity))
                if held is None or _content(held) != _content(file.identity):
                    self._put(system, f"{root}/{_place(file.identity)}", file)
            listed = [file.identity for file in files]
            if before is not None and maps(before.get("files")) == listed:
                return
            earlier = None if before is None else before.get("id")
            index = {"format": _FORMAT, "id": uuid.uuid4().hex, "written": atomic.utc_now(), "before": earlier}
            # Noted first: whichever of the two is the last thing that is written, the list is known as ours.
            atomic.write_json(self._run.path / _KNOWN, {"id": index["id"], "before": earlier})
            index["files"] = listed
            system.pipe_file(f"{root}/{INDEX}", atomic.json_bytes(index, indent=1))
            kept = {_place(file.identity) for file in files}
            gone = [f"{root}/{place}" for place in there if place not in kept]
            if gone:
                system.rm(gone)

    def _put(self, system: Any, target: str, file: _Copied) -> None:
        if file.content is not None:
            system.pipe_file(target, file.content)
        else:
            system.put_file(str(self._run.path / file.identity["name"]), target)
        found = system.info(target)["size"]
        if found != file.identity["bytes"]:
            raise OSError(f"{found} of {file.identity['bytes']} bytes of {file.identity['name']} arrived")

    def _index(self) -> JsonObject | None:
        """The list in the bucket; None where there is none. Raises OSError or ValueError for one that is damaged."""
        system, root = opened(self.url)
        try:
            index = json.loads(system.cat_file(f"{root}/{INDEX}"))
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError(f"{INDEX} is nested too deeply") from error
        if not isinstance(index, dict) or index.get("format") != _FORMAT or not index.get("files"):
            raise ValueError(f"{INDEX} is none that this ftcli reads")
        return index

    def _download(self, index: JsonObject, folder: Path) -> None:
        """Brings all files into ``folder``, and compares each. A checkpoint that is damaged there is left out.

        Raises ValueError where anything else is.
        """
        system, root = opened(self.url)
        files = maps(index["files"])
        for inner in (PurePosixPath(str(each["name"])) for each in files):
            if inner.is_absolute() or ".." in inner.parts:
                raise ValueError(f"{INDEX} names {inner}")
        damaged: set[str] = set()
        with self._reporter.progress(len(files), f"fetching {self.url}") as progress:
            for each in files:
                name = str(each["name"])
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    system.get_file(f"{root}/{_place(each)}", str(target))
                    wrong = difference(folder, [each], thorough=True)
                except FileNotFoundError:
                    wrong = f"{name} is missing"
                if wrong is not None:
                    checkpoint = "/".join(name.split("/")[:2])
                    if not name.startswith("checkpoints/"):
                        raise ValueError(wrong)
                    damaged.add(checkpoint)
                progress.advance()
        for checkpoint in sorted(damaged):
            shutil.rmtree(folder / checkpoint, ignore_errors=True)
            message = f"checkpoint {self.url}/{checkpoint} is damaged and is skipped"
            self._reporter.finding(Finding("FT726", message, severity="warning"))

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        try:
            yield
        except FtcliError:
            raise
        except client_errors(self._row) as error:
            message = f"{self.url} cannot be {what}: {first_line(error) or type(error).__name__}"
            help = "check the address, your rights (credentials of its own client are used), and the network"
            raise FtcliError.single("FT776", message, exit_code=ExitCode.PREFLIGHT, help=help) from error


@dataclass(frozen=True, slots=True)
class _Copied:
    """A file of the run: name, size and digest, where it lies in the bucket (``at``; its name without that), and its
    content where that may change.
    """

    identity: JsonObject
    content: bytes | None


class _Mirrored(Checkpoints):
    """Checkpoints that are copied. None that is being copied is removed."""

    def __init__(self, root: Path, mirror: Mirror) -> None:
        super().__init__(root)
        self._mirror = mirror

    @contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        """As :meth:`Checkpoints.staging`; the copy begins with :meth:`rotate`."""
        self._mirror.wait()
        with super().staging(step) as staged:
            yield staged

    def rotate(self, keep_last: int, spared: Any = ()) -> None:
        """As :meth:`Checkpoints.rotate`; what is left is copied."""
        super().rotate(keep_last, spared)
        self._mirror.begin_copy()


def _place(identity: JsonMap) -> str:
    return str(identity.get("at") or identity["name"])


def _content(identity: JsonMap) -> tuple[Any, ...]:
    return tuple(identity.get(name) for name in ("bytes", "sha256", "sha256_of_blocks"))
