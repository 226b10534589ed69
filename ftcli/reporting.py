"""Reports from library code without printing: a `Reporter` and the `Session` that carries it.

Library code is given a :class:`Session` and reports through ``session.reporter``. The command line decides what comes
of that: a progress bar on a terminal, plain lines in a log, nothing with ``--quiet``, and findings in the JSON document
with ``--json``. :class:`SilentReporter` is for callers that want to hear nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ftcli.errors import Finding
from ftcli.ranks import Place


class Progress(Protocol):
    """A running count. Use it inside the ``with`` block of :meth:`Reporter.progress` only."""

    def advance(self, count: int = 1) -> None:
        """`count` more of the total are done."""

    def update(self, **fields: float | int | str) -> None:
        """Show these values (``loss=1.2, learning_rate=1e-4``) beside the count; each call may print a line."""


class Reporter(Protocol):
    """Receives what library code reports. Nothing here raises, and nothing here returns an answer."""

    def info(self, text: str) -> None:
        """One line that a person may like to know; dropped by ``--quiet``."""

    def warn(self, text: str) -> None:
        """One line that a person should know. A warning with a code and a remedy is a :meth:`finding`."""

    def finding(self, finding: Finding) -> None:
        """A warning or note of a check. Errors are not reported but raised, as :class:`ftcli.errors.FtcliError`."""

    def progress(self, total: int | None, description: str) -> AbstractContextManager[Progress]:
        """Start counting to `total` (None: unknown); the count ends with the ``with`` block."""


class SilentProgress:
    """Counts nothing."""

    def advance(self, count: int = 1) -> None:
        """Say nothing."""

    def update(self, **fields: float | int | str) -> None:
        """Say nothing."""


class SilentReporter:
    """Says nothing: for library use and for tests."""

    def info(self, text: str) -> None:
        """Say nothing."""

    def warn(self, text: str) -> None:
        """Say nothing."""

    def finding(self, finding: Finding) -> None:
        """Say nothing."""

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """Count nothing."""
        yield SilentProgress()


def _no_environment() -> Mapping[str, str]:
    return MappingProxyType({})


def _no_secret(_name: str) -> str | None:
    return None


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Session:
    """Options of one invocation, beside the recipe. Only ``ftcli.cli`` reads the environment to build one.

    Attributes:
        is_tty: Whether messages go to a terminal.
        command: The command line with secrets masked, for the manifest.
        arguments: The words after ``ftcli`` as they were given, to start it again with; never written anywhere.
        environment: The few variables that change what a run computes or where it runs (``CUDA_VISIBLE_DEVICES``,
            ``SLURM_JOB_ID`` ...); never secrets.
        secret: Gives the value of a variable of the environment that a recipe names; it is kept nowhere.
        cache_dir: Where tokenized data is cached; None for nowhere.
        place: Which of several processes this is; None where nobody has started several.
        on_complete: Called once a run is complete: whoever stops the command after that stops nothing.
    """

    reporter: Reporter = field(default_factory=SilentReporter)
    quiet: bool = False
    json: bool = False
    offline: bool = False
    debug: bool = False
    is_tty: bool = False
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=_no_environment)
    secret: Callable[[str], str | None] = _no_secret
    cache_dir: Path | None = None
    place: Place | None = None
    on_complete: Callable[[], None] = _nothing
