"""Mixtures of experts inside the fused layers: transformers' own router, then the experts on the kernels.

Stacks, adapters and their names stay transformers' and PEFT's, whose own path forms the delta of every expert in each
call. Here A and B are read from PEFT's wrappers and multiplied as they are.

Frozen stacks may be stored quantized. transformers and PEFT take a stack for a parameter of three dimensions, so it has
to be a tensor. This one has the shape and dtype of the stack and holds its packed parts; whatever torch is asked to
compute with it gets the numbers that they stand for, for that one operation. The kernels take the packed form
(:func:`packed_stack`). Another stack's parts can be copied into it; any other write is refused, since it would be lost
with the numbers of that one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from ftkernels.experts import ExpertPacks, ExpertStack, lora_experts
from ftkernels.lora_mlp import lora_mlp
from ftkernels.projection import FrozenWeight
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.model.quantized import QuantizedLayer, as_shardable, is_shardable, no_matrix, unreadable_weights
from ftcli.model.routing import choice_of
from ftcli.tables import code_of, quantizations
from ftcli.tables.architecture import Experts

if TYPE_CHECKING:
    from ftkernels.device import BackendName
    from ftkernels.experts import Save
    from ftkernels.limits import Activation
    from ftkernels.projection import Projection
    from peft.tuners.lora.layer import ParamWrapper


def mixture(
    block: Any,
    described: Experts,
    x: Tensor,
    shared: list[Projection],
    added: Tensor | None,
    *,
    activation: Activation,
    save: Save,
    prepared: tuple[ExpertPacks | Tensor | None, ...] = (),
    routed: Tensor | None = None,
    backend: BackendName,
) -> Tensor:
    """The output of a mixture of experts for its normalised input x (B, S, H), and ``added`` (B, S, H).

    Args:
        block: transformers' module, with PEFT's wrappers in it.
        prepared: of both stacks, the adapters, packed already, or a copy of weights that are trained.
        routed: what the router reads (B, S, H), where that is not x.
        shared: gate, up and down of the expert that every token goes to; empty where there is none.
    """
    read = x if routed is None else routed
    weights, index = choice_of(block.get_submodule(described.router)(read.reshape(-1, x.shape[-1])))
    if shared:
        gate, up, down = shared
        own = lora_mlp(x, gate, up, down, activation=activation, save="input" if save == "input" else "gate_up_once",
                       backend=backend)  # fmt: skip
        assert isinstance(own, Tensor)
        if described.shared_gate is not None:
            own = torch.sigmoid(block.get_submodule(described.shared_gate)(x)) * own
        added = own if added is None else added + own
    shape = (*x.shape[:-1], index.shape[-1])
    first, last = stacks_of(block.experts, described)
    if prepared:
        first, last = (_with(stack, one) for stack, one in zip((first, last), prepared, strict=True))
    return lora_experts(
        x, index.view(shape), weights.view(shape), first, last, unit="clamped" if described.clamped else activation,
        interleaved=described.interleaved, added=added, save=save, backend=backend,
    )  # fmt: skip


def _with(stack: ExpertStack, prepared: ExpertPacks | Tensor | None) -> ExpertStack:
    return replace(stack, copy=prepared) if isinstance(prepared, Tensor) else replace(stack, packed=prepared)


def stacks_of(experts: Any, described: Experts) -> tuple[ExpertStack, ExpertStack]:
    """Both stacks with their active adapters; without those that are disabled or merged."""
    wrappers = {wrapper.parameter_name: wrapper for wrapper in _wrappers(experts)}
    base = base_experts(experts)
    first, last = (_stack(base, name, wrappers, described) for name in ("gate_up_proj", "down_proj"))
    return first, last


def base_experts(experts: Any) -> Any:
    """transformers' module of the experts, beneath PEFT's wrappers."""
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    return experts


def _wrappers(experts: Any) -> Iterator[ParamWrapper]:
    while hasattr(experts, "base_layer"):
        yield experts
        experts = experts.base_layer


def _stack(base: Any, name: str, wrappers: dict[str, ParamWrapper], described: Experts) -> ExpertStack:
    bare = ExpertStack(
        packed_stack(getattr(base, name)),
        int(base.num_experts),
        bias=getattr(base, f"{name}_bias") if described.biases else None,
        transposed=described.transposed,
    )
    wrapper = wrappers.get(name)
    if wrapper is None or wrapper.disable_adapters or wrapper.merged or not wrapper.active_adapters:
        return bare
    adapter = wrapper.active_adapters[0]
    if adapter not in wrapper.lora_A:
        return bare
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    return replace(bare, a=a, b=b, scaling=float(wrapper.scaling[adapter]))


def why_not_experts(block: nn.Module, described: Experts) -> str | None:
    """The reason why the kernels cannot take a layer's experts, as one clause; None if they can."""
    experts = getattr(block, "experts", None)
    base = base_experts(experts)
    # What transformers says of the layout on the class of the experts.
    layout = {
        "is_transposed": described.transposed,
        "is_concatenated": not described.interleaved,
        "has_bias": described.biases,
        "has_gate": True,
    }
    if any(getattr(base, flag, wanted) is not wanted for flag, wanted in layout.items()):
        return "its experts are laid out otherwise"
    for name in ("gate_up_proj", "down_proj"):
        weight, bias = getattr(base, name, None), getattr(base, f"{name}_bias", None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"its experts have no stack {name}"
        trained = weight.requires_grad or (isinstance(bias, Tensor) and bias.requires_grad)
        if trained and base is not experts:
            return "its experts are trained beside their adapters"
    if any(len(wrapper.active_adapters) > 1 for wrapper in _wrappers(experts)):
        return "several adapters are active at once"
    return None


class QuantizedStack(Tensor):
    """(E, O, I) in a floating dtype, stored as a quantized matrix (E * O, I).

    Attributes:
        source: The matrix, or what has its parts.
        method: The recipe's name of the storage format.
        stack_name: Where in the model it is.
    """

    source: FrozenWeight | StackParts
    method: str
    stack_name: str

    @staticmethod
    def __new__(cls, packed: Any, shape: torch.Size, dtype: torch.dtype, method: str, name: str) -> QuantizedStack:
        made: QuantizedStack = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.source, made.method, made.stack_name = packed, method, name
        return made

    def __init__(self, *_: Any) -> None:
        """All is done where it is made."""

    def __repr__(self) -> str:  # type: ignore[override]  # torch's reads memory of numbers, of which there is none
        return f"QuantizedStack({self.stack_name}, {tuple(self.shape)} in {self.method})"

    @property
    def packed(self) -> FrozenWeight:
        """The matrix."""
        return self.source.weight() if isinstance(self.source, StackParts) else self.source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``stack.data = other``, by which modules are moved, takes the other's parts over, too.

        Raises:
            FtcliError: FT332 where the other is no stack.
        """
        sets = func == Tensor.data.__set__  # type: ignore[attr-defined]
        stacks = [each for each in args if isinstance(each, QuantizedStack)]
        if sets and len(stacks) < 2:
            raise _unwritable(stacks[0])
        with torch._C.DisableTorchFunctionSubclass():  # as of any tensor that has `__torch_dispatch__` alone
            found = func(*args, **(kwargs or {}))
        if sets:
            stacks[0].source, stacks[0].method = stacks[1].source, stacks[1].method
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Moving, copying and detaching keep it packed; every other operation gets it dequantized.

        Raises:
            FtcliError: FT332 for an operation that writes into it, but for copying another stack of its kind.
        """
        kwargs = kwargs or {}
        if func in _KEEPING:
            stack: QuantizedStack = args[0]
            dtype, device = kwargs.get("dtype") or stack.dtype, kwargs.get("device") or stack.device
            copied = func is torch.ops.aten.clone.default
            packed = _moved(stack.packed, lambda x: x.to(device, copy=copied))
            return QuantizedStack(packed, stack.shape, dtype, stack.method, stack.stack_name)
        if func in _TAKING and all(isinstance(each, QuantizedStack) for each in args[:2]):
            into, source = args[:2]
            if into.shape == source.shape:
                copied = func is torch.ops.aten.copy_.default
                into.source = _moved(source.packed, lambda x: x.to(into.device, copy=copied))
                into.method = source.method
                return into
        written = kwargs.get("out", args[0] if args else None) if func._schema.is_mutable else None
        if isinstance(written, QuantizedStack):
            raise _unwritable(written)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is stored, on all ranks together."""
        return int(self.source.stored_bytes)  # type: ignore[union-attr]


#: Operations after which a stack is one still.
_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
#: Those that give a stack what another one holds; PEFT's forward goes through the second.
_TAKING = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)


def _unwritable(stack: QuantizedStack) -> FtcliError:
    return no_matrix(stack.stack_name, stack.shape, stack.method)


def _dense(value: Any) -> Any:
    if not isinstance(value, QuantizedStack):
        return value
    return value.packed.dequantize(value.dtype).view(value.shape)


def _moved(packed: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A quantized weight with each tensor of its parts moved."""
    changed = {}
    for field in fields(packed):
        value = getattr(packed, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = move(value)
        elif is_dataclass(value):
            changed[field.name] = _moved(value, move)
    return replace(packed, **changed)


def packed_stack(weight: Tensor) -> Tensor | FrozenWeight:
    """The stack as the kernels take it: (E, O, I), or packed as (E * O, I)."""
    return weight.packed if isinstance(weight, QuantizedStack) else weight


class StackParts(nn.Module):
    """The large parts of a quantized stack as parameters that torch shards, beside it in its module: the stack itself
    is none any more then (:func:`hide_stacks`), and reads them where they are all-gathered.
    """

    def __init__(self, packed: Any) -> None:
        super().__init__()
        self.stored_bytes = packed.stored_bytes
        self._kind = type(packed)
        self._others = {field.name: getattr(packed, field.name) for field in fields(packed)}
        self._dtypes: dict[str, torch.dtype] = {}
        for name in [name for name in _LARGE if name in self._others and is_shardable(self._others[name])]:
            tensor = self._others.pop(name)
            self._dtypes[name] = tensor.dtype
            self.register_parameter(name, nn.Parameter(as_shardable(tensor), requires_grad=False))

    def weight(self) -> FrozenWeight:
        """The matrix, of the parts as they are now."""
        parts = {name: self._parameters[name] for name in self._dtypes}
        views = {name: part.view(self._dtypes[name]) for name, part in parts.items() if part is not None}
        made: FrozenWeight = self._kind(**self._others, **views)
        return made


#: Fields of a packed matrix that grow with it.
_LARGE = ("data", "absmax")


def part_stacks(layer: nn.Module) -> None:
    """Puts the large parts of a layer's quantized stacks into parameters of their own, in place."""
    for module in list(layer.modules()):
        held: dict[str, Any] = dict(module._parameters)
        for name, stack in held.items():
            if isinstance(stack, QuantizedStack) and not isinstance(stack.source, StackParts):
                stack.source = StackParts(stack.source)
                module.add_module(f"{name}_parts", stack.source)


def hide_stacks(layer: nn.Module) -> None:
    """Makes quantized stacks, which have no numbers of their own, attributes of their modules and no parameters."""
    for module in layer.modules():
        for name in [name for name, stack in module._parameters.items() if isinstance(stack, QuantizedStack)]:
            object.__setattr__(module, name, module._parameters.pop(name))


def quantizes_stacks(settings: QuantizationConfig) -> bool:
    """True if the method stores experts quantized, too."""
    return quantizations.row(settings.method).quantize_stack is not None


def is_stack(leaf: str, weight: Tensor) -> bool:
    """True if a parameter is a stack of experts' matrices."""
    return weight.dim() == 3 and leaf in ("gate_up_proj", "down_proj")


#: On a parameter: what it was made of, for the manifest.
_ATTRIBUTE = "_ftcli_dequantized_stack"


def quantized_stack(
    weight: Tensor, settings: QuantizationConfig, dtype: torch.dtype, name: str, *, dequantized: bool = False
) -> nn.Parameter:
    """``weight`` (E, O, I) as the method stores it, on the device where it is; ``dtype``: what it is computed in.

    Args:
        dequantized: Hold the numbers that it stands for, as a plain parameter.

    Raises:
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    quantize = quantizations.row(settings.method).quantize_stack
    assert quantize is not None
    try:
        packed = code_of(quantize)(weight.reshape(-1, weight.shape[-1]), settings)
    except ValueError as error:
        raise unreadable_weights(f"{name} {tuple(weight.shape)}: {error}") from error
    if not dequantized:
        stack = QuantizedStack(packed, weight.shape, dtype, settings.method, name)
        return nn.Parameter(stack, requires_grad=False)
    numbers = nn.Parameter(packed.dequantize(dtype).view(weight.shape), requires_grad=False)
    entry = QuantizedLayer(name, settings.method, tuple(weight.shape), numbers.nbytes, dequantized=True)
    setattr(numbers, _ATTRIBUTE, entry)
    return numbers


def quantized_stacks(model: nn.Module) -> list[QuantizedLayer]:
    """Every stack that is stored quantized, or holds the numbers of one; see ``quantized.quantized_layers``."""
    found = []
    for stack in model.parameters():
        if isinstance(stack, QuantizedStack):
            shape = tuple(stack.shape)
            found.append(QuantizedLayer(stack.stack_name, stack.method, shape, stack.stored_bytes, dequantized=False))
        elif hasattr(stack, _ATTRIBUTE):
            found.append(getattr(stack, _ATTRIBUTE))
    return found
