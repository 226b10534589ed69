"""Copies a full fine-tune as transformers saved it, and compares the copy with its source byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor

from ftcli.export.clean.ask import model_request, sent, tokens_compared
from ftcli.export.clean.request import LOGITS
from ftcli.export.compare import elements
from ftcli.export.lazy import computing_from
from ftcli.export.loading import load_written, not_verified, source_tokenizer, unwritten
from ftcli.export.probe import Probe, compare_logits, continued, logits, probe_batch
from ftcli.export.resolve import ExportSource, unusable
from ftcli.export.tensorfile import TensorFile
from ftcli.export.verify import (
    TOLERANCE,
    Verified,
    check_generation,
    check_stops,
    compare_tokenizers,
    loaded,
    logits_problems,
    reloaded,
    same_greedy,
    shortened,
)
from ftcli.export.weights import base_weights
from ftcli.facts.model import read_facts
from ftcli.model.pretrained import read_config
from ftcli.model.tokenizer import source_of, stop_token_ids
from ftcli.run.checkpoint import PROGRESS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What lies beside the weights of a model that takes images or sound.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


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
    """Load the copy with plain transformers; its weights must be the files', bit for bit, and its logits the source's.

    Raises:
        FtcliError: FT741 when anything differs, FT742 when the source itself is damaged.
    """
    try:
        wanted = _tensors(source.folder)
    except (OSError, SafetensorError) as error:
        raise unusable(source.folder, f"its weights cannot be read ({error})") from error
    tokenizer = source_tokenizer(source, offline=offline)
    rounds = getattr(read_config(str(source.folder), revision=None, offline=True), "quantization_config", None)
    probe, trained, parameters = _trained(source, tokenizer, rounds=rounds is not None)
    request = model_request(folder, probe, parameters, dtype="float32" if rounds is None else "stored")
    answer = source.reload(request, sent(probe))
    if answer.problems:
        raise not_verified(folder, list(answer.problems))
    # By the names in the files: some families' weights have others once they are loaded.
    problems = shortened(list(_compare(_tensors(folder), wanted)))
    problems += compare_tokenizers(answer.tokenizer, tokenizer)
    stops = stop_token_ids(read_facts(source.base, offline=offline, origins=source.origins), tokenizer)
    problems += check_stops(answer.stops, stops)
    found = answer.tensors[LOGITS]
    compared = compare_logits(found, trained, TOLERANCE)
    problems += logits_problems(compared, TOLERANCE)
    problems += check_generation(answer, trained, probe, stops, TOLERANCE)
    if problems:
        raise not_verified(folder, problems)
    facts: dict[str, str | int | float] = {
        "tensors": len(wanted),
        "tolerance": TOLERANCE,
        "relative_error": compared.relative_error,
        "greedy_tokens": same_greedy(found, probe),
        "loaded": loaded(request),
    }
    return Verified("every weight bit for bit, logits, tokenizer, stop tokens", {**facts, **reloaded(answer)})


def _trained(source: ExportSource, tokenizer: PreTrainedTokenizerBase, *, rounds: bool) -> tuple[Probe, Tensor, int]:
    """A probe, what the source answers to it in float32, and how many parameters it has.

    ``rounds``: its layers round in every product, so they are transformers' own.
    """
    if rounds:
        model = load_written(source.folder)
        probe = continued(model, probe_batch(tokenizer, model.get_input_embeddings().weight.shape[0]))
        return probe, logits(model, probe), sum(parameter.numel() for parameter in model.parameters())
    stored = base_weights(source, offline=True)
    outline = unwritten(read_config(str(source.folder), revision=None, offline=True))
    probe = probe_batch(tokenizer, stored.shape(stored.ends[0])[0])
    with computing_from(outline, stored.read, stored.names):
        probe = continued(outline, probe, tokens_compared(elements(stored)))
        return probe, logits(outline, probe), elements(stored)


def _tensors(folder: Path) -> dict[str, TensorFile]:
    """The file that each stored tensor is in."""
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    return {key: file for file in files for key in file.entries}


def _compare(found: dict[str, TensorFile], wanted: dict[str, TensorFile]) -> Iterator[str]:
    for key in sorted({*found, *wanted}):
        if key not in found:
            yield f"{key} is missing"
        elif key not in wanted:
            yield f"{key} was not there before"
        else:
            one, other = found[key].entries[key], wanted[key].entries[key]
            pieces = zip_longest(found[key].pieces(key), wanted[key].pieces(key))
            if (one.dtype, one.shape) != (other.dtype, other.shape) or any(a != b for a, b in pieces):
                yield f"{key} differs"
