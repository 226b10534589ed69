"""Triton's interpreter without what it does over and over, which is more than half of what small kernels take.

In each launch, and in each call of a function inside it, the interpreter looks through every name of
``triton.language`` for what it must replace. Here that is done once a launch, and the names are found once a process.
What is replaced, by what, and for how long stays Triton's own code. And whether an integer overflows is not worked out
for each sum and product: Triton drops the answer, but for kernels compiled with ``debug``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quickened() -> Iterator[None]:
    """Until the end of the block, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _unless_patched(interpreter._patch_lang))
        patch.setattr(interpreter, "_patch_builtin", _names_once())
        patch.setattr(interpreter, "_get_np_dtype", _types_once(interpreter._get_np_dtype))
        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


def _unless_patched(patch_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Functions that a kernel calls see what was replaced for the kernel; those of Triton see ``tl.core`` besides."""
    seen: dict[Any, list[Any]] = {}

    def patch(function: Any) -> Any:
        if function not in seen:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            seen[function] = [module for module in modules if module in (tl, tl.core)]
        if seen[function] and not any(tl.core.is_builtin(module.load) for module in (tl, *seen[function])):
            return interpreter._LangPatchScope()
        return patch_all(function)

    return patch


def _names_once() -> Callable[[Any, Any, Any], None]:
    names: dict[Any, list[str]] = {}

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        found = [name for name in names.get(owner, dir(owner)) if tl.core.is_builtin(getattr(owner, name, None))]
        names.setdefault(owner, found)
        for name in found:
            interpreter._patch_attr(owner, name, getattr(owner, name), builder, scope)

    return patch


def _types_once(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's type for a type of Triton, or for a block of it."""
    known: dict[str, Any] = {}

    def dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return dtype
