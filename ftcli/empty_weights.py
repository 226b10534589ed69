"""Weights without memory: they are not drawn, since filling them does nothing and takes longer than making them; and
who computes with one before it is read gets no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
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


def fill_with_nan(model: nn.Module) -> None:
    """Gives parameters on the device ``meta`` one NaN for all of their elements: whoever computes with one that was not
    read in time gets no answer, and not a wrong one.
    """
    nothing = torch.full((), torch.nan)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)


def model_class(config: Any) -> Any:
    """transformers' auto class for the whole of a model; for a config of a sequence classifier, the one for that.

    A model that also takes images has its language model's config inside its own. ``AutoModelForCausalLM`` would build
    some of those without their other parts.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
