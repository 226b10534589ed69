"""Options of rewards and tasks: which judges read them, and which judges require them."""

from __future__ import annotations

import re

from ftcli.config.evaluation import TaskConfig
from ftcli.config.judging import RewardConfig
from ftcli.errors import FtcliError
from ftcli.judges import judge_name
from ftcli.judges.builtin import NoSchema, validator_of
from ftcli.judges.reward_model import classifier_folder
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.support import Installed, is_installed
from ftcli.tables import judges
from ftcli.tables.judges import BuiltinJudge

#: Options that need no look at their value, and whether a function of the user's reads them too.
_PLAIN = {
    "min_chars": False,
    "max_chars": False,
    "timeout": True,
    "memory_mb": False,
    "json_schema": False,
    "model": False,
    "on_error": True,
}


def judge_findings(
    context: Context, path: str, judged: TaskConfig | RewardConfig, installed: Installed = is_installed
) -> Findings:
    """FT253, FT264, FT265, FT280 and FT767 for a reward or a task that has one judge."""
    yield from _pattern(context, path, judged)
    yield from _extract(context, path, judged)
    yield from _others(context, path, judged)
    judge = _judge_of(judged)
    if judge is None:
        return
    if judge.model and isinstance(judged, TaskConfig):
        message = f"`use: {judge_name(judged)}` gives no share of right answers, which a task measures"
        yield context.error("FT265", f"{path}.use", message, help="use it in grpo.rewards")
    elif judge.model and judged.model is not None:
        try:
            classifier_folder(judged.model)
        except FtcliError as error:
            found = error.findings[0]
            yield context.error(found.code, f"{path}.model", found.message, help=found.help)
    if judge.package is not None and not installed(judge.package.name.replace("-", "_")):
        message = f"`use: {judge_name(judged)}` needs the package {judge.package.name}, which is not installed"
        yield context.error("FT253", f"{path}.use", message, help=f"pip install '{judge.package.install}'")
    if judged.json_schema is not None and "json_schema" in judge.reads:
        try:
            validator_of(judged.json_schema)
        except NoSchema as error:
            help = "a schema must be self-contained: put what it refers to under `$defs`"
            yield context.error("FT280", f"{path}.json_schema", f"json_schema {error}", help=help)


def _judge_of(judged: TaskConfig | RewardConfig) -> BuiltinJudge | None:
    """The built-in judge; None for functions, and where none is named."""
    kind = judge_name(judged)
    return judges.row(kind) if judged.file is None and kind in judges.names() else None


def _pattern(context: Context, path: str, judged: TaskConfig | RewardConfig) -> Findings:
    """FT264: a pattern that is missing, that nothing reads, or that is not a regular expression."""
    use, judge = judge_name(judged), _judge_of(judged)
    if judge is not None and "pattern" in judge.needs and judged.pattern is None:
        yield context.error("FT264", path, f"`use: {use}` needs a pattern", help="add `pattern:`")
    elif judged.pattern is not None and (judge is None or "pattern" not in judge.reads):
        readers = " and ".join(f"`use: {name}`" for name in judges.readers("pattern"))
        yield context.error("FT264", f"{path}.pattern", f"a pattern is only read by {readers}", help="remove it")
    elif judged.pattern is not None:
        yield from regex_findings(context, f"{path}.pattern", judged.pattern)


def _others(context: Context, path: str, judged: TaskConfig | RewardConfig) -> Findings:
    """FT265: options that a judge does not read, or lacks."""
    use, judge = judge_name(judged), _judge_of(judged)
    for name, of_functions in _PLAIN.items():
        given = getattr(judged, name) is not None
        read = name in judge.reads if judge is not None else of_functions and judged.file is not None
        if given and not read:
            readers = [f"`use: {reader}`" for reader in judges.readers(name)] + ["`file`"] * of_functions
            message = f"`{name}` is only read by {' and '.join(readers)}"
            yield context.error("FT265", f"{path}.{name}", message, help="remove it")
        elif judge is not None and name in judge.needs and not given:
            yield context.error("FT265", path, f"`use: {use}` needs {name}", help=f"add `{name}:`")


def _extract(context: Context, path: str, judged: TaskConfig | RewardConfig) -> Findings:
    """FT264 for an `extract` that is no expression with a group; FT767 where a task's judge does not read it."""
    if judged.extract is None:
        return
    judge = _judge_of(judged)
    if judge is not None and "extract" in judge.reads:
        yield from regex_findings(context, f"{path}.extract", judged.extract, group=True)
    elif isinstance(judged, TaskConfig):
        readers = " and ".join(f"`use: {name}`" for name in judges.readers("extract"))
        yield context.error("FT767", f"{path}.extract", f"`extract` is only read by {readers}", help="remove it")


def regex_findings(context: Context, path: str, pattern: str, *, group: bool = False) -> Findings:
    """FT264 for what Python's ``re`` cannot compile and, with ``group``, for an expression without a group."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # numbers and brackets without end
        yield context.error("FT264", path, f"not a regular expression: {error}", help="test it with Python's re")
        return
    if group and compiled.groups == 0:
        yield context.error("FT264", path, "the expression has no group to extract", help="put (...) around the answer")
