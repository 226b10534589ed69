"""Builds a model with quantized layers without ever holding it in full precision.

The model is made without memory; each weight is drawn or read by itself on the device where it will live, quantized
where it is a linear layer's, and its full-precision form freed before the next one. At the peak there are the quantized
model and one layer's matrix; packed files are gathered in host memory first.

Weights come from safetensors, in full precision, in a form that is read into it (:mod:`ftcli.tables.released`) or in
the packed layout that the method reads, or from GGUF files of ternary weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.facts.weights import inspect_weights
from ftcli.gguf import ReadFile, from_file, heads_of, names_of, require_gguf_package
from ftcli.model.backbone import decoder_layers
from ftcli.model.experts import is_stack, quantized_stack, quantizes_stacks
from ftcli.model.fsdp import UNSHARDED_LAYERS, RankShards, has_shards_only, keep_shards
from ftcli.model.pretrained import COMPUTED, hollow, weight_files
from ftcli.model.quantized import (
    DequantizedLinear,
    PackedReader,
    QuantizedLinear,
    TrainedQuantizedLinear,
    can_be_packed,
    layers_to_quantize,
    packed_reader,
    quantize_linear,
    rounded_before,
    stores_masters,
    stores_packed,
    unreadable_weights,
)
from ftcli.model.released import form_of, grouped, read_group
from ftcli.model.renaming import Renaming
from ftcli.plain import JsonMap
from ftcli.tables import code_of, quantizations
from ftcli.tables.gguf import architecture_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelStorage:
    """The storage of a model: on ``device``, linear layers quantized by ``settings``, everything else in ``dtype``.

    The first ``dequantized_layers`` decoder layers are held dequantized where the method allows it. ``trained``: the
    base weights are, if the method trains them. ``recognises``: weights in full precision are no masters, so those that
    are quantized values already are kept as these. ``shards``: this process's shard of each decoder layer, where
    it is one of several ranks that share the weights. ``stacks``: experts are quantized, too, where the method stores
    them: of families whose experts the kernels compute. transformers' code would keep them dequantized for backward.
    """

    settings: QuantizationConfig
    dtype: torch.dtype
    device: torch.device
    dequantized_layers: int = 0
    trained: bool = False
    recognises: bool = False
    shards: RankShards | None = None
    stacks: bool = False

    def quantized(self, linear: nn.Linear, name: str) -> nn.Linear:
        """The layer of full precision as it is held."""
        already = quantizations.row(self.settings.method).already
        if self.recognises and already is not None:
            found: QuantizedLinear | None = code_of(already)(linear, name)
            if found is not None:
                return self.held(found)
        layer = quantize_linear(linear, self.settings, name, trained=self.trained)
        return self.held(layer) if isinstance(layer, QuantizedLinear) else layer

    def takes_stack(self, name: str, weight: Tensor) -> bool:
        """True if a parameter is a stack of experts that is held quantized."""
        return self.stacks and quantizes_stacks(self.settings) and is_stack(name.rpartition(".")[2], weight)

    def stack(self, weight: Tensor, name: str) -> nn.Parameter:
        """A stack of full precision as it is held: quantized, or the numbers that this stands for."""
        return quantized_stack(weight, self.settings, self.dtype, name, dequantized=self._dequantized(name))

    def _dequantized(self, name: str) -> bool:
        found = _DECODER_LAYER.search(name)
        return found is not None and int(found[1]) < self.dequantized_layers

    def held(self, layer: QuantizedLinear) -> nn.Linear:
        """The layer itself, or its numbers in ``dtype``; where it is trained, its masters."""
        training = quantizations.row(self.settings.method).training
        if self.trained and training is not None:
            if self.settings.lambda_warmup_steps:
                raise rounded_before(f"{layer.layer_name} holds quantized values")
            masters: nn.Linear = code_of(training.of_packed)(layer)
            return masters
        if self._dequantized(layer.layer_name) and quantizations.row(self.settings.method).holds_dequantized:
            return DequantizedLinear(layer, self.dtype)
        return layer


def random_quantized(config: PretrainedConfig, holding: ModelStorage, attention: str, seed: int) -> PreTrainedModel:
    """A model of random weights, each drawn on ``device``: on one kind of device a seed gives the same weights."""
    model = _hollow(config, holding.dtype, attention)
    compute_buffers(model, holding.device)
    torch.manual_seed(seed)
    shared: dict[nn.Parameter, nn.Parameter] = {}
    chosen = layers_to_quantize(model)
    owners = _owners(model)
    for name, module in list(model.named_modules()):
        _give_memory(module, holding.device, shared)
        for child in module.children():  # a mixture draws its router's weights itself
            if not isinstance(child, nn.Linear):
                _give_memory(child, holding.device, shared)
        owners[module]._init_weights(module)
        _quantize_stacks(module, name, holding, shared)
        if name in chosen:
            assert isinstance(module, nn.Linear)
            model.set_submodule(name, holding.quantized(module, name))
            full = module._parameters.pop("weight")  # the list above holds the module
            shared = {hollow: given for hollow, given in shared.items() if given is not full}
            del full
        keep_shards_of(model, name, holding)
    _require_drawn(model)
    if holding.shards is not None:
        keep_shards(model, holding.shards)
    return model.eval()


def _require_drawn(model: PreTrainedModel) -> None:
    """FT336 for parameters that only the constructors of transformers' modules give values to, which are lost here."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.is_meta and bool(parameter.isnan().any()):
            raise FtcliError.single(
                "FT336",
                f"quantization.method: transformers has no random start for {name}, so that weights of this family "
                "cannot be drawn quantized",
                exit_code=ExitCode.PREFLIGHT,
                help="name a folder with weights, or train with quantization.method: none",
            )


