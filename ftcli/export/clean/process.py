"""Starts the process that loads exports again, asks it, and ends it; what it says comes back as data."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.clean.request import ANSWER, ReloadAnswer, ReloadRequest
from ftcli.paths import scratch
from ftcli.run.atomic import writing_into

#: Without -P the folder of the program would stand before all others, and `safetensors.py` beside it for the library.
#: In a checkout that is not installed ftcli is found where this process found it.
#: The libraries, a million objects that stay, are not searched for garbage while they are imported.
_START = (
    "import gc, sys; gc.disable(); sys.path.append({place!r}); from ftcli.export.clean.answering import serve; serve()"
)
#: Patience: for any answer, and for each GiB that is loaded.
_SECONDS, _SECONDS_A_GIB = 900.0, 180.0
#: Answers a request: :func:`ask_once`, or a :class:`CleanProcess` that is there for all formats.
Reload: TypeAlias = Callable[[ReloadRequest, Mapping[str, Tensor]], ReloadAnswer]
#: How much of what it complained of is kept.
_TAIL = 2000


class CleanProcess:
    """A process of this Python that imports nothing of ftcli's models, and loads what it is asked to.

    It is started when it is first needed, and serves until :meth:`close`.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._running: subprocess.Popen[str] | None = None
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complaints: IO[str] | None = None

    def __enter__(self) -> CleanProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Has it import its libraries while something else is done here."""
        if self._running is not None:
            return
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        place = str(Path(__file__).parents[3])
        self._running = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", _START.format(place=place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for this process, which ends that one
        )
        self._said = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(self._running.stdout, self._said), daemon=True).start()

    def ask(self, request: ReloadRequest, sent: Mapping[str, Tensor]) -> ReloadAnswer:
        """The answer to a request. Raises FtcliError FT760 (exit 1) when it does not answer in time, or ends: killed
        for memory, for instance. FT723 and FT724 where nothing can be written for it.
        """
        self.start()
        try:
            with scratch("verify") as made:
                folder = made.path
                there, back = folder / "sent.safetensors", folder / "back.safetensors"
                with writing_into(folder, there):
                    save_file(
                        {name: tensor.clone() for name, tensor in sent.items()}, there
                    )  # not parts of one another
                asked = replace(request, threads=torch.get_num_threads())
                said = self._exchange({"request": asdict(asked), "sent": str(there), "back": str(back)}, request)
                return _parsed(said, {name: tensor.clone() for name, tensor in load_file(back).items()})
        except BaseException:
            self.close()  # what it would say next is no answer to another question
            raise

    def close(self) -> None:
        """Ends it; the next question starts another one."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.communicate()
        if self._complaints is not None:
            self._complaints.close()
            self._complaints = None

    def _exchange(self, asked: dict[str, Any], request: ReloadRequest) -> dict[str, Any]:
        running = self._running
        assert running is not None  # started
        assert running.stdin is not None  # a pipe
        seconds = self._seconds + _SECONDS_A_GIB * _bytes(Path(request.folder)) / 2**30
        try:
            running.stdin.write(json.dumps(asked) + "\n")
            running.stdin.flush()
            line = self._said.get(timeout=seconds)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            raise _no_answer(f"did not answer within {seconds:,.0f} s") from None
        if line is None:
            raise _no_answer(self._end(running))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self, running: subprocess.Popen[str]) -> str:
        """The end of the process, in words."""
        status = running.wait()
        if status < 0:
            memory = ", as systems do that run out of memory" if status == -9 else ""
            return f"was ended by signal {-status}{memory}"
        said = ""
        if self._complaints is not None:
            self._complaints.seek(0)
            lines = self._complaints.read()[-_TAIL:].strip().splitlines()
            said = f": {lines[-1]}" if lines else ""
        return f"ended with status {status}{said}"


def ask_once(request: ReloadRequest, sent: Mapping[str, Tensor]) -> ReloadAnswer:
    """Asks a process that is there for this question alone. Raises as :meth:`CleanProcess.ask`."""
    with CleanProcess() as process:
        return process.ask(request, sent)


def _listen(stream: IO[str] | None, said: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None  # a pipe
    for line in stream:
        if line.startswith(ANSWER):
            said.put(line.removeprefix(ANSWER))
    said.put(None)


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _parsed(said: dict[str, Any], tensors: dict[str, Tensor]) -> ReloadAnswer:
    return ReloadAnswer(
        problems=tuple(said.get("problems", ())),
        tokenizer=said.get("tokenizer", {}),
        stops={name: tuple(ids) for name, ids in said.get("stops", {}).items()},
        peak_bytes=int(said["peak_bytes"]),
        libraries=str(said["libraries"]),
        unavailable=str(said.get("unavailable", "")),
        tensors=tensors,
    )


def _no_answer(how: str) -> FtcliError:
    message = f"what was written could not be verified: the process that loads it again {how}"
    help = "it was removed again; free memory and export once more, or skip the verification with --no-verify"
    return FtcliError.single("FT760", message, exit_code=ExitCode.BUG, help=help)
