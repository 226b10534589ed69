"""Frozen weights that read the same input as one parameter, for models whose weights are spread over ranks.

Weights that lie one behind the other are multiplied in one product (``ftkernels.projection.joined``). torch gathers
several parameters into separate pieces of memory, and a single one into one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ftcli.facts.shape import SHARED_INPUTS
from ftcli.model.quantized import QuantizedLinear, as_told


class Joint(nn.Module):
    """Tensors joined along ``dim`` in one frozen parameter; as :func:`ftcli.model.quantized.as_told` says.

    Raises:
        ValueError: they differ in dtype.
    """

    def __init__(self, tensors: Sequence[Tensor], dim: int = 0) -> None:
        super().__init__()
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError("tensors of several dtypes cannot be joined")
        self._dtype, self._dim = tensors[0].dtype, dim
        self._bytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        self._sizes = [int(tensor.shape[dim]) for tensor in tensors]
        self.stored = nn.Parameter(as_told(torch.cat(list(tensors), dim)), requires_grad=False)

    def part(self, index: int) -> Tensor:
        """One of the tensors, as a view."""
        whole = self.stored if self.stored.dtype == self._dtype else self.stored.view(self._dtype)
        return whole.narrow(self._dim, sum(self._sizes[:index]), self._sizes[index])

    def shard_bytes(self, index: int) -> int:
        """Bytes of one of the tensors."""
        return self._bytes[index]


class JoinedLinear(nn.Linear):
    """A frozen linear layer (O, I) whose weight is one of a :class:`Joint`'s tensors. It has no weight of its own."""

    def __init__(self, linear: nn.Linear, joint: Joint, index: int) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        object.__setattr__(self, "_joint", joint)  # not a submodule: it is its neighbours', too
        self._index = index
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(O, I), a view."""
        joint: Joint = self._joint  # type: ignore[assignment]
        return joint.part(self._index)


def join_shared(layer: nn.Module) -> None:
    """Joins the frozen weights of a decoder layer that read the same input, adapted or not, in place.

    Those that are trained stay apart, and so do those that become neighbours when they are dequantised.
    """
    for names in SHARED_INPUTS:
        modules: list[Any] = [layer.get_submodule(name) for name in names]
        bases = [getattr(module, "base_layer", module) for module in modules]
        if any(base.weight.requires_grad for base in bases):
            continue
        if all(isinstance(base, QuantizedLinear) for base in bases):
            if len({type(base) for base in bases}) == 1:
                type(bases[0]).join_spread(bases, partial(_joint_of, layer, names))
        elif not any(isinstance(base, QuantizedLinear) for base in bases):
            joint = _joint_of(layer, names, [base.weight for base in bases], 0)
            for index, (name, base) in enumerate(zip(names, bases, strict=True)):
                inner = f"{name}.base_layer" if base is not layer.get_submodule(name) else name
                layer.set_submodule(inner, JoinedLinear(base, joint, index))


def _joint_of(layer: nn.Module, names: Sequence[str], tensors: Sequence[Tensor], dim: int) -> Joint:
    """Beside the modules whose weights are joined, so that it goes where these go."""
    parent = layer.get_submodule(names[0].rpartition(".")[0])
    joint = Joint(tensors, dim)
    leaves = "_".join(name.rpartition(".")[2] for name in names)
    parent.add_module(f"joint_{leaves}" + ("_columns" if dim else ""), joint)
    return joint