def _quantize_stacks(
    module: nn.Module, name: str, holding: ModelStorage, shared: dict[nn.Parameter, nn.Parameter]
) -> None:
    """A module's own stacks of experts, as they are held; what they were made of is in nobody's hands any more."""
    for leaf, weight in list(module._parameters.items()):
        if weight is not None and holding.takes_stack(f"{name}.{leaf}", weight):
            module._parameters[leaf] = holding.stack(weight, f"{name}.{leaf}")
            for key in [hollow for hollow, given in shared.items() if given is weight]:
                del shared[key]


def keep_shards_of(model: PreTrainedModel, name: str, holding: ModelStorage) -> None:
    """Keeps only this rank's shard of the decoder layer around ``name``, once the whole layer is loaded.

    The first layers stay whole.
    """
    found = _DECODER_LAYER.search(name)
    if holding.shards is None or found is None or int(found[1]) < UNSHARDED_LAYERS:
        return
    layer = decoder_layers(model)[int(found[1])]
    if not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())) and not has_shards_only(layer):
        holding.shards.keep(layer)


def load_quantized(
    source: str, config: PretrainedConfig, holding: ModelStorage, attention: str, *, revision: str | None, offline: bool
) -> PreTrainedModel:
    """The weights of ``source`` (a folder or a Hub id), linear layers quantized from the dtype they are stored in.

    Raises:
        OSError: no safetensors files can be found.
        safetensors.SafetensorError: a file is damaged.
        FtcliError: FT323 for tensors that are missing, of another shape, or that the model has no place for.
    """
    # A checkpoint that is quantized already keeps some layers in full precision on purpose (llm_int8_skip_modules).
    raw = config.to_dict()
    # The GGUF file of a folder without other weights, where the method reads it.
    gguf = inspect_weights(Path(source)).gguf if quantizations.row(holding.settings.method).reads_gguf else None
    stored_quantized = gguf is None and stores_packed(raw, holding.settings)
    model = _hollow(config, holding.dtype, attention)
    compute_buffers(model, holding.device)
    renaming = Renaming(model)
    quantizes = quantizations.row(holding.settings.method).quantize is not None
    chosen = frozenset[str]() if stored_quantized or not quantizes else layers_to_quantize(model)
    holding = replace(holding, recognises=gguf is not None or not stores_masters(raw, holding.settings))
    reader = packed_reader(holding.settings, raw) if gguf is None else None
    packed: dict[str, dict[str, Tensor]] = {}
    tensors = (
        _tensors(source, revision, offline, raw, holding) if gguf is None else ternary_tensors(gguf, model, chosen)
    )
    for key, tensor in tensors:
        found = None if reader is None else reader.part_of(key)
        if found is not None:
            layer, part = found
            packed.setdefault(renaming.name_of(f"{layer}.weight")[0], {})[part] = tensor
            continue
        name, pattern = renaming.name_of(key)
        _place_finished(model, name, packed, holding, reader)
        if name not in renaming.names:
            require_ignorable(model, key)
        elif pattern is not None:
            renaming.keep_part(key, name, pattern, tensor)
            _place_joined(model, renaming, holding, chosen, whole=name)
        elif _is_packed(model, name, tensor, reader):
            packed.setdefault(name, {})["weight"] = tensor
        else:
            _place(model, name, tensor, holding, chosen)
            keep_shards_of(model, name, holding)
    for name, parts in packed.items():
        _place_packed(model, name, parts, holding, reader)
        keep_shards_of(model, name, holding)
    _place_joined(model, renaming, holding, chosen)
    model.tie_weights()
    if holding.shards is not None:
        keep_shards(model, holding.shards)
    _require_complete(model)
    if reader is not None:
        try:
            reader.require(model)
        except ValueError as error:
            raise unreadable_weights(str(error)) from error
    model.requires_grad_(holding.trained)
    return model.eval()


