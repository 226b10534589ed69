"""Adapters that do not begin at nothing: those that are gone on from, and those that begin as a part of the base
weights (PiSSA, OLoRA), with the plain LoRA that they are saved as.

Training starts from W = R + s B₀ A₀, with R in the place of the base weight. What is learnt is the difference

    W' - W = s (B A - B₀ A₀) = s [B | -B₀] [A ; A₀]

which is a plain adapter of twice the rank on the published base. That is what checkpoints and results hold, and its
halves give back A and B to the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAGNITUDE = ".lora_magnitude_vector.weight"
_ATTRIBUTE, _START = "_ftcli_initial_adapters", "_ftcli_start"


@dataclass(frozen=True, slots=True)
class InitialAdapters:
    """A₀ (r, in) and B₀ (out, r) of each adapter on the host, by the name that PEFT's files have for its module."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def as_plain(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Trained tensors by their names in PEFT's files, with A over A₀ and B beside -B₀."""
        plain = dict(trained)
        for name, (a, b) in self.pairs.items():
            now_a, now_b = trained[name + _A], trained[name + _B]
            plain[name + _A] = torch.cat([now_a, a.to(now_a)], dim=0)
            plain[name + _B] = torch.cat([now_b, -b.to(now_b)], dim=1)
        return plain

    def rewrite(self, folder: Path) -> None:
        """Turns the adapter that PEFT has written into ``folder`` into the plain one."""
        from safetensors.torch import load_file, save_file

        save_file(self.as_plain(load_file(folder / _FILE)), folder / _FILE, metadata={"format": "pt"})
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        more = math.sqrt(2) if config.get("use_rslora") else 2  # alpha / r, or alpha / sqrt(r), stays what it is
        config["init_lora_weights"] = True
        config["r"] *= 2
        config["lora_alpha"] *= more
        config["rank_pattern"] = {name: 2 * rank for name, rank in (config.get("rank_pattern") or {}).items()}
        config["alpha_pattern"] = {name: more * alpha for name, alpha in (config.get("alpha_pattern") or {}).items()}
        (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")

    @torch.no_grad()
    def take(self, model: PeftModel, folder: Path) -> InitialAdapters:
        """Loads the adapter that :meth:`rewrite` has left in ``folder``.

        Where A₀ and B₀ were others there, as on another machine, the base weights are made to fit those.

        Returns:
            The initial adapters from now on.

        Raises:
            KeyError: the file lacks a trained tensor.
        """
        from safetensors.torch import load_file

        stored = load_file(folder / _FILE)
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (a, b) in self.pairs.items():
            rank = a.shape[0]
            both_a, both_b = stored[name + _A], stored[name + _B]
            stored[name + _A], stored[name + _B] = both_a[:rank], both_b[:, :rank]
            pairs[name] = (both_a[rank:].contiguous(), -both_b[:, rank:].contiguous())
            if not torch.equal(a, pairs[name][0]) or not torch.equal(b, pairs[name][1]):
                _move(model.get_submodule(name), (a, b), pairs[name])
        for name, parameter in trained_by_file_name(model).items():
            parameter.copy_(stored[name])
        return InitialAdapters(pairs)


def _move(layer: Any, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    """Puts B₀ A₀ back into a layer's base weight and takes another one out."""
    weight = layer.get_base_layer().weight
    (a, b), (new_a, new_b) = ((a.to(weight.device), b.to(weight.device)) for a, b in (before, after))
    change = layer.scaling[layer.active_adapters[0]] * (b @ a - new_b @ new_a)
    change = change.t() if layer.fan_in_fan_out else change
    weight.copy_((weight.float() + change).to(weight.dtype))


def trained_by_file_name(model: Any) -> dict[str, Tensor]:
    """Trained tensors by their names in PEFT's files, without the adapter's name in them."""
    active = f".{model.active_adapter}"

    def of_file(name: str) -> str:
        short = name.replace(".modules_to_save" + active, "").replace(active, "")
        return short.removesuffix(".weight") if short.endswith(_MAGNITUDE) else short

    return {of_file(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def remember_initial(model: PeftModel) -> None:
    """Notes the adapters of a model that has just got them."""
    from peft.tuners.lora import LoraLayer

    def copy(weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", copy=True)

    active = model.active_adapter
    pairs = {
        name: (copy(module.lora_A[active].weight), copy(module.lora_B[active].weight))
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and active in module.lora_A
    }
    setattr(model, _ATTRIBUTE, InitialAdapters(pairs))


def initial_of(model: Any) -> InitialAdapters | None:
    """The adapters that ``model`` began with, where they are a part of its base weights; else None."""
    found: InitialAdapters | None = getattr(model, _ATTRIBUTE, None)
    return found


def load_over(model: PeftModel, initial: InitialAdapters, folder: Path) -> None:
    """Loads what :meth:`InitialAdapters.rewrite` has left in ``folder``. Raises KeyError as ``take``."""
    setattr(model, _ATTRIBUTE, initial.take(model, folder))


def remember_start(model: Any) -> None:
    """Notes all that is trained of a model as it is now: from here on this is the base that it is compared with."""
    trained = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if parameter.requires_grad]
    setattr(model, _START, trained)


def start_of(model: Any) -> Sequence[tuple[Tensor, Tensor]]:
    """The trained parameters of a model with their values at the start that was noted; empty where none was."""
    found: Sequence[tuple[Tensor, Tensor]] = getattr(model, _START, ())
    return found


def as_base(model: PreTrainedModel | PeftModel) -> AbstractContextManager[None]:
    """A block in which a model with adapters computes what its base does, or did at the start that was noted. Raises
    ValueError if it has none.
    """
    return AdapterSwitch(model).off()


class AdapterSwitch:
    """Lets a model with adapters compute what its base does, or did at the start that was noted.

    Layers are found once, and PEFT's `disable_adapter` is not asked: it reads the state of every module and adapter
    first, tens of milliseconds of an 8B, for which each step with a reference would wait. Raises ValueError if the
    model has no adapters.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
        if not layers:
            raise ValueError("a model without adapters has no base that it could compute")
        self._model, self._layers = model, layers
        #: Modules that are trained whole, which have their originals beside them.
        self._whole = [layer for layer in layers if isinstance(layer, AuxiliaryTrainingWrapper)]

    @contextmanager
    def off(self) -> Iterator[None]:
        """A block without adapters, or with those of the start; what was switched off before stays so behind it."""
        if start := start_of(self._model):
            with _as_started(start):
                yield
            return
        initial = initial_of(self._model)
        switched = [layer for layer in (self._whole if initial else self._layers) if not layer.disable_adapters]
        for layer in switched:
            layer.enable_adapters(False)
        try:
            with nullcontext() if initial is None else _as_begun(self._model, initial):
                yield
        finally:
            for layer in switched:
                layer.enable_adapters(True)


@contextmanager
def _as_started(start: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A block in which these parameters hold what they started with."""
    with torch.no_grad():
        now = [parameter.detach().clone() for parameter, _ in start]
        for parameter, value in start:
            parameter.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), value in zip(start, now, strict=True):
                parameter.copy_(value)


@contextmanager
def _as_begun(model: Any, initial: InitialAdapters) -> Iterator[None]:
    """A block in which adapters are those that a model began with."""
    trained = trained_by_file_name(model)
    kept = {name: tensor.detach().clone() for name, tensor in trained.items() if name.endswith((_A, _B))}
    with torch.no_grad():
        for name, (a, b) in initial.pairs.items():
            trained[name + _A].copy_(a)
            trained[name + _B].copy_(b)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                trained[name].copy_(tensor)
