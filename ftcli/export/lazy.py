"""Runs a model whose weights are read layer by layer: a layer's weights are in memory only while it computes.

The largest layer sets the memory, not the model: an 8B model's logits on a machine of 8 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Reads a weight by its name in the model.
Read = Callable[[str], Tensor]
#: Elements of a layer that is read as a whole, 4 GiB in float32; of larger ones each module is read by itself.
WHOLE_LAYER = 1 << 30


@dataclass(frozen=True, slots=True)
class _Slot:
    """A weight of ``owner`` that ``name`` is read for, a parameter or a buffer that is stored."""

    owner: nn.Module
    leaf: str
    name: str

    @property
    def _table(self) -> dict[str, Any]:
        return self.owner._parameters if self.leaf in self.owner._parameters else self.owner._buffers

    @property
    def value(self) -> Tensor:
        value: Tensor = self._table[self.leaf]
        return value

    def put(self, value: Tensor) -> None:
        self._table[self.leaf] = value

    def fill(self, read: Read) -> None:
        value = read(self.name)
        if self.leaf in self.owner._parameters:
            self.put(nn.Parameter(value.float(), requires_grad=False))
        else:
            self.put(value.to(self.value.dtype))


@contextmanager
def computing_from(model: nn.Module, read: Read, stored: Collection[str] = ()) -> Iterator[None]:
    """While it is entered, ``model`` computes with what ``read`` answers, in float32.

    A layer's weights are read before it computes, all at once where it is not too large: some modules compute with the
    weights of those inside them, and never call them.

    Args:
        model: Its parameters are place holders of the right shape (``ftcli.export.source.unwritten``). With an adapter
            of PEFT on it, the adapter's own parameters are left as they are.
        stored: Names that are stored; buffers among them are read as parameters are.
    """
    handles = []
    for module, slots in _units(model, stored):
        # Hooks that look at the weights themselves come after the first of these, and before the second.
        handles += [module.register_forward_pre_hook(_fill(slots, read)), module.register_forward_hook(_clear(slots))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(model: nn.Module, stored: Collection[str]) -> Iterator[tuple[nn.Module, list[_Slot]]]:
    """Each module that computes with weights of the base model, or layer of such modules, and which."""
    whole: Any = model
    base: nn.Module = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    layers = {
        f"{name}.{number}": layer
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList)
        for number, layer in module.named_children()
    }
    gathered: dict[str, list[_Slot]] = {}
    for path, module, slots in _slots(base, stored, _adapters() if base is not whole else ()):
        layer = next((name for name in layers if path == name or path.startswith(f"{name}.")), None)
        if layer is None or _elements(layers[layer]) > WHOLE_LAYER:
            yield module, slots
        else:
            gathered.setdefault(layer, []).extend(slots)
    for name, slots in gathered.items():
        yield layers[name], slots


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapters() -> tuple[type, ...]:
    from peft.tuners.lora import LoraLayer

    return (LoraLayer,)


def _slots(
    base: nn.Module, stored: Collection[str], adapters: tuple[type, ...]
) -> Iterator[tuple[str, nn.Module, list[_Slot]]]:
    inner: set[int] = set()
    for path, module in base.named_modules():
        if id(module) in inner or ".modules_to_save." in f".{path}.":
            continue
        adapted: Any = module
        # DoRA and stacks of experts look at the weight outside of the layer that has it.
        owner = adapted.get_base_layer() if isinstance(module, adapters) else module
        if owner is not module:  # what the owner has inside of it computes by itself, as a router's bias does
            inner |= {id(each) for each in module.modules()} - {id(each) for each in owner.children()}
        plain = path.replace(".base_layer", "").replace(".original_module", "")
        names = {leaf: f"{plain}.{leaf}".removeprefix(".") for leaf in (*owner._parameters, *owner._buffers)}
        slots = [
            _Slot(owner, leaf, name)
            for leaf, name in names.items()
            if owner._parameters.get(leaf) is not None or (owner._buffers.get(leaf) is not None and name in stored)
        ]
        if slots:
            yield path, module, slots


def _fill(slots: list[_Slot], read: Read) -> Callable[..., None]:
    def before(*_: object) -> None:
        for slot in slots:
            slot.fill(read)

    return before


def _clear(slots: list[_Slot]) -> Callable[..., None]:
    holders = [slot.value for slot in slots]

    def after(*_: object) -> None:
        for slot, holder in zip(slots, holders, strict=True):
            slot.put(holder)

    return after
