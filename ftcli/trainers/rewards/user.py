"""The user's functions, rewards and judges: ``path.py:function``, loaded from the one file that the recipe names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftcli.errors import ExitCode, FtcliError, Origin


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by ``path.py:function``.

    The file is trusted like any script the user runs. Raises FtcliError (exit 2): FT451 no such file or function,
    FT452 the file fails when it is run.
    """
    name, _, function = spec.rpartition(":")
    path = Path(name).expanduser()
    if not path.is_file():
        raise _error("FT451", f"no file at {path.absolute()}", spec, "the path starts at the current directory")
    module_spec = importlib.util.spec_from_file_location(f"ftcli_user_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise _error("FT451", f"{path} is not a Python file", spec, "write `path.py:function`")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        message = f"{path} fails when it is run: {type(error).__name__}: {error}"
        raise _error("FT452", message, spec, f"run `python {path}` and mend what it says") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        message = f"{path} has no function {function}; it has: {', '.join(names) or 'none'}"
        raise _error("FT451", message, spec, "name one of them, or define it at the top level of the file")
    return found  # type: ignore[no-any-return]


def _error(code: str, message: str, spec: str, help: str) -> FtcliError:
    return FtcliError.single(code, message, exit_code=ExitCode.RECIPE, origin=Origin(spec), help=help)
