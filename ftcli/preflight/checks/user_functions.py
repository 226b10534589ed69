"""The user's functions that a recipe names: rewards of GRPO, and judges of evaluation tasks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ftcli.judges import file_of
from ftcli.paths import is_file
from ftcli.preflight.checks.context import Context, Findings


def function_findings(context: Context, path: str, spec: str) -> Findings:
    """FT451 and FT452: whether the file of ``path.py:function`` defines the function, without running it."""
    file, function = file_of(spec)
    if not is_file(file):
        yield context.error(
            "FT451",
            path,
            f"no file at {file.absolute()}",
            help="write `path.py:function`; the path is relative to the current directory",
        )
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        message = f"{file} cannot be read as Python: {error}"
        yield context.error("FT452", path, message, help=f"run `python {file}` and fix what it says")
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
        yield context.error(
            "FT452",
            path,
            f"{node.name} takes no argument {missing[0]!r}, which it is called with",
            help=f"write def {node.name}(completions, prompts, **columns)",
        )
