"""A complete model in transformers' own layout: base and adapter merged, or the full fine-tune as it was saved."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.export.adapter import finite_tensors
from ftcli.export.clean.ask import model_request, sent
from ftcli.export.clean.request import GREEDY, LOGITS
from ftcli.export.loading import attach, load_base, load_written, not_verified, source_tokenizer
from ftcli.export.merge import merge, rounded, stored_dtypes
from ftcli.export.probe import Probe, compare_logits, continued, logits, probe_batch
from ftcli.export.resolve import ExportSource, read_adapter_config, unusable
from ftcli.export.verify import (
    TOLERANCE,
    Place,
    Verified,
    check_greedy,
    check_logits,
    check_stops,
    compare_tensors,
    compare_tokenizers,
    compare_weights,
    logits_problems,
    not_asked,
    places,
    read_tensors,
    reloaded,
    same_greedy,
    updates,
)
from ftcli.facts.device import cpu_device
from ftcli.facts.model import read_facts
from ftcli.model.load import align_special_tokens, stop_token_ids
from ftcli.model.tokenizer import source_of
from ftcli.plain import plain_fields
from ftcli.preflight.memory.host import merge_bytes
from ftcli.run.checkpoint import PROGRESS
from ftcli.tables import exports
from ftcli.units import gib

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: Size of one file; small enough for every file system and for loading file by file.
SHARD_SIZE = "4GB"
#: What lies beside the weights of a model that takes images or sound.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Above this share of an adapter's effect lost in rounding, people are told.
LOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Reference:
    """What the merged model is held against: float32 logits (positions, vocabulary) of the probe before merging.

    Attributes:
        rounded: Of base and adapter, with the weights rounded as they are stored.
        adapted: Of base and adapter.
        base: Of the base alone.
    """

    probe: Probe
    rounded: Tensor
    adapted: Tensor
    base: Tensor
    dtype: torch.dtype
    merged: int
    stops: tuple[int, ...]
    placed: Mapping[str, Place]


def write(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Verified:
    """Write a complete model into ``folder`` and verify it; ``say`` is told of what takes time.

    Raises:
        FtcliError: as :func:`write_merged` and :func:`verify_merged`, or :func:`copy_model` and :func:`verify_copy`.
        OSError: it cannot be written.
    """
    if source.kind == "model":
        copy_model(source, folder, offline=offline)
        return verify_copy(source, folder, offline=offline) if source.verify else not_asked()
    reference = write_merged(source, folder, offline=offline, say=say)
    if not source.verify:
        return not_asked()
    return verify_merged(source, folder, reference, offline=offline, say=say)


def write_merged(source: ExportSource, folder: Path, *, offline: bool, say: Callable[[str], None]) -> Reference:
    """Merge into the base's stored dtype and save; needs 4 bytes of memory per parameter.

    Raises:
        FtcliError: FT747 for a base of random weights, FT748 for too little memory, FT323, FT735, FT742, FT321, FT322.
        OSError: it cannot be written.
    """
    if source.base.init == "random":
        raise random_base(source)
    finite_tensors(source.folder)
    tokenizer = source_tokenizer(source, offline=offline)
    stops = stop_token_ids(read_facts(source.base, offline=offline, origins=source.origins), tokenizer)
    say(f"loading {source.base.name_or_path}")
    base = load_base(source, offline=offline)
    _require_memory(base)
    dtypes = stored_dtypes(base)
    probe = probe_batch(tokenizer, base.get_input_embeddings().weight.shape[0])
    adapted = attach(base, source.folder).float()
    probe = continued(adapted, probe) if source.verify else probe
    reference = logits(adapted, probe)
    with adapted.disable_adapter():
        without = logits(adapted, probe)
    placed = places(adapted)
    with rounded(adapted, {name: place.weight for name, place in placed.items()}, dtypes):
        exact = logits(adapted, probe)
    say("merging")
    model = merge(adapted, dtypes)
    align_special_tokens(model, tokenizer, stops)
    _save(model, tokenizer, folder)
    copy_processors(source, folder, offline=offline)
    merged = sum(name.endswith("lora_A.weight") for name in finite_tensors(source.folder))
    dtype = Counter(dtypes.values()).most_common(1)[0][0]
    return Reference(probe, exact, reference, without, dtype, merged, stops, placed)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        model.save_pretrained(str(folder), max_shard_size=SHARD_SIZE)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(str(folder))


def verify_merged(
    source: ExportSource, folder: Path, reference: Reference, *, offline: bool, say: Callable[[str], None]
) -> Verified:
    """Load what was written with plain transformers and compare weights, logits, tokenizer and stop tokens.

    A warning (FT744) tells when rounding took away most of what the adapter does.

    Raises:
        FtcliError: FT741 when anything differs.
    """
    say("verifying: loading the result again")
    written = load_written(folder)
    parameters = sum(parameter.numel() for parameter in written.parameters())
    answer = source.reload(model_request(folder, reference.probe, parameters), sent(reference.probe))
    changes = updates(read_adapter_config(source.folder), finite_tensors(source.folder), reference.placed)
    problems = compare_weights(written, load_base(source, offline=offline), changes)
    problems += answer.problems
    if problems:
        raise not_verified(folder, problems)
    problems += compare_tokenizers(answer.tokenizer, source_tokenizer(source, offline=offline))
    problems += check_stops(answer.stops, reference.stops)
    found, probe = answer.tensors[LOGITS], reference.probe
    report = check_logits(found, probe, reference.rounded, reference.adapted, reference.base, reference.dtype)
    problems += report.problems
    if GREEDY in answer.tensors:
        generated, allowed = answer.tensors[GREEDY], report.tolerance + report.rounding
        problems += check_greedy(generated, reference.adapted, probe, reference.stops, allowed)
    if problems:
        raise not_verified(folder, problems)
    facts = {name: value for name, value in plain_fields(report).items() if name != "problems"}
    return Verified(
        "every weight, logits in float32, tokenizer, stop tokens",
        {"merged": reference.merged, **facts, **reloaded(answer)},
        _rounding_warnings(report.lost, report.dtype),
    )


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


def copy_model(source: ExportSource, folder: Path, *, offline: bool) -> None:
    """Copy a full fine-tune, which is complete already, and write its tokenizer with the template of training.

    Raises:
        OSError: it cannot be written.
    """
    for path in sorted(source.folder.iterdir()):
        wanted = path.is_file() and path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt")
        if wanted and path.name not in PROGRESS:
            shutil.copyfile(path, folder / path.name)
    source_tokenizer(source, offline=offline).save_pretrained(str(folder))
    if source.base.init == "pretrained":
        copy_processors(source, folder, offline=offline)


def copy_processors(source: ExportSource, folder: Path, *, offline: bool) -> None:
    """Copies how a multimodal base prepares images and sound, without which its frozen parts are of no use."""
    from transformers.utils.hub import cached_file

    for name in _PROCESSORS:
        found = cached_file(
            source_of(source.base.name_or_path),
            name,
            revision=source.base.revision,
            local_files_only=offline,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, folder / name)


def verify_copy(source: ExportSource, folder: Path, *, offline: bool) -> Verified:
    """Load the copy with plain transformers; its weights must be the files', bit for bit, and its logits finite.

    Raises:
        FtcliError: FT741 when anything differs, FT742 when the source itself is damaged.
    """
    try:
        wanted = read_tensors(source.folder)
    except (OSError, SafetensorError) as error:
        raise unusable(source.folder, f"its weights cannot be read ({error})") from error
    tokenizer = source_tokenizer(source, offline=offline)
    probe, trained, parameters = _trained(source.folder, tokenizer)
    answer = source.reload(model_request(folder, probe, parameters), sent(probe))
    if answer.problems:
        raise not_verified(folder, list(answer.problems))
    # By the names in the files: some families' weights have others once they are loaded.
    problems = compare_tensors(read_tensors(folder), wanted)
    problems += compare_tokenizers(answer.tokenizer, tokenizer)
    stops = stop_token_ids(read_facts(source.base, offline=offline, origins=source.origins), tokenizer)
    problems += check_stops(answer.stops, stops)
    found = answer.tensors[LOGITS]
    compared = compare_logits(found, trained, TOLERANCE)
    problems += logits_problems(compared, TOLERANCE)
    if GREEDY in answer.tensors:
        problems += check_greedy(answer.tensors[GREEDY], trained, probe, stops, TOLERANCE)
    if problems:
        raise not_verified(folder, problems)
    facts: dict[str, str | int | float] = {
        "tensors": len(wanted),
        "tolerance": TOLERANCE,
        "relative_error": compared.relative_error,
        "greedy_tokens": same_greedy(found, probe),
    }
    return Verified("every weight bit for bit, logits, tokenizer, stop tokens", {**facts, **reloaded(answer)})


def _trained(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Probe, Tensor, int]:
    """A probe, what the model in ``folder`` answers to it in float32, and how many parameters that has."""
    model = load_written(folder)
    if getattr(model.config, "quantization_config", None) is None:
        model.float()
    probe = continued(model, probe_batch(tokenizer, model.get_input_embeddings().weight.shape[0]))
    return probe, logits(model, probe), sum(parameter.numel() for parameter in model.parameters())


def _require_memory(base: PreTrainedModel) -> None:
    """Refuse before the system kills the process: merging is done in float32."""
    parameters = sum(p.numel() for p in base.parameters())
    held = sum(p.numel() * p.element_size() for p in base.parameters())
    needed, free = merge_bytes(parameters), cpu_device().free_bytes
    if free is None or needed <= free + held:
        return
    raise FtcliError.single(
        "FT748",
        f"merging needs about {gib(needed)} GiB of memory, and {gib(free + held)} GiB are free",
        exit_code=ExitCode.PREFLIGHT,
        help=f"merge on a machine with more memory, or export the adapter alone: {_unmerged()}",
    )


def random_base(source: ExportSource) -> FtcliError:
    """FT747: nothing can be merged with weights that are not kept."""
    return FtcliError.single(
        "FT747",
        "the base model has random weights (model.init: random), which are not kept, so nothing can be merged with it",
        exit_code=ExitCode.RECIPE,
        origin=source.origins.at("model.init"),
        help=f"export the adapter alone: {_unmerged()}",
    )


def _unmerged() -> str:
    """Formats that take the adapter as it is, as a recipe says it."""
    return f"export.formats: [{', '.join(exports.supported(merges=False))}]"
