"""Where CUDA graphs write the gradients of the trained weights, and how the weights get them.

A graph writes to the same place in every replay. What it wrote becomes the weights' ``grad``; in the next micro-batch
of an accumulated step it is moved aside first, and added to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """One tensor for each weight, in its shape and dtype: views of one buffer for each dtype, copied in one launch."""

    buffers: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def zeros_like(cls, weights: Sequence[Tensor]) -> Gradients:
        """Zeros on the weights' device."""
        sizes: dict[torch.dtype, int] = {}
        for weight in weights:
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
        device = weights[0].device
        return cls._over({dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}, weights)

    @classmethod
    def _over(cls, buffers: Mapping[torch.dtype, Tensor], like: Sequence[Tensor]) -> Gradients:
        taken = dict.fromkeys(buffers, 0)
        tensors = []
        for tensor in like:
            start = taken[tensor.dtype]
            taken[tensor.dtype] += tensor.numel()
            tensors.append(buffers[tensor.dtype][start : taken[tensor.dtype]].view(tensor.shape))
        return cls(tuple(buffers.values()), tuple(tensors))

    def clone(self) -> Gradients:
        """A copy in buffers of its own."""
        return self._over({buffer.dtype: buffer.clone() for buffer in self.buffers}, self.tensors)

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copies ``gradients``, one for each weight, into these."""
        torch._foreach_copy_(list(self.tensors), list(gradients))

    def make_room(self, weights: Sequence[Tensor]) -> None:
        """Moves gradients of an earlier micro-batch aside, before these tensors are written again."""
        if weights[0].grad is not None and weights[0].grad.data_ptr() == self.tensors[0].data_ptr():
            _assign(weights, self.clone().tensors)

    def hand_to(self, weights: Sequence[Tensor]) -> None:
        """Adds these to the weights' gradients, or makes them those of weights that have none."""
        if weights[0].grad is None:
            _assign(weights, self.tensors)
        else:
            torch._foreach_add_([w.grad for w in weights if w.grad is not None], list(self.tensors))


def _assign(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
