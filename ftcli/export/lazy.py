"""Runs a model whose weights are read module by module: what a module needs is there while it computes, and no longer.

The largest module sets the memory, not the model: an 8B model's logits on a machine of 8 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Reads a weight by its name in the model.
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A weight of ``owner`` that ``name`` is read for."""

    owner: nn.Module
    leaf: str
    name: str


@contextmanager
def reading(model: nn.Module, read: Read) -> Iterator[None]:
    """While it is entered, ``model`` computes with what ``read`` answers, in float32.

    Args:
        model: Its parameters are place holders of the right shape (``ftcli.export.loading.unwritten``). With an adapter
            of PEFT on it, the adapter's own parameters are left as they are.
    """
    handles = []
    for module, slots in _slots(model):
        handles += [module.register_forward_pre_hook(_fill(slots, read)), module.register_forward_hook(_clear(slots))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, list[_Slot]]]:
    """Each module that computes with weights of the base model, and which."""
    whole: Any = model
    base = whole.get_base_model() if hasattr(model, "get_base_model") else whole
    adapters = _adapters() if base is not whole else ()
    inner: set[int] = set()
    for path, module in base.named_modules():
        if id(module) in inner or ".modules_to_save." in f".{path}.":
            continue
        adapted: Any = module
        # DoRA and stacks of experts look at the weight outside of the layer that has it.
        owner = adapted.get_base_layer() if isinstance(module, adapters) else module
        if owner is not module:
            inner |= {id(each) for each in module.modules()}
        plain = path.replace(".base_layer", "").replace(".original_module", "")
        slots = [_Slot(owner, leaf, f"{plain}.{leaf}") for leaf, p in owner._parameters.items() if p is not None]
        if slots:
            yield module, slots


def _adapters() -> tuple[type, ...]:
    from peft.tuners.lora import LoraLayer

    return (LoraLayer,)


def _fill(slots: list[_Slot], read: Read) -> Callable[..., None]:
    def before(*_: object) -> None:
        for slot in slots:
            value = read(slot.name).float()
            slot.owner._parameters[slot.leaf] = nn.Parameter(value, requires_grad=False)

    return before


def _clear(slots: list[_Slot]) -> Callable[..., None]:
    holders = [slot.owner._parameters[slot.leaf] for slot in slots]

    def after(*_: object) -> None:
        for slot, holder in zip(slots, holders, strict=True):
            slot.owner._parameters[slot.leaf] = holder

    return after
