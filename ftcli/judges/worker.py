"""Calls one function of a Python file, over and over, in a process of its own that can be killed; or makes one instance
of an environment, and does with it what it is told.

A script of its own: ``python -P worker.py DESCRIPTOR``, a socket on which the first message says what to load, and all
others are calls.

What comes in is pickled by the process that starts this one. What goes out is JSON: it never gets an object back. Each
message is a mark, its length in eight bytes, and its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
from io import TextIOWrapper
from types import CoroutineType, FrameType, SimpleNamespace, TracebackType
from typing import Any

_NEWUSER, _NEWNET, _SET_DEATH_SIGNAL = 0x10000000, 0x40000000, 1
#: Integers from here on are told in words: Python refuses to write out those of more than 4,300 digits.
_MOST_SHOWN = 10**40
_MOST_CHARS = 1000
#: Scores are added, multiplied by weights and squared in float32.
_MOST = 1e12
MARK = b"ftcli-judge:"
#: Ends what a call has printed, for the supervisor.
END_OF_CALL = b"\0ftcli-call\0"


class _TimeUp(BaseException):
    """The alarm rang. No Exception: libraries catch those."""


def main(descriptor: int) -> None:
    """Loads, then answers calls until the other side is gone."""
    if sys.platform == "linux":  # also while a call runs, which would not see the closed socket
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    os.dup2(2, 1)  # what the function prints is for people; the command's stdout may be a JSON document
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a call that is killed keeps nothing to itself
    printed = os.dup(2)  # whatever the function makes of its own
    asked = socket.socket(fileno=descriptor)  # no program that the function starts inherits it
    asked.set_inheritable(False)
    own = os.getpid()
    try:
        order = pickle.loads(_received(asked))  # noqa: S301 - of the command that started this
        sys.path[:] = order["sys_path"]
        if order["address_space"]:
            _confine(order["address_space"])
        source = (order["path"], order["shown"])
        function, answer = _loaded(source, order["text"], order["module"], order["function"])
        if os.getpid() != own:  # a copy that the file has forked
            os._exit(0)
        _end_of_call(printed)
        _send(asked, answer)
        environment = _Environment(function, source)
        while function is not None:
            call = pickle.loads(_received(asked))  # noqa: S301 - of the command that started this
            if "do" in call:
                answer = environment.done(call)
            else:
                answer = _called(function, _taken(function, call), call["count"], call["alarm"], source)
            if os.getpid() != own:  # a copy that the function has forked, and that came back as well
                os._exit(0)
            _end_of_call(printed)
            _send(asked, answer)
    except (EOFError, OSError):  # the other side is gone, or the function has closed the socket
        return


def _end_of_call(printed: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have put anything there
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(printed, END_OF_CALL)


def _received(asked: socket.socket) -> bytes:
    _exactly(asked, len(MARK))
    return _exactly(asked, int.from_bytes(_exactly(asked, 8)))


def _exactly(asked: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = asked.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _send(asked: socket.socket, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    asked.sendall(MARK + len(body).to_bytes(8) + body)


def _taken(function: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those that are offered, where the function has no parameter for them."""
    arguments: dict[str, Any] = call["arguments"]
    if "environments" in call["offered"] and "environments" in arguments:
        made = [SimpleNamespace(**each) for each in arguments["environments"]]
        arguments = {**arguments, "environments": made}
    try:
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # noqa: BLE001 - of what the user wrote
        return arguments
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return arguments
    names = {one.name for one in parameters}
    return {name: value for name, value in arguments.items() if name in names or name not in call["offered"]}


def _confine(address_space: int) -> None:
    """Limits for code that works on untrusted text: memory, and no network where the system allows it."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_NEWUSER | _NEWNET)  # refused in many containers


class _AsRead(importlib.machinery.SourceFileLoader):
    """Runs the text that was read when the command began: the file may have been edited since."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Any:
        raise OSError  # no compiled file is looked for, or written


def _loaded(source: tuple[str, str], text: bytes, module_name: str, name: str) -> tuple[Any, dict[str, Any]]:
    """The function, None where there is none; and what to say of it."""
    path = source[0]
    try:
        spec = importlib.util.spec_from_file_location(module_name, path, loader=_AsRead(module_name, path, text))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses, pickle and typing look for the module of a class there
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if callable(found):
            return found, {}
        return None, {"has": sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))}
    except BaseException as error:  # noqa: BLE001 - whatever the file raises
        return None, {"raised": _words(error, source)}


def _called(
    function: Any, arguments: dict[str, Any], count: int, alarm: float | None, source: tuple[str, str]
) -> dict[str, Any]:
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
        return {"raised": _words(error, source)}


