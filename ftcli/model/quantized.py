"""Quantized linear layers: the parts that all methods share, and the interface of a method's code.

A quantized layer stands where an ``nn.Linear`` stood, under its name. Its state lies in buffers, so that moving,
copying and replicating the model takes it along; there is no ``weight`` parameter that something could multiply by
mistake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, Self

import torch
from ftkernels.lora_linear import lora_linear
from ftkernels.projection import FrozenWeight, Projection
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.lora_targets import is_read_by_mixer, is_router
from ftcli.plain import JsonMap
from ftcli.tables import code_of, quantizations
from ftcli.tables.architecture import LAYER_INPUT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative difference of the model's loss, of a layer's output, and of any gradient in a layer."""

    loss: float
    output: float
    gradient: float


class StoredWeight:
    """``layer.weight`` of a quantized layer: device, dtype and logical shape, but no numbers.

    PEFT asks for device and dtype before it places an adapter. Whatever else reads a weight (merging, scaling, a
    product) would take packed bytes for numbers, so it is refused.
    """

    def __init__(self, layer: QuantizedLinear) -> None:
        self._layer = layer

    @property
    def device(self) -> torch.device:
        """Device of the stored bytes."""
        return next(chain(self._layer.buffers(), self._layer.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored bytes. PEFT gives new adapters this dtype for a moment, which rounds them."""
        return self._layer.stored_dtype or next(self._layer.buffers()).dtype

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
        raise no_matrix(self._layer.layer_name, self.shape, self._layer.method)


def no_matrix(name: str, shape: torch.Size, method: str) -> FtcliError:
    """FT332: a stored weight is asked for, or written to, as if it were numbers."""
    return FtcliError.single(
        "FT332",
        f"{name}: the weight {tuple(shape)} is stored in {method}, so nothing can be merged into it or read from it as "
        "a matrix",
        help="`ftcli export` merges into the full-precision base model, loaded again",
    )


def is_shardable(tensor: Tensor) -> bool:
    """True if :func:`as_shardable` can take a tensor: one of bytes has rows of a multiple of four."""
    return tensor.element_size() > 1 or tensor.shape[-1] % 4 == 0


def as_shardable(tensor: Tensor) -> Tensor:
    """A tensor in a form that torch shards: bytes are viewed as a quarter as many float32.

    torch 2.11 shards no integers (pytorch#177844). And it copies bfloat16 by way of float32, which makes one NaN of
    all, so that bytes do not survive as bfloat16 (bitsandbytes#1945); float32 is copied as it is.
    """
    return tensor.contiguous() if tensor.element_size() > 1 else tensor.contiguous().view(torch.float32)


class JoinedParameter(Protocol):
    """Tensors that are one parameter: :class:`ftcli.model.fsdp.JoinedTensors`."""

    def part(self, index: int) -> Tensor:
        """One of them, as a view."""
        ...

    def shard_bytes(self, index: int) -> int:
        """Its bytes."""
        ...


class QuantizedLinear(nn.Linear, ABC):
    """A frozen linear layer (O, I) without a floating weight. Subclasses hold their state in buffers.

    Attributes:
        method: The recipe's name of the storage format.
        rounds_input: Its products round their input as well, which the fused LoRA layers do not.
        tolerance: How far the start-up self-check lets a model with such layers be off; None: as any other model.
        layer_name: Where in the model the layer is.
        bias: A frozen parameter, or None.
        stored_dtype: Of the first tensor of the state, once that is in no buffer any more.
        sharded: Names of the tensors of the state that FSDP shards; the others are small.
    """

    method: ClassVar[str]
    sharded: ClassVar[tuple[str, ...]] = ()
    rounds_input: ClassVar[bool] = False
    tolerance: ClassVar[Tolerance | None] = None

    def __init__(self, in_features: int, out_features: int, bias: Tensor | None, name: str) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight of full size
        self.in_features = in_features
        self.out_features = out_features
        self.layer_name = name
        self.stored_dtype: torch.dtype | None = None
        self._stored: dict[str, torch.dtype] = {}  # of what lies in a parameter, by its name
        self._shared: dict[str, tuple[JoinedParameter, int]] = {}
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @abstractmethod
    def frozen_weight(self) -> FrozenWeight:
        """The weight as kernels take it, made of the buffers as they are now.

        Raises:
            FtcliError: FT331 when state is missing or does not fit, naming the layer and the shapes.
        """

    def as_parameters(self) -> None:
        """Puts the large tensors of the state into frozen parameters, which torch can shard, by :func:`as_shardable`.

        A tensor that cannot be sharded stays a buffer.
        """
        self.stored_dtype = self.weight.dtype
        for name in self.sharded:
            buffer = self._buffers.get(name)
            if buffer is not None and is_shardable(buffer):
                del self._buffers[name]
                self._stored[name] = buffer.dtype
                self.register_parameter(name, nn.Parameter(as_shardable(buffer), requires_grad=False))

    def state(self, name: str) -> Tensor | None:
        """A tensor of the state in its own dtype: from its buffer or, once weights are sharded, from its parameter or
        from one that it shares with its neighbours.
        """
        if name in self._shared:
            joint, index = self._shared[name]
            return joint.part(index)
        parameter = self._parameters.get(name)
        if parameter is None:
            return self._buffers.get(name)
        dtype = self._stored[name]
        return parameter if parameter.dtype == dtype else parameter.view(dtype)

    def share(self, name: str, joint: JoinedParameter, index: int) -> None:
        """Has a tensor of the state be one of those that are ``joint``."""
        self.stored_dtype = self.weight.dtype
        self._buffers.pop(name, None)
        self._shared[name] = joint, index

    @classmethod
    def join_for_sharding(
        cls, layers: Sequence[Self], joint: Callable[[Sequence[Tensor], int], JoinedParameter]
    ) -> None:
        """Joins weights that are about to be sharded. Does nothing by default, as :meth:`join`.

        ``joint`` makes one parameter of tensors, joined along a dimension (:class:`ftcli.model.fsdp.JoinedTensors`).
        """

    def check_state(self) -> None:
        """Looks at values too, which waits for the device: once, when the model is built.

        Raises:
            FtcliError: FT331 as :meth:`frozen_weight`, and for state that is there and was never written.
        """
        self.frozen_weight()

    @classmethod
    def join(cls, layers: Sequence[Self]) -> Callable[[], None] | None:
        """Lays the weights of layers that read the same input one behind the other, so that they are one product.

        Returns:
            What puts them apart again. None where nothing was done: such weights become neighbours when they are
            dequantized.
        """
        return None

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is stored in place of the weight."""
        own = (parameter for name, parameter in self.named_parameters() if name != "bias")
        shared = sum(joint.shard_bytes(index) for joint, index in self._shared.values())
        return shared + sum(tensor.numel() * tensor.element_size() for tensor in (*self.buffers(), *own))

    @property
    def weight(self) -> StoredWeight:  # type: ignore[override]  # there is no tensor: see StoredWeight
        """Device, dtype and logical shape of what is stored."""
        return StoredWeight(self)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O), in autocast's dtype or x's; the gradient flows to ``x``."""
        return lora_linear(x, Projection(self.frozen_weight(), self.bias))

    def extra_repr(self) -> str:
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


class TrainedQuantizedLinear(nn.Linear):
    """A linear layer whose master weights are trained, and quantized for every product.

    Attributes:
        method: The recipe's name of the quantization.
        layer_name: Where in the model the layer is.
    """

    method: ClassVar[str]
    layer_name: str


class DequantizedLinear(nn.Linear):
    """A plain frozen linear layer that holds the numbers which a quantized one stands for, in the compute dtype.

    It takes the memory and the time of a layer that was never quantized. ``method`` is that of the quantized layer.
    """

    def __init__(self, layer: QuantizedLinear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # no weight of its own to begin with
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.layer_name = layer.layer_name
        self.method = layer.method
        self.weight = nn.Parameter(layer.frozen_weight().dequantize(dtype), requires_grad=False)
        self.register_parameter("bias", layer.bias)


def unreadable_weights(reason: str) -> FtcliError:
    """FT323: weights that no model can be built of."""
    return FtcliError.single(
        "FT323",
        f"the weights cannot be loaded: {reason}",
        help="download or copy the model again",
    )


def rounded_before(reason: str) -> FtcliError:
    """FT340: a warm-up from exact to quantized values, and there are no exact ones."""
    return FtcliError.single(
        "FT340",
        f"quantization.lambda_warmup_steps starts from full-precision weights, but {reason}",
        help="remove quantization.lambda_warmup_steps; training goes on from the ternary weights",
    )


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """One line of the manifest's table of quantized layers: logical shape, (out, in) or of a stack of experts
    (experts, out, in), bytes as stored, and whether it is held dequantized.
    """

    layer: str
    method: str
    shape: tuple[int, ...]
    bytes: int
    dequantized: bool


def has_coarse_products(model: nn.Module) -> bool:
    """True if products of some layers are coarser than the compute dtype."""
    return any(isinstance(m, QuantizedLinear) and m.tolerance is not None for m in model.modules())


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    """Every quantized linear layer. Stacks of experts: :func:`ftcli.model.experts.quantized_stacks`."""
    return [
        QuantizedLayer(
            module.layer_name,
            module.method,
            (module.out_features, module.in_features),
            module.stored_bytes if isinstance(module, QuantizedLinear) else module.weight.nbytes,
            isinstance(module, DequantizedLinear),
        )
        for module in model.modules()
        if isinstance(module, QuantizedLinear | DequantizedLinear | TrainedQuantizedLinear)
    ]


def check_weights(model: nn.Module) -> None:
    """Refuses, before anything is computed, packed numbers whose scales are missing.

    Raises:
        FtcliError: FT331 for a quantized layer whose state is lost, and for a plain linear layer whose weight is a raw
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


class PackedReader(Protocol):
    """``packed_files.read`` of a row of :mod:`ftcli.tables.quantizations`: makes layers of files that are quantized."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """Layer and part that the stored tensor ``key`` is, such as ``absmax``; None for a tensor of another kind."""
        ...

    def is_packed(self, weight: Tensor) -> bool:
        """True if the floating tensor that is stored under a layer's ``weight`` holds packed bytes."""
        ...

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> QuantizedLinear:
        """The quantized layer in the place of ``linear``, made of its parts by name; ``weight`` is one of them.

        Raises:
            ValueError: A part is missing or does not fit.
        """
        ...

    def add(self, parts: Mapping[str, Tensor], layer: nn.Module) -> None:
        """Gives ``layer``, which was stored in full precision, the parts that lie beside its weight.

        Raises:
            ValueError: A part does not fit, or the layer takes none.
        """
        ...

    def require(self, model: nn.Module) -> None:
        """Looks whether every layer has what config.json says that it has.

        Raises:
            ValueError: A layer has not.
        """
        ...


def can_be_packed(name: str, module: nn.Module) -> bool:
    """True if files may hold a module's weight packed: every plain linear layer but the head, which the loss reads, and
    the time step's of state-space mixers, which they read themselves.
    """
    return type(module) is nn.Linear and name.rpartition(".")[2] not in ("lm_head", "dt_proj")


def layers_to_quantize(model: PreTrainedModel) -> frozenset[str]:
    """Names of the layers whose full-precision weights are quantized: the linear layers of the language model.

    Towers of other kinds, which are kept and not trained, stay as they are; so do routers, weights that a mixer reads
    itself, what makes layers' own inputs of the embeddings, and what transformers names as too fragile.

    Raises:
        FtcliError: FT336 (exit 3) for a model without any such layer, such as GPT-2, whose layers are no ``nn.Linear``.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    root = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is root)
    fragile = list(model._keep_in_fp32_modules or ())
    found = frozenset(
        name
        for name, module in root.named_modules(prefix=prefix)
        if can_be_packed(name, module)
        and not is_router(name)
        and not is_read_by_mixer(model, name)
        and name.rpartition(".")[2] not in LAYER_INPUT.from_hidden
        and should_convert_module(name, fragile)
    )
    if not found:
        raise FtcliError.single(
            "FT336",
            f"quantization.method: a {type(model).__name__} has no linear layers that could be stored quantized",
            help="remove the section quantization",
        )
    return found


def quantize_linear(linear: nn.Linear, settings: QuantizationConfig, name: str, *, trained: bool = False) -> nn.Linear:
    """``linear``'s weight quantized by ``settings.method``, on the device where it is; its bias is shared.

    ``trained``: with master weights, if the method trains them.

    Raises:
        ValueError: The method stores no quantized linear layers.
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    method = quantizations.row(settings.method)
    if trained and method.training is not None:
        trained_layer: nn.Linear = code_of(method.training.layer)(linear, settings, name)
        return trained_layer
    if method.quantize is None:
        raise ValueError(f"quantization.method {settings.method} does not quantize linear layers")
    layer: QuantizedLinear = code_of(method.quantize)(linear, settings, name)
    return layer


def stores_packed(config: JsonMap, settings: QuantizationConfig) -> bool:
    """True if a model of this config.json has files that are packed by ``settings.method``."""
    files = quantizations.row(settings.method).packed_files
    return files is not None and bool(code_of(files.recognise)(config))


def stores_masters(config: JsonMap, settings: QuantizationConfig) -> bool:
    """True if a model of this config.json has files of masters that the method rounds when they are used."""
    files = quantizations.row(settings.method).packed_files
    return files is not None and files.masters is not None and bool(code_of(files.masters)(config))


def packed_reader(settings: QuantizationConfig, config: JsonMap) -> PackedReader | None:
    """The reader of the method's packed files, for their config.json; None where it has none."""
    files = quantizations.row(settings.method).packed_files
    if files is None:
        return None
    reader: PackedReader = code_of(files.read)(config)
    return reader
