"""The content of a GGUF file, and how it is written.

What is expected of it: the weights as llama.cpp has them, and the metadata. It is written tensor by tensor through the
gguf library, K-quants by llama.cpp's ``llama-quantize``.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ftkernels.ternary import ternarise
from torch import Tensor

from ftcli.errors import Finding
from ftcli.export.bitnet import load_masters, rounded_weights
from ftcli.export.clean.process import Reload, ask_once
from ftcli.export.gguf.metadata import Description, metadata_of, usual_activation, with_common_values
from ftcli.export.gguf.vocabulary import vocabulary_of
from ftcli.export.safetensors import require_kept_base
from ftcli.export.source import ExportSource, not_verified, source_stops, source_tokenizer, unwritten
from ftcli.export.verify import Probe, compare_logits, logits, probe_batch, trained_logits
from ftcli.export.weights import MergedWeights, ModelWeights, source_config, source_weights
from ftcli.facts.llama_cpp import LLAMA_QUANTIZE
from ftcli.gguf import (
    FILTER,
    GATE,
    SHARED_GATE,
    STACK,
    STACKED_BIAS,
    UP,
    TensorNames,
    Value,
    halves,
    heads_of,
    in_stored_layout,
    names_of,
    no_place,
    no_quantizer,
    part_of,
    require_quantizer,
)
from ftcli.plan.quantization import stores_ternary_masters
from ftcli.run.atomic import read_json_object
from ftcli.run.directory import RunDirectory
from ftcli.run.report.card import licence_of_base, public_base
from ftcli.tables import quantizations
from ftcli.tables.gguf import (
    NORMS_OF_LAYERS,
    TYPES,
    Architecture,
    architecture_of,
    unknown_architecture,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


#: Elements that are rounded at once.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is to be written: its shape, its type's name in the gguf library, and what reads it."""

    shape: tuple[int, ...]
    type: str
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.shape, self.type)


def in_memory(tensor: Tensor) -> PlannedTensor:
    """A tensor that is there already, in float32."""
    return PlannedTensor(tuple(tensor.shape), "F32", lambda: tensor)


def stored_bytes(shape: Sequence[int], ggml: str) -> int:
    """Bytes of a tensor in a file."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml]]
    return math.prod(shape) // int(block) * int(size)


def type_of(stored: str, shape: Sequence[int], wanted: str) -> str:
    """The type of one tensor in a file of type ``wanted``: vectors, biases of experts, the choice among these and the
    filters of convolutions stay in float32, as llama.cpp wants them.

    Rows that are no multiple of a block are in float16; so are, in ternary types, embedding and head.
    """
    if len(shape) < 2 or stored.endswith(".bias") or part_of(stored) in ("ffn_gate_inp", "ssm_conv1d"):
        return "F32"
    row = TYPES[wanted]
    if row.outer is not None and stored in ("token_embd.weight", "output.weight"):
        row = TYPES[row.outer]
    return "F16" if shape[-1] % row.block else row.ggml


def as_stored(tensor: Tensor, ggml: str) -> Tensor:
    """The numbers in float32 that a file's tensor of this type stands for."""
    import gguf

    if ggml == "F32":
        return tensor.float()
    kind = gguf.GGMLQuantizationType[ggml]
    rows = tensor.float().reshape(-1, tensor.shape[-1])
    found = torch.empty_like(rows)
    step = max(1, _PIECE // rows.shape[-1])  # the library takes three times the memory of what it makes
    for first in range(0, len(rows), step):
        data = gguf.quants.quantize(rows[first : first + step].contiguous().numpy(), kind)
        found[first : first + step] = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), np.float32))
    return found.view(tensor.shape)


