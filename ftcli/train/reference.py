"""The model that a trained one is compared with: a second one, or the same without its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ftcli.model.initial_adapters import as_base

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@contextmanager
def of_reference(reference: PreTrainedModel | None, model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A block in which the reference can be computed: of adapters it is the model without them."""
    if reference is not None or _is_off(model):
        yield
        return
    with as_base(model):
        yield


def _is_off(model: PreTrainedModel | PeftModel) -> bool:
    """True if its adapters are switched off already: PEFT would switch them on at the end of an inner block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    found = next(layers, None)
    return found is not None and found.disable_adapters
