"""The weights of a model read one by one from its files, with what an adapter does to each.

Only the tensor that was asked for is in memory, or the parts that transformers joins into it. So a model can be written
and verified on a machine that could not hold it.

A linear layer that training quantized is quantized here in the same way from the same stored weight, or read from the
same packed file, and then dequantized into the dtype of training's products. So an adapter is merged with the very
matrix that it was trained beside, and not with the full-precision one before rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError, first_line
from ftcli.export.source import (
    ADAPTER_WEIGHTS,
    ExportSource,
    attach,
    base_facts,
    base_files,
    local_config,
    plain_config,
    read_adapter_config,
    unusable,
    unwritten,
)
from ftcli.export.tensorfile import DTYPES, TensorEntry, TensorFile, finite_tensors, opened
from ftcli.facts.shape import shape_of
from ftcli.model.experts import is_stack, quantized_stack, quantizes_stacks
from ftcli.model.load import config_of
from ftcli.model.load_quantized import require_ignorable
from ftcli.model.pretrained import hollow, weight_files
from ftcli.model.quantized import (
    PackedReader,
    QuantizedLinear,
    can_be_packed,
    layers_to_quantize,
    packed_reader,
    quantize_linear,
    stores_packed,
    unreadable_weights,
)
from ftcli.model.renaming import Renaming
from ftcli.model.score_head import SCORE, as_classifier
from ftcli.plain import JsonMap
from ftcli.plan.quantization import stored_method
from ftcli.plan.released import released_form
from ftcli.tables import quantizations

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class BaseInTraining:
    """The form of the base's linear layers in training.

    Attributes:
        dtype: Of training's products, into which the weights were dequantized for them.
        linears: Names of the weights that it made of full-precision ones; empty where the files are quantized.
        reader: What reads quantized files.
        stacks: Names of the stacks of experts that it quantized.
    """

    settings: QuantizationConfig
    dtype: torch.dtype
    linears: frozenset[str]
    reader: PackedReader | None
    stacks: frozenset[str]

    @property
    def stored(self) -> bool:
        """True if the base's files are quantized themselves."""
        return self.reader is not None

    def quantizes(self, name: str) -> bool:
        """True if training quantized this weight of the files."""
        return name in self.linears or name in self.stacks

    def packed_part(self, key: str, entry: TensorEntry) -> tuple[str, str] | None:
        """Layer and part that a stored tensor of quantized files is; None for one in full precision."""
        if self.reader is None:
            return None
        found = self.reader.part_of(key)
        if found is not None:
            return found
        layer, _, leaf = key.rpartition(".")
        if leaf != "weight" or entry.dtype not in DTYPES:
            return None
        outline = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        packed = not outline.is_floating_point() or self.reader.is_packed(outline)
        return (layer, "weight") if packed else None

    def unpacked(self, parts: Mapping[str, Tensor], model: PreTrainedModel, name: str) -> Tensor:
        """The numbers (out, in) that a layer of quantized files stands for. Raises FtcliError FT323 where none."""
        layer = name.removesuffix(".weight")
        module = model.get_submodule(layer)
        if self.reader is None or not can_be_packed(layer, module):
            raise unreadable_weights(f"{layer} is stored quantized, and ftcli keeps it in full precision")
        assert isinstance(module, nn.Linear)
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        try:
            return self._numbers(self.reader.layer(parts, plain, layer))
        except ValueError as error:
            raise unreadable_weights(f"{layer}: {error}") from error

    def as_in_training(self, name: str, tensor: Tensor) -> Tensor:
        """A stored tensor as training held it."""
        if name in self.stacks:
            return quantized_stack(tensor, self.settings, self.dtype, name, dequantized=True).detach()
        if name not in self.linears:
            return tensor
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(tensor, requires_grad=False)
        layer = quantize_linear(linear, self.settings, name.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear)
        return self._numbers(layer)

    def _numbers(self, layer: QuantizedLinear) -> Tensor:
        weight: Any = layer.frozen_weight()
        numbers: Tensor = weight.dequantize(self.dtype)
        return numbers

    def said(self) -> str:
        """For the record and the model card."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"the {self.settings.method} weights that were trained against, dequantized in {dtype}"


#: The same, of weights that are taken as they are stored.
ORIGINAL = "the base model's weights as they are stored"


def base_in_training(source: ExportSource, config: PretrainedConfig, model: PreTrainedModel) -> BaseInTraining | None:
    """Finds the form of ``source``'s base in training; None if it is taken as it is stored.

    Args:
        config: The base's, ``model``: the same without memory.

    Raises FtcliError FT740 for ``export.base: original`` where the files themselves are quantized.
    """
    raw: JsonMap = config.to_dict()
    settings, original = source.quantization, source.settings.base == "original"
    method = stored_method(raw)
    shape = shape_of(raw)
    packs = quantizes_stacks(settings) and shape is not None and shape.has_experts  # as ftcli.model.load
    stacks = _stacks_of(model) if packs else frozenset[str]()
    if quantizations.row(settings.method).quantize is None and method is not None:
        settings = QuantizationConfig(method=method)  # an adapter in any folder, of which no recipe is known
    if quantizations.row(settings.method).quantize is None:
        return None
    stored = stores_packed(raw, settings)
    if original and stored:
        raise FtcliError.single(
            "FT740",
            f"export.base: original needs full-precision weights, and {source.base.name_or_path} is stored in "
            f"{settings.method}",
            origin=source.origins.at("export.base"),
            help="leave export.base out",
        )
    if original:
        return None
    linears = frozenset[str]() if stored else frozenset(f"{name}.weight" for name in layers_to_quantize(model))
    reader = packed_reader(settings, raw) if stored else None
    return BaseInTraining(settings, getattr(torch, source.compute), linears, reader, stacks)


def _stacks_of(model: PreTrainedModel) -> frozenset[str]:
    """Names of all stacks of experts."""
    return frozenset(name for name, p in model.named_parameters() if is_stack(name.rpartition(".")[2], p))


class ModelWeights(Protocol):
    """The tensors of a model by the names that they have in it."""

    @property
    def names(self) -> Sequence[str]:
        """All that are stored; of tied ones the embedding alone."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """A tensor, as it is stored or in float32; a tied head is read by its own name, too."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of files that are one of the model's, or that make some together.

    Attributes:
        keys, files: What the files call each, and which file it is in.
        roles: Of parts, the pattern of the rule that joins them; of packed ones, the part that each is; else empty.
        names: What the model calls what they make; empty for what it has no place for, and may ignore.
        packed: They are a quantized weight and what turns it back.
    """

    keys: tuple[str, ...]
    files: tuple[TensorFile, ...]
    roles: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    packed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """In which the tensor, or the first of the parts, is stored."""
        return self.files[0].dtype(self.keys[0])


class StoredWeights:
    """A model's safetensors files, opened and not read.

    Attributes:
        stored: All that is in them, in their order.
        in_training: How training held the weights of the linear layers; None: as they are stored.
        ties: For a parameter that is another one in the model, and not stored, the name of that one.

    Args:
        model: Without memory (``ftcli.model.pretrained.hollow``).
        other_head: The layer that the model has in place of the files' head, which is passed over.
        rows: How many rows some weights are taken to have: zeros are added to the files', or the last left out.
        stated: What config.json says, of files that may be in a form that is read into full precision.
        dtype: Of what is read of such a form.

    Raises FtcliError FT323 for files that are damaged, or do not make this model.
    """

    def __init__(
        self,
        files: Sequence[Path],
        model: PreTrainedModel,
        in_training: BaseInTraining | None = None,
        rows: Mapping[str, int] = MappingProxyType({}),
        other_head: str | None = None,
        *,
        stated: JsonMap = MappingProxyType({}),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.renaming, self.in_training, self._model, self._rows = Renaming(model), in_training, model, rows
        self._other_head = other_head
        found = released_form(stated)
        self._released = "" if found is None else f"{found[1]}, dequantized in {str(dtype).removeprefix('torch.')}"
        try:
            self.stored = tuple(self._grouped(opened(files, stated, dtype)))
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise unreadable_weights(first_line(error)) from error
        self._by_name = {name: each for each in self.stored for name in each.names}
        self.names: Sequence[str] = tuple(self._by_name)
        self.ties = _ties(model, self._by_name)
        made = {*self._by_name, *self.ties}
        missing = sorted(
            name for name, _ in model.named_parameters() if name not in made and name.partition(".")[0] != other_head
        )
        if missing:
            raise unreadable_weights(f"{missing[0]} is not among the stored weights")

    def _grouped(self, files: Sequence[TensorFile]) -> Iterator[StoredTensors]:
        found: dict[tuple[str, str], list[tuple[str, TensorFile, str]]] = {}
        for file in files:
            for key in file.entries:
                if self._other_head is not None and key.startswith("lm_head."):
                    continue
                kind, name, role = self._kind(key, file)
                found.setdefault((kind, name), []).append((key, file, role))
        for (kind, name), entries in found.items():
            keys, holders, roles = (tuple(column) for column in zip(*entries, strict=True))
            if kind == "parts":
                made = self.renaming.join(name, [(key, role, _outline(file, key)) for key, file, role in entries])
                shapes = tuple(tuple(tensor.shape) for tensor in made.values())
                yield StoredTensors(keys, holders, roles, tuple(made), shapes)
            elif kind == "packed":
                shape = tuple(self._model.get_parameter(name).shape)
                yield StoredTensors(keys, holders, roles, (name,), (shape,), packed=True)
            else:
                shape = holders[0].entries[keys[0]].shape
                yield StoredTensors(keys, holders, (), (name,) if kind == "whole" else (), (shape,))

    def _kind(self, key: str, file: TensorFile) -> tuple[str, str, str]:
        """The kind of a stored tensor: one of the model's, a part, or of no place; of which; and as what."""
        packed = None if self.in_training is None else self.in_training.packed_part(key, file.entries[key])
        if packed is not None:
            layer, part = packed
            return "packed", self.renaming.name_of(f"{layer}.weight")[0], part
        name, pattern = self.renaming.name_of(key)
        if name not in self.renaming.names:
            require_ignorable(self._model, key)
            return "ignored", key, ""
        return ("whole", name, "") if pattern is None else ("parts", name, pattern)

    @property
    def form(self) -> str:
        """The form of the base, in words."""
        if self.in_training is None:
            return f"{ORIGINAL}: {self._released}" if self._released else ORIGINAL
        return self.in_training.said()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self.of(name)
        shape = found.shapes[found.names.index(self.ties.get(name, name))]
        return (self._rows[name], *shape[1:]) if name in self._rows else shape

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the embedding's and the head's weight; the head's is empty where there is none."""
        return ends(self._model)

    def of(self, name: str) -> StoredTensors:
        """The stored tensors of a name."""
        return self._by_name[self.ties.get(name, name)]

    def is_as_stored(self, name: str) -> bool:
        """True if training held a tensor as it is stored, and did not quantize it."""
        found = self.of(name)
        return not found.packed and (self.in_training is None or not self.in_training.quantizes(name))

    def read(self, name: str) -> Tensor:
        """A tensor as training held it: as it is stored, or the numbers that its quantized form stands for.

        Raises FtcliError FT323 for numbers that cannot be quantized, or a file that has changed meanwhile.
        """
        asked, name = name, self.ties.get(name, name)
        found = self._by_name[name]
        try:
            if found.packed:
                assert self.in_training is not None
                parts = {role: f.read(key) for key, f, role in zip(found.keys, found.files, found.roles, strict=True)}
                return self.in_training.unpacked(parts, self._model, name)
            tensor = self.joined(found)[name] if found.roles else found.files[0].read(found.keys[0])
        except (OSError, SafetensorError, ValueError) as error:
            raise unreadable_weights(f"{name}: {first_line(error)}") from error
        tensor = tensor if self.in_training is None else self.in_training.as_in_training(name, tensor)
        return _resized(tensor, self._rows[asked]) if asked in self._rows else tensor

    def joined(self, found: StoredTensors) -> dict[str, Tensor]:
        """Joins stored parts, as they are stored."""
        entries = zip(found.keys, found.roles, found.files, strict=True)
        parts = [(key, role, file.read(key)) for key, role, file in entries]
        return self.renaming.join(found.names[0], parts)


