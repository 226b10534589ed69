"""Compares what was written with its source: tensor by tensor, and by the logits and tokens that it answers with.

Both are asked a fixed batch, the probe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ftcli.errors import Finding, FtcliError
from ftcli.export.clean.request import ATTENTION_MASK, GREEDY, INPUT_IDS, LOGITS, PROMPT, ReloadAnswer, ReloadRequest
from ftcli.export.lazy import computing_from
from ftcli.export.merge import Rounding
from ftcli.export.source import local_config, not_verified, plain_config
from ftcli.export.tensorfile import TensorFile
from ftcli.export.weights import MergedWeights, ModelWeights, StoredTensors, StoredWeights
from ftcli.facts.device import cpu_device
from ftcli.model.pretrained import hollow, weight_files
from ftcli.plain import JsonMap, JsonObject
from ftcli.rows.limits import REFUSALS, limited_template

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


#: A user's messages, rendered in the model's chat template; plain text where it has none.
TEXTS = ("Name three rivers of Europe, and say where each one ends.", "def add(a, b):\n    return a + b\n")
ROW_TOKENS = 40
#: How many of the likeliest tokens the first row is gone on with; and by a model whose weights are read anew for each.
NEW_TOKENS, STREAMED_TOKENS = 6, 2


@dataclass(frozen=True, slots=True)
class Probe:
    """``input_ids`` and ``attention_mask`` are (rows, tokens), padded on the right.

    Attributes:
        new_tokens: How many tokens at the end of the first row are what the trained model goes on with.
    """

    input_ids: Tensor
    attention_mask: Tensor
    new_tokens: int = 0

    @property
    def prompt(self) -> Tensor:
        """The first row (1, tokens) without what the trained model goes on with."""
        return self.input_ids[:1, : self._first - self.new_tokens]

    @property
    def greedy(self) -> Tensor:
        """The tokens that the trained model goes on with: (new_tokens,)."""
        return self.input_ids[0, self._first - self.new_tokens : self._first]

    @property
    def continued_at(self) -> slice:
        """The positions, among those of :func:`logits`, at which the trained model chose each of these tokens."""
        return slice(self._first - self.new_tokens - 1, self._first - 1)

    @property
    def _first(self) -> int:
        return int(self.attention_mask[0].sum())


def probe_batch(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Probe:
    """Two texts of different length and one row of ids from everywhere in the vocabulary; the same every time."""
    rows = [torch.tensor(rendered_ids(tokenizer, text)[:ROW_TOKENS], dtype=torch.long) for text in TEXTS]
    rows.append(torch.randint(0, vocab_size, (ROW_TOKENS,), generator=torch.Generator().manual_seed(0)))
    return _padded([row.clamp(max=vocab_size - 1) for row in rows], tokenizer.pad_token_id or 0)


def _padded(rows: Sequence[Tensor], padding: int, new_tokens: int = 0) -> Probe:
    masks = [torch.ones_like(row) for row in rows]
    return Probe(pad_sequence(list(rows), True, padding), pad_sequence(masks, True), new_tokens)


@torch.no_grad()
def continued(model: PreTrainedModel | PeftModel, probe: Probe, tokens: int = NEW_TOKENS) -> Probe:
    """``probe`` with the first row continued by ``model``: ``tokens`` times the likeliest token."""
    rows = [row[mask.bool()] for row, mask in zip(probe.input_ids, probe.attention_mask, strict=True)]
    for _ in range(tokens):
        alone = Probe(rows[0][None], torch.ones_like(rows[0][None]))
        rows[0] = torch.cat((rows[0], logits(model, alone)[-1:].argmax(-1)))
    return _padded(rows, 0, tokens)


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of :func:`rendered_text`, or of the plain text with what the tokenizer puts around it."""
    shown = rendered_text(tokenizer, text)
    return list(tokenizer(text if shown is None else shown, add_special_tokens=shown is None)["input_ids"])


def rendered_text(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """``text`` as a user's message up to where the answer begins; None without a chat template that takes it."""
    try:
        with limited_template():
            return str(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            )
    except REFUSALS:  # without a template this is a ValueError
        return None


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel, probe: Probe) -> Tensor:
    """Float32 logits (positions, vocabulary) of all positions that are not padding."""
    # transformers compiles the rounding of some layers, which needs a compiler and takes longer than the pass.
    quantized = getattr(model.config, "quantization_config", None) is not None
    with torch.compiler.set_stance("force_eager") if quantized else nullcontext():
        output = model(input_ids=probe.input_ids, attention_mask=probe.attention_mask, use_cache=False)
    real: Tensor = output.logits[probe.attention_mask.bool()].float()
    return real


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """Distance of logits from their reference.

    Each position's mean is removed first, since softmax does not see it.

    Attributes:
        relative_error: Root mean square of the difference, over that of the reference.
        top1_agreement: Share of positions with the same likeliest token.
        firm_disagreements: Positions with another likeliest token that rounding cannot explain: the reference's best
            is ahead of its second by more than ``4 · tolerance`` times its root mean square.
    """

    relative_error: float
    top1_agreement: float
    firm_disagreements: int