def _hollow(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # transformers would look for the package that wrote it
    return hollow(config, dtype=dtype, attn_implementation=attention)


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Memory for all buffers, and what transformers computes for those that are not stored: rotary tables and the like.

    A module's own class need not know them: a model fills in some of its layers' (Falcon-H1), and a tower is a model of
    its own. Parameters without memory are not drawn: it would do nothing, and takes longer than all else.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)

    undrawn: list[Any] = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in undrawn:
        parameter._is_hf_initialized = True  # what transformers leaves as it is
    with torch.no_grad():
        for module, owner in reversed(_owners(model).items()):
            owner._init_weights(module)
    for parameter in undrawn:
        del parameter._is_hf_initialized


def _owners(model: PreTrainedModel) -> dict[nn.Module, PreTrainedModel]:
    """For each module, outer ones first, the innermost model that it is a part of: its config has the module's values.

    A model that takes images as well has one for the text inside.
    """
    from transformers import PreTrainedModel

    # Without a function that calls itself: its closure would keep all modules, and full weights, until a collection.
    found: dict[nn.Module, PreTrainedModel] = {model: model}
    for module in model.modules():
        for child in module.children():
            found[child] = child if isinstance(child, PreTrainedModel) else found[module]
    return found


def _give_memory(module: nn.Module, device: torch.device, shared: dict[nn.Parameter, nn.Parameter]) -> None:
    """Memory for a module's own parameters, NaN until it is drawn; one that two modules share stays shared."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and parameter.is_meta:
            if parameter not in shared:
                undrawn = float("nan") if parameter.is_floating_point() else 0
                shared[parameter] = nn.Parameter(torch.full_like(parameter, undrawn, device=device))
            module._parameters[name] = shared[parameter]


def _tensors(
    source: str, revision: str | None, offline: bool, config: JsonMap, holding: ModelStorage
) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every stored tensor, one in memory at a time; those that ``config`` says are in a packed form
    in full precision, on the device.

    Of files one is open at a time, beside that in which the other parts of a weight are.
    """
    from safetensors import safe_open

    paths, form = weight_files(source, revision, offline), form_of(config)
    places: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    opened: dict[Path, Any] = {}

    def read(key: str) -> Tensor:
        path = places[key]
        if path not in opened:
            for other in list(opened)[:-1]:
                del opened[other]
            opened[path] = safe_open(path, framework="pt")
        tensor: Tensor = opened[path].get_tensor(key)
        return tensor

    for name, group in grouped(places, form).items():
        yield name, read_group(form, name, group, read, holding.dtype, holding.device)


def _place_finished(
    model: PreTrainedModel,
    name: str,
    packed: dict[str, dict[str, Tensor]],
    holding: ModelStorage,
    reader: PackedReader | None,
) -> None:
    """Makes layers of packed tensors that have come before ``name``'s and are whole, so that the host need not hold
    those of all layers. What is not whole may go on in the next file, and is judged at the end.
    """
    for other in [each for each in packed if each != name]:
        with suppress(FtcliError):
            _place_packed(model, other, packed[other], holding, reader)
            del packed[other]
            keep_shards_of(model, other, holding)


def _place_joined(
    model: PreTrainedModel,
    renaming: Renaming,
    holding: ModelStorage,
    chosen: Collection[str],
    whole: str | None = None,
) -> None:
    """Places what parts make, of all names or, once all of its parts are there, of ``whole``."""
    try:
        for name, tensor in renaming.joined(whole):
            _place(model, name, tensor, holding, chosen)
            keep_shards_of(model, name, holding)
    except (RuntimeError, ValueError) as error:
        raise unreadable_weights(f"stacks of experts cannot be put together: {first_line(error)}") from error


