"""The argument of every rule, a recipe with the origins of its values, and the findings that it answers with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ftcli.config.recipe import Recipe
from ftcli.config.yaml import Origins
from ftcli.errors import Finding, Severity
from ftcli.plan.execution import Work
from ftcli.tables import methods
from ftcli.tables.methods import Method

#: ``eval``, ``chat``, ``export``, ``check``, ``bench``, or a command of :mod:`ftcli.tables.methods`.
Command = str
Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class NotMade:
    """A check that could not be made, and why. It has neither passed nor failed."""

    check: str
    reason: str


#: What a stage finds, and what it could not look at.
Found = Iterator[Finding | NotMade]


@dataclass(frozen=True, slots=True)
class Context:
    """A recipe, where its values came from, and the command that is to run."""

    recipe: Recipe
    origins: Origins
    command: Command

    @property
    def work(self) -> Work:
        """The command's work with the model; ``check`` is about training."""
        if self.command == "export":
            return "export"
        return "eval" if self.command in ("eval", "chat", "sample") else "train"

    @property
    def method(self) -> Method:
        return methods.method_of(self.recipe, self.command)

    @property
    def trains(self) -> bool:
        """True if the recipe's own rows are trained on."""
        return self.command in (*methods.commands(), "check")

    @property
    def from_prompts(self) -> bool:
        """True if the rows of `data.train` are prompts that the model answers."""
        return self.command == "sample" or (self.work == "train" and self.method.from_prompts)

    @property
    def scores_tasks(self) -> bool:
        """True if `eval.tasks` are scored, or looked at for a command that scores them."""
        by_method = self.method.scores_tasks or self.recipe.eval.tasks_every_steps is not None
        return self.command in ("eval", "check", "sample") or (self.trains and by_method)

    @property
    def reads_data(self) -> bool:
        """True if rows are read at all."""
        return self.command not in ("chat", "export") and not self.benches

    @property
    def benches(self) -> bool:
        """True if the command is a benchmark, which takes random weights and tokens."""
        return self.command == "bench"

    @property
    def is_trial(self) -> bool:
        """True if ``train.max_steps`` comes from the command line."""
        origin = self.origins.at("train.max_steps")
        return origin is not None and origin.source.startswith("--")

    def says(self, path: str) -> bool:
        """True if the recipe or an override sets this value, and not to its default, which a run's own recipe.yaml
        writes out.
        """
        value: object = self.recipe
        default: object = None
        for name in path.split("."):
            if isinstance(value, tuple):
                value, default = value[int(name)], None
                continue
            field = type(value).model_fields[name] if isinstance(value, BaseModel) else None
            default = field.get_default(call_default_factory=True) if field is not None else None
            value = getattr(value, name, None)
        return self.origins.explicit(path) and value != default

    def error(self, code: str, path: str, message: str, help: str | None = None) -> Finding:
        """An error that points at the value of ``path``."""
        return self._finding(code, path, message, help, "error")

    def warning(self, code: str, path: str, message: str, help: str | None = None) -> Finding:
        """A warning that points at the value of ``path``."""
        return self._finding(code, path, message, help, "warning")

    def no_effect(self, path: str, why: str, help: str | None = None) -> Finding:
        """FT259: the value of ``path`` changes nothing; ``why`` ends that sentence."""
        return self.warning("FT259", path, f"{path} has no effect {why}", help)

    def lacks(self, path: str, what: str, package: str, install: str) -> Finding:
        """FT253: what the value of ``path`` asks for needs a package that is not here."""
        message = f"{what} needs the package {package}, which is not installed"
        return self.error("FT253", path, message, f"pip install '{install}'")

    def note(self, code: str, path: str, message: str, help: str | None = None) -> Finding:
        """A note that points at the value of ``path``."""
        return self._finding(code, path, message, help, "note")

    def before_export(self, code: str, path: str, message: str, help: str | None = None) -> Finding:
        """A refusal of `ftcli export`, as an error; as a note before, when it is known before anything is trained."""
        return (self.error if self.command == "export" else self.note)(code, path, message, help)

    def _finding(self, code: str, path: str, message: str, help: str | None, severity: Severity) -> Finding:
        return Finding(code, message, self.origins.at(path), help, severity)


def as_in_recipe(value: Any) -> str:
    """A value as the recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
