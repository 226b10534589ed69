"""Findings about rows that the chat template refuses, or of which it leaves something out."""

from __future__ import annotations

from jinja2.exceptions import TemplateError

from ftcli.data.omissions import MessagePart
from ftcli.errors import FtcliError, first_line
from ftcli.rows.row import Row, data_error


def stopped(row: Row, error: Exception) -> FtcliError:
    """FT422: the template took more time or memory than it may."""
    return data_error(
        "FT422",
        f"the chat template was stopped: {first_line(error)}",
        row.origin,
        "use another template (data.chat_template); if only one row is that large, remove it",
    )


def unknown_role(row: Row, role: str, error: Exception) -> FtcliError:
    """FT425: the template refuses the row, and renders no message of ``role``."""
    return data_error(
        "FT425", f"the chat template has no role {role!r}: {first_line(error)}", row.origin, _role_help(role)
    )


def refused(row: Row, error: Exception) -> FtcliError:
    """FT422: the template, or Python while it rendered, raised ``error``."""
    return data_error(
        "FT422",
        f"the chat template refuses this conversation: {_said(error)}",
        row.origin,
        help="user and assistant must alternate, starting with the user"
        if isinstance(error, TemplateError)
        else "the template expects something other than the row holds, such as arguments of a call as text",
    )


def left_out(part: MessagePart, row: Row) -> FtcliError:
    """FT426: the template does not show a part of the row."""
    return data_error(
        "FT426",
        f"the chat template leaves out {part.name}, which would be lost silently",
        row.origin,
        "remove it from the row (data.reasoning: drop does so), or use a template that shows it (data.chat_template)"
        if part.kind == "reasoning"
        else "use a template that shows it (data.chat_template), or remove it from the row",
    )


def _said(error: Exception) -> str:
    """A template's own words of refusal; for other errors Python's text with their kind."""
    said = first_line(error)[:500]
    return said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"


def _role_help(role: str) -> str:
    if role == "system":
        return (
            "move that text into the first user message; for Gemma, data.chat_template: gemma-system does so, "
            "in training, evaluation and export alike"
        )
    return "use a template that has it (data.chat_template), or rename the role in the data"
