"""The request of a parsed command line, run later in the one place that maps errors to exit statuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from ftcli.reporting import Session

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every command takes."""

    json: bool = False
    quiet: bool = False
    offline: bool = False
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Invocation(Generic[R]):
    """One invocation: `action` does the work when it is called with a session, and gives a value of the command's type.

    ``render`` turns the result into text for people; None shows it as aligned keys and values. ``raw`` results are
    printed as rendered even with ``--json``: a schema is a JSON document already. ``exit_code`` is the status that a
    result stands for; None: it is a success. ``verbatim`` texts are written as they are: what steers a terminal has
    been taken out by whoever painted them, or they are the content of a file. ``owns_stdout``: the action itself keeps
    the libraries' output off stdout, because it writes to it while it works.
    """

    command: str
    options: CommonOptions
    action: Callable[[Session], R]
    render: Callable[[R], str] | None = None
    raw: bool = False
    verbatim: bool = False
    exit_code: Callable[[R], int] | None = None
    owns_stdout: bool = False


@dataclass(frozen=True, slots=True)
class EndedElsewhere:
    """A command has run in other processes, one of which has told what came of it, with this exit status."""

    exit_code: int


#: A command's function is asked for its annotations when the command line is built, before its result's type is loaded.
AnyRequest: TypeAlias = Invocation[Any]
