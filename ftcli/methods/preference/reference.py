"""The reference's log-probabilities, scored once before the first step and kept: when, of which model, by whom."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ftcli import __version__
from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.evaluate.batching import in_batches
from ftcli.methods.preference.cache import PairLogProbs, ReferenceCache, pair_digest
from ftcli.methods.preference.choice import caches, compares
from ftcli.methods.preference.pairs import AnswerScorer
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.model.backbone import base_of, compute_context, head_of
from ftcli.model.initial_adapters import as_base, initial_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.errors import Origin
    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup

#: Part of every key: raised whenever the same model and tokens give other log-probabilities.
_SCORING = 1
_VALUES = 4
#: Words of 8 bytes that are summed at a time, and what makes the sum depend on their order (the golden ratio, 2^64).
_WORDS, _SPREAD = 1 << 20, -7046029254386353131
#: What PEFT puts into the names of weights that it adapts.
_OF_ADAPTERS = ("base_model.model.", ".base_layer", ".original_module")


@dataclass(frozen=True, slots=True)
class Reference:
    """What pairs are compared with.

    Attributes:
        model: A second model; None where the trained one can be computed without its adapters, or nothing is needed.
        of_units: Log-probabilities of the training pairs, (pairs, 4) float32; NaN for those that are not seen. None
            where the reference is computed in each step.
        held_out: Those of held-out pairs, by :func:`~ftcli.methods.preference.cache.pair_digest`.
    """

    model: PreTrainedModel | None = None
    of_units: PairLogProbs | None = None
    held_out: Mapping[bytes, PairLogProbs] = field(default_factory=dict)


def by_answer(values: PairLogProbs) -> Tensor:
    """(2 P, 2) float32 of (P, 4): sums and weighed sums of chosen and rejected answers in turn."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, 2)))


def by_pair(answers: Tensor) -> PairLogProbs:
    """The inverse of :func:`by_answer`, on the host."""
    host = answers.detach().float().cpu().numpy()
    return np.ascontiguousarray(host.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, _VALUES))


def seen_pairs(job: Job, epochs: Epochs, ranks: int) -> tuple[Sequence[int], bool]:
    """The pairs that training sees, and whether it sees some of them more than once."""
    train, drawn = job.recipe.train, len(epochs)
    of_step = train.per_device_train_batch_size * ranks * train.gradient_accumulation_steps
    of_epoch = math.ceil(drawn / of_step)
    steps = train.max_steps or math.ceil(train.num_train_epochs * of_epoch)
    if steps >= of_epoch:
        return range(epochs.units), steps > of_epoch or drawn > epochs.units
    seen = epochs.order(0)[: steps * of_step]
    return sorted(set(seen)), len(set(seen)) < len(seen)


def scored_ahead(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    held_out: Sequence[TokenizedRow],
    group: RankGroup | None,
    *,
    keep: bool = True,
) -> Reference:
    """Log-probabilities of all pairs that training and evaluation will see, where that pays; ``model`` has not been
    trained yet. What is missing in the cache is computed and kept there, unless it is not to be looked at. All ranks
    call it.
    """
    recipe = job.recipe
    settings = recipe.preference or PreferenceConfig()
    if not compares(recipe.train.method, settings) or not caches(recipe, "possibly"):
        return Reference()
    units, again = seen_pairs(job, epochs, 1 if group is None else group.size)
    certain = again or caches(recipe, "surely")
    folder = cache_folder(settings, job.session.cache_dir) if keep else None
    if not certain and folder is None:
        return Reference()
    leads = group is None or group.leads
    cache = None
    if folder is not None and leads:
        cache = ReferenceCache(folder / reference_key(job, model, settings.ld_alpha), job.reporter.warn)
    if not certain and not _for_all(group, cache is not None and cache.is_there):
        return Reference()
    pairs = [tuple(epochs.members(unit)) for unit in units]
    pairs += [(held_out[row], held_out[row + 1]) for row in range(0, len(held_out), 2)]
    digests = [pair_digest(chosen, rejected) for chosen, rejected in pairs]
    values = _shared(_laid_out({} if cache is None else cache.read(), digests), job, group)
    missing = [index for index in range(len(pairs)) if np.isnan(values[index]).any()]
    if missing and not certain:
        return Reference()
    if missing:
        _compute(job, model, settings.ld_alpha, pairs, missing, values, group)
        if cache is not None and np.isfinite(values[missing]).all():
            kept = cache.add({digests[index]: values[index] for index in missing})
            values[missing] = np.stack([kept[digests[index]] for index in missing])
        values = _shared(values, job, group)
    where = "" if folder is None else f" in {folder}"
    job.reporter.info(
        f"reference: scored ahead, {len(pairs) - len(missing):,} of {len(pairs):,} pairs found{where}, "
        f"{len(missing):,} computed"
    )
    of_units = np.full((epochs.units, _VALUES), np.nan, np.float32)
    of_units[list(units)] = values[: len(units)]
    return Reference(None, of_units, dict(zip(digests[len(units) :], values[len(units) :], strict=True)))


def _for_all(group: RankGroup | None, said: bool) -> bool:
    """What the leading rank says, on all ranks."""
    return said if group is None else bool(group.agree("looked for the reference", [said])[0][0])


def cache_folder(settings: PreferenceConfig, of_session: Path | None) -> Path | None:
    """Where log-probabilities are kept: the recipe's folder, or ftcli's cache; None for nowhere."""
    if settings.reference_cache != "auto":
        return Path(settings.reference_cache).expanduser()
    return None if of_session is None else of_session / "reference"


