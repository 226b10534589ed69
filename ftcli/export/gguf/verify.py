"""Compares a GGUF file with what was trained: what the gguf library reads from it is put into transformers' model.

Weights are compared one by one, metadata by building the model from it, the tokenizer by cutting the same texts into
tokens. Where llama.cpp's library (llama-cpp-python) is installed, the file runs there, too: it gives the logits of all
prompts and cuts the texts into tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import Finding
from ftcli.export.clean.request import LOGITS, ReloadAnswer, ReloadRequest
from ftcli.export.gguf.file import ExpectedFile, Trained, as_stored, in_model_shapes, type_of
from ftcli.export.gguf.metadata import ROUNDING
from ftcli.export.gguf.vocabulary import NORMAL, is_known, pieces_of
from ftcli.export.lazy import computing_from
from ftcli.export.source import unwritten
from ftcli.export.verify import (
    SENSITIVE,
    TEXTS,
    TOLERANCE,
    Probe,
    check_greedy,
    compare_logits,
    logits,
    logits_problems,
    reloaded,
    rendered_ids,
    same_greedy,
    sent,
    shortened,
    unlike_names,
)
from ftcli.gguf import (
    GATE,
    ReadFile,
    columns_in_file_order,
    columns_in_model_order,
    in_model_order,
    in_stored_layout,
    numbers_in_file,
)
from ftcli.plain import JsonMap
from ftcli.tables.gguf import TYPES, StoredType

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: What tokens that end a turn are called in a file.
STOPS = ("eos", "eot", "eom")
#: Half of float16's smallest step: the error of a subnormal number.
_HALF_STEP = 2.0**-25


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of verifying a file, or of running llama.cpp on it.

    Attributes:
        rounding: Relative error of the file's logits against the trained model's: what rounding the weights does.
    """

    problems: tuple[str, ...] = ()
    told: Mapping[str, str | float] = field(default_factory=dict)
    rounding: float = 0.0
    answer: ReloadAnswer = field(default_factory=ReloadAnswer)

    def warnings(self, path: Path, kind: str) -> list[Finding]:
        """FT772 where rounding moves the logits further than it mostly does."""
        usual = TYPES[kind].logits
        if self.rounding <= usual:
            return []
        message = (
            f"{path.name}: rounding the weights to {kind} moves this model's logits by {self.rounding:.2g} of their "
        )
        message += f"size, where {usual:.2g} is the most that is usual"
        return [Finding("FT772", message, help="export a type of more bits, and evaluate it", severity="warning")]

    def facts(self, prefix: str) -> dict[str, str | int | float]:
        """Facts of the file for an export's record, each name with ``prefix`` in front."""
        return {f"{prefix}{name}": value for name, value in self.told.items()} | reloaded(self.answer)


def verify_file(path: Path, kind: str, wanted: ExpectedFile) -> FileReport:
    """Read ``path`` again and compare everything."""
    try:
        file = ReadFile(path)
        values = file.values
        problems = _compare_values(values, wanted) or compare_vocabulary(values, wanted)
        problems += _compare_tensors(file, wanted)
    except (OSError, ValueError, IndexError, KeyError, RuntimeError) as error:
        return FileReport((f"{path.name} cannot be read: {type(error).__name__}: {error}",))
    if problems:  # a model may not even be built of it
        return FileReport(tuple(shortened(problems)))
    return _compare_logits(path, kind, wanted)


def _compare_tensors(file: ReadFile, wanted: ExpectedFile) -> list[str]:
    expected = set(wanted.names.stored.values()) | set(wanted.description.tensors)
    problems = unlike_names(file.names, expected, "is not the model's")
    for name, stored in wanted.names.stored.items():
        problem = _compare_tensor(file, name, stored, wanted) if stored in file.names else None
        problems += [f"{stored} {problem}"] if problem else []
    for stored, factor in wanted.description.tensors.items():
        if stored in file.names and not torch.equal(file.read(stored), factor):
            problems.append(f"{stored} differs")
    return problems


def _compare_tensor(file: ReadFile, name: str, stored: str, wanted: ExpectedFile) -> str | None:
    """The fault of one tensor, or None. A function of its own: what it has read is gone before the next is read."""
    tensor = numbers_in_file(stored, wanted.weights.read(name), wanted.architecture)
    found = in_model_order(stored, file.read(stored), wanted.heads, wanted.architecture)
    # Blocks are of columns that are neighbours in the file.
    found, tensor = (columns_in_file_order(stored, each, wanted.heads, wanted.architecture) for each in (found, tensor))
    return difference(found, tensor, file.type_name(stored))