def require_ignorable(model: PreTrainedModel, key: str) -> None:
    """Raises FtcliError FT323 for a stored tensor that the model has no place for, and may not ignore."""
    patterns = [COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if not any(re.search(pattern, key) for pattern in patterns):
        raise unreadable_weights(f"the model has no place for the stored tensor {key}")


def _is_packed(model: nn.Module, name: str, tensor: Tensor, reader: PackedReader | None) -> bool:
    """True if a tensor that is stored under a parameter's name holds packed bytes, of integers or of another dtype."""
    if not tensor.dtype.is_floating_point:
        return True
    layer, _, leaf = name.rpartition(".")
    is_weight = leaf == "weight" and can_be_packed(layer, model.get_submodule(layer))
    return is_weight and reader is not None and reader.is_packed(tensor)


def _place(model: nn.Module, name: str, tensor: Tensor, holding: ModelStorage, chosen: Collection[str]) -> None:
    """One full-precision tensor to its place; the weights of the ``chosen`` layers are quantized."""
    layer, _, leaf = name.rpartition(".")
    module = model.get_submodule(layer)
    is_parameter = module._parameters.get(leaf) is not None
    wanted: Tensor | None = module._parameters[leaf] if is_parameter else module._buffers[leaf]
    assert wanted is not None
    if wanted.shape != tensor.shape:
        raise unreadable_weights(f"{name} is stored with shape {tuple(tensor.shape)} and must be {tuple(wanted.shape)}")
    if not is_parameter:
        module._buffers[leaf] = tensor.to(holding.device, wanted.dtype)
    elif leaf == "weight" and layer in chosen:
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(tensor.to(holding.device), requires_grad=False)
        model.set_submodule(layer, holding.quantized(module, layer))
    elif holding.takes_stack(name, tensor):
        module._parameters[leaf] = holding.stack(tensor.to(holding.device), name)
    else:
        placed = tensor.to(holding.device, holding.dtype)
        module._parameters[leaf] = nn.Parameter(placed, requires_grad=False)


def _place_packed(
    model: nn.Module, name: str, parts: Mapping[str, Tensor], holding: ModelStorage, reader: PackedReader | None
) -> None:
    layer = name.removesuffix(".weight")
    module = model.get_submodule(layer)
    on_device = {part: tensor.to(holding.device) for part, tensor in parts.items()}
    if reader is not None and isinstance(module, QuantizedLinear | TrainedQuantizedLinear):
        try:
            reader.add(on_device, module)
        except ValueError as error:
            raise unreadable_weights(f"{layer}: {error}") from error
        return
    if not can_be_packed(layer, module):
        raise unreadable_weights(f"{layer} is stored quantized, and ftcli keeps it in full precision")
    if reader is None:
        method = holding.settings.method
        raise unreadable_weights(f"{layer} is stored quantized, and quantization.method {method} reads no such files")
    assert isinstance(module, nn.Linear)
    try:
        quantized = reader.layer(on_device, module, layer)
    except ValueError as error:
        raise unreadable_weights(f"{layer} ({module.out_features}, {module.in_features}): {error}") from error
    model.set_submodule(layer, holding.held(quantized))


def _require_complete(model: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise unreadable_weights(f"{', '.join(missing[:3])}{more} not stored")


#: Tensors that say nothing of the weights: factors of the rotation, which the model's config has.
_ROTATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def ternary_tensors(path: Path, model: PreTrainedModel, layers: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Name in ``model`` and value, in float32, of every tensor of the GGUF file ``path``, one in memory at a time.

    Args:
        layers: Names of the linear layers, whose weights are ternary: -a, 0 and a.

    Raises:
        FtcliError: FT758 where the package gguf is not installed; FT323 when the file is damaged, of another model, or
            has other weights there. A file that was rounded by blocks, in a ternary type or another, is another model
            than the one it was made of.
    """
    config = model.config.get_text_config()
    architecture = architecture_of(config.model_type, getattr(config, "hidden_act", None) or "silu")
    if architecture is None:
        raise unreadable_weights(f"{path.name}: ftcli does not know how GGUF holds a model_type {config.model_type}")
    require_gguf_package()
    try:
        file = ReadFile(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise unreadable_weights(
            f"{path.name}: {first_line(error)} (bitnet.cpp's own types I2_S, TL1 and TL2 are not read: the same models "
            "are published as packed safetensors)"
        ) from error
    said = file.values.get("general.architecture")
    if said != architecture.name:
        raise unreadable_weights(
            f"{path.name} is of the architecture {said}, and config.json's model is {architecture.name}"
        )
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    try:
        names = names_of([name for name in model.state_dict() if name not in tied], architecture).in_model
    except FtcliError as error:
        raise unreadable_weights(f"{path.name}: {error.findings[0].message}") from error
    heads = heads_of(config)
    for stored in file.names:
        if stored in _ROTATION:
            continue
        if stored not in names:
            raise unreadable_weights(f"the model has no place for {stored} of {path.name}")
        tensor = file.read(stored)
        if names[stored].removesuffix(".weight") in layers and not _is_ternary(tensor):
            raise unreadable_weights(
                f"{stored} of {path.name} ({file.type_name(stored)}) has more values than -a, 0 and a: it is no "
                "BitNet model, or it was rounded by blocks and is no longer one"
            )
        yield names[stored], from_file(stored, tensor, heads, architecture)


def _is_ternary(tensor: Tensor) -> bool:
    return torch.equal(tensor.sign() * tensor.abs().amax(), tensor)
