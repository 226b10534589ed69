"""Compares what was written with its source: tensor by tensor, and by the logits and tokens that it answers with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.errors import Finding, FtcliError
from ftcli.export.clean.process import tokens_compared
from ftcli.export.clean.request import GREEDY, LOGITS, ReloadAnswer, ReloadRequest
from ftcli.export.lazy import computing_from
from ftcli.export.merge import Rounding
from ftcli.export.probe import TEXTS, LogitsComparison, Probe, compare_logits, continued, logits, rendered_ids
from ftcli.export.source import local_config, not_verified, plain_config
from ftcli.export.tensorfile import TensorFile
from ftcli.export.weights import MergedWeights, ModelWeights, StoredTensors, StoredWeights
from ftcli.model.pretrained import hollow, weight_files
from ftcli.plain import JsonMap, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Problems of one kind that are named; the rest is counted.
NAMED = 5

#: Allowed relative error of the logits: this, or the second number's share of what rounding the weights does to them,
#: whichever is more. Both sides compute in float32 with the same weights and sum in another order. That is as good as
#: changing weights by a few 2^-24, where rounding to bfloat16 changes them by 2^-9: measured are 3e-7 in most models,
#: 1e-4 to 7e-4 of what rounding does, and 3e-5 in Mamba, which carries any change on more than others.
TOLERANCE = 1e-4
SENSITIVE = 1e-2
#: Largest relative error of one rounding to the dtype.
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: Elements that are compared at once.
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class Verified:
    """An export that passed.

    Attributes:
        compared: What was compared, in words.
        facts: What came out, by names of the format's own.
        warnings: What people should know about it.
        merged_with: Which form of the base an adapter was merged with; empty where none was.
    """

    compared: str
    facts: Mapping[str, str | int | float]
    warnings: tuple[Finding, ...] = ()
    merged_with: str = ""

    def as_dict(self) -> JsonObject:
        """For the record beside the export."""
        return {"compared": self.compared, **self.facts}


def not_asked(merged_with: str = "") -> Verified:
    """The record of an export that nobody wanted verified."""
    message = "written without verification (--no-verify): nothing is known of how it answers"
    return Verified("nothing", {"verified": "no"}, (Finding("FT754", message, severity="warning"),), merged_with)


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """The result of comparing logits; all but ``problems`` is written into the export.

    Attributes:
        relative_error: Against base and adapter, weights rounded alike: what is compared with ``tolerance``.
        rounding: How far rounding the merged weights moved the logits.
        adapter_effect: How far the adapter moves them.
        top1_agreement: Share of positions whose likeliest token rounding left as it was.
        greedy_tokens: How many of the tokens that the trained model goes on with are what was written's, too.
    """

    dtype: str
    tolerance: float
    relative_error: float
    rounding: float
    adapter_effect: float
    top1_agreement: float
    greedy_tokens: str
    problems: tuple[str, ...]

    @property
    def lost(self) -> float:
        """Share of the adapter's effect on the logits that rounding to the stored dtype took away."""
        return self.rounding / self.adapter_effect if self.adapter_effect > 0 else 0.0


def check_logits(
    found: Tensor, probe: Probe, rounded: Tensor, exact: Tensor, without: Tensor, dtype: torch.dtype
) -> LogitsReport:
    """Logits of the written model against those of base and adapter, float32 (positions, vocabulary) all of them.

    Args:
        found: Of the model as it was loaded from what was written.
        rounded: Base and adapter, unmerged, with the weights rounded as they are stored.
        exact: Base and adapter, unmerged.
        without: The base alone: tells how much the adapter does at all.
        dtype: What the weights are stored in.
    """
    rounding = compare_logits(rounded, exact, TOLERANCE)
    allowed = max(TOLERANCE, SENSITIVE * rounding.relative_error)
    compared = compare_logits(found, rounded, allowed)
    return LogitsReport(
        dtype=str(dtype).removeprefix("torch."),
        tolerance=allowed,
        relative_error=compared.relative_error,
        rounding=rounding.relative_error,
        adapter_effect=compare_logits(without, exact, TOLERANCE).relative_error,
        top1_agreement=rounding.top1_agreement,
        greedy_tokens=same_greedy(found, probe),
        problems=tuple(logits_problems(compared, allowed)),
    )


