"""A LoRA adapter as a GGUF file, which llama.cpp puts on a base model (``--lora``).

llama.cpp adds ``alpha / rank · B A``. Where training scaled otherwise (rsLoRA, patterns), B takes up the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ftcli.export.gguf.expected import ExpectedFile, unsplit
from ftcli.export.gguf.file import PlannedTensor, write_file
from ftcli.export.lazy import computing_from
from ftcli.export.probe import compare_logits, logits
from ftcli.export.source import unwritten
from ftcli.export.verify import shortened
from ftcli.export.weights import MergedWeights, WeightUpdate
from ftcli.gguf.file import ReadFile
from ftcli.gguf.names import Value, from_file, no_place, to_file
from ftcli.tables.gguf import TYPES

_ALPHA = "adapter.lora.alpha"
_TYPE = "f32"


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices of one weight: A (rank, in), B (out, rank) and what their product is multiplied by."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def write_adapter(wanted: ExpectedFile, path: Path, name: str, alpha: float) -> None:
    """Write the adapter of ``wanted``'s weights.

    Args:
        alpha: The adapter's ``lora_alpha``.

    Raises:
        FtcliError: FT756 for an adapter that is more than pairs of matrices on weights that llama.cpp has.
        OSError: it cannot be written.
    """
    tensors: dict[str, PlannedTensor] = {}
    for weight, pair in _pairs(wanted).items():
        stored = wanted.names.stored[weight]
        factor = pair.scale / (alpha / pair.rank)
        b = to_file(stored, pair.b if factor == 1.0 else pair.b * factor, wanted.heads, wanted.architecture)
        for part, matrix in (("a", pair.a.float()), ("b", b)):
            tensors[f"{stored}.lora_{part}"] = PlannedTensor(tuple(matrix.shape), "F32", lambda matrix=matrix: matrix)  # type: ignore[misc]
    values: dict[str, Value] = {
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        _ALPHA: float(alpha),
        **wanted.provenance,
    }
    write_file(path, wanted.architecture.name, values, tensors)


def _pairs(wanted: ExpectedFile) -> dict[str, _Pair]:
    weights = unsplit(wanted.weights)
    assert isinstance(weights, MergedWeights)  # there is an adapter
    found: dict[str, _Pair] = {}
    for weight, change in weights.changes.items():
        if change.whole is not None or change.magnitude is not None or change.a is None or change.b is None:
            kind = "is trained whole" if change.whole is not None else "has DoRA's lengths"
            raise no_place(f"{weight} {kind}, and llama.cpp's adapters are LoRA's two matrices alone")
        if weight not in wanted.names.stored or weight not in weights.base.names:
            raise no_place(f"llama.cpp has no weight of its own for the adapter of {weight}")
        found[weight] = _Pair(change.a, change.b, change.scale)
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
    problems += [f"{name} is missing" for name in sorted(expected - set(found))]
    problems += [f"{name} is not the adapter's" for name in sorted(set(found) - expected)]
    if problems:
        return shortened(problems), 0.0
    return _compare(wanted, _changes(wanted, found, alpha))


def _changes(wanted: ExpectedFile, found: Mapping[str, Tensor], alpha: float) -> dict[str, WeightUpdate]:
    changes = {}
    for weight in _pairs(wanted):
        stored = wanted.names.stored[weight]
        a, b = found[f"{stored}.lora_a"], found[f"{stored}.lora_b"]
        changes[weight] = WeightUpdate(a, from_file(stored, b, wanted.heads, wanted.architecture), alpha / a.shape[0])
    return changes


def _compare(wanted: ExpectedFile, changes: Mapping[str, WeightUpdate]) -> tuple[list[str], float]:
    weights = unsplit(wanted.weights)
    assert isinstance(weights, MergedWeights)
    model = unwritten(wanted.config)
    again = MergedWeights(weights.base, changes)
    with computing_from(model, again.read, again.names):
        compared = compare_logits(logits(model, wanted.probe), wanted.logits, TYPES[_TYPE].logits)
    allowed = TYPES[_TYPE].logits
    if compared.relative_error > allowed:
        return [f"logits differ by {compared.relative_error:.3g} of their size; {allowed:g} is allowed"], 0.0
    return [], compared.relative_error
