"""The format ``gguf``: one file for each type of ``export.gguf.types``, each read again and compared with training.

And a LoRA adapter as a GGUF file, which llama.cpp puts on a base model (``--lora``). It adds ``alpha / rank · B A``;
where training scaled otherwise (rsLoRA, patterns), B takes up the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ftcli.export.calibration import importance
from ftcli.export.gguf.converted import write_converted, write_projector
from ftcli.export.gguf.file import (
    ExpectedFile,
    PlannedTensor,
    has_row,
    in_memory,
    in_model_shapes,
    prepare_gguf,
    quantize_file,
    stored_bytes,
    type_of,
    write_file,
)
from ftcli.export.gguf.images import IMAGE, compare_seen
from ftcli.export.gguf.verify import verify_file
from ftcli.export.lazy import computing_from
from ftcli.export.safetensors import plan_model, require_kept_base
from ftcli.export.source import ExportSource, not_verified, read_adapter_config, unwritten
from ftcli.export.tensorfile import require_room
from ftcli.export.verify import Verified, compare_logits, logits, not_asked, shortened, unlike_names
from ftcli.export.weights import MergedWeights, WeightUpdate, base_weights, source_config, stored_names
from ftcli.gguf import (
    ReadFile,
    Value,
    columns_in_file_order,
    columns_in_model_order,
    no_place,
    require_gguf_package,
    rows_in_file_order,
    rows_in_model_order,
    to_file,
)
from ftcli.tables.gguf import TYPES

#: llama-quantize mixes K-quants: none of its files has more bits for a weight than this.
_MOST = "Q6_K"
#: The vocabulary and the header.
_BESIDE = 16 << 20


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """Write a file for each type into ``folder`` and verify it. Raises FtcliError FT741 when a file is not what it
    should be, FT747 for a base of random weights, FT756 for a model that llama.cpp does not compute as it was trained,
    FT758 where the package gguf, or llama.cpp's converter for a family without a row, is not there; OSError where it
    cannot be written.
    """
    require_gguf_package()
    require_kept_base(source)
    if not has_row(source_config(source)):
        return write_converted(source, folder, say)
    wanted = prepare_gguf(source, say)
    facts: dict[str, str | int | float] = dict(wanted.facts)
    warnings = [*wanted.description.warnings]
    matrix, weighed = _importance(source, wanted, folder, say) or (None, 0)
    for kind in source.settings.gguf.types:
        path = folder / f"{wanted.name}-{TYPES[kind].ggml}.gguf"
        say(f"writing {path.name}")
        write_type(wanted, path, kind, matrix)
        if not source.verify:
            continue
        say(f"verifying {path.name}")
        report = verify_file(path, kind, wanted)
        if report.problems:
            raise not_verified(folder, [f"{path.name}: {problem}" for problem in report.problems])
        facts |= report.facts(f"{kind}_")
        warnings += report.warnings(path, kind)
    if matrix is not None:
        matrix.unlink()
        facts["imatrix_tokens"] = weighed
    if source.settings.gguf.lora_adapter:
        facts["adapter_relative_error"] = _adapter(source, wanted, folder, say)
    if wanted.names.left_out:
        told, untold = write_projector(source, folder, say)
        warnings += untold
        if told and source.verify and wanted.llama_cpp and wanted.architecture.fault is None:
            facts |= _shown_images(source, wanted, folder, str(told["projector"]))
        facts |= told
    if not source.verify:
        return not_asked(wanted.merged_with)
    facts["tensors"] = len(wanted.names.stored)
    return Verified(
        "every weight, logits of the model that the file describes, tokenizer, template, stop tokens",
        facts,
        tuple(warnings),
        wanted.merged_with,
    )


def _shown_images(source: ExportSource, wanted: ExpectedFile, folder: Path, projector: str) -> dict[str, str | float]:
    """Shows llama.cpp an image, with the type of the most bits; facts for the record."""
    kind = min(source.settings.gguf.types, key=lambda each: TYPES[each].logits)
    path = folder / f"{wanted.name}-{TYPES[kind].ggml}.gguf"
    told, problems = compare_seen(source, wanted, path, folder / projector, max(TYPES[kind].logits, IMAGE))
    if problems:
        raise not_verified(folder, [f"{projector}: {problem}" for problem in problems])
    return told


def _importance(
    source: ExportSource, wanted: ExpectedFile, folder: Path, say: Callable[[str], None]
) -> tuple[Path, int] | None:
    """A file as llama.cpp's ``llama-imatrix`` writes it, and of how many tokens; None where no type asks for it."""
    asked = source.settings.gguf
    made = [TYPES[kind] for kind in asked.types if TYPES[kind].quantized_by is not None]
    if not any(asked.imatrix or each.weighed for each in made):
        return None
    tensors: dict[str, PlannedTensor] = {}
    most = 0
    for name, (squares, tokens) in importance(source, plan_model(source), say).items():
        stored = wanted.names.stored.get(name)
        if stored is not None:
            sums = columns_in_file_order(stored, squares[None], wanted.heads, wanted.architecture)
            tensors[f"{stored}.in_sum2"] = in_memory(sums)
            tensors[f"{stored}.counts"] = in_memory(torch.full((1, 1), float(tokens)))
            most = max(most, tokens)
    path = folder / ".imatrix.gguf"
    values: dict[str, Value] = {
        "general.type": "imatrix",
        "imatrix.datasets": ["data.train of the run"],
        "imatrix.chunk_count": 1,
        "imatrix.chunk_size": most,
    }
    write_file(path, "imatrix", values, tensors)
    return path, most