def compare_logits(found: Tensor, reference: Tensor, tolerance: float) -> LogitsComparison:
    """Compare two (positions, vocabulary) tensors; NaN anywhere gives an infinite error."""
    reference = reference.double() - reference.double().mean(dim=-1, keepdim=True)
    found = found.double() - found.double().mean(dim=-1, keepdim=True)
    scale = reference.square().mean().sqrt().clamp(min=1e-30)
    error = float((found - reference).square().mean().sqrt() / scale)
    same = found.argmax(-1) == reference.argmax(-1)
    best = reference.topk(2, dim=-1).values
    firm = (best[:, 0] - best[:, 1]) > 4 * tolerance * scale
    return LogitsComparison(
        relative_error=error if error == error else float("inf"),
        top1_agreement=float(same.double().mean()),
        firm_disagreements=int((firm & ~same).sum()),
    )


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


#: What the process that loads it again takes beside the weights, libraries included.
_BESIDE = 2**30


@dataclass(frozen=True, slots=True)
class Verified:
    """An export that passed.

    Attributes:
        facts: What came out, by names of the format's own.
        merged_with: Which form of the base an adapter was merged with; empty where none was.
    """

    compared: str
    facts: Mapping[str, str | int | float]
    warnings: tuple[Finding, ...] = ()
    merged_with: str = ""

    def as_dict(self) -> JsonObject:
        return {"compared": self.compared, **self.facts}


def not_asked(merged_with: str = "") -> Verified:
    """The record of an export that nobody wanted verified."""
    message = "written without verification (--no-verify): nothing is known of how it answers"
    return Verified("nothing", {"verified": "no"}, (Finding("FT754", message, severity="warning"),), merged_with)


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
        allowed: The relative error of logits that passes: another token is no problem where the lead of the trained
            model's is less than four times that, as in :func:`ftcli.export.verify.compare_logits`.
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
    """Stop tokens that config.json or generation_config.json does not name: generation would not end there."""
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
        # Fewer where each one reads all the weights anew.
        probe = continued(model, probe, NEW_TOKENS if fits(elements(base)) else STREAMED_TOKENS)
        return probe, logits(model, probe)


def check_answer(
    answer: ReloadAnswer,
    trained: Tensor,
    probe: Probe,
    tokenizer: PreTrainedTokenizerBase,
    stops: Collection[int],
    allowed: float,
    unrounded: tuple[Tensor, float] | None = None,
) -> tuple[list[str], dict[str, str | int | float]]:
    """Problems with the tokenizer, stop tokens, logits and tokens of the written model; and what the record says.

    Args:
        trained: The trained model's logits of the probe; with its weights rounded as they are stored, if they are.
        allowed: The relative error of logits that passes.
        unrounded: What tokens are held against then: logits before rounding, and the relative error that passes.
    """
    found = answer.tensors[LOGITS]
    compared = compare_logits(found, trained, allowed)
    problems = compare_tokenizers(answer.tokenizer, tokenizer) + check_stops(answer.stops, stops)
    problems += logits_problems(compared, allowed)
    reference, room = unrounded or (trained, allowed)
    problems += check_generation(answer, reference, probe, stops, room)
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


def unlike_names(found: Iterable[str], wanted: Iterable[str], foreign: str = "was not there before") -> list[str]:
    """Problems between the names of tensors that are there and of those that are to be: missing, or ``foreign``."""
    found, wanted = set(found), set(wanted)
    missing = [f"{name} is missing" for name in sorted(wanted - found)]
    return missing + [f"{name} {foreign}" for name in sorted(found - wanted)]


def compare_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Problems between two sets of tensors that must be equal bit for bit."""
    problems = unlike_names(found, wanted)
    for name in sorted(set(wanted) & set(found)):
        problem = difference(found[name], wanted[name], wanted[name].dtype, exact=True)
        if problem:
            problems.append(f"{name} {problem}")
    return shortened(problems)


def open_written(folder: Path) -> StoredWeights:
    """The weights in ``folder``.

    Raises FtcliError FT741 for files that do not make the model of the folder's config.json.
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


def fits(parameters: int) -> bool:
    """True if memory holds a model of so many numbers as a whole, in float32."""
    free = cpu_device().free_bytes
    # Loaded as it is stored and widened then: for a moment both are there.
    return free is None or 4 * parameters + 2 * parameters + _BESIDE <= free


def model_request(
    folder: Path,
    probe: Probe,
    parameters: int,
    *,
    dtype: Literal["stored", "float32"] = "stored",
    layers: Mapping[str, int] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> ReloadRequest:
    """Loads ``folder`` as transformers does, in float32: whole where memory holds that, else layer by layer.

    Args:
        dtype: ``stored``: all weights are rounded first to the dtype that config.json names.
    """
    from_disk = not fits(parameters)
    return ReloadRequest(
        "model",
        str(folder),
        dtype=dtype,
        from_disk=from_disk,
        new_tokens=0 if from_disk else probe.new_tokens,
        texts=TEXTS,
        layers=dict(layers),
        names=dict(names),
    )


def sent(probe: Probe) -> dict[str, Tensor]:
    """The tensors of a probe, as a request sends them."""
    return {INPUT_IDS: probe.input_ids, ATTENTION_MASK: probe.attention_mask, PROMPT: probe.prompt}
