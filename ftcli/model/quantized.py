"""Linear layers whose frozen weight is stored quantised: what all methods share, and the way into them.

A quantised layer stands where an ``nn.Linear`` stood, under its name. Its state lies in buffers, so that moving,
copying and replicating the model takes it along; there is no ``weight`` parameter that something could multiply by
mistake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from ftkernels.lora_linear import lora_linear
from ftkernels.projection import FrozenWeight, Projection
from torch import Tensor, nn

from ftcli.config import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError


class StoredWeight:
    """What a quantised layer answers when asked for ``weight``: where it is and how large, and no numbers.

    PEFT asks for device and dtype before it places an adapter. Everything else that reads a weight (merging, scaling,
    a product) would take packed bytes for numbers, so it is refused.
    """

    def __init__(self, layer: QuantizedLinear) -> None:
        self._layer = layer

    @property
    def device(self) -> torch.device:
        """Where the stored bytes are."""
        return next(self._layer.buffers()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored bytes."""
        return next(self._layer.buffers()).dtype

    @property
    def shape(self) -> torch.Size:
        """The logical shape, (O, I)."""
        return torch.Size((self._layer.out_features, self._layer.in_features))

    @property
    def requires_grad(self) -> bool:
        """Never: the base is frozen."""
        return False

    @property
    def data(self) -> NoReturn:
        """Refused: there is no matrix to read or to merge into.

        Raises:
            FtcliError: FT332, naming the layer.
        """
        raise FtcliError.single(
            "FT332",
            f"{self._layer.layer_name}: the weight {tuple(self.shape)} is stored in {self._layer.method}, so nothing "
            "can be merged into it or read from it as a matrix",
            exit_code=ExitCode.PREFLIGHT,
            help="`ftcli export` merges into the full-precision base model, loaded again",
        )


class QuantizedLinear(nn.Linear, ABC):
    """A frozen linear layer (O, I) without a floating weight. Subclasses hold their state in buffers.

    ``method`` is the recipe's name of the storage format. ``layer_name`` is where in the model the layer is.
    ``bias`` is a frozen parameter or None.
    """

    method: ClassVar[str]

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None, name: str) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight of full size
        self.in_features = in_features
        self.out_features = out_features
        self.layer_name = name
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @abstractmethod
    def frozen_weight(self) -> FrozenWeight:
        """The weight as kernels take it, made of the buffers as they are now.

        Raises:
            FtcliError: FT331 when state is missing or does not fit, naming the layer and the shapes.
        """

    @property
    def weight(self) -> StoredWeight:  # type: ignore[override]  # there is no tensor: see StoredWeight
        """Device, dtype and logical shape of what is stored."""
        return StoredWeight(self)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in autocast's dtype or x's; the gradient flows to ``x``."""
        return lora_linear(x, Projection(self.frozen_weight(), self.bias))

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.method}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the state, and leaves its dtypes alone: ``.half()`` must not round scales."""
        dtypes = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, dtype in dtypes.items():
            moved, original = self._buffers[name], before[name]
            if moved is not None and original is not None and moved.dtype != dtype:
                self._buffers[name] = original.to(moved.device)
        return self

    def state_lost(self, reason: str) -> FtcliError:
        """FT331 for this layer."""
        return FtcliError.single(
            "FT331",
            f"{self.layer_name}: the {self.method} weight ({self.out_features}, {self.in_features}) has lost its "
            f"state: {reason}",
            exit_code=ExitCode.BUG,
            help="move and copy the model with .to(), deepcopy or state_dict, which take buffers along",
        )


def quantize_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> QuantizedLinear:
    """``linear``'s weight quantised by ``settings.method``, on the device where it is; its bias is shared.

    Raises:
        ValueError: a method that stores no quantised linear layers.
    """
    raise ValueError(f"quantization.method {settings.method} does not quantise linear layers")


def quantize_linears(model: nn.Module, settings: QuantizationConfig, *, skip: tuple[str, ...] = ("lm_head",)) -> int:
    """Puts a quantised layer in the place of every ``nn.Linear`` of ``model``, one after the other; returns how many.

    Each full-precision weight is freed before the next layer is looked at. Layers whose own name is in ``skip`` stay.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    names = [name for name, _ in found if name.rpartition(".")[2] not in skip]
    del found
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, quantize_linear(linear, settings, name))
        del linear
    return len(names)