def write_file(
    path: Path, architecture: str, values: Mapping[str, Value], tensors: Mapping[str, PlannedTensor]
) -> None:
    """Write a file; one tensor at a time is in memory. Raises OSError: it cannot be written."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add_value(writer, key, value)
    for name, planned in tensors.items():
        kind = gguf.GGMLQuantizationType[planned.type]
        dtype = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}.get(planned.type, np.dtype(np.uint8))
        shape = gguf.quant_shape_to_byte_shape(planned.shape, kind) if dtype == np.uint8 else planned.shape
        writer.add_tensor_info(name, shape, dtype, planned.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for planned in tensors.values():
            data = planned.read().float().contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(data, gguf.GGMLQuantizationType[planned.type]))
    finally:
        writer.close()


def add_value(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def quantize_file(source: Path, target: Path, kind: str, matrix: Path | None = None) -> None:
    """Make ``target`` of the 16-bit file ``source``; with a file of an importance ``matrix``, where there is one.

    Raises FtcliError FT758 where the program is not on the PATH, or fails.
    """
    program = require_quantizer([kind], [kind])
    weighed = [] if matrix is None else ["--imatrix", str(matrix)]
    arguments = [program, *weighed, str(source), str(target), TYPES[kind].ggml]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, errors="replace")  # noqa: S603
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise no_quantizer(
            f"{LLAMA_QUANTIZE} failed (exit {done.returncode}): {said[-1] if said else 'it said nothing'}"
        )


#: Largest relative error of the logits that rounding the activations may make: training does so by token and to eight
#: bits, the model that a file is put into not at all, llama.cpp by token and block.
ACTIVATIONS = 0.5
_HUB = "https://huggingface.co/"


class FileShapes:
    """Weights in a file's shapes. Stacks of gate and up (experts, 2 · width, hidden) are two tensors, called by the
    stack's name and :data:`GATE` or :data:`UP`, and so are their biases; the gate of a shared expert (1, hidden) is a
    vector, and the filter of a convolution (channels, 1, width) a matrix.
    """

    def __init__(self, whole: ModelWeights, architecture: Architecture) -> None:
        self.whole, self._architecture = whole, architecture

    @property
    def names(self) -> Sequence[str]:
        return tuple(part for name in self.whole.names for part in _parts(name))

    def shape(self, name: str) -> tuple[int, ...]:
        plain = name.removesuffix(GATE).removesuffix(UP)
        shape = self.whole.shape(plain)
        if self._architecture.transposed and len(shape) == 3:
            shape = (shape[0], shape[2], shape[1])
        if plain != name:
            return (shape[0], shape[1] // 2, *shape[2:])
        if name.endswith(FILTER):
            return (shape[0], shape[2])
        return shape[1:] if name.endswith(SHARED_GATE) else shape

    def read(self, name: str) -> Tensor:
        """A tensor: half of a stack is read with the other one."""
        plain = name.removesuffix(GATE).removesuffix(UP)
        tensor = in_stored_layout(plain, self.whole.read(plain), self._architecture)
        if plain != name:
            return halves(tensor, self._architecture)[name.endswith(UP)].contiguous()
        if name.endswith(FILTER):
            return tensor.squeeze(1)
        return tensor.reshape(-1) if name.endswith(SHARED_GATE) else tensor.contiguous()


def _parts(name: str) -> tuple[str, ...]:
    return (f"{name}{GATE}", f"{name}{UP}") if name.endswith((STACK, STACKED_BIAS)) else (name,)


def in_model_shapes(weights: ModelWeights) -> ModelWeights:
    """The weights as the model has them."""
    return weights.whole if isinstance(weights, FileShapes) else weights


class TernaryWeights:
    """The ternary values of masters, in float32; the other tensors as they are."""

    def __init__(self, masters: ModelWeights, layers: frozenset[str]) -> None:
        self._masters, self._layers = masters, layers

    @property
    def names(self) -> Sequence[str]:
        return self._masters.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._masters.shape(name)

    def read(self, name: str) -> Tensor:
        tensor = self._masters.read(name)
        return ternarise(tensor).dequantize(torch.float32) if name in self._layers else tensor


def rounded_layers(config: PretrainedConfig) -> frozenset[str]:
    """Names of the weights that are rounded in every product; empty for a model of plain weights.

    Raises FtcliError FT756 where these layers have norms of their own.
    """
    said: Any = config.to_dict()
    if not stores_ternary_masters(said):
        return frozenset()
    if said["quantization_config"].get("use_rms_norm"):
        raise no_place(NORMS_OF_LAYERS)
    return rounded_weights(config)


def activations_rounded(folder: Path, probe: Probe, unrounded: Tensor) -> tuple[dict[str, float], list[str]]:
    """Measures how far rounding the activations, which is in no file, moves the logits: for the record, and problems.

    Args:
        unrounded: What the ternary weights give without it.
    """
    found = compare_logits(unrounded, logits(load_masters(folder), probe), ACTIVATIONS)
    problems = []
    if not found.relative_error <= ACTIVATIONS:
        problems.append(f"the ternary weights' logits differ by {found.relative_error:.3g} from the trained model's")
    facts = {"activations_rounding": found.relative_error, "activations_top1_agreement": found.top1_agreement}
    return facts, problems


def provenance_of(source: ExportSource) -> dict[str, Value]:
    """The licence that the run has recorded, and the base model where others can know it by its name on the Hub."""
    manifest = {} if source.run is None else read_json_object(RunDirectory(source.run[0]).manifest_path)
    base = public_base(source.base.name_or_path, source.base.revision, manifest)
    licence = licence_of_base(manifest)
    values: dict[str, Value] = {}
    for key, name in (("license", "id"), ("license.name", "name"), ("license.link", "link")):
        if licence.get(name):
            values[f"general.{key}"] = str(licence[name])
    if base.repo is None:
        return values
    organization, _, name = base.repo.rpartition("/")
    values |= {"general.base_model.count": 1, "general.base_model.0.name": name}
    values["general.base_model.0.repo_url"] = f"{_HUB}{base.repo}"
    if organization:
        values["general.base_model.0.organization"] = organization
    if base.commit is not None:
        values["general.base_model.0.version"] = base.commit
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The trained model that files for llama.cpp are compared with.

    Attributes:
        name: What files are called, before their type.
        probe, logits: A batch, and what base and adapter, or the full fine-tune, answer to it in float32.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stops: tuple[int, ...]
    probe: Probe
    logits: Tensor
    reload: Reload = ask_once
    llama_cpp: bool = False
    provenance: Mapping[str, Value] = field(default_factory=dict)
    name: str = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedFile(Trained):
    """The expected content of a file.

    Attributes:
        description: The metadata of its shape, and factors of the rotation.
        facts: What an export's record says beside what is compared of each file.
        activations: What layers' activations have trained, by full key.
    """

    architecture: Architecture
    names: TensorNames
    weights: ModelWeights
    heads: Mapping[str, int]
    description: Description
    vocabulary: Mapping[str, Value]
    facts: Mapping[str, float] = field(default_factory=dict)
    activations: Mapping[str, Value] = field(default_factory=dict)

    @property
    def merged_with(self) -> str:
        """The form of the base that an adapter was merged with; empty if there is none."""
        return self.weights.base.form if isinstance(self.weights, MergedWeights) else ""


def has_row(config: PretrainedConfig) -> bool:
    """True for a model of a family in the table, which ftcli writes itself."""
    text: Any = with_common_values(config.get_text_config())
    return architecture_of(text.model_type, usual_activation(text)) is not None


def prepare_gguf(source: ExportSource, say: Callable[[str], None]) -> ExpectedFile:
    """Reads what is exported and computes what its files are compared with.

    Raises FtcliError as :func:`ftcli.export.gguf.write.write`.
    """
    require_kept_base(source)
    config = source_config(source)
    text: Any = with_common_values(config.get_text_config())
    architecture = architecture_of(text.model_type, usual_activation(text))
    if architecture is None:
        raise no_place(unknown_architecture(text.model_type))
    description = metadata_of(config.get_text_config(), architecture)
    description = replace(description, values={**description.values, **_beside_text(config)})
    rounded = rounded_layers(config)
    if not rounded and any(TYPES[kind].ternary for kind in source.settings.gguf.types):
        able = " | ".join(quantizations.trained())
        raise no_place(f"ternary types are for ternary weights, which quantization.method: {able} trains")
    stored, adapted = source_weights(source)
    weights = TernaryWeights(stored, rounded) if rounded else stored
    in_file = FileShapes(weights, architecture) if architecture.experts or architecture.delta_nets else weights
    names = names_of([n for n in in_file.names if not _is_the_embedding(n, in_file, architecture)], architecture)
    tokenizer = source_tokenizer(source)
    stops = source_stops(source, tokenizer)
    probe = probe_batch(tokenizer, text.vocab_size)
    trained = torch.empty(0)
    facts: dict[str, float] = {}
    if source.verify:
        say("computing the reference that the files are compared with")
        apart = adapted if weights is stored else None
        model: Any = unwritten(source_config(source)) if apart is None else apart
        base = weights.base if isinstance(weights, MergedWeights) else weights
        probe, trained = trained_logits(model, base, probe)
        facts, problems = activations_rounded(source.folder, probe, trained) if rounded else ({}, [])
        if problems:
            raise not_verified(source.destination, problems)
    return ExpectedFile(
        config=config,
        architecture=architecture,
        names=names,
        weights=in_file,
        heads=heads_of(text),
        description=replace(description, warnings=(*description.warnings, *_warnings(architecture))),
        vocabulary=vocabulary_of(tokenizer, stops, text.vocab_size, architecture.merges),
        tokenizer=tokenizer,
        stops=stops,
        probe=probe,
        logits=trained,
        reload=source.reload,
        llama_cpp=source.llama_cpp,
        provenance=provenance_of(source),
        name=file_name(source),
        facts=facts,
        activations=_activation_values(in_file, names),
    )


def _beside_text(config: PretrainedConfig) -> dict[str, Value]:
    """How many layers of a Qwen3-VL read what the tower's layers saw, without which llama.cpp takes no projector."""
    seen: Any = getattr(config, "vision_config", None)
    layers = getattr(seen, "deepstack_visual_indexes", None)
    return {"n_deepstack_layers": len(layers)} if layers else {}


