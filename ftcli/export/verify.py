"""Checks that what was written is what was trained, by loading it as any user would.

Three things must hold for a merged model:

- Every tensor equals the base's, or ``cast(W + s · B A)``, computed here from the adapter's file without PEFT.
- Its logits are those of base and adapter, computed in float32 with the weights rounded alike. So the size of a
  rounding, and how it spreads through the model, does not matter; it is measured separately and reported.
- Tokenizer, chat template and stop tokens are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.errors import Finding
from ftcli.export.clean.request import GREEDY, LOGITS, ReloadAnswer, ReloadRequest
from ftcli.export.probe import TEXTS, LogitsComparison, Probe, compare_logits, rendered_ids
from ftcli.plain import JsonMap, JsonObject

if TYPE_CHECKING:
    from peft import PeftModel
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
    """Of an export that nobody wanted verified: it says so in its record."""
    message = "written without verification (--no-verify): nothing is known of how it answers"
    return Verified("nothing", {"verified": "no"}, (Finding("FT754", message, severity="warning"),), merged_with)


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """Which weight of the base model an adapter's pair of matrices belongs to.

    ``transposed``: it is stored as (in, out), as in GPT-2 and in the experts of some families.
    """

    weight: str
    transposed: bool


def places(adapted: PeftModel) -> dict[str, AdaptedWeight]:
    """The place of each adapter, by the name of its module in the adapter's file."""
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    found: dict[str, AdaptedWeight] = {}
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            layer, leaf = module.get_base_layer(), getattr(module, "parameter_name", "weight")
            transposed = isinstance(layer, Conv1D) or bool(getattr(layer, "is_transposed", False))
            found[name] = AdaptedWeight(f"{name.replace('.base_layer', '')}.{leaf}", transposed)
    return found


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """How an adapter changes one weight (out, in): ``scale · b @ a`` is added to it, or ``whole`` replaces it.

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
    config: JsonMap, tensors: Mapping[str, Tensor], placed: Mapping[str, AdaptedWeight]
) -> dict[str, WeightUpdate]:
    """What the adapter does to each weight, by the weight's name in the base model.

    Args:
        placed: What :func:`places` says of the adapter on its model.

    Raises:
        ValueError: the file holds a tensor that neither LoRA nor DoRA has.
    """
    found: dict[str, WeightUpdate] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.")
        module, _, part = name.rpartition(".lora_")
        if not module:
            found[name] = WeightUpdate(whole=tensor)
        elif part == "A.weight":
            place = placed[module]
            pattern = place.weight.removesuffix(".weight")
            found[place.weight] = WeightUpdate(
                tensor,
                tensors.get(key.replace("lora_A", "lora_B")),
                _scale(config, pattern),
                transposed=place.transposed,
                magnitude=tensors.get(f"{key.removesuffix('A.weight')}magnitude_vector"),
            )
        elif part not in ("B.weight", "magnitude_vector"):
            raise ValueError(f"{key} is not a LoRA or DoRA tensor")
    return found


def _scale(config: JsonMap, module: str) -> float:
    """``alpha / r`` or ``alpha / sqrt(r)``; patterns name a module by the end of its path, or by a regex of it."""
    import re

    def pattern(table: Mapping[str, float] | None, default: float) -> float:
        matches = (v for k, v in (table or {}).items() if re.fullmatch(rf"(.*\.)?({k})", module))
        return float(next(matches, default))

    rank = pattern(config.get("rank_pattern"), config["r"])
    alpha = pattern(config.get("alpha_pattern"), config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _difference(found: Tensor, want: Tensor, *, exact: bool) -> str | None:
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"is {found.dtype} {tuple(found.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if torch.equal(found, want):
        return None
    if not bool(torch.isfinite(found).all()):
        return "holds NaN or infinity"
    largest = float((found.float() - want.float()).abs().max())
    if exact:
        return f"differs from what it should be by up to {largest:.3g}"
    # Where W and its change nearly cancel, the last place of the sum is that of the larger one.
    room = 2 * UNIT_ROUNDOFF[want.dtype] * want.float().abs() + 1e-7 * float(want.float().abs().max())
    if bool(((found.float() - want.float()).abs() <= room).all()):
        return None
    return f"differs from W + s B A by up to {largest:.3g}"


@dataclass(frozen=True, slots=True)
class LogitsReport:
    """What comparing logits found; all but ``problems`` is written into the export.

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
    """What is wrong with logits of which a relative error of ``allowed`` passes."""
    problems = []
    if not compared.relative_error <= allowed:
        problems.append(f"logits differ by {compared.relative_error:.3g} of their size; {allowed:.3g} is allowed")
    if compared.firm_disagreements:
        problems.append(f"the likeliest token differs at {compared.firm_disagreements} places beyond rounding")
    return problems


def same_greedy(found: Tensor, probe: Probe) -> str:
    """How many of the tokens that the trained model goes on with are the likeliest in ``found``, too."""
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


def loaded(request: ReloadRequest) -> str:
    """How it was loaded again, for an export's record."""
    return "layer by layer, for lack of memory" if request.from_disk else "whole"


def reloaded(answer: ReloadAnswer) -> dict[str, str | int]:
    """What an export's record says of the process that loaded it again."""
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
        problem = _difference(found[name], wanted[name], exact=True)
        if problem:
            problems.append(f"{name} {problem}")
    return shortened(problems)