def logits_problems(compared: LogitsComparison, allowed: float) -> list[str]:
    """Problems of logits, of which a relative error of ``allowed`` passes."""
    problems = []
    if not compared.relative_error <= allowed:
        problems.append(f"logits differ by {compared.relative_error:.3g} of their size; {allowed:.3g} is allowed")
    if compared.firm_disagreements:
        problems.append(f"the likeliest token differs at {compared.firm_disagreements} places beyond rounding")
    return problems


def same_greedy(found: Tensor, probe: Probe) -> str:
    """Number of the trained model's next tokens that are the likeliest in ``found``, too."""
    chosen = found[probe.continued_at].argmax(-1)
    return f"{int((chosen == probe.greedy).sum())} of {probe.new_tokens}"


def check_generation(
    answer: ReloadAnswer, reference: Tensor, probe: Probe, stops: Collection[int], allowed: float
) -> list[str]:
    """Problems with what the written model goes on with: see :func:`check_greedy`.

    Of a model that is read layer by layer, which generates nothing, it is what generation would give: the likeliest
    token behind what the trained model has gone on with so far, up to the first that the written files call a stop.
    """
    generated = answer.tensors.get(GREEDY)
    if generated is None:
        ends = answer.stops.get("generation_config.json", stops)
        chosen = answer.tensors[LOGITS][probe.continued_at].argmax(-1)
        last = next((index for index, token in enumerate(chosen.tolist()) if token in ends), probe.new_tokens)
        generated = chosen[: last + 1]
    return check_greedy(generated, reference, probe, stops, allowed)


def check_greedy(generated: Tensor, reference: Tensor, probe: Probe, stops: Iterable[int], allowed: float) -> list[str]:
    """Tokens (tokens,) that the written model has generated, against those that the trained model goes on with.

    Args:
        reference: The trained model's logits of the probe.
        stops: Ids that end a turn: generation ends there.
        allowed: The relative error of logits that passes: another token is no problem where the lead of the trained
            model's is less than four times that, as in :func:`ftcli.export.probe.compare_logits`.
    """
    ends = set(stops)
    scale = (reference - reference.mean(-1, keepdim=True)).double().square().mean().sqrt()
    for index, (wanted, row) in enumerate(zip(probe.greedy.tolist(), reference[probe.continued_at], strict=True)):
        if index == len(generated):
            before = int(generated[-1]) if index else -1
            return [] if before in ends else [f"generation ends after token {index}, which is no stop token"]
        token = int(generated[index])
        if token != wanted:
            best, second = row.double().topk(2).values
            lead = float(best - second)
            return [] if lead <= 4 * allowed * float(scale) else [f"generated token {index + 1} differs"]
        if token in ends and len(generated) > index + 1:
            return ["generation does not end at a stop token"]
    return []


def compare_tokenizers(written: JsonMap, wanted: PreTrainedTokenizerBase) -> list[str]:
    """Problems with the tokenizer that lies beside the weights, as :class:`ReloadAnswer` tells of it."""
    if not written:
        return ["there is no tokenizer"]
    problems = []
    for name in ("eos_token_id", "pad_token_id", "bos_token_id", "chat_template"):
        if written[name] != getattr(wanted, name):
            problems.append(f"the tokenizer's {name} differs")
    if written["tokens"] != len(wanted):
        problems.append(f"the tokenizer has {written['tokens']} tokens instead of {len(wanted)}")
    if written["rendered"] != [rendered_ids(wanted, text) for text in TEXTS]:
        problems.append("the tokenizer renders a conversation into different tokens")
    return problems