def _is_the_embedding(name: str, weights: ModelWeights, architecture: Architecture) -> bool:
    """True for a head that is left out where the file has none: rows of tied embeddings were trained in both."""
    if not architecture.tied or not name.endswith("lm_head.weight"):
        return False
    embedding = next((each for each in weights.names if each.endswith("embed_tokens.weight")), None)
    return embedding is not None and torch.equal(weights.read(name), weights.read(embedding))


def _activation_values(weights: ModelWeights, names: TensorNames) -> dict[str, Value]:
    """Trained values of each layer's activation, by key."""
    found: dict[str, dict[int, float]] = {}
    for name, (key, layer) in names.in_metadata.items():
        found.setdefault(key, {})[layer] = float(weights.read(name))
    return {key: [value for _, value in sorted(layers.items())] for key, layers in found.items()}


def _warnings(architecture: Architecture) -> list[Finding]:
    """FT757 where llama.cpp does not build the architecture."""
    if architecture.only_in is None:
        return []
    message = f"llama.cpp does not build {architecture.name}: the file is for {architecture.only_in}, where ftcli's "
    return [Finding("FT757", f"{message}files have not been run", severity="warning")]


def file_name(source: ExportSource) -> str:
    """The files' name, before their type: the run, or the adapter's folder."""
    folder = source.run[0] if source.run is not None else source.folder
    return re.sub(r"[^\w.=,+-]+", "-", folder.resolve().name) or "model"
