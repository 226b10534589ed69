"""The format ``gguf``: one file for each type of ``export.gguf.types``, each read again and compared with training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftcli.errors import Finding
from ftcli.export.clean.ask import tokens_compared
from ftcli.export.compare import elements
from ftcli.export.gguf.adapter import verify_gguf_adapter, write_adapter
from ftcli.export.gguf.experts import SplitExperts
from ftcli.export.gguf.file import PlannedTensor, type_of, write_file
from ftcli.export.gguf.metadata import Description, Value, metadata_of, usual_activation
from ftcli.export.gguf.provenance import provenance_of
from ftcli.export.gguf.ternary import TernaryWeights, activations_rounded, rounded_layers
from ftcli.export.gguf.verify import ExpectedFile, verify_file
from ftcli.export.gguf.vocabulary import vocabulary_of
from ftcli.export.lazy import computing_from
from ftcli.export.loading import not_verified, source_tokenizer, unwritten
from ftcli.export.probe import continued, logits, probe_batch
from ftcli.export.resolve import ExportSource, read_adapter_config
from ftcli.export.room import require_room
from ftcli.export.safetensors import require_kept_base
from ftcli.export.verify import Verified, not_asked
from ftcli.export.weights import MergedWeights, ModelWeights, source_config, source_weights
from ftcli.facts.model import read_facts
from ftcli.gguf.file import require_gguf_package
from ftcli.gguf.names import TensorNames, names_of, no_place, to_file
from ftcli.model.tokenizer import stop_token_ids
from ftcli.tables import quantizations
from ftcli.tables.families import family_of
from ftcli.tables.gguf import TYPES, Architecture, architecture_of, unknown_architecture

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.export.probe import Probe


@dataclass(frozen=True, slots=True)
class PreparedGguf:
    """All that the files of one export have in common; ``facts`` are for its record."""

    wanted: ExpectedFile
    description: Description
    name: str
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def merged_with(self) -> str:
        """Which form of the base an adapter was merged with; empty where there is none."""
        weights = self.wanted.weights
        return weights.base.form if isinstance(weights, MergedWeights) else ""


def write(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Verified:
    """Write a file for each type into ``folder`` and verify it.

    Raises:
        FtcliError: FT741 when a file is not what it should be, FT747 for a base of random weights, FT756 for a model
            that llama.cpp does not compute as it was trained, FT758 where the package gguf is not there.
        OSError: it cannot be written.
    """
    require_gguf_package()
    prepared = prepare_gguf(source, offline=offline, say=say)
    facts: dict[str, str | int | float] = dict(prepared.facts)
    warnings = [*prepared.description.warnings]
    for kind in source.settings.gguf.types:
        path = folder / f"{prepared.name}-{TYPES[kind].ggml}.gguf"
        say(f"writing {path.name}")
        write_type(prepared, path, kind)
        if not source.verify:
            continue
        say(f"verifying {path.name}")
        report = verify_file(path, kind, prepared.wanted)
        if report.problems:
            raise not_verified(folder, [f"{path.name}: {problem}" for problem in report.problems])
        facts |= report.facts(f"{kind}_")
        warnings += report.warnings(path, kind)
    if source.settings.gguf.lora_adapter:
        facts["adapter_relative_error"] = _adapter(source, prepared, folder, say)
    if not source.verify:
        return not_asked(prepared.merged_with)
    facts["tensors"] = len(prepared.wanted.names.stored)
    return Verified(
        "every weight, logits of the model that the file describes, tokenizer, template, stop tokens",
        facts,
        tuple(warnings),
        prepared.merged_with,
    )


def _adapter(source: ExportSource, prepared: PreparedGguf, folder: Path, say: Callable[[str], None]) -> float:
    if source.kind != "adapter":
        raise no_place("a full fine-tune has no adapter: leave export.gguf.lora_adapter out")
    path = folder / f"{prepared.name}-LoRA-F32.gguf"
    say(f"writing {path.name}")
    write_adapter(prepared.wanted, path, prepared.name, float(read_adapter_config(source.folder)["lora_alpha"]))
    problems, error = verify_gguf_adapter(prepared.wanted, path) if source.verify else ([], 0.0)
    if problems:
        raise not_verified(folder, [f"{path.name}: {problem}" for problem in problems])
    return error


def prepare_gguf(source: ExportSource, *, offline: bool, say: Callable[[str], None]) -> PreparedGguf:
    """Reads what is exported and computes what its files are compared with.

    Raises:
        FtcliError: as :func:`write`.
    """
    require_kept_base(source)
    config = source_config(source, offline=offline)
    text: Any = config.get_text_config()
    architecture = architecture_of(text.model_type, usual_activation(text))
    if architecture is None:
        raise no_place(unknown_architecture(text.model_type))
    description = _described(metadata_of(text, architecture), architecture)
    rounded = rounded_layers(config)
    if not rounded and any(TYPES[kind].ternary for kind in source.settings.gguf.types):
        able = " | ".join(quantizations.trained())
        raise no_place(f"ternary types are for ternary weights, which quantization.method: {able} trains")
    stored, adapted = source_weights(source, offline=offline)
    weights = TernaryWeights(stored, rounded) if rounded else stored
    in_file = SplitExperts(weights) if architecture.experts else weights
    names = names_of(in_file.names, family_of(text.model_type), architecture)
    tokenizer = source_tokenizer(source, offline=offline)
    stops = stop_token_ids(read_facts(source.base, offline=offline, origins=source.origins), tokenizer)
    probe = probe_batch(tokenizer, text.vocab_size)
    trained = torch.empty(0)
    facts: dict[str, float] = {}
    if source.verify:
        say("computing the reference that the files are compared with")
        apart = adapted if weights is stored else None
        model: Any = unwritten(source_config(source, offline=offline)) if apart is None else apart
        probe, trained = _trained_logits(model, weights, probe)
        facts, problems = activations_rounded(source.folder, probe, trained) if rounded else ({}, [])
        if problems:
            raise not_verified(source.destination, problems)
    wanted = ExpectedFile(
        config,
        architecture,
        names,
        in_file,
        _heads(text),
        description.tensors,
        description.values,
        vocabulary_of(tokenizer, stops, text.vocab_size),
        tokenizer,
        stops,
        probe,
        trained,
        source.reload,
        source.llama_cpp,
        provenance_of(source),
    )
    return PreparedGguf(wanted, _without_images(description, names), file_name(source), facts)


def _heads(config: Any) -> dict[str, int]:
    """How many heads the rows of queries and of keys stand for, by what GGUF calls the weights."""
    heads: int = config.num_attention_heads
    return {"attn_q": heads, "attn_k": getattr(config, "num_key_value_heads", None) or heads}


def _without_images(description: Description, names: TensorNames) -> Description:
    """With a warning where the model has other parts than its language model."""
    if not names.left_out:
        return description
    message = f"llama.cpp reads images from a file of its own, which ftcli does not write: {len(names.left_out)} "
    message += "tensors of other parts than the language model are left out"
    warning = Finding("FT757", message, severity="warning")
    return replace(description, warnings=(*description.warnings, warning))


def _described(description: Description, architecture: Architecture) -> Description:
    if architecture.only_in is None:
        return description
    message = f"llama.cpp does not build {architecture.name}: the file is for {architecture.only_in}, where ftcli's "
    warning = Finding("FT757", f"{message}files have not been run", severity="warning")
    return replace(description, warnings=(*description.warnings, warning))


def file_name(source: ExportSource) -> str:
    """What the files are called, before their type: the run, or the adapter's folder."""
    folder = source.run[0] if source.run is not None else source.folder
    return re.sub(r"[^\w.=,+-]+", "-", folder.resolve().name) or "model"


