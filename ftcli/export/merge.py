"""Adds an adapter to its base model: ``W' = cast(float32(W) + s · B A)``, one rounding, tensor by tensor.

s is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA. A is (r, in), B is (out, r), W is (out, in); A and B are
float32. A stack of experts has a product for each of them. PEFT's own merge rounds twice: it rounds s B A to bfloat16
before it adds it. DoRA's weights are then brought to the row lengths that were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import ExitCode, FtcliError
from ftcli.export.tensorfile import TensorToWrite, computed, copied
from ftcli.export.weights import StoredTensors, StoredWeights, untied
from ftcli.model.lora import delta_weight, magnitude_of, merged_weight, row_norms

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class AdapterUpdates:
    """The changes of an adapter to the weights of its base, through PEFT's own layers.

    Attributes:
        layers: PEFT's layer that changes a weight, by the weight's name.

    Args:
        adapted: A model with the adapter; the base's own weights are not looked at.
    """

    def __init__(self, adapted: PeftModel | None) -> None:
        from peft.tuners.lora import LoraLayer
        from peft.utils.other import ModulesToSaveWrapper

        self.layers: dict[str, Any] = {}
        self.whole: dict[str, Tensor] = {}
        for name, module in adapted.get_base_model().named_modules() if adapted is not None else ():
            plain = name.replace(".base_layer", "")
            if isinstance(module, LoraLayer):
                self.layers[f"{plain}.{_leaf(module)}"] = module
            elif isinstance(module, ModulesToSaveWrapper):
                trained = module.modules_to_save[module.active_adapters[0]]
                self.whole |= {f"{plain}.{leaf}": parameter.data for leaf, parameter in trained.named_parameters()}

    @property
    def changed(self) -> frozenset[str]:
        return frozenset({*self.layers, *self.whole})

    @torch.no_grad()
    def merged(self, name: str, weight: Tensor) -> Tensor:
        """A weight of the base with the adapter in it, in float32; the weight itself where the adapter has none."""
        if name in self.whole:
            return self.whole[name].float()
        layer = self.layers.get(name)
        return weight if layer is None else merged_weight(layer, weight)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The dtype that each tensor is stored in.

    Attributes:
        dtype: What weights are rounded to; None: each to the dtype that the base stores it in.
        quantized: The dtype of weights that the base stores quantized.
        kept: Answers whether a tensor keeps its dtype whatever ``dtype`` says: the model says so of fragile ones.
    """

    dtype: torch.dtype | None
    quantized: torch.dtype
    kept: Callable[[str], bool]

    def of(self, name: str, found: StoredTensors) -> torch.dtype:
        """The dtype of a tensor of the merged model that the base has as ``found``."""
        stored = self.quantized if found.packed else found.dtype
        if self.dtype is None or not stored.is_floating_point or self.kept(name):
            return stored
        return self.dtype

    def applied(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """``tensor`` in ``dtype``. Raises FtcliError FT769 (exit 3) where a number is too large for it."""
        rounded = tensor.to(dtype)
        if dtype == torch.float16 and tensor.dtype != dtype:
            over = torch.isinf(rounded) & torch.isfinite(tensor)
            if bool(over.any()):
                largest = float(tensor[over].abs().max())
                message = f"{name} holds {largest:.6g}, and the largest float16 is 65504"
                help = "use export.dtype: bfloat16, which has float32's range"
                raise FtcliError.single("FT769", message, exit_code=ExitCode.PREFLIGHT, help=help)
        return rounded


def rounding_of(model: PreTrainedModel, dtype: torch.dtype | None, quantized: torch.dtype) -> Rounding:
    """The storage of the weights of ``model``: see :class:`Rounding`."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    fragile = [part for name in names for part in getattr(model, name, None) or ()]

    def kept(name: str) -> bool:
        return not all(should_convert_module(each, fragile) for each in (name, name.rpartition(".")[0]))

    return Rounding(dtype, quantized, kept)


def outputs(base: StoredWeights, adapter: AdapterUpdates, rounding: Rounding) -> list[TensorToWrite]:
    """The merged model's tensors as they are written: under the base's names, and in its order.

    What is neither trained nor converted is copied byte for byte.

    Raises FtcliError: While they are written, FT769 as :meth:`Rounding.applied`.
    """
    found: list[TensorToWrite] = []
    for stored in base.stored:
        if is_copied(base, adapter, stored):
            found += [_converted(stored, i, rounding) for i in range(len(stored.keys))]
        elif stored.roles and not stored.packed:
            found += _parts(base, adapter, rounding, stored)
        else:
            key = next(k for k, role in zip(stored.keys, stored.roles or ("weight",), strict=True) if role == "weight")
            found.append(_one(base, adapter, rounding, stored.names[0], key))
    names = untied(base, adapter.changed)
    return found + [_one(base, adapter, rounding, name, base.renaming.key_of(name)) for name in names]


def is_copied(base: StoredWeights, adapter: AdapterUpdates, stored: StoredTensors) -> bool:
    """True if the merged model's tensors are those of the file, but for the dtype."""
    changed = adapter.changed
    return not stored.packed and all(base.is_as_stored(name) and name not in changed for name in stored.names)


def _converted(stored: StoredTensors, number: int, rounding: Rounding) -> TensorToWrite:
    key, file = stored.keys[number], stored.files[number]
    if not stored.names or file.dtype(key) == (wanted := rounding.of(stored.names[0], stored)):
        return copied(key, file)
    entry = file.entries[key]
    return computed(key, entry.shape, wanted, lambda: rounding.applied(key, file.read(key), wanted))


def _one(base: StoredWeights, adapter: AdapterUpdates, rounding: Rounding, name: str, key: str) -> TensorToWrite:
    dtype = rounding.of(name, base.of(name))

    def make() -> Tensor:
        return rounding.applied(name, adapter.merged(name, base.read(name)), dtype)

    return computed(key, base.shape(name), dtype, make)


def _parts(
    base: StoredWeights, adapter: AdapterUpdates, rounding: Rounding, stored: StoredTensors
) -> list[TensorToWrite]:
    """Parts that are joined, merged and taken apart again when the first of them is written."""
    dtype = rounding.of(stored.names[0], stored)
    made: dict[str, Tensor] = {}

    def make(key: str) -> Tensor:
        if not made:
            whole = {name: base.read(name) for name in stored.names}
            for name in stored.names:
                whole[name] = rounding.applied(name, adapter.merged(name, whole[name]), dtype)
            made.update(base.renaming.part(whole, stored.keys))
        return made.pop(key)

    entries = [(key, file.entries[key].shape) for key, file in zip(stored.keys, stored.files, strict=True)]
    return [computed(key, shape, dtype, partial(make, key)) for key, shape in entries]


@contextmanager
def rounded_as_merged(adapted: PeftModel, dtype_of: Callable[[str], torch.dtype]) -> Iterator[None]:
    """While it is entered, ``adapted`` answers as the merged model will, rounding included.

    In each forward a layer's W is ``cast(W + s B A) - s B A``, and the layer adds its adapter as it always does. Its
    answers differ from the merged model's by the order of float32 sums, if what a layer adds is what is merged. The
    modules that are trained whole are rounded for good, as merging will do.

    Args:
        adapted: Base and adapter, both in float32. Of a base that is read lazily (``ftcli.export.lazy``), entered after
            that.
    """
    adapter = AdapterUpdates(adapted)
    with ExitStack() as stack, torch.no_grad():
        for name, module in adapter.layers.items():
            for handle in _round_in_forward(module, dtype_of(name)):
                stack.callback(handle.remove)
        for name, trained in adapter.whole.items():
            trained.copy_(trained.to(dtype_of(name)))
        yield


def _round_in_forward(module: Any, dtype: torch.dtype) -> list[Any]:
    kept: list[tuple[Tensor, Tensor | None]] = []

    def before(*_: object) -> None:
        weight, change, magnitude = _weight(module), delta_weight(module), magnitude_of(module)
        kept.append((weight.data, None if magnitude is None else magnitude.data))
        weight.data = merged_weight(module, weight.data).to(dtype).float().sub_(change)
        if magnitude is not None:  # so that the lengths that the layer gives the rows are those that they have
            magnitude.data = row_norms(module, weight.data + change)

    def after(*_: object) -> None:
        magnitude = magnitude_of(module)
        _weight(module).data, lengths = kept.pop()
        if magnitude is not None and lengths is not None:
            magnitude.data = lengths

    # Before whoever puts a place holder back, which would be given the weight for good.
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, prepend=True)]


def _weight(module: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = getattr(module.get_base_layer(), _leaf(module))
    return weight


def _leaf(module: Any) -> str:
    """The name of the weight that a layer adapts; a stack of experts has one of its own."""
    return str(getattr(module, "parameter_name", "weight"))
