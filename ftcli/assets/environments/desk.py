"""An example of an environment: a desk with a calculator and a box of notes, by TRL's contract.

A class without arguments: ``reset`` gets the columns of a row, and public methods are tools, which the model is shown
by their name, types and docstring; ``get_reward`` would score what was done. TRL's GRPOTrainer takes the class as it
is, as ``environment_factory``.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Desk:
    """One rollout at the desk."""

    def __init__(self) -> None:
        text = Path(__file__).with_name("garden.txt").read_text(encoding="utf-8")
        self._notes = [line.split(": ") for line in text.splitlines()]

    def reset(self, **row: object) -> str | None:
        """Begins a rollout. What it returned would stand at the end of the user's turn."""
        return None

    def calc(self, text: str) -> str:
        """Computes one sum, difference or product of whole numbers; 0 where there is none.

        Args:
            text: Such as 12*7.
        """
        found = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", text)
        if found is None:
            return "0"
        return str(_OPERATORS[found[2]](int(found[1]), int(found[3])))

    def find(self, text: str) -> str:
        """Looks a word up in the notes; 0 where it is not there.

        Args:
            text: The word.
        """
        found = [colour for name, colour in self._notes if name == text.strip()]
        return found[0] if found else "0"
