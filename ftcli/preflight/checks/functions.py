"""The user's functions that a recipe names: rewards of GRPO, and judges of evaluation tasks."""

from __future__ import annotations

import ast

from ftcli.judges import file_of
from ftcli.preflight.checks.base import Context, Findings


def function_findings(context: Context, path: str, spec: str) -> Findings:
    """FT451 and FT452: whether the file of ``path.py:function`` defines the function, without running it."""
    file, function = file_of(spec)
    if not file.is_file():
        yield context.error(
            "FT451",
            path,
            f"no file at {file.absolute()}",
            help="write `path.py:function`; the path starts at the current directory",
        )
        return
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:
        message = f"{file} is not Python that can be run: {error}"
        yield context.error("FT452", path, message, help=f"run `python {file}` and fix what it says")
        return
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if function in functions:
        yield from _signature(context, path, functions[function])
    elif not _assigns(tree, function):
        names = ", ".join(n for n in functions if not n.startswith("_")) or "none"
        yield context.error("FT451", path, f"{file} defines no function {function}", help=f"it has: {names}")


def _assigns(tree: ast.Module, name: str) -> bool:
    """Whether the module binds ``name`` at its top level in another way: an import, or an assignment."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            if name in bound or "*" in bound:
                return True
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return True
    return False


def _signature(context: Context, path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Findings:
    if isinstance(node, ast.AsyncFunctionDef):
        message = f"{node.name} is async; it is called as a plain function"
        yield context.error("FT452", path, message, help="write `def` instead of `async def`")
        return
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
