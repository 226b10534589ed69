"""A complete model in transformers' own layout: base and adapter merged, or the full fine-tune as it was saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.export.clean.ask import model_request, sent, tokens_compared
from ftcli.export.clean.request import LOGITS
from ftcli.export.compare import compare_written, elements, open_written
from ftcli.export.copying import copy_model, copy_processors, verify_copy
from ftcli.export.lazy import computing_from
from ftcli.export.loading import (
    attach,
    not_verified,
    plain_config,
    source_tokenizer,
    unwritten,
)
from ftcli.export.merge import AdapterUpdates, Rounding, outputs, rounded_as_merged, rounding_of
from ftcli.export.probe import Probe, continued, logits, probe_batch
from ftcli.export.resolve import ExportSource
from ftcli.export.room import merge_bytes, require_room
from ftcli.export.tensorfile import finite_tensors, write_shards
from ftcli.export.verify import (
    Verified,
    check_generation,
    check_logits,
    check_stops,
    compare_tokenizers,
    loaded,
    not_asked,
    reloaded,
)
from ftcli.export.weights import StoredWeights, base_weights, ends, source_updates, untied, with_vocabulary
from ftcli.facts.device import cpu_device
from ftcli.facts.model import read_facts
from ftcli.model.pretrained import hollow, read_config
from ftcli.model.quantized import unreadable_weights
from ftcli.model.tokenizer import align_special_tokens, source_of, stop_token_ids
from ftcli.plain import plain_fields
from ftcli.tables import exports
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Size of one file; small enough for every file system and for loading file by file.
SHARD_BYTES = 4 * 10**9
#: Above this share of an adapter's effect lost in rounding, people are told.
LOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is written: base and adapter, or the weights of a full fine-tune in another dtype.

    Attributes:
        config: The base's, which the written one is made of.
        adapted: PEFT's adapter on a model without the base's weights; None in a full fine-tune.
        merged: How many pairs of matrices the adapter has.
        stops: Ids that end a turn.
    """

    config: PretrainedConfig
    base: StoredWeights
    adapter: AdapterUpdates
    rounding: Rounding
    merged: int
    stops: tuple[int, ...]
    adapted: PeftModel | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors."""
        stored = (self.rounding.of(name, self.base.of(name)) for name in self.base.names)
        return Counter(dtype for dtype in stored if dtype.is_floating_point).most_common(1)[0][0]

    @property
    def merged_with(self) -> str:
        """Which form of the base the adapter is merged with; empty where there is no adapter."""
        return self.base.form if self.adapter.changed else ""


def write(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Verified:
    """Write a complete model into ``folder`` and verify it; ``say`` is told of what takes time.

    Raises:
        FtcliError: as :func:`write_merged` and :func:`verify_merged`, or :func:`copy_model` and :func:`verify_copy`.
        OSError: it cannot be written.
    """
    if source.kind == "model" and source.settings.dtype == "auto":
        copy_model(source, folder, offline=offline)
        return verify_copy(source, folder, offline=offline) if source.verify else not_asked()
    plan = write_merged(source, folder, offline=offline, say=say)
    if not source.verify:
        return not_asked(plan.merged_with)
    return verify_merged(source, folder, plan, offline=offline, say=say)


def write_merged(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> ModelPlan:
    """Merge tensor by tensor, round once and write; a full fine-tune is rounded alone.

    Raises:
        FtcliError: FT747 for a base of random weights, FT748 for too little memory, FT769 for numbers too large for the
            dtype, FT740 as :func:`ftcli.export.weights.base_weights`, FT323, FT735, FT742, FT321, FT322.
        OSError: it cannot be written.
    """
    require_kept_base(source)
    plan = plan_model(source, offline=offline)
    _require_memory(plan)
    say(f"merging with {plan.merged_with}" if source.kind == "adapter" else f"rounding to {source.settings.dtype}")
    planned = outputs(plan.base, plan.adapter, plan.rounding)
    require_room(folder, sum(output.nbytes for output in planned))
    try:
        write_shards(folder, planned, SHARD_BYTES)
    except SafetensorError as error:  # the base was cut short meanwhile
        raise unreadable_weights(first_line(error)) from error
    tokenizer = source_tokenizer(source, offline=offline)
    save_config(source, plan, tokenizer, folder, offline=offline)
    tokenizer.save_pretrained(str(folder))
    if source.base.init == "pretrained":
        copy_processors(source, folder, offline=offline)
    return plan


def plan_model(source: ExportSource, *, offline: bool) -> ModelPlan:
    """Opens what is merged. Raises FtcliError as :func:`write_merged`."""
    tokenizer = source_tokenizer(source, offline=offline)
    stops = stop_token_ids(read_facts(source.base, offline=offline, origins=source.origins), tokenizer)
    config = _stored_config(source, offline=offline)
    adapted = None
    if source.kind == "adapter":
        finite_tensors(source.folder)
    base = base_weights(source, offline=offline)
    model = unwritten(config)
    if source.kind == "adapter":
        adapted = attach(model, source.folder).float()
    dtype = None if source.settings.dtype == "auto" else getattr(torch, source.settings.dtype)
    rounding = rounding_of(model, dtype, _plain_dtype(config, source))
    adapter = AdapterUpdates(adapted)
    return ModelPlan(config, base, adapter, rounding, len(adapter.layers), stops, adapted)


def _stored_config(source: ExportSource, *, offline: bool) -> PretrainedConfig:
    name, revision = (str(source.folder), None)
    if source.kind == "adapter":
        name, revision = source_of(source.base.name_or_path), source.base.revision
    return with_vocabulary(read_config(name, revision=revision, offline=offline or source.kind == "model"), source)


def _plain_dtype(config: PretrainedConfig, source: ExportSource) -> torch.dtype:
    """What weights are stored in that the base stores quantised: what its config.json says of the others."""
    said: Any = config.get_text_config()
    stated = getattr(config, "dtype", None) or getattr(said, "dtype", None)
    return stated if isinstance(stated, torch.dtype) else getattr(torch, source.compute)


def save_config(
    source: ExportSource, plan: ModelPlan, tokenizer: PreTrainedTokenizerBase, folder: Path, *, offline: bool
) -> None:
    """config.json and generation_config.json: the base's, with what merging and training have made otherwise."""
    from transformers import GenerationConfig

    model = hollow(plain_config(deepcopy(plan.config)))
    config: Any = model.config
    config.architectures = [type(model).__name__]
    told = {id(one): one for one in (config, config.get_text_config())}.values()
    for one in told:
        one.dtype = plan.dtype
        if untied(plan.base, plan.adapter.changed) or _both_ends_stored(model, plan):
            # Loading would copy one side over the other.
            one.tie_word_embeddings = False
    name, revision = (str(source.folder), None)
    if source.kind == "adapter":
        name, revision = source_of(source.base.name_or_path), source.base.revision
    with suppress(OSError):  # a model without one has what its config says
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision, local_files_only=offline)
    align_special_tokens(model, tokenizer, plan.stops)
    config.save_pretrained(str(folder))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(str(folder))


