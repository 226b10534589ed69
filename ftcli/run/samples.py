"""The folder of `ftcli sample`: what was drawn and what judges said, a line for each prompt, and the rows made of it.

====================  ==================================================================================
file                  holds
====================  ==================================================================================
``sample.json``       what the answers depend on, and the summary once all is written
``answers.jsonl``     every answer to each prompt
``scores.jsonl``      the scores of these answers
``sft.jsonl``         the best answers, as rows of prompt and completion
``pairs.jsonl``       better and worse answers, as rows of prompt, chosen and rejected
====================  ==================================================================================

Prompts come in groups of a fixed size, whose lines are appended together. What a killed process has left of a group is
taken away, so that the files of a resumed run are those of one that was never stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.paths import make_folder
from ftcli.plain import JsonMap, JsonObject, map_in, parsed_map
from ftcli.run import atomic
from ftcli.run.directory import LOCK_NAME, DirectoryLock

MANIFEST, ANSWERS, SCORES = "sample.json", "answers.jsonl", "scores.jsonl"
#: The rows, by what they are for.
ROWS = {"sft": "sft.jsonl", "pairs": "pairs.jsonl"}
_OURS = (MANIFEST, ANSWERS, SCORES, *ROWS.values())
#: Answers of a group, about: what a kill costs at most. Eight times what is decoded at once, so that few places of a
#: batch are empty while the last answers of a group are completed.
GROUP_ANSWERS = 1024
#: Of a line: a thousand answers of 32,000 tokens take less.
_MOST_LINE_BYTES = 256 << 20
#: Differences that are named; the others are counted.
_MOST_NAMED = 8


def key_of(text: str) -> str:
    """A digest that tells a prompt from others."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


class GroupLog:
    """A JSONL file with a line for each prompt, in order, that grows by whole groups.

    ``count`` are the prompts in it that are complete.

    Args:
        replace: Take lines about other prompts away, and what follows them.
        alone: Take lines about further prompts away; else they stay for who asks for more prompts again.

    Raises FtcliError FT773 (exit 2) where a line is about another prompt than ``keys`` say, FT723 or FT724 (exit 3)
    where the file cannot be read or cut.
    """

    def __init__(
        self,
        path: Path,
        keys: Sequence[str],
        group: int,
        sound: Callable[[JsonMap], bool],
        *,
        replace: bool = False,
        alone: bool = False,
    ) -> None:
        self.path = path
        self._keys = keys
        self._group = group
        self._sound = sound
        self._replace = replace
        with atomic.storage_errors(path):
            if path.is_symlink() and not path.exists():
                path.unlink()  # two that lead to nothing may lead to one file
            self.count, size = self._complete()
            descriptor = atomic.open_regular(path, os.O_RDWR | os.O_CREAT)
            if alone or self.count < len(keys):
                os.ftruncate(descriptor, size)
            os.close(descriptor)

    def _complete(self) -> tuple[int, int]:
        """Prompts in whole groups, and the bytes of their lines."""
        ends = [0]
        with contextlib.suppress(FileNotFoundError):
            for line, key in zip(_lines(self.path), self._keys, strict=False):
                found = parsed_map(line)
                if found is None or not self._sound(found):
                    break
                if found.get("key") != key:
                    if self._replace:
                        break
                    raise _others(self.path.parent, [f"{self.path.name}:{len(ends)} answers another prompt"])
                ends.append(ends[-1] + len(line))
        count = len(ends) - 1
        count -= 0 if count == len(self._keys) else count % self._group
        return count, ends[count]

    def append(self, records: Iterable[JsonObject]) -> None:
        """Adds the lines of the next group, and flushes them. Raises FtcliError FT723 or FT724 (exit 3)."""
        made = [atomic.json_bytes(record) for record in records]
        with (
            atomic.storage_errors(self.path),
            os.fdopen(atomic.open_regular(self.path, os.O_WRONLY | os.O_APPEND), "ab") as file,
        ):
            file.write(b"".join(made))
            file.flush()
            os.fsync(file.fileno())
        self.count += len(made)

    def read(self, places: range) -> Iterator[JsonObject]:
        """The lines of the prompts at ``places``, which are complete."""
        for at, line in enumerate(_lines(self.path)):
            if at >= places.stop:
                return
            if at >= places.start:
                yield json.loads(line)