def _trained_logits(model: Any, weights: ModelWeights, probe: Probe) -> tuple[Probe, Tensor]:
    """A probe with what ``model`` goes on with, and what it answers in float32: base and adapter, apart, or a full
    fine-tune itself. Its weights are read while it computes.
    """
    base = weights.base if isinstance(weights, MergedWeights) else weights
    with computing_from(model, base.read, base.names), torch.no_grad():
        probe = continued(model, probe, tokens_compared(elements(weights)))
        return probe, logits(model, probe)


def write_type(prepared: PreparedGguf, path: Path, kind: str) -> None:
    """Write one file.

    Raises:
        FtcliError: FT758 where ``llama-quantize`` would make it and is not there, or fails.
        OSError: it cannot be written, or the disk has too little room.
    """
    intermediate = TYPES[kind].quantized_by
    if intermediate is None:
        _write_plain(prepared, path, kind)
        return
    from ftcli.export.gguf.quantize import quantize_file

    plain = path.with_name(f".{path.name}.{intermediate}")
    try:
        _write_plain(prepared, plain, intermediate)
        quantize_file(plain, path, kind)
    finally:
        plain.unlink(missing_ok=True)


def _write_plain(prepared: PreparedGguf, path: Path, kind: str) -> None:
    wanted = prepared.wanted
    tensors: dict[str, PlannedTensor] = {
        stored: PlannedTensor(tuple(factor.shape), "F32", lambda factor=factor: factor)  # type: ignore[misc]
        for stored, factor in prepared.description.tensors.items()
    }
    for name, stored in wanted.names.stored.items():
        shape = wanted.weights.shape(name)
        tensors[stored] = PlannedTensor(shape, type_of(stored, shape, kind), _reader(wanted, name, stored))
    require_room(path, sum(planned.nbytes for planned in tensors.values()))
    write_file(path, wanted.architecture.name, _values(prepared, kind), tensors)


def _reader(wanted: ExpectedFile, name: str, stored: str) -> Callable[[], Tensor]:
    return lambda: to_file(stored, wanted.weights.read(name), wanted.heads, wanted.architecture)


def _values(prepared: PreparedGguf, kind: str) -> dict[str, Value]:
    name = prepared.wanted.architecture.name
    return {
        "general.type": "model",
        "general.name": prepared.name,
        "general.file_type": TYPES[kind].file_type,
        "general.quantization_version": 2,
        **prepared.wanted.provenance,
        **{f"{name}.{key}": value for key, value in prepared.description.values.items()},
        **prepared.wanted.vocabulary.values,
    }