def _resized(tensor: Tensor, rows: int) -> Tensor:
    """``tensor`` with so many rows."""
    added = tensor.new_zeros((max(rows - len(tensor), 0), *tensor.shape[1:]))
    return torch.cat((tensor[:rows], added))


def _outline(file: TensorFile, key: str) -> Tensor:
    """A stored tensor without its numbers."""
    return torch.empty(file.entries[key].shape, dtype=file.dtype(key), device="meta")


def _ties(model: PreTrainedModel, stored: Mapping[str, StoredTensors]) -> dict[str, str]:
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for names in shared.values():
        there = next((name for name in names if name in stored), None)
        if there is not None:
            found |= {name: there for name in names if name not in stored}
    return found


class MergedWeights:
    """Base and adapter: ``W + s B A`` in float32, one rounding short of what is written. Other tensors are the base's.

    Tied embeddings of which one side was adapted are two tensors.

    Attributes:
        untied: Tensors that the base has no file for, since they were another one.
    """

    def __init__(self, base: StoredWeights, changes: Mapping[str, WeightUpdate]) -> None:
        self.base, self.changes = base, changes
        self.untied = untied(base, changes)

    @property
    def names(self) -> Sequence[str]:
        return (*self.base.names, *self.untied)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def read(self, name: str) -> Tensor:
        """A tensor: as training held the base's, or merged, in float32."""
        tensor, change = self.base.read(name), self.changes.get(name)
        return tensor if change is None else change.applied(tensor.float())


