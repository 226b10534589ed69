"""Training forms of chat templates: the same template, written so that earlier turns keep their text.

``data.history: template`` renders with one. A row is asked whether it knows a template, by its whole text and nothing
else; the first that does is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingForms:
    """A collection of training forms. ``code`` answers the training form of a tokenizer and its template, or None for
    one that it does not know.
    """

    code: str


TABLE: Mapping[str, TrainingForms] = {"trl": TrainingForms("ftcli.data.template:of_trl")}


def rows() -> tuple[TrainingForms, ...]:
    """Every collection, in the order in which they are asked."""
    return tuple(TABLE.values())
