"""What a parsed command line asks for. Parsing and running are apart, so that one place maps errors to statuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ftcli.reporting import Result, Session


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every command takes."""

    json: bool = False
    quiet: bool = False
    offline: bool = False
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One invocation: `action` does the work when it is called with a session.

    ``render`` turns the result into the text for a person; None renders any result as aligned keys and values.
    ``raw`` results are printed as they are rendered even with ``--json`` (a schema is a JSON document already).
    """

    command: str
    options: CommonOptions
    action: Callable[[Session], Result]
    render: Callable[[Result], str] | None = None
    raw: bool = False