def _both_ends_stored(model: PreTrainedModel, plan: ModelPlan) -> bool:
    """Whether the model ties embeddings that the base stores twice, and one of them was changed."""
    embedding, head = ends(model)
    stored = {embedding, head} <= set(plan.base.names)
    return stored and bool({embedding, head} & set(plan.adapter.changed))


def verify_merged(
    source: ExportSource, folder: Path, plan: ModelPlan, *, offline: bool, say: Callable[[str], None]
) -> Verified:
    """Compare what was written with the files of base and adapter: weights, logits, tokenizer and stop tokens.

    The files are opened anew. Weights are held against the adapter's own file, logits against PEFT's layers.

    A warning (FT744) tells when rounding took away most of what the adapter does.

    Raises:
        FtcliError: FT741 when anything differs.
    """
    say("verifying: comparing weights")
    written = open_written(folder)
    base, adapted = base_weights(source, offline=offline), plan.adapted
    changes = {} if adapted is None else source_updates(source, adapted)
    problems = compare_written(written, base, changes, plan.rounding)
    say("verifying: comparing logits")
    tokenizer = source_tokenizer(source, offline=offline)
    probe = probe_batch(tokenizer, base.shape(base.ends[0])[0])
    probe, exact, without, wanted = _reference(plan, base, adapted, probe, tokens_compared(elements(written)))
    request = model_request(folder, probe, elements(written), dtype="float32")
    answer = source.reload(request, sent(probe))
    problems += answer.problems
    if problems:
        raise not_verified(folder, problems)
    problems += compare_tokenizers(answer.tokenizer, tokenizer)
    problems += check_stops(answer.stops, plan.stops)
    report = check_logits(answer.tensors[LOGITS], probe, wanted, exact, without, plan.dtype)
    problems += report.problems
    problems += check_generation(answer, exact, probe, plan.stops, report.tolerance + report.rounding)
    if problems:
        raise not_verified(folder, problems)
    facts = {name: value for name, value in plain_fields(report).items() if name != "problems"}
    merged: dict[str, str | int] = {"merged": plan.merged} if adapted is not None else {}
    return Verified(
        "every weight, logits in float32, tokenizer, stop tokens",
        {**merged, "loaded": loaded(request), **facts, **reloaded(answer)},
        _rounding_warnings(report.lost, report.dtype),
        plan.merged_with,
    )


