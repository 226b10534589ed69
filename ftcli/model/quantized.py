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
from ftkernels.nf4 import NF4_TABLE, NestedScales, NF4Weight, quantize_nf4
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

    def check_state(self) -> None:
        """Looks at values too, which waits for the device: once, when the model is built.

        Raises:
            FtcliError: FT331 as :meth:`frozen_weight`, and for state that is there and was never written.
        """
        self.frozen_weight()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is stored in place of the weight."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

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


class NF4Linear(QuantizedLinear):
    """A frozen linear layer in NF4: the parts of an ``ftkernels.nf4.NF4Weight``, as buffers.

    Off the kernels a pass dequantises the weight, multiplies and lets it go; backward does the same again.
    """

    method = "nf4"

    def __init__(self, weight: NF4Weight, bias: Tensor | None, name: str) -> None:
        super().__init__(int(weight.shape[1]), int(weight.shape[0]), bias, name)
        self.block_size = weight.block_size
        nested = weight.nested
        self.nested_block_size = 0 if nested is None else nested.block_size
        self.register_buffer("packed", weight.data)
        self.register_buffer("absmax", weight.absmax)
        self.register_buffer("table", weight.table)
        self.register_buffer("nested_absmax", None if nested is None else nested.absmax)
        self.register_buffer("nested_table", None if nested is None else nested.table)
        self.register_buffer("nested_offset", None if nested is None else nested.offset)

    @property
    def double_quant(self) -> bool:
        """Whether the scales are quantised as well."""
        return self.nested_block_size > 0

    def frozen_weight(self) -> NF4Weight:
        """As the base class says; nothing is copied."""
        state = self._buffers
        names = ("packed", "absmax", "table") + (
            ("nested_absmax", "nested_table", "nested_offset") if self.double_quant else ()
        )
        parts = [state.get(name) for name in names]
        missing = [name for name, part in zip(names, parts, strict=True) if part is None]
        if missing:
            raise self.state_lost(f"{', '.join(missing)} gone")
        packed, absmax, table, *rest = [part for part in parts if part is not None]
        try:
            nested = NestedScales(rest[0], rest[1], rest[2], self.nested_block_size) if rest else None
            shape = torch.Size((self.out_features, self.in_features))
            return NF4Weight(packed, absmax, table, shape, self.block_size, nested)
        except ValueError as error:
            raise self.state_lost(str(error)) from error

    def check_state(self) -> None:
        """As the base class says: the table must be NF4's and every scale finite."""
        weight = self.frozen_weight()
        if tuple(weight.table.tolist()) != NF4_TABLE:
            raise self.state_lost("its table is not NF4's, so its memory was never written")
        scales = weight.absmax if weight.nested is None else weight.nested.absmax
        if not bool(torch.isfinite(scales).all()):
            raise self.state_lost("its scales are not finite")


class DequantizedLinear(nn.Linear):
    """A plain frozen linear layer that holds the numbers a quantised one stands for: its memory is that of a layer
    which was never quantised, and so is its speed.
    """

    def __init__(self, layer: NF4Linear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # no weight of its own to begin with
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.layer_name = layer.layer_name
        self.weight = nn.Parameter(layer.frozen_weight().dequantize(dtype), requires_grad=False)
        self.register_parameter("bias", layer.bias)


def quantize_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> QuantizedLinear:
    """``linear``'s weight quantised by ``settings.method``, on the device where it is; its bias is shared.

    Raises:
        ValueError: a method that stores no quantised linear layers.
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    if settings.method == "fp8":
        from ftcli.model.fp8 import fp8_linear  # its base class is here

        return fp8_linear(linear, name)
    if settings.method == "nf4":
        try:
            weight = quantize_nf4(linear.weight, double_quant=settings.double_quant)
        except ValueError as error:
            raise unreadable(f"{name} {tuple(linear.weight.shape)}: {error}") from error
        return NF4Linear(weight, linear.bias, name)
    raise ValueError(f"quantization.method {settings.method} does not quantise linear layers")


def unreadable(reason: str) -> FtcliError:
    """FT323: weights that no model can be built of."""
    return FtcliError.single(
        "FT323",
        f"the weights cannot be loaded: {reason}",
        exit_code=ExitCode.PREFLIGHT,
        help="download or copy the model again",
    )


def is_quantizable(name: str, module: nn.Module) -> bool:
    """Whether a module's weight is stored quantised: every plain linear layer but the head, which the loss reads."""
    return type(module) is nn.Linear and name.rpartition(".")[2] != "lm_head"


def quantized_layers(model: nn.Module) -> list[dict[str, Any]]:
    """For manifest.json: name, method, logical shape and stored bytes of every quantised layer, and whether its numbers
    are held dequantised.
    """
    table = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear | DequantizedLinear):
            kept = isinstance(module, DequantizedLinear)
            table.append(
                {
                    "layer": module.layer_name,
                    "method": NF4Linear.method if isinstance(module, DequantizedLinear) else module.method,
                    "shape": [module.out_features, module.in_features],
                    "bytes": module.weight.nbytes if isinstance(module, DequantizedLinear) else module.stored_bytes,
                    "dequantized": kept,
                }
            )
    return table


def check_weights(model: nn.Module) -> None:
    """Refuses, before anything is computed, packed numbers without what they mean.

    Raises:
        FtcliError: FT331 for a quantised layer whose state is lost, and for a plain linear layer whose weight is a raw
            tensor of integers, naming the layer and the shapes.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            module.check_state()
        elif isinstance(module, nn.Linear) and not module.weight.is_floating_point():
            raise FtcliError.single(
                "FT331",
                f"{name}: a raw {str(module.weight.dtype).removeprefix('torch.')} tensor of shape "
                f"{tuple(module.weight.shape)} stands where the weight ({module.out_features}, {module.in_features}) "
                "should be; without its scales it means nothing",
                exit_code=ExitCode.BUG,
                help="load the model through `quantization.method`, or name it in bfloat16",
            )