class SampleFolder:
    """The folder, which nobody else writes to inside of the ``with`` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: DirectoryLock | None = None

    def __enter__(self) -> SampleFolder:
        """Raises FtcliError FT720 (exit 2) while another process holds it, FT723 where it cannot be made."""
        with atomic.storage_errors(self.path):
            make_folder(self.path)
        with atomic.storage_errors(self.path / LOCK_NAME):
            self._lock = DirectoryLock(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def begin(self, drawn: JsonMap, judged: JsonMap, *, replace: bool) -> bool:
        """Goes on with what is there, if these settings made it; whether there were scores of other judges, which go.

        Args:
            drawn: All that answers depend on, but the prompts.
            judged: All that scores depend on beside the answers.
            replace: Start over where something else is there.

        Raises FtcliError FT773 (exit 2) where something else is there.
        """
        before = atomic.read_json_object(self.path / MANIFEST)
        there = [name for name in _OURS if os.path.lexists(self.path / name)]
        differs = _differences(map_in(before, "drawn"), drawn) if before else [f"no {MANIFEST}"] * bool(there)
        if differs and not replace:
            raise _others(self.path, differs)
        judged_otherwise = bool(there) and not differs and map_in(before, "judged") != judged
        stale = there if differs else [SCORES, *ROWS.values()] if judged_otherwise else []
        for name in stale:
            with atomic.storage_errors(self.path / name):
                (self.path / name).unlink(missing_ok=True)
        self.note(drawn, judged)
        return judged_otherwise and SCORES in there

    def note(self, drawn: JsonMap, judged: JsonMap, summary: JsonMap | None = None) -> None:
        """Writes down what the files are made of."""
        content = {"format": 1, "complete": summary is not None, "drawn": drawn, "judged": judged, "summary": summary}
        atomic.store_json(self.path / MANIFEST, content)

    @contextlib.contextmanager
    def writing(self, names: Mapping[str, str]) -> Iterator[dict[str, Callable[[JsonObject], None]]]:
        """Takes rows for files by their keys in ``names``; they are there, whole, when the block has ended.

        Raises FtcliError FT723 or FT724 (exit 3) where one cannot be written.
        """
        with atomic.storage_errors(self.path), contextlib.ExitStack() as opened:
            asides = {key: self.path / f"{atomic.TEMPORARY_PREFIX}{name}" for key, name in names.items()}
            files: dict[str, BinaryIO] = {}
            for key, aside in asides.items():
                aside.unlink(missing_ok=True)
                files[key] = opened.enter_context(aside.open("xb"))
            yield {key: partial(_put, file) for key, file in files.items()}
            for key, name in names.items():
                files[key].flush()
                os.fsync(files[key].fileno())
                with atomic.storage_errors(self.path / name):
                    asides[key].replace(self.path / name)
            atomic.fsync_directory(self.path)


def _put(file: BinaryIO, row: JsonObject) -> None:
    """Writes a row; a NaN that its prompt holds, in a tool's schema for one, is read again as it was."""
    file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="backslashreplace"))


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are whole, up to one longer than any is written: a damaged file may be one line without end."""
    with os.fdopen(atomic.open_regular(path), "rb") as file:
        while (line := file.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
            yield line


def _differences(before: JsonMap, now: JsonMap) -> list[str]:
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def _others(folder: Path, differs: Sequence[str]) -> FtcliError:
    named, more = "; ".join(differs[:_MOST_NAMED]), len(differs) - _MOST_NAMED
    message = f"{folder} holds samples of something else: {named}{f'; and {more} more' if more > 0 else ''}"
    help = "name another folder with --output, or replace what is there with --force"
    return FtcliError([Finding("FT773", message, help=help)], ExitCode.RECIPE)
