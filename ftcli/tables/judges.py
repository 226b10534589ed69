"""Built-in judges: what `use:` may name in ``grpo.rewards`` and ``eval.tasks``, and the function behind each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftcli.tables import Package

#: The judge of a task that names neither `use` nor `file`.
DEFAULT = "exact_match"


@dataclass(frozen=True, slots=True)
class BuiltinJudge:
    """One built-in judge.

    Attributes:
        code: Gives its scorer (``ftcli.judges.verdicts.Scorer``) for its options.
        compares: It compares completions with a known answer. A task has one; a reward names its column in `answer`.
        options: Keys of a recipe that it reads besides, as keyword arguments.
        needs: Those of them that it cannot do without.
        fails: There are completions that it cannot judge, so that ``on_error`` has a meaning.
        model: It is a model: it scores rewards alone, and is given the whole batch.
        remote: It works elsewhere, with what ``ftcli.judges.endpoint.JudgeAccess`` has.
        package: What it needs and ftcli does not.
    """

    code: str
    compares: bool = False
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    fails: bool = False
    model: bool = False
    remote: bool = False
    package: Package | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """Every key of a reward that has a meaning with this judge."""
        return (*self.options, *(("answer",) if self.compares else ()), *(("on_error",) if self.fails else ()))


TABLE: Mapping[str, BuiltinJudge] = {
    "exact_match": BuiltinJudge("ftcli.judges.builtin:exact_match", compares=True, options=("extract",), fails=True),
    "contains": BuiltinJudge("ftcli.judges.builtin:contains", compares=True),
    "regex": BuiltinJudge("ftcli.judges.builtin:regex", options=("pattern",), needs=("pattern",), fails=True),
    "json_valid": BuiltinJudge("ftcli.judges.builtin:json_valid", options=("json_schema",), fails=True),
    "length": BuiltinJudge("ftcli.judges.builtin:length", options=("min_chars", "max_chars"), needs=("max_chars",)),
    "math_verify": BuiltinJudge(
        "ftcli.judges.builtin:math_verify",
        compares=True,
        options=("timeout",),
        fails=True,
        package=Package("math-verify", "ftcli[math]", "math_verify in rewards and tasks"),
    ),
    "reward_model": BuiltinJudge(
        "ftcli.judges.reward_model:reward_model", options=("model",), needs=("model",), fails=True, model=True
    ),
    "llm_judge": BuiltinJudge(
        "ftcli.judges.endpoint:LlmJudge",
        options=("endpoint", "extract"),
        needs=("endpoint",),
        fails=True,
        model=True,
        remote=True,
    ),
    "python_tests": BuiltinJudge("ftcli.judges.builtin:python_tests", compares=True, options=("timeout", "memory_mb")),
}


def names() -> tuple[str, ...]:
    return tuple(TABLE)


def row(name: str) -> BuiltinJudge:
    return TABLE[name]


def readers(option: str) -> tuple[str, ...]:
    """The judges that read an option."""
    return tuple(name for name, judge in TABLE.items() if option in judge.reads)
