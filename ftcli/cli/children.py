"""Runs of a sweep as processes of their own, each with the GPU that it is given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ftcli.cli.place import obeying
from ftcli.errors import FtcliError, Origin
from ftcli.pipeline.sweep import Start, SweepRun
from ftcli.run.signals import SignalName

#: Which GPUs a process sees, by number or by UUID.
_VISIBLE = "CUDA_VISIBLE_DEVICES"

#: What a run is sent for each signal that this process gets. A scheduler may have sent SIGTERM to all processes, and a
#: second one would end a run without its last checkpoint; a second SIGHUP does not.
PASSED_ON: Mapping[SignalName, signal.Signals] = {
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGHUP,
    "SIGHUP": signal.SIGHUP,
}


class RunProcess:
    """`ftcli train` or `ftcli grpo` of one run, in a session of its own: what a terminal sends does not reach it."""

    def __init__(self, words: Sequence[str], device: str | None) -> None:
        environment = dict(os.environ) if device is None else {**os.environ, _VISIBLE: device}
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it has been read
        self._process = subprocess.Popen(  # noqa: S603 - words of ours, and no shell
            [sys.executable, "-P", "-m", "ftcli", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._answer,
            env=environment,
            start_new_session=True,
            preexec_fn=obeying(),
        )
        self._signalled = 0

    def ended(self) -> tuple[int, str | None] | None:
        """Exit status and reason; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if self._answer.closed:
            return status, None
        self._answer.seek(0)
        text = self._answer.read()
        self._answer.close()
        return status, _reason(status, text)

    def signal(self, name: SignalName) -> None:
        """The first one is passed on so that it cannot count twice; the second one as it is."""
        self._signalled += 1
        if self._process.poll() is None:
            self._process.send_signal(PASSED_ON[name] if self._signalled == 1 else signal.Signals[name])


def _reason(status: int, answer: bytes) -> str | None:
    """The reason of a failed run: the first error of its JSON document, or the signal that killed it."""
    if status == 0:
        return None
    if status < 0:
        return f"killed by signal {-status}"
    try:
        findings = json.loads(answer)["findings"]
        errors = [found for found in findings if found["severity"] == "error"]
        return f"{errors[0]['code']}: {errors[0]['message']}"
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def starter(recipe: str, *, quiet: bool, offline: bool, debug: bool) -> Start:
    """Starts runs of a recipe with these common options."""

    def start(run: SweepRun, device: str | None) -> RunProcess:
        words = [run.command, recipe, "--json"]
        for override in run.overrides:
            words += ["--set", override.text]
        switches = {"--quiet": quiet, "--offline": offline, "--debug": debug}
        return RunProcess([*words, *(word for word, on in switches.items() if on)], device)

    return start


def devices(wanted: str | None, environment: Mapping[str, str], count: Callable[[], int]) -> tuple[str | None, ...]:
    """The GPUs that `--gpus` means, by the names that a process is given; (None,): what this process would use.

    Args:
        count: Asks how many GPUs there are, where the environment does not list them.

    Raises:
        FtcliError: FT516 (exit 3) for more than there are, FT150 (exit 2) for what is no number.
    """
    if wanted is None:
        return (None,)
    listed = environment.get(_VISIBLE)
    found = _listed(listed) if listed is not None else tuple(str(number) for number in range(count()))
    if wanted == "auto":
        return found or (None,)
    origin = Origin(f"--gpus {wanted}")
    if not wanted.isdecimal() or int(wanted) < 1:
        help = "a number of GPUs, or `auto` for all that are visible"
        raise FtcliError.single("FT150", "that is not a number of GPUs", origin=origin, help=help)
    if int(wanted) > len(found):
        raise FtcliError.single(
            "FT516",
            f"{len(found)} GPUs are visible here",
            origin=origin,
            help="ask for fewer, or set CUDA_VISIBLE_DEVICES; without --gpus one GPU is used",
        )
    return found[: int(wanted)]


def _listed(text: str) -> tuple[str, ...]:
    """CUDA's own rule: names up to the first that is none."""
    names = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def count_gpus() -> int:
    """Number of GPUs that torch sees. It asks the driver's library, which takes no memory of them."""
    import torch

    return torch.cuda.device_count()