def untied(base: StoredWeights, changed: Container[str]) -> tuple[str, ...]:
    """Parameters that were another one in the base, and are not once ``changed`` ones are merged."""
    return tuple(name for name, other in base.ties.items() if name in changed or other in changed)


def ends(model: PreTrainedModel) -> tuple[str, str]:
    """The names of the embedding's and the head's weight; the head's is empty where there is none."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    return names[id(inputs)], names.get(id(outputs), "")


def source_weights(source: ExportSource) -> tuple[StoredWeights, None] | tuple[MergedWeights, PeftModel]:
    """The weights to export, read tensor by tensor; and the adapter on its base, whose weights are not read yet.

    Raises FtcliError FT323 when the weights are not there, FT742 when the adapter is damaged or does not fit.
    """
    base = base_weights(source)
    if source.kind == "model":
        return base, None
    adapted = attach(unwritten(source_config(source)), source.folder)
    return MergedWeights(base, source_updates(source, adapted)), adapted


def base_weights(source: ExportSource) -> StoredWeights:
    """The weights that an adapter belongs to, as training held them; those of a full fine-tune themselves.

    Raises FtcliError FT323 when they are not there or damaged, FT740 for `export.base: original` where there is nothing
    but quantized weights.
    """
    config = source_config(source)
    if source.kind == "model":
        return StoredWeights(weight_files(str(source.folder), None, offline=True), hollow(plain_config(config)))
    model = hollow(plain_config(config))
    rows = {} if source.vocabulary is None else dict.fromkeys(filter(None, ends(model)), source.vocabulary)
    files = base_files(source)
    trained, head = base_in_training(source, config, model), SCORE if source.classifier else None
    dtype = getattr(torch, source.compute)
    return StoredWeights(files, model, trained, rows, other_head=head, stated=config.to_dict(), dtype=dtype)


def source_updates(source: ExportSource, adapted: PeftModel) -> dict[str, WeightUpdate]:
    """The change of each weight by the adapter of ``source``."""
    try:
        return updates(read_adapter_config(source.folder), finite_tensors(source.folder), places(adapted))
    except ValueError as error:
        raise unusable(source.folder, str(error)) from error


def source_config(source: ExportSource) -> PretrainedConfig:
    """transformers' config of what is exported: the base's, or that of the full fine-tune."""
    if source.kind == "model":
        return local_config(source.folder)
    return with_vocabulary(config_of(base_facts(source).raw), source)


def with_vocabulary(config: PretrainedConfig, source: ExportSource) -> PretrainedConfig:
    """``config`` with as many tokens as the adapter's embeddings have; of what scores rows, that of a classifier."""
    if source.classifier:
        config = as_classifier(config)
    if source.vocabulary is not None:
        text: Any = config.get_text_config()
        text.vocab_size = source.vocabulary
    return config


