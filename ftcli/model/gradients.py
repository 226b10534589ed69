"""The dtype of the trained weights' gradients; where CUDA graphs write them, and how the weights get them.

A graph writes to the same place in every replay. What it wrote becomes the weights' ``grad``; in the next micro-batch
of an accumulated step it is moved aside first, and added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from ftkernels.projection import gradient_dtype
from torch import Tensor, nn


def keep_gradients_in(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Has autograd keep the gradients of trained matrices in ``dtype``. Vectors, such as norms, are left as they are:
    they take no room, and each would be rounded by a kernel of its own.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim() > 1 and gradient_dtype(parameter) != dtype:
            parameter.grad_dtype = dtype


@dataclass(frozen=True, slots=True)
class Gradients:
    """One tensor for each weight, in its shape and its gradient's dtype: views of one buffer for each dtype."""

    buffers: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def zeros_like(cls, weights: Sequence[Tensor]) -> Gradients:
        sizes: dict[torch.dtype, int] = {}
        for weight in weights:
            dtype = gradient_dtype(weight)
            sizes[dtype] = sizes.get(dtype, 0) + weight.numel()
        device = weights[0].device
        return cls._over({dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}, weights)

    @classmethod
    def _over(cls, buffers: Mapping[torch.dtype, Tensor], like: Sequence[Tensor]) -> Gradients:
        taken = dict.fromkeys(buffers, 0)
        tensors = []
        for tensor in like:
            dtype = gradient_dtype(tensor)
            start = taken[dtype]
            taken[dtype] += tensor.numel()
            tensors.append(buffers[dtype][start : taken[dtype]].view(tensor.shape))
        return cls(tuple(buffers.values()), tuple(tensors))

    def clone(self) -> Gradients:
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
