"""Rows of plain text, all of it or with a prompt in front."""

from __future__ import annotations

from typing import Any

from ftcli.rows.row import Example, Misfit, Row


def understand(row: Row) -> Example:
    """``{"text": "..."}``."""
    return Example(row, text=text_of(row.fields["text"], "text"))


def pair(row: Row) -> Example:
    """``{"prompt": "...", "completion": "..."}``; the prompt may be empty."""
    prompt = text_of(row.fields["prompt"], "prompt", empty=True)
    return Example(row, text=prompt + text_of(row.fields["completion"], "completion"), prompt_text=prompt)


def text_of(value: Any, name: str, *, empty: bool = False) -> str:
    """``value`` as text. Raises Misfit, which names the column, for anything else and unless ``empty`` for no text."""
    if not isinstance(value, str) or not (value or empty):
        raise Misfit(f"{name!r} must be a string that is not empty")
    return value
