"""Rules of rewards and tasks: which judges read and require their options, and the user's functions that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator, Iterator
from pathlib import Path

from ftcli.config.evaluation import RewardConfig, TaskConfig
from ftcli.errors import Finding, FtcliError
from ftcli.judges import file_of, judge_name
from ftcli.judges.builtin import NoSchema, validator_of
from ftcli.judges.reward_model import classifier_folder
from ftcli.paths import is_file
from ftcli.preflight.checks.context import Context, Findings
from ftcli.preflight.checks.support import Installed, is_installed
from ftcli.tables import code_of, judges
from ftcli.tables.judges import BuiltinJudge

#: Options that need no look at their value, and whether a function of the user's reads them too.
_PLAIN = {
    "min_chars": False,
    "max_chars": False,
    "timeout": True,
    "memory_mb": False,
    "json_schema": False,
    "model": False,
    "endpoint": False,
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
        yield context.lacks(f"{path}.use", f"`use: {judge_name(judged)}`", judge.package.name, judge.package.install)
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


def class_findings(context: Context, path: str, spec: str) -> Findings:
    """FT451 and FT452: whether the file of ``path.py:Class`` defines an environment, without running it."""
    file, name = file_of(spec)
    tree = yield from _parsed(context, path, file)
    if tree is None:
        return
    nodes = [node for node in _top_level(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    found = [node for node in nodes if node.name == name]
    if not found and not _assigns(tree, name):
        names = ", ".join(sorted({node.name for node in nodes if not node.name.startswith("_")})) or "none"
        yield context.error("FT451", path, f"{file} defines no class {name}", help=f"it has: {names}")
    for node in found:
        methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        if isinstance(node, ast.ClassDef) and not node.bases and "reset" not in methods:
            help = "an environment has reset(**row), public methods as tools, and get_reward where it rewards"
            yield context.error("FT452", path, f"{file} defines {name} without a method reset", help=help)


def _parsed(context: Context, path: str, file: Path) -> Generator[Finding, None, ast.Module | None]:
    """The file as Python; None where it is none, which is said."""
    if not is_file(file):
        help = "write `path.py:name`; the path is relative to the current directory"
        yield context.error("FT451", path, f"no file at {file.absolute()}", help=help)
        return None
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        message = f"{file} cannot be read as Python: {error}"
        yield context.error("FT452", path, message, help=f"run `python {file}` and fix what it says")
        return None


def function_findings(context: Context, path: str, spec: str) -> Findings:
    """FT451 and FT452: whether the file of ``path.py:function`` defines the function, without running it."""
    file, function = file_of(spec)
    tree = yield from _parsed(context, path, file)
    if tree is None:
        return
    functions = [node for node in _top_level(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [list(_signature(context, path, node)) for node in functions if node.name == function]
    if found:
        yield from min(found, key=len)  # which of several is defined is known only when the file runs
    elif not _assigns(tree, function):
        names = ", ".join(sorted({node.name for node in functions if not node.name.startswith("_")})) or "none"
        yield context.error("FT451", path, f"{file} defines no function {function}", help=f"it has: {names}")


def _top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements that run when the module does: those under ``if``, ``try``, ``with`` and loops among them."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:  # not by recursion: a long `elif` chain is deep
        node = waiting.pop(0)
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)


def _assigns(tree: ast.Module, name: str) -> bool:
    """True if the module binds ``name`` at its top level in another way: an import, an assignment or a class."""
    for node in _top_level(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            if name in bound or "*" in bound:
                return True
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return True
    return False


def _signature(context: Context, path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Findings:
    arguments = node.args
    named = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    missing = [name for name in ("completions", "prompts") if name not in named]
    if missing and arguments.kwarg is None:
        message = f"{node.name} takes no argument {missing[0]!r}, which it is called with"
        yield context.error("FT452", path, message, help=f"write def {node.name}(completions, prompts, **columns)")


def check_sampling(context: Context) -> Findings:
    """FT284 for a recipe without a judge; what is wrong with rewards, as the method that they belong to says."""
    recipe = context.recipe
    if context.command != "sample":
        return
    if not recipe.rewards and not recipe.eval.tasks:
        message = (
            "the recipe has neither rewards (grpo.rewards) nor tasks (eval.tasks), so nothing judges what is sampled"
        )
        help = "add a task, such as `eval: {tasks: [{use: exact_match}]}`, or `- file: judges.py:score` for your own"
        yield context.error("FT284", "", message, help=help)
    if context.method.reward_rules is not None:
        yield from code_of(context.method.reward_rules)(context)