def check_stops(named: Mapping[str, Iterable[int]], stops: Iterable[int]) -> list[str]:
    """Stop tokens that config.json or generation_config.json does not name: generation would not end there.

    Args:
        named: Those that each of the two names.
    """
    wanted, problems = tuple(stops), []
    for label, known in named.items():
        missing = [token for token in wanted if token not in tuple(known)]
        if missing:
            problems.append(f"{label} does not name the stop token {missing[0]}: generation would not end there")
    return problems


def trained_logits(model: Any, base: ModelWeights, probe: Probe) -> tuple[Probe, Tensor]:
    """``probe`` with what the trained model goes on with, and its logits (positions, vocabulary) in float32.

    Args:
        model: Base and adapter, apart, or a full fine-tune; its ``base`` weights are read while it computes.
    """
    with computing_from(model, base.read, base.names):
        probe = continued(model, probe, tokens_compared(elements(base)))
        return probe, logits(model, probe)


def check_answer(
    answer: ReloadAnswer,
    trained: Tensor,
    probe: Probe,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    allowed: float,
) -> tuple[list[str], dict[str, str | int | float]]:
    """Problems with the tokenizer, stop tokens, logits and tokens of the written model; and what the record says.

    Args:
        trained: The trained model's logits of the probe.
        allowed: The relative error of logits that passes.
    """
    found = answer.tensors[LOGITS]
    compared = compare_logits(found, trained, allowed)
    problems = compare_tokenizers(answer.tokenizer, tokenizer) + check_stops(answer.stops, stops)
    problems += logits_problems(compared, allowed)
    problems += check_generation(answer, trained, probe, stops, allowed)
    return problems, {
        "relative_error": compared.relative_error,
        "tolerance": allowed,
        "top1_agreement": compared.top1_agreement,
        "greedy_tokens": same_greedy(found, probe),
    }


def loaded(request: ReloadRequest) -> str:
    """The way in which it was loaded again, for an export's record."""
    return "layer by layer, for lack of memory" if request.from_disk else "whole"


def reloaded(answer: ReloadAnswer) -> dict[str, str | int]:
    """Facts of the process that loaded it again, for an export's record."""
    return {"reloaded_by": answer.libraries, "reload_peak_bytes": answer.peak_bytes}


def shortened(problems: list[str]) -> list[str]:
    """The first few, and how many more there are."""
    if len(problems) <= NAMED:
        return problems
    return [*problems[:NAMED], f"and {len(problems) - NAMED} more"]


