"""Experts as llama.cpp has them: three stacks, where transformers has gate and up in one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ftcli.export.weights import ModelWeights
from ftcli.gguf.names import GATE, SHARED_GATE, STACK, UP


class SplitExperts:
    """Weights whose stacks of gate and up (experts, 2 · width, hidden) are two tensors, called by the stack's name and
    :data:`GATE` or :data:`UP`; the gate of a shared expert (1, hidden) is a vector.

    Attributes:
        whole: The weights as the model has them.
    """

    def __init__(self, whole: ModelWeights) -> None:
        self.whole = whole

    @property
    def names(self) -> Sequence[str]:
        """All that are stored."""
        return tuple(part for name in self.whole.names for part in _parts(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        plain = name.removesuffix(GATE).removesuffix(UP)
        shape = self.whole.shape(plain)
        if plain != name:
            return (shape[0], shape[1] // 2, *shape[2:])
        return shape[1:] if name.endswith(SHARED_GATE) else shape

    def read(self, name: str) -> Tensor:
        """A tensor: half of a stack is read with the other one."""
        plain = name.removesuffix(GATE).removesuffix(UP)
        tensor = self.whole.read(plain)
        if plain != name:
            return tensor.chunk(2, dim=1)[name.endswith(UP)].contiguous()
        return tensor.reshape(-1) if name.endswith(SHARED_GATE) else tensor


def _parts(name: str) -> tuple[str, ...]:
    return (f"{name}{GATE}", f"{name}{UP}") if name.endswith(STACK) else (name,)


def unsplit(weights: ModelWeights) -> ModelWeights:
    """The weights as the model has them."""
    return weights.whole if isinstance(weights, SplitExperts) else weights