def places(adapted: PeftModel) -> dict[str, tuple[str, bool]]:
    """The weight of the base model that each adapter's pair of matrices belongs to, by the name of its module in the
    adapter's file; and whether that is stored as (in, out), as in GPT-2 and in the experts of some families.
    """
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    found: dict[str, tuple[str, bool]] = {}
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            layer, leaf = module.get_base_layer(), getattr(module, "parameter_name", "weight")
            transposed = isinstance(layer, Conv1D) or bool(getattr(layer, "is_transposed", False))
            found[name] = f"{name.replace('.base_layer', '')}.{leaf}", transposed
    return found


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The change of one weight (out, in) by an adapter: ``scale · b @ a`` is added to it, or ``whole`` replaces it.

    With ``magnitude`` (out,), which DoRA has, the sum's rows are then brought to these lengths.

    ``a`` is (r, in), ``b`` is (out, r). For a stack of n experts (n, out, in), ``a`` is (n · r, in) with an expert's
    rows together, and ``b`` is (out, r · n) with an expert's columns n apart.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 0.0
    whole: Tensor | None = None
    transposed: bool = False
    magnitude: Tensor | None = None

    def applied(self, weight: Tensor) -> Tensor:
        """The merged weight in ``weight``'s dtype."""
        if self.whole is not None:
            return self.whole.to(weight.dtype)
        if self.a is None or self.b is None:
            raise ValueError("an adapter's matrix A without its B, or B without A")
        a, b = self.a.float(), self.b.float()
        if weight.dim() == 3:
            experts = weight.shape[0]
            a = a.view(experts, -1, a.shape[-1])
            b = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
        delta = b @ a
        if self.transposed:
            delta = delta.transpose(-2, -1)
        changed = weight.float() + delta * self.scale
        if self.magnitude is not None:
            lengths = changed.norm(dim=0 if self.transposed else 1)
            factor = self.magnitude.float() / lengths
            changed = changed * (factor if self.transposed else factor[:, None])
        return changed.to(weight.dtype)