def compare_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Problems between two sets of tensors that must be equal bit for bit."""
    problems = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    problems += [f"{name} was not there before" for name in sorted(set(found) - set(wanted))]
    for name in sorted(set(wanted) & set(found)):
        problem = difference(found[name], wanted[name], wanted[name].dtype, exact=True)
        if problem:
            problems.append(f"{name} {problem}")
    return shortened(problems)


def open_written(folder: Path) -> StoredWeights:
    """The weights in ``folder``.

    Raises:
        FtcliError: FT741 for files that do not make the model of the folder's config.json.
    """
    try:
        config = local_config(folder)
        return StoredWeights(weight_files(str(folder), None, offline=True), hollow(plain_config(config)))
    except FtcliError as error:
        raise not_verified(folder, [finding.message for finding in error.findings]) from error
    except OSError as error:
        raise not_verified(folder, [str(error)]) from error


def compare_written(
    written: StoredWeights,
    merged: MergedWeights,
    rounding: Rounding,
    added: Collection[str] = (),
    passed_over: Mapping[str, TensorFile] = MappingProxyType({}),
) -> list[str]:
    """Problems found tensor by tensor; empty when there are none.

    Tensors that the adapter does not change must be the base's byte for byte, or rounded from those alike. Merged ones
    may differ by one unit in the last place, since the order of sums may be another.

    Args:
        merged: Base and adapter, from the adapter's file and without PEFT.
        added: Tensors that the adapter brings beside the base's; they are not compared here.
        passed_over: Further tensors by their keys, which are not the model's own (``ftcli.export.weights``).
    """
    base, changes = merged.base, merged.changes
    unknown = set(changes) - {*base.names, *base.ties, *added}
    problems = [f"the adapter changes {name}, which the base model does not have" for name in sorted(unknown)]
    files = {key: file for each in written.stored for key, file in zip(each.keys, each.files, strict=True)}
    keys = set(passed_over)
    for key, file in passed_over.items():
        problems += _compare_files(StoredTensors((key,), (file,), (), (), (file.entries[key].shape,)), files, rounding)
    for stored in base.stored:
        if not stored.packed and all(base.is_as_stored(name) and name not in changes for name in stored.names):
            keys |= set(stored.keys)
            problems += _compare_files(stored, files, rounding)
        else:
            problems += _compare_merged(stored.names, written, merged, rounding)
    problems += _compare_merged(merged.untied, written, merged, rounding)
    expected = {name for stored in base.stored for name in stored.names} | {*merged.untied, *added}
    for each in written.stored:
        foreign = set(each.names) - expected if each.names else set(each.keys) - keys
        problems += [f"{name} is not in the base model" for name in sorted(foreign)]
    return shortened(problems)


def _compare_files(stored: StoredTensors, files: Mapping[str, TensorFile], rounding: Rounding) -> Iterator[str]:
    """Problems of tensors that are the base's, by their names in the files."""
    for key, file in zip(stored.keys, stored.files, strict=True):
        if key not in files:
            yield f"{key} is missing"
            continue
        found, entry, wanted = files[key], files[key].entries[key], file.entries[key]
        if entry.shape != wanted.shape:
            yield f"{key} is {entry.shape} instead of {wanted.shape}"
        elif not stored.names or rounding.of(stored.names[0], stored) == file.dtype(key):
            equal = entry.dtype == wanted.dtype and all(
                one == other for one, other in zip_longest(found.pieces(key), file.pieces(key))
            )
            if not equal:
                yield f"{key} differs from the base model's"
        else:
            problem = difference(found.read(key), file.read(key), rounding.of(stored.names[0], stored), exact=True)
            if problem:
                yield f"{key} {problem}"


@torch.no_grad()
def _compare_merged(
    names: Sequence[str], written: StoredWeights, merged: MergedWeights, rounding: Rounding
) -> Iterator[str]:
    for name in names:
        if name not in written.names:
            yield f"{name} is missing"
            continue
        change, dtype = merged.changes.get(name), rounding.of(name, merged.base.of(name))
        exact = change is None or change.whole is not None
        problem = difference(written.read(name), merged.read(name), dtype, exact=exact)
        if problem:
            yield f"{name} {problem}"


def difference(found: Tensor, want: Tensor, dtype: torch.dtype, *, exact: bool) -> str | None:
    """The fault of ``found``, which ``want`` was to be rounded to ``dtype`` for."""
    if found.shape != want.shape or found.dtype != dtype:
        return f"is {found.dtype} {tuple(found.shape)} instead of {dtype} {tuple(want.shape)}"
    pieces = list(zip(torch.split(found.reshape(-1), _PIECE), torch.split(want.reshape(-1), _PIECE), strict=True))
    if all(torch.equal(got, wished.to(dtype)) for got, wished in pieces):
        return None
    if not bool(torch.isfinite(found).all()):
        return "holds NaN or infinity"
    differences = [float((got.float() - wished.to(dtype).float()).abs().max()) for got, wished in pieces]
    if exact:
        return f"differs from what it should be by up to {max(differences):.3g}"
    # Where W and its change nearly cancel, the last place of the sum is that of the larger one.
    largest = 1e-7 * float(want.abs().max())
    for got, wished in pieces:
        rounded = wished.to(dtype).float()
        room = 2 * UNIT_ROUNDOFF[dtype] * rounded.abs() + largest
        if bool(((got.float() - rounded).abs() > room).any()):
            return f"differs from W + s B A by up to {max(differences):.3g}"
    return None


def elements(weights: ModelWeights) -> int:
    """Numbers of the model."""
    return sum(torch.Size(weights.shape(name)).numel() for name in weights.names)
