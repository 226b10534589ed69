"""Weights without memory are not drawn: filling them does nothing, and takes longer than making them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

#: Where the functions are that fill tensors with initial values: torch's, and transformers' that call those.
_FILLING = ("torch.nn.init", "transformers.initialization")


class Undrawn(TorchFunctionMode):
    """A block in which initial values of tensors on the device ``meta`` are left out.

    The others are drawn as ever, so that a seed gives the same numbers in it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) in _FILLING:
            tensor = given["tensor"] if "tensor" in given else args[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)