def difference(found: Tensor, want: Tensor, ggml: str) -> str | None:
    """The fault of a tensor of a file, which ``want`` was to be rounded to the type ``ggml`` for; None: it has none."""
    if found.shape != want.shape:
        return f"has shape {tuple(found.shape)} instead of {tuple(want.shape)}"
    row = next((each for each in TYPES.values() if each.ggml == ggml and each.quantized_by is None), None)
    if found.dim() < 2:
        found, want = found[None], want[None]
    rows = max(1, (1 << 22) // want.shape[-1])
    for got, wished in zip(torch.split(found, rows), torch.split(want, rows), strict=True):
        if not bool(torch.isfinite(got).all()):
            return "holds NaN or infinity"
        if row is None:  # made by llama-quantize, whose error is its own
            continue
        scale = wished.abs()
        if row.block > 1 and not row.ternary:
            scale = scale.reshape(-1, row.block).amax(-1, keepdim=True).expand(-1, row.block).reshape(wished.shape)
        room = row.error * scale + (0.0 if ggml == "F32" else (row.steps + 1) * _HALF_STEP)
        if row.ternary and not torch.equal(got.sign(), wished.sign()):
            return "has signs other than those trained"
        if bool(((got - wished).abs() > room).any()):
            return f"differs by up to {float((got - wished).abs().max()):.3g} from what was trained"
    return None


def _compare_logits(path: Path, kind: str, wanted: ExpectedFile) -> FileReport:
    row = TYPES[kind]
    with tempfile.TemporaryDirectory(prefix="ftcli-config-") as config:
        wanted.config.save_pretrained(config)
        asked = ReloadRequest(
            "gguf",
            str(path),
            config=config,
            names=wanted.names.stored,
            heads=wanted.heads,
        )
        answer = wanted.reload(asked, sent(wanted.probe))
    if answer.problems:
        return FileReport(answer.problems)
    found = answer.tensors[LOGITS]
    rounding = compare_logits(found, wanted.logits, row.logits)
    reference, allowed = wanted.logits, row.logits
    if row.quantized_by is None:
        reference = _rounded_logits(kind, wanted)
        error = compare_logits(reference, wanted.logits, row.logits).relative_error
        allowed = max(TOLERANCE, SENSITIVE * error)
    compared = compare_logits(found, reference, allowed)
    problems = logits_problems(compared, allowed)
    llama = FileReport() if problems else run_in_llama_cpp(path, row, wanted, rounding.relative_error)
    told = {
        "rounding": rounding.relative_error,
        "relative_error": compared.relative_error,
        "allowed": allowed,
        "top1_agreement": rounding.top1_agreement,
        "greedy_tokens": same_greedy(found, wanted.probe),
        **llama.told,
    }
    return FileReport((*problems, *llama.problems), told, rounding.relative_error, answer)


def _rounded_logits(kind: str, wanted: ExpectedFile) -> Tensor:
    """The trained model's logits with each of its weights rounded as a file of this type rounds them."""
    model, weights, names = unwritten(wanted.config), in_model_shapes(wanted.weights), wanted.names.stored

    def read(name: str) -> Tensor:
        part = next((each for each in (name, f"{name}{GATE}") if each in names), None)
        shape = weights.shape(name) if part is None else wanted.weights.shape(part)
        stored = "token_embd.weight" if part is None else names[part]  # a head that is not there is the embedding
        turned = in_stored_layout(name, weights.read(name), wanted.architecture)
        columns = columns_in_file_order(stored, turned, wanted.heads, wanted.architecture)
        rounded = as_stored(columns, type_of(stored, shape, kind))
        rounded = columns_in_model_order(stored, rounded, wanted.heads, wanted.architecture)
        return in_stored_layout(name, rounded, wanted.architecture)

    with computing_from(model, read, weights.names):
        return logits(model, wanted.probe)


def _compare_values(values: JsonMap, wanted: ExpectedFile) -> list[str]:
    """Metadata that is not what was written; what it means is compared afterwards."""
    written = {f"{wanted.architecture.name}.{key}": value for key, value in wanted.description.values.items()}
    written |= {"general.architecture": wanted.architecture.name, **wanted.provenance, **wanted.vocabulary}
    written |= wanted.activations
    return [
        f"{key} differs from what was written" for key, value in written.items() if not _same(values.get(key), value)
    ]


def compare_vocabulary(values: JsonMap, wanted: Trained) -> list[str]:
    """Problems with the tokenizer, the special tokens and the template of a file."""
    tokenizer, problems = wanted.tokenizer, []
    ids = {values.get(f"tokenizer.ggml.{name}_token_id") for name in STOPS}
    missing = [stop for stop in wanted.stops[:3] if stop not in ids]
    problems += [f"the stop token {stop} is not named" for stop in missing]
    if tokenizer.bos_token_id is not None and values.get("tokenizer.ggml.bos_token_id") != tokenizer.bos_token_id:
        problems.append("bos is a different token")
    text_config: Any = wanted.config.get_text_config()
    if len(values["tokenizer.ggml.tokens"]) != text_config.vocab_size:
        problems.append("there are more or fewer tokens than embeddings")
    problems += _other_pieces(values, tokenizer)
    if is_known(values):
        problems += _compare_tokens([pieces_of(values, text) for text in TEXTS], tokenizer)
    return problems + _compare_template(values, tokenizer)


def _other_pieces(values: JsonMap, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Pieces of the vocabulary, special ones and bytes aside, that are others than the tokenizer's."""
    kinds = values["tokenizer.ggml.token_type"]
    plain = {at: piece for at, piece in enumerate(values["tokenizer.ggml.tokens"]) if kinds[at] == NORMAL}
    known: Any = tokenizer.convert_ids_to_tokens(list(plain))
    others = [at for (at, piece), wanted in zip(plain.items(), known, strict=True) if piece != wanted]
    return [f"token {others[0]} is another piece, and so are {len(others) - 1} more"] if others else []


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, float):
        return isinstance(found, float) and abs(found - value) <= ROUNDING * abs(value)
    return bool(found == value)


def _compare_template(values: JsonMap, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The file's template must render what training's does, and its tokens be those of training."""
    template = values.get("tokenizer.chat_template")
    if not tokenizer.chat_template:
        return ["there is a chat template, and training had none"] if template else []
    served: Any = deepcopy(tokenizer)
    served.chat_template = template
    if any(rendered_ids(served, text) != rendered_ids(tokenizer, text) for text in TEXTS):
        return ["the chat template renders a conversation differently than training did"]
    return []


LIBRARY = "llama-cpp-python"
ABSENT = f"llama.cpp is not on this machine ({LIBRARY}), so the files are not run in it"
#: Relative error of the logits that passes at least: GELU is looked up in a table of float16 there, which makes 3e-4.
#: Of ternary types activations are rounded there, by token and block, which makes 2.4e-2.
LEAST, _LEAST_TERNARY = 2e-3, 0.1


def has_llama_cpp() -> bool:
    """True if llama.cpp's library is installed."""
    return find_spec("llama_cpp") is not None


def run_in_llama_cpp(path: Path, row: StoredType, wanted: ExpectedFile, rounding: float) -> FileReport:
    """Runs a file in llama.cpp, where that is there. A fault of llama.cpp's own that the table names is no problem.

    ``rounding`` of the weights is what moves the logits this far; llama.cpp also rounds the activations, as finely.
    """
    if not wanted.llama_cpp:
        return FileReport(told={"llama_cpp": "not on this machine"})
    if wanted.architecture.only_in is not None:
        return FileReport(told={"llama_cpp": f"it does not build {wanted.architecture.name}"})
    least = _LEAST_TERNARY if row.ternary else LEAST
    said = wanted.description.values.get("context_length")
    report = in_library(path, max(row.logits, least, 2 * rounding), wanted, said if isinstance(said, int) else None)
    fault = wanted.architecture.fault or wanted.description.fault
    if fault is None or not report.problems:
        return report
    return FileReport(told={**report.told, "llama_cpp": f"{report.problems[0]}: {fault}"})


def in_library(path: Path, allowed: float, wanted: Trained, most: int | None = None) -> FileReport:
    """Compares a file in llama.cpp's library with the trained model.

    Args:
        allowed: The relative error of the logits that passes.
        most: How many tokens the file says that the model takes.
    """
    longest = wanted.probe.input_ids.shape[1]
    context = min(most or longest, longest)
    probe = Probe(wanted.probe.input_ids[:, :context], wanted.probe.attention_mask[:, :context])
    answer = wanted.reload(ReloadRequest("llama", str(path), texts=TEXTS), sent(probe))
    if answer.unavailable:
        return FileReport(told={"llama_cpp": f"not asked: {answer.unavailable}"})
    said = [f"in llama.cpp {problem}" for problem in answer.problems]
    if said:
        return FileReport(tuple(said))
    found = answer.tensors[LOGITS]
    places = wanted.probe.attention_mask.bool().nonzero()[:, 1]
    compared = compare_logits(found, wanted.logits[places < context], allowed)
    problems = logits_problems(compared, allowed)
    version = next((name for name in answer.libraries.split(", ") if name.startswith("llama_cpp")), LIBRARY)
    facts: dict[str, str | float] = {"llama_cpp": version, "llama_cpp_error": compared.relative_error}
    if context >= longest:
        chosen = found[wanted.probe.continued_at].argmax(-1)
        problems += check_greedy(chosen, wanted.logits, wanted.probe, (), allowed)
        facts["llama_cpp_greedy_tokens"] = same_greedy(found, wanted.probe)
    problems += _compare_tokens(answer.tokenizer["rendered"], wanted.tokenizer)
    ends = answer.stops[LIBRARY]
    problems += [f"generation does not end at the stop token {stop}" for stop in wanted.stops[:3] if stop not in ends]
    return FileReport(tuple(f"in llama.cpp {problem}" for problem in problems), facts)


def _compare_tokens(found: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Problems of the ids of each of the texts."""
    return [
        f"{text[:20]!r} is cut into different tokens"
        for text, tokens in zip(TEXTS, found, strict=True)
        if list(tokens) != list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ]
