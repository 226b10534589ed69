"""Runs the user's code such that it can fail, but not end the command or move it to another folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ftcli.errors import Unwinding


class UserCodeFailed(Exception):
    """What the user's code raised, or how it tried to end the process, in words; the cause is ``__cause__``."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """A block of the user's code.

    ``sys.exit`` and ``os._exit`` would end the command with a status of their own, 0 among them, and no result. Within
    the block both are errors like any other. ``os._exit`` ends a process without a trace that could be caught, so it is
    replaced for the time of the block; processes that the user's code forks have the real one. Code in C that ends the
    process, and what the user's code leaves behind in threads or exit handlers, is not held back.

    Raises:
        UserCodeFailed: for every exception but Ctrl-C and the signals that stop a run.
    """
    leave, owner = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        raise SystemExit(status)

    folder = _current_folder()
    os._exit = refuse
    try:
        yield
    except (KeyboardInterrupt, Unwinding):
        raise
    except SystemExit as error:
        raise UserCodeFailed(f"tried to end the program (exit status {error.code})") from error
    except BaseException as error:
        raise UserCodeFailed(f"raised {type(error).__name__}: {_text_of(error)}") from error
    finally:
        os._exit = leave
        if folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(folder)


def _current_folder() -> Path | None:
    with contextlib.suppress(OSError):  # it has been deleted
        return Path.cwd()
    return None


def _text_of(error: BaseException) -> str:
    """The exception's own text, which is the user's code as well."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - whatever it raises, it has no text
        return f"(its text raises {type(broken).__name__})"