def _laid_out(known: Mapping[bytes, PairLogProbs], digests: Sequence[bytes]) -> PairLogProbs:
    unknown = np.full(_VALUES, np.nan, np.float32)
    return np.stack([known.get(digest, unknown) for digest in digests]).astype(np.float32)


def _shared(values: PairLogProbs, job: Job, group: RankGroup | None) -> PairLogProbs:
    """The leading rank's values, on all ranks."""
    if group is None:
        return values
    mine = torch.from_numpy(values if group.leads else np.zeros_like(values)).to(job.device)
    with group.exchanging():
        group.all_reduce([mine])
    return mine.cpu().numpy()


def _compute(
    job: Job,
    model: PreTrainedModel | PeftModel,
    ld_alpha: float,
    pairs: Sequence[tuple[TokenizedRow, ...]],
    missing: Sequence[int],
    values: PairLogProbs,
    group: RankGroup | None,
) -> None:
    """Fills ``values`` in where they are ``missing``, the longest pairs first; ranks take batches in turn."""
    size = job.recipe.train.per_device_train_batch_size
    ordered = sorted(missing, key=lambda index: -sum(len(row.input_ids) for row in pairs[index]))
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    mine = batches if group is None else batches[group.rank :: group.size]
    found = np.zeros((len(pairs), _VALUES), np.float32)
    with nullcontext() if group is None else group.exchanging():
        for chosen, scored in _scored(job, model, ld_alpha, pairs, [index for batch in mine for index in batch]):
            found[list(chosen)] = by_pair(scored)
            if group is not None and group.signalled:
                break
    if group is not None:
        group.agree("scored the reference")
        group.stop_if_asked("scoring the reference")
        total = torch.from_numpy(found).to(job.device)
        with group.exchanging():
            group.all_reduce([total])
        found = total.cpu().numpy()
    values[list(missing)] = found[list(missing)]


def _scored(
    job: Job,
    model: PreTrainedModel | PeftModel,
    ld_alpha: float,
    pairs: Sequence[tuple[TokenizedRow, ...]],
    indices: Sequence[int],
) -> Iterator[tuple[Sequence[int], Tensor]]:
    scorer = AnswerScorer(job.batches(model), job.pad_token_id, head_of(model).weight.shape[0], ld_alpha)

    def step(chosen: Sequence[int]) -> Tensor:
        batch = scorer.batch([row for index in chosen for row in pairs[index]])
        inputs = {name: value.to(job.device) for name, value in batch.items()}
        with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
            scored = scorer.score(model, inputs)
        return torch.stack([scored.sums, scored.weighed], 1)

    def where(index: int) -> Origin:
        return pairs[index][0].row.origin

    size, reporter = job.recipe.train.per_device_train_batch_size, job.reporter
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _untrained(model), reporter.progress(len(indices), "scoring the reference") as progress:
            for done, found in in_batches(indices, size, step, where=where, reporter=reporter, what="the reference"):
                yield done, found
                progress.advance(len(done))
    finally:
        model.train(training)


def _untrained(model: PreTrainedModel | PeftModel) -> AbstractContextManager[None]:
    """Of a model with adapters its base; one that is trained whole has not changed yet."""
    return as_base(model) if hasattr(model, "disable_adapter") else nullcontext()


def reference_key(job: Job, model: PreTrainedModel | PeftModel, ld_alpha: float) -> str:
    """Of all that a pair's log-probabilities depend on beside its tokens: each weight of the reference as it is in
    memory, its configuration, how it is computed and by which code. No setting of training is in it.
    """
    base, plan, batches = base_of(model), job.plan, job.batches(model)
    config = {name: value for name, value in base.config.to_dict().items() if name != "_name_or_path"}
    execution = plan.execution
    computed = {
        "ld_alpha": ld_alpha,
        "dtypes": [job.dtypes.compute, job.dtypes.autocast, plan.stream],
        "kernels": [job.recipe.model.kernels, execution.on_kernels, execution.layers.code, execution.attention],
        "attention": str(base.config._attn_implementation),
        "quantization": job.recipe.quantization.model_dump(mode="json"),
        "batches": [batches.layout, batches.shares_prompts],
        "device": job.device.type,
        "matmul": torch.get_float32_matmul_precision(),
        "code": [_SCORING, __version__, torch.__version__, transformers.__version__],
    }
    text = json.dumps([computed, config, weight_digests(model)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weight_digests(model: PreTrainedModel | PeftModel) -> list[list[Any]]:
    """Name, dtype, shape and digest of each tensor of the reference, by the name that it has without adapters.

    Adapters are left out, unless they begin as a part of the weights.
    """
    without = hasattr(model, "disable_adapter") and initial_of(model) is None
    found, sums = [], []
    for name, tensor in _tensors(model):
        if without and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            continue
        for piece in _OF_ADAPTERS:
            name = name.replace(piece, "", 1)
        found.append([name, str(tensor.dtype), list(tensor.shape)])
        sums.append(_digest(tensor))
    digests = torch.stack([each.cpu() for each in sums]).tolist()  # the device is waited for once
    return sorted([*each, digest] for each, digest in zip(found, digests, strict=True))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _digest(tensor: Tensor) -> Tensor:
    """A sum of all bits, each word times an odd number of its own: no single word can change unnoticed."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), 8 * _WORDS):
        piece = flat[start : start + 8 * _WORDS]
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)).clone()
        words = piece.view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(words), device=flat.device)
        total += (words * ((places * _SPREAD) | 1)).sum()
    return total