def _adapter(source: ExportSource, wanted: ExpectedFile, folder: Path, say: Callable[[str], None]) -> float:
    if source.kind != "adapter":
        raise no_place("a full fine-tune has no adapter: leave export.gguf.lora_adapter out")
    path = folder / f"{wanted.name}-LoRA-F32.gguf"
    say(f"writing {path.name}")
    write_adapter(wanted, path, wanted.name, float(read_adapter_config(source.folder)["lora_alpha"]))
    problems, error = verify_gguf_adapter(wanted, path) if source.verify else ([], 0.0)
    if problems:
        raise not_verified(folder, [f"{path.name}: {problem}" for problem in problems])
    return error


def write_type(wanted: ExpectedFile, path: Path, kind: str, matrix: Path | None = None) -> None:
    """Write one file; ``matrix``: the importance matrix that ``llama-quantize`` is given.

    Raises FtcliError FT758 where ``llama-quantize`` would make it and is not there, or fails; OSError: it cannot be
    written, or the disk has too little room.
    """
    intermediate = TYPES[kind].quantized_by
    if intermediate is None:
        _write_plain(wanted, path, kind)
        return
    plain = path.with_name(f".{path.name}.{intermediate}")
    try:
        _write_plain(wanted, plain, intermediate)
        quantize_file(plain, path, kind, matrix)
    finally:
        plain.unlink(missing_ok=True)


def _write_plain(wanted: ExpectedFile, path: Path, kind: str) -> None:
    tensors = {stored: in_memory(factor) for stored, factor in wanted.description.tensors.items()}
    for name, stored in wanted.names.stored.items():
        shape = wanted.weights.shape(name)
        tensors[stored] = PlannedTensor(shape, type_of(stored, shape, kind), _reader(wanted, name, stored))
    require_room(path, sum(planned.nbytes for planned in tensors.values()))
    write_file(path, wanted.architecture.name, _values(wanted, kind), tensors)


def _reader(wanted: ExpectedFile, name: str, stored: str) -> Callable[[], Tensor]:
    return lambda: to_file(stored, wanted.weights.read(name), wanted.heads, wanted.architecture)


def _values(wanted: ExpectedFile, kind: str) -> dict[str, Value]:
    name = wanted.architecture.name
    return {
        "general.type": "model",
        "general.name": wanted.name,
        "general.file_type": TYPES[kind].file_type,
        "general.quantization_version": 2,
        **wanted.provenance,
        **{f"{name}.{key}": value for key, value in wanted.description.values.items()},
        **wanted.activations,
        **wanted.vocabulary,
    }


def gguf_bytes(source: ExportSource) -> int:
    """Bytes of all types of ``export.gguf.types``, and of the file that the K-quants are made of."""
    return _bytes(source, source.settings.gguf.types)


def ollama_bytes(source: ExportSource) -> int:
    """Bytes of the first type."""
    return _bytes(source, source.settings.gguf.types[:1])


def _bytes(source: ExportSource, types: Sequence[str]) -> int:
    base = base_weights(source)
    embedding, head = base.ends
    places = {embedding: "token_embd.weight", head: "output.weight"}
    shapes = [(places.get(name, ""), base.shape(name)) for name in stored_names(source, base)]

    def plain(kind: str) -> int:
        return _BESIDE + sum(stored_bytes(shape, type_of(stored, shape, kind)) for stored, shape in shapes)

    mixed = _BESIDE + sum(stored_bytes(shape, _MOST if len(shape) > 1 else "F32") for _, shape in shapes)
    files = sum(mixed if TYPES[kind].quantized_by else plain(kind) for kind in types)
    if not has_row(source_config(source)):
        return files + 2 * plain("bf16")  # the model that the converter is given, and the file that others are made of
    return files + max(
        (plain(TYPES[kind].quantized_by or kind) for kind in types if TYPES[kind].quantized_by), default=0
    )


