"""The user's judges: ``path.py:function``, loaded from the file that the recipe names and checked at every call."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.config import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.judges.contained import UserCodeFailed, contained
from ftcli.paths import expanded, is_file
from ftcli.plain import JsonMap
from ftcli.rows.prompts import Prompt
from ftcli.tables import layouts

#: Integers from here on are told in words: Python refuses to write out those of more than 4,300 digits.
_MOST_SHOWN = 10**40

#: Arguments that judges get beside columns; no column may have such a name.
RESERVED = frozenset(
    (
        *("prompt", "prompts", "completion", "completions", "completion_ids"),
        *("trainer_state", "log_extra", "log_metric", "image", "images", "environments"),
    )
)

#: What a file defines: ``function(completions, prompts, **columns)`` gives a number, or None, for each completion. It
#: may be ``async``.
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class UserJudge:
    """A function with what the recipe says of it.

    ``code`` is that of the error for whatever the function does wrong, and ``what`` names it there: "the reward".
    """

    spec: str
    function: Function
    arguments: JsonMap = field(default_factory=dict)
    code: str = "FT765"
    what: str = "the function"

    def scores(
        self, completions: Sequence[str], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[float | None]:
        """One number for each completion; None for those that the function does not judge.

        Args:
            prompts: As the model saw them, one for each completion.
            columns: What the rows lend (:func:`columns_of`), one value for each completion.

        Raises:
            FtcliError: ``code`` (exit 4) when the function raises, or returns anything else.
        """
        given = {**columns, **self.arguments}
        try:
            with contained():
                result = self.function(completions=list(completions), prompts=list(prompts), **given)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
        except UserCodeFailed as error:
            first = completions[0][:200] if completions else ""
            raise self._bad(f"{error} (first completion: {first!r})") from error
        expected = len(completions)
        if not isinstance(result, list | tuple) or len(result) != expected:
            found = f"{len(result)} values" if isinstance(result, list | tuple) else type(result).__name__
            raise self._bad(f"returned {found}, a list of {expected} numbers was expected")
        for index, value in enumerate(result, 1):
            if value is not None and not _is_finite(value):
                raise self._bad(f"returned {_shown(value)} for completion {index}; expected a finite number or None")
        try:
            with contained():  # a number's own class may be the user's, too
                return [None if value is None else float(value) for value in result]
        except UserCodeFailed as error:
            raise self._bad(f"returned a number that {error}") from error

    def _bad(self, message: str) -> FtcliError:
        text = f"{self.what} {self.spec} {message}"
        return FtcliError.single(self.code, text, exit_code=ExitCode.DATA, origin=Origin(self.spec))


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _shown(value: Any) -> str:
    """What the function returned, as a message shows it; its repr is the user's code as well."""
    if isinstance(value, int) and abs(value) >= _MOST_SHOWN:
        return "an integer beyond every float"
    try:
        with contained():
            return repr(value)[:200]
    except UserCodeFailed:
        return f"an object of type {type(value).__name__}"


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """What rows lend to judges: the columns that every row has, except those that hold the conversation itself, and
    ``answer`` from the row's known answer where there is no such column and every row has one."""
    names = set.intersection(*(set(prompt.row.fields) for prompt in prompts)) if prompts else set()
    columns = {name: [p.row.fields[name] for p in prompts] for name in sorted(names - layouts.conversation_columns())}
    if "answer" not in columns and all(prompt.reference is not None for prompt in prompts):
        columns["answer"] = [prompt.reference for prompt in prompts]
    return columns


def reserved_column(columns: Collection[str]) -> Finding | None:
    """FT454 for a column that a reward could not be handed, since GRPO uses its name itself."""
    clash = sorted(RESERVED & (set(columns) - layouts.conversation_columns()))
    if not clash:
        return None
    message = f"the data has a column named {clash[0]!r}, which GRPO uses itself"
    return Finding("FT454", message, help="rename it in the file")


def judges_of(recipe: Recipe) -> dict[str, Function]:
    """The functions of the recipe's tasks by what it calls them, loaded before anything that takes long.

    Raises FtcliError as :func:`load_function`.
    """
    return {task.file: load_function(task.file) for task in recipe.eval.tasks if task.file is not None}


#: What helps where a file fails while it is loaded.
_GUARD = "run `python {0}` and fix what it says; what only a script does belongs under `if __name__ == '__main__':`"


def file_of(spec: str) -> tuple[Path, str]:
    """File and name of ``path.py:function``; the path starts at the current directory."""
    name, _, function = spec.rpartition(":")
    return expanded(name), function


def load_function(spec: str) -> Function:
    """The function named by ``path.py:function``.

    The file is trusted like any script the user runs. Raises FtcliError (exit 2): FT451 no such file or function,
    FT452 the file fails when it is run.
    """
    path, function = file_of(spec)
    if not is_file(path):
        raise _unusable("FT451", f"no file at {path.absolute()}", spec, "the path starts at the current directory")
    name = f"_ftcli_user_{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise _unusable("FT451", f"{path} is not a Python file", spec, "write `path.py:function`")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses, pickle and typing look for the module of a class there
    try:
        with contained():
            module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, UserCodeFailed):
            raise
        raise _unusable("FT452", f"{path} {error} when it was run", spec, _GUARD.format(path)) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        message = f"{path} has no function {function}; it has: {', '.join(names) or 'none'}"
        raise _unusable("FT451", message, spec, "name one of them, or define it at the top level of the file")
    return found  # type: ignore[no-any-return]


def _unusable(code: str, message: str, spec: str, help: str) -> FtcliError:
    return FtcliError.single(code, message, exit_code=ExitCode.RECIPE, origin=Origin(spec), help=help)
