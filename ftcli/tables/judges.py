"""Built-in judges: what `use:` may name in ``grpo.rewards`` and ``eval.tasks``, and the function behind each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: The judge of a task that names neither `use` nor `file`.
DEFAULT = "exact_match"


@dataclass(frozen=True, slots=True)
class Judge:
    """What the rest of the program has to know of a built-in judge.

    Attributes:
        code: Its function (``ftcli.judges.builtin.BuiltIn``).
        compares: It compares completions with a known answer. A task has one; a reward names its column in `answer`.
        options: Keys of a recipe that it reads besides; the function takes them as keyword arguments.
        needs: Those of them that it cannot do without.
    """

    code: str
    compares: bool = False
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Every key of a reward that has a meaning with this judge."""
        return ("answer", *self.options) if self.compares else self.options


TABLE: Mapping[str, Judge] = MappingProxyType(
    {
        "exact_match": Judge("ftcli.judges.builtin:exact_match", compares=True, options=("extract",)),
        "contains": Judge("ftcli.judges.builtin:contains", compares=True),
        "regex": Judge("ftcli.judges.builtin:regex", options=("pattern",), needs=("pattern",)),
        "json_valid": Judge("ftcli.judges.builtin:json_valid"),
        "length": Judge("ftcli.judges.builtin:length", options=("min_chars", "max_chars"), needs=("max_chars",)),
        "python_tests": Judge(
            "ftcli.judges.python_tests:python_tests", compares=True, options=("timeout", "memory_mb")
        ),
    }
)


def names() -> tuple[str, ...]:
    """What a recipe may say."""
    return tuple(TABLE)


def row(name: str) -> Judge:
    """The row of a judge that a recipe names."""
    return TABLE[name]


def readers(option: str) -> tuple[str, ...]:
    """The judges that read an option."""
    return tuple(name for name, judge in TABLE.items() if option in judge.reads)