_ALPHA = "adapter.lora.alpha"
_TYPE = "f32"


def write_adapter(wanted: ExpectedFile, path: Path, name: str, alpha: float) -> None:
    """Write the adapter of ``wanted``'s weights.

    Raises FtcliError FT756 for an adapter that is more than pairs of matrices on weights that llama.cpp has; OSError
    where it cannot be written.
    """
    tensors: dict[str, PlannedTensor] = {}
    for weight, (a, b, scale) in _pairs(wanted).items():
        stored = wanted.names.stored[weight]
        factor = scale / (alpha / a.shape[0])
        b = b.float() if factor == 1.0 else b.float() * factor
        pair = {
            "a": columns_in_file_order(stored, a.float(), wanted.heads, wanted.architecture),
            "b": rows_in_file_order(stored, b, wanted.heads, wanted.architecture),
        }
        for part, matrix in pair.items():
            tensors[f"{stored}.lora_{part}"] = in_memory(matrix)
    values: dict[str, Value] = {
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        _ALPHA: float(alpha),
        **wanted.provenance,
    }
    write_file(path, wanted.architecture.name, values, tensors)


def _pairs(wanted: ExpectedFile) -> dict[str, tuple[Tensor, Tensor, float]]:
    """By weight the two matrices A (rank, in) and B (out, rank), and what their product is multiplied by."""
    weights = in_model_shapes(wanted.weights)
    assert isinstance(weights, MergedWeights)  # there is an adapter
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for weight, change in weights.changes.items():
        if change.whole is not None or change.magnitude is not None or change.a is None or change.b is None:
            kind = "is trained whole" if change.whole is not None else "has DoRA's lengths"
            raise no_place(f"{weight} {kind}, and llama.cpp's adapters are LoRA's two matrices alone")
        stacked = len(weights.shape(weight)) > 2
        if weight not in wanted.names.stored or weight not in weights.base.names or stacked:
            raise no_place(f"llama.cpp has no weight of its own for the adapter of {weight}")
        found[weight] = change.a, change.b, change.scale
    return found


def verify_gguf_adapter(wanted: ExpectedFile, path: Path) -> tuple[list[str], float]:
    """Read the adapter again, put it on the base and compare logits: problems, and the relative error."""
    try:
        file = ReadFile(path)
        values = file.values
        found = {name: file.read(name) for name in file.names}
        alpha = float(values[_ALPHA])
    except (OSError, ValueError, IndexError, KeyError) as error:
        return [f"{path.name} cannot be read: {type(error).__name__}: {error}"], 0.0
    problems = [] if values.get("general.architecture") == wanted.architecture.name else ["it belongs to another model"]
    if (values.get("general.type"), values.get("adapter.type")) != ("adapter", "lora"):
        problems.append("it does not say that it is an adapter")
    expected = {f"{wanted.names.stored[w]}.lora_{part}" for w in _pairs(wanted) for part in "ab"}
    problems += unlike_names(found, expected, "is not the adapter's")
    if problems:
        return shortened(problems), 0.0
    return _compare(wanted, _changes(wanted, found, alpha))


def _changes(wanted: ExpectedFile, found: Mapping[str, Tensor], alpha: float) -> dict[str, WeightUpdate]:
    changes = {}
    for weight in _pairs(wanted):
        stored = wanted.names.stored[weight]
        a, b = found[f"{stored}.lora_a"], found[f"{stored}.lora_b"]
        a = columns_in_model_order(stored, a, wanted.heads, wanted.architecture)
        b = rows_in_model_order(stored, b, wanted.heads, wanted.architecture)
        changes[weight] = WeightUpdate(a, b, alpha / a.shape[0])
    return changes


def _compare(wanted: ExpectedFile, changes: Mapping[str, WeightUpdate]) -> tuple[list[str], float]:
    weights = in_model_shapes(wanted.weights)
    assert isinstance(weights, MergedWeights)
    model = unwritten(wanted.config)
    again = MergedWeights(weights.base, changes)
    with computing_from(model, again.read, again.names):
        compared = compare_logits(logits(model, wanted.probe), wanted.logits, TYPES[_TYPE].logits)
    allowed = TYPES[_TYPE].logits
    if compared.relative_error > allowed:
        return [f"logits differ by {compared.relative_error:.3g} of their size; {allowed:g} is allowed"], 0.0
    return [], compared.relative_error