def updates(
    config: JsonMap, tensors: Mapping[str, Tensor], placed: Mapping[str, tuple[str, bool]]
) -> dict[str, WeightUpdate]:
    """The change of each weight by the adapter, by the weight's name in the base model.

    Raises ValueError: the file holds a tensor that neither LoRA nor DoRA has.
    """
    found: dict[str, WeightUpdate] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.")
        module, _, part = name.rpartition(".lora_")
        if not module:
            found[name] = WeightUpdate(whole=tensor)
        elif part == "A.weight":
            weight, transposed = placed[module]
            found[weight] = WeightUpdate(
                tensor,
                tensors.get(key.replace("lora_A", "lora_B")),
                _scale(config, weight.removesuffix(".weight")),
                transposed=transposed,
                magnitude=tensors.get(f"{key.removesuffix('A.weight')}magnitude_vector"),
            )
        elif part not in ("B.weight", "magnitude_vector"):
            raise ValueError(f"{key} is not a LoRA or DoRA tensor")
    return found


def _scale(config: JsonMap, module: str) -> float:
    """``alpha / r`` or ``alpha / sqrt(r)``; patterns name a module by the end of its path, or by a regex of it."""

    def pattern(table: Mapping[str, float] | None, default: float) -> float:
        matches = (v for k, v in (table or {}).items() if re.fullmatch(rf"(.*\.)?({k})", module))
        return float(next(matches, default))

    rank = pattern(config.get("rank_pattern"), config["r"])
    alpha = pattern(config.get("alpha_pattern"), config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def stored_names(source: ExportSource, base: StoredWeights) -> list[str]:
    """Names of the tensors of a merged model, as in the adapter's file: heads that it unties are among them."""
    trained: set[str] = set()
    if source.kind == "adapter":
        file = TensorFile(source.folder / ADAPTER_WEIGHTS)
        for key in file.entries:
            name, pair, _ = key.removeprefix("base_model.model.").partition(".lora_")
            trained.add(f"{name}.weight" if pair else name)
    return [*base.names, *untied(base, trained)]
