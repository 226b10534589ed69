"""Compares a GGUF file with what was trained: what the gguf library reads from it is put into transformers' model.

Weights are compared one by one, metadata by building the model from it, the tokenizer by cutting the same texts into
tokens.
"""

from __future__ import annotations

import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import Finding
from ftcli.export.clean.process import sent
from ftcli.export.clean.request import LOGITS, ReloadAnswer, ReloadRequest
from ftcli.export.gguf.expected import ExpectedFile, unsplit
from ftcli.export.gguf.file import as_stored, type_of
from ftcli.export.gguf.llama import LlamaReport, run_in_llama_cpp
from ftcli.export.gguf.metadata import ROUNDING
from ftcli.export.gguf.vocabulary import pieces_of
from ftcli.export.lazy import computing_from
from ftcli.export.probe import TEXTS, compare_logits, logits, rendered_ids
from ftcli.export.source import unwritten
from ftcli.export.verify import SENSITIVE, TOLERANCE, logits_problems, reloaded, same_greedy, shortened
from ftcli.gguf.file import ReadFile
from ftcli.gguf.names import GATE, from_file, to_file
from ftcli.plain import JsonMap
from ftcli.tables.gguf import TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Half of float16's smallest step: the error of a subnormal number.
_HALF_STEP = 2.0**-25


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of verifying a file.

    Attributes:
        error: Relative error of its logits against the trained model's: what rounding the weights does.
        unexplained: The same against the trained model with its weights rounded alike.
        allowed: The largest ``unexplained`` that passes.
        top1_agreement: Share of positions with the same likeliest token.
        greedy_tokens: How many of the tokens that the trained model goes on with are the file's, too.
        answer: Of the process that loaded it.
        llama: What llama.cpp makes of it.
    """

    problems: tuple[str, ...]
    error: float = 0.0
    unexplained: float = 0.0
    allowed: float = 0.0
    top1_agreement: float = 0.0
    greedy_tokens: str = ""
    answer: ReloadAnswer = field(default_factory=ReloadAnswer)
    llama: LlamaReport = field(default_factory=LlamaReport)

    def warnings(self, path: Path, kind: str) -> list[Finding]:
        """FT772 where rounding moves the logits further than it mostly does."""
        usual = TYPES[kind].logits
        if self.error <= usual:
            return []
        message = f"{path.name}: rounding the weights to {kind} moves this model's logits by {self.error:.2g} of their "
        message += f"size, where {usual:.2g} is the most that is usual"
        return [Finding("FT772", message, help="export a type of more bits, and evaluate it", severity="warning")]

    def facts(self, prefix: str) -> dict[str, str | int | float]:
        """Facts of the file for an export's record, each name with ``prefix`` in front."""
        found: dict[str, str | int | float] = {
            "rounding": self.error,
            "relative_error": self.unexplained,
            "allowed": self.allowed,
            "top1_agreement": self.top1_agreement,
            "greedy_tokens": self.greedy_tokens,
            **self.llama.facts,
        }
        return {f"{prefix}{name}": value for name, value in found.items()} | reloaded(self.answer)


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
    problems = [f"{name} is missing" for name in sorted(expected - set(file.names))]
    problems += [f"{name} is not the model's" for name in sorted(set(file.names) - expected)]
    for name, stored in wanted.names.stored.items():
        problem = _compare_tensor(file, name, stored, wanted) if stored in file.names else None
        problems += [f"{stored} {problem}"] if problem else []
    for stored, factor in wanted.description.tensors.items():
        if stored in file.names and not torch.equal(file.read(stored), factor):
            problems.append(f"{stored} differs")
    return problems


def _compare_tensor(file: ReadFile, name: str, stored: str, wanted: ExpectedFile) -> str | None:
    """The fault of one tensor, or None. A function of its own: what it has read is gone before the next is read."""
    tensor = to_file(stored, wanted.weights.read(name), {}, wanted.architecture)
    return _difference(_unordered(file.read(stored), stored, wanted), tensor, file.type_name(stored))


def _unordered(found: Tensor, stored: str, wanted: ExpectedFile) -> Tensor:
    """A file's tensor with its rows in the model's order, and norms as the file has them."""
    if stored.split(".")[-2] in wanted.heads:
        return from_file(stored, found, wanted.heads, wanted.architecture)
    return found


def _difference(found: Tensor, want: Tensor, ggml: str) -> str | None:
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
    llama = LlamaReport() if problems else run_in_llama_cpp(path, row, wanted, rounding.relative_error)
    return FileReport(
        (*problems, *llama.problems),
        rounding.relative_error,
        compared.relative_error,
        allowed,
        rounding.top1_agreement,
        same_greedy(found, wanted.probe),
        answer,
        llama,
    )


def _rounded_logits(kind: str, wanted: ExpectedFile) -> Tensor:
    """The trained model's logits with each of its weights rounded as a file of this type rounds them."""
    model, weights, names = unwritten(wanted.config), unsplit(wanted.weights), wanted.names.stored

    def read(name: str) -> Tensor:
        part = next((each for each in (name, f"{name}{GATE}") if each in names), None)
        shape = weights.shape(name) if part is None else wanted.weights.shape(part)
        stored = "token_embd.weight" if part is None else names[part]  # a head that is not there is the embedding
        return as_stored(weights.read(name), type_of(stored, shape, kind))

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


def compare_vocabulary(values: JsonMap, wanted: ExpectedFile) -> list[str]:
    """Problems with the tokenizer, the special tokens and the template of a file."""
    tokenizer, problems = wanted.tokenizer, []
    ids = {values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    missing = [stop for stop in wanted.stops[:3] if stop not in ids]
    problems += [f"the stop token {stop} is not named" for stop in missing]
    if tokenizer.bos_token_id is not None and values.get("tokenizer.ggml.bos_token_id") != tokenizer.bos_token_id:
        problems.append("bos is a different token")
    text_config: Any = wanted.config.get_text_config()
    if len(values["tokenizer.ggml.tokens"]) != text_config.vocab_size:
        problems.append("there are more or fewer tokens than embeddings")
    problems += [
        f"{text[:20]!r} is cut into different tokens"
        for text in TEXTS
        if pieces_of(values, text) != _plain(tokenizer, text)
    ]
    return problems + _compare_template(values, tokenizer)


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, float):
        return isinstance(found, float) and abs(found - value) <= ROUNDING * abs(value)
    return bool(found == value)


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