def _reference(
    plan: ModelPlan, base: StoredWeights, adapted: PeftModel | None, probe: Probe, tokens: int
) -> tuple[Probe, Tensor, Tensor, Tensor]:
    """A probe with what base and adapter go on with, so many ``tokens``; and float32 logits (positions, vocabulary): of
    base and adapter, of the base, of both with the weights rounded.
    """

    def as_stored(name: str) -> Tensor:
        tensor = base.read(name)
        return tensor if name in plan.adapter.changed else tensor.to(plan.rounding.of(name, base.of(name)))

    if adapted is None:
        model: Any = unwritten(plan.config)
        with computing_from(model, base.read, base.names):
            probe = continued(model, probe, tokens)
            exact = logits(model, probe)
        with computing_from(model, as_stored, base.names):
            return probe, exact, exact, logits(model, probe)
    with computing_from(adapted, base.read, base.names):
        probe = continued(adapted, probe, tokens)
        exact = logits(adapted, probe)
        with adapted.disable_adapter():
            without = logits(adapted, probe)
    with (
        computing_from(adapted, as_stored, base.names),
        rounded_as_merged(adapted, lambda name: plan.rounding.of(name, base.of(name))),
    ):
        return probe, exact, without, logits(adapted, probe)


def _rounding_warnings(lost: float, dtype: str) -> tuple[Finding, ...]:
    if lost <= LOST_SHARE:
        return ()
    return (
        Finding(
            "FT744",
            f"rounding the merged weights to {dtype} changes the logits by {lost:.0%} of what the adapter does to them",
            help="this adapter changes little: serve it unmerged, or train it longer",
            severity="warning",
        ),
    )


def _require_memory(plan: ModelPlan) -> None:
    """Refuse before the system kills the process."""
    needed, free = merge_bytes(plan.base, plan.adapter.changed), cpu_device().free_bytes
    if free is None or needed <= free:
        return
    raise FtcliError.single(
        "FT748",
        f"merging needs about {gib(needed)} GiB of memory, and {gib(free)} GiB are free",
        exit_code=ExitCode.PREFLIGHT,
        help=f"merge on a machine with more memory, or export the adapter alone: {_unmerged()}",
    )


def require_kept_base(source: ExportSource) -> None:
    """Raises FtcliError FT747 (exit 2) for an adapter of random weights: they are not kept, to be merged with."""
    if source.base.init != "random" or source.kind != "adapter":
        return
    raise FtcliError.single(
        "FT747",
        "the base model has random weights (model.init: random), which are not kept, so nothing can be merged with it",
        exit_code=ExitCode.RECIPE,
        origin=source.origins.at("model.init"),
        help=f"export the adapter alone: {_unmerged()}",
    )


def _unmerged() -> str:
    """Formats that take the adapter as it is, as a recipe says it."""
    return f"export.formats: [{', '.join(exports.supported(merges=False))}]"
