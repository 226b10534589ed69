"""Calls one function of a Python file, over and over, in a process of its own that can be killed. A script of its own:
``python -P worker.py DESCRIPTOR``, a socket on which the first message says what to load, and all others are calls.

What comes in is pickled by the process that starts this one. What goes out is JSON: it never gets an object back.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection
from types import CoroutineType, FrameType
from typing import Any

_NEWUSER, _NEWNET, _SET_DEATH_SIGNAL = 0x10000000, 0x40000000, 1
#: Integers from here on are told in words: Python refuses to write out those of more than 4,300 digits.
_MOST_SHOWN = 10**40
_MOST_CHARS = 1000


class _TimeUp(BaseException):
    """The alarm rang. No Exception: libraries catch those."""


def main(descriptor: int) -> None:
    """Loads, then answers calls until the other side is gone."""
    if sys.platform == "linux":  # also while a call runs, which would not see the closed socket
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)  # what the function prints is for people; the command's stdout may be a JSON document
    asked = Connection(descriptor)
    try:
        order = pickle.loads(asked.recv_bytes())  # noqa: S301 - of the command that started this
        sys.path[:] = order["sys_path"]
        if order["address_space"]:
            _confine(order["address_space"])
        function, answer = _loaded(order["path"], order["module"], order["function"])
        asked.send_bytes(json.dumps(answer).encode())
        while function is not None:
            call = pickle.loads(asked.recv_bytes())  # noqa: S301 - of the command that started this
            answer = _called(function, call["arguments"], call["count"], call["alarm"])
            asked.send_bytes(json.dumps(answer).encode())
    except (EOFError, ConnectionError):
        return


def _confine(address_space: int) -> None:
    """Limits for code that works on untrusted text: memory, and no network where the system allows it."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEWUSER | _NEWNET)  # refused in many containers


def _loaded(path: str, module_name: str, name: str) -> tuple[Any, dict[str, Any]]:
    """The function, None where there is none; and what to say of it."""
    try:
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            return None, {"unusable": True}
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses, pickle and typing look for the module of a class there
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if callable(found):
            return found, {}
        return None, {"has": sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))}
    except BaseException as error:  # noqa: BLE001 - whatever the file raises
        return None, {"raised": _words(error)}


def _called(function: Any, arguments: dict[str, Any], count: int, alarm: float | None) -> dict[str, Any]:
    """``scores``; or ``raised``, ``shape``, ``late``. Values that are no numbers are in ``bad``, by place."""
    try:
        try:
            _set_alarm(alarm)
            result = function(**arguments)
            if isinstance(result, CoroutineType):
                import asyncio  # half of what a process takes to start, and few functions need it

                result = asyncio.run(result)
            return _checked(result, count)
        finally:
            _set_alarm(None)
    except _TimeUp:
        return {"late": True}
    except BaseException as error:  # noqa: BLE001 - whatever the function raises
        return {"raised": _words(error)}


def _set_alarm(seconds: float | None) -> None:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _TimeUp

    if seconds is not None:
        signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)


def _checked(result: Any, count: int) -> dict[str, Any]:
    if not isinstance(result, list | tuple):
        return {"shape": type(result).__name__}
    if len(result) != count:
        return {"shape": f"{len(result)} values"}
    bad = {
        str(place): f"returned {_shown(value)}"
        for place, value in enumerate(result)
        if value is not None and not _is_finite(value)
    }
    scores = []
    for place, value in enumerate(result):
        try:  # a number's own class may be the user's, too
            scores.append(None if value is None or str(place) in bad else float(value))
        except BaseException as error:  # noqa: BLE001 - whatever it raises
            bad[str(place)] = f"returned a number that {_words(error)}"
            scores.append(None)
    return {"scores": scores, "bad": bad}


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
        return repr(value)[:200]
    except BaseException:  # noqa: BLE001 - whatever it raises
        return f"an object of type {type(value).__name__}"


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"tried to end the program (exit status {error.code})"
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - whatever it raises
        text = f"(its text raises {type(broken).__name__})"
    return f"raised {type(error).__name__}: {text[:_MOST_CHARS]}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