class _Environment:
    """An instance of what the file defines, by TRL's contract: ``reset``, public methods as tools, ``get_reward``."""

    def __init__(self, factory: Any, source: tuple[str, str]) -> None:
        self._factory, self._source = factory, source
        self._made: Any = None
        self._loop: Any = None

    def done(self, call: dict[str, Any]) -> dict[str, Any]:
        """The result of a call; ``raised`` where the environment's own code has."""
        try:
            answer: dict[str, Any] = getattr(self, "_" + call["do"])(*call["given"])
            return answer
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            return {"raised": _words(error, self._source)}

    def _make(self) -> dict[str, Any]:
        self._made = self._factory()
        tools = [[name, inspect.iscoroutinefunction(one)] for name, one in self._methods()]
        kind = type(self._made)
        return {
            "environment": kind.__name__,
            "tools": tools,
            "parts": [n for n in ("reset", "get_reward") if hasattr(kind, n)],
        }

    def _methods(self) -> list[tuple[str, Any]]:
        # Of the class: of the instance, properties would be computed.
        found = inspect.getmembers(type(self._made), predicate=inspect.isfunction)
        return [one for one in found if one[0] not in ("reset", "get_reward") and not one[0].startswith("_")]

    def _describe(self) -> dict[str, Any]:
        from transformers.utils import get_json_schema

        return {"schemas": [get_json_schema(getattr(self._made, name)) for name, _ in self._methods()]}

    def _reset(self, row: dict[str, Any]) -> dict[str, Any]:
        said = self._awaited(self._made.reset(**row))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {type(said).__name__}, where text or None was expected")
        return {"said": said}

    def _call(self, calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Calls tools one after the other, coroutines together, as TRL does."""
        methods = dict(self._methods())
        made = [self._begun(methods, name, arguments) for name, arguments in calls]
        waiting = [place for place, (one, _) in enumerate(made) if isinstance(one, CoroutineType)]
        if waiting:
            import asyncio

            async def together() -> list[Any]:
                return await asyncio.gather(*(made[place][0] for place in waiting), return_exceptions=True)

            for place, one in zip(waiting, self._awaited(together()), strict=True):
                made[place] = ({"error": str(one)}, True) if isinstance(one, BaseException) else (one, False)
        return {"results": [[_text(one), failed] for one, failed in made]}

    def _begun(self, methods: dict[str, Any], name: str, arguments: dict[str, Any]) -> tuple[Any, bool]:
        """A tool's return value, and whether it failed."""
        try:
            if name not in methods:
                raise ValueError(f"Tool {name} not found.")
            return getattr(self._made, name)(**arguments), False
        except Exception as error:  # noqa: BLE001 - whatever the tool raises, the model is told
            return {"error": str(error)}, True

    def _reward(self) -> dict[str, Any]:
        return _called(lambda: [self._awaited(self._made.get_reward())], {}, 1, None, self._source)

    def _state(self) -> dict[str, Any]:
        """Its public attributes that are JSON values, for reward functions that look at ``environments``."""
        found = {}
        for name, value in vars(self._made).items() if hasattr(self._made, "__dict__") else ():
            with contextlib.suppress(Exception):  # what is no JSON value, or whatever the user's class raises
                if not name.startswith("_"):
                    found[name] = json.loads(json.dumps(value, allow_nan=False))
        return {"state": found}

    def _awaited(self, result: Any) -> Any:
        if not isinstance(result, CoroutineType):
            return result
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()  # what an environment keeps open belongs to one loop
        return self._loop.run_until_complete(result)


def _text(result: Any) -> str:
    """A tool's return value as the model reads it. Raises TypeError for content that is no text."""
    if isinstance(result, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in result):
        raise TypeError("a tool returned an image, which a text model cannot read")
    return str(result)


def _set_alarm(seconds: float | None) -> None:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _TimeUp

    if seconds is not None:
        signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)


def _checked(result: Any, count: int) -> dict[str, Any]:
    whole = _counted(result) if isinstance(result, list | tuple) else type(result).__name__
    if not isinstance(result, list | tuple) and callable(getattr(result, "tolist", None)):  # an array, a tensor
        whole = f"{whole} of shape {tuple(getattr(result, 'shape', ()))}"
        result = result.tolist()
    if not isinstance(result, list | tuple) or len(result) != count or any(isinstance(one, list) for one in result):
        return {"shape": whole}
    scores, bad = [], {}
    for place, value in enumerate(result):
        score = None
        try:  # a number's own class may be the user's, too
            score = None if value is None else _number(value)
            if value is not None and score is None:
                bad[str(place)] = f"returned {_shown(value)}"
        except BaseException as error:  # noqa: BLE001 - whatever it raises
            bad[str(place)] = f"returned a number that {_words(error)}"
        scores.append(score)
    return {"scores": scores, "bad": bad}


def _counted(result: list[Any] | tuple[Any, ...]) -> str:
    """A list of another length than was asked for, or of lists, in words."""
    lists = sum(isinstance(one, list) for one in result)
    values = "1 value" if len(result) == 1 else f"{len(result):,} values"
    inner = f", {lists:,} of which {'is a list' if lists == 1 else 'are lists'}" if lists else ""
    return f"a {type(result).__name__} of {values}{inner}"


def _number(value: Any) -> float | None:
    """A number, or what holds one (numpy's, a tensor's); None for all else, and where it is too large."""
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # it holds several
            return None
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        return None
    return number if math.isfinite(number) and abs(number) <= _MOST else None


def _shown(value: Any) -> str:
    """Text of the function's result for a message; its repr is the user's code as well."""
    if isinstance(value, int) and abs(value) >= _MOST_SHOWN:
        return "an integer beyond every float"
    try:
        return repr(value)[:200]
    except BaseException:  # noqa: BLE001 - whatever it raises
        return f"an object of type {type(value).__name__}"


def _words(error: BaseException, source: tuple[str, str] = ("", "")) -> str:
    if isinstance(error, SystemExit):
        return f"tried to end the program (exit status {error.code})"
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - whatever it raises
        text = f"(its text raises {type(broken).__name__})"
    return f"raised {type(error).__name__}: {text[:_MOST_CHARS]}{_place(error.__traceback__, *source)}"


def _place(trace: TracebackType | None, path: str, shown: str) -> str:
    """Place of an error: the innermost line of the user's file, and that of another file which it called."""
    own = last = ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        last = "" if name == path else f"{name}:{trace.tb_lineno}"
        own = f"{shown}:{trace.tb_lineno}" if name == path else own
        trace = trace.tb_next
    return f" ({own}{f', in {last}' if last else ''})" if shown and own else ""


if __name__ == "__main__":
    main(int(sys.argv[1]))
