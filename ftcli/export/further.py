"""Tensors of a model's files that transformers passes over when it loads them: heads that predict further tokens
(``mtp.*``), which other programs look for.

A merge copies them with the base's other files. A full fine-tune is saved by transformers, which never had them: the
run adds them to its result, from the base that was just trained, so the base may be gone when the result is exported.
Checkpoints go without; exported, they take the base's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from ftcli.config.model import ModelConfig
from ftcli.errors import Finding, FtcliError, first_line
from ftcli.export.source import ExportSource, base_facts, base_files, local_config, plain_config
from ftcli.export.tensorfile import TensorFile, add_shard, copied, opened
from ftcli.facts.config_file import hub_errors
from ftcli.facts.weights import FURTHER_WEIGHTS
from ftcli.model.pretrained import hollow, read_config, weight_files
from ftcli.model.quantized import unreadable_weights
from ftcli.model.tokenizer import source_of
from ftcli.plain import JsonMap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What configs call the number of layers that predict further tokens.
_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def passed_over(source: ExportSource) -> dict[str, TensorFile]:
    """Tensors of the base, by key, that a full fine-tune's own files lack. None of another source, none that its run
    has kept, and none of a base that is not there any more.

    Raises FtcliError FT323 where the base's files are damaged.
    """
    if _complete(source):
        return {}
    model = hollow(plain_config(local_config(source.folder)))
    if not _patterns(model):
        return {}
    try:
        files = base_files(source)
    except FtcliError:  # a full fine-tune is exported without its base: missing_further tells
        return {}
    try:
        return _found(model, opened(files, base_facts(source).raw, torch.bfloat16))
    except (OSError, SafetensorError) as error:
        raise unreadable_weights(first_line(error)) from error


def missing_further(source: ExportSource) -> list[Finding]:
    """FT757 where config.json promises layers that are neither in a full fine-tune nor to be had from its base."""
    if _complete(source) or not promised(local_config(source.folder).get_text_config().to_dict()):
        return []
    try:
        base_files(source)
    except FtcliError as error:
        return [_lacking(f"{source.folder} has none of its own, and {error.findings[0].message}")]
    return []


def promised(config: JsonMap) -> bool:
    """True if a config.json says that there are layers that predict further tokens."""
    return any(config.get(key) for key in _PROMISES)


def keep_passed_over(
    model: PreTrainedModel, base: ModelConfig, folder: Path, *, offline: bool, tell: Callable[[Finding], None]
) -> None:
    """Adds what transformers passed over in the files of ``base`` to the full fine-tune ``model``, saved in ``folder``.

    The result is complete without them, so a base that is gone or damaged by now is told of (FT757), where its
    config.json promises such layers, and ends nothing.
    """
    if base.init == "random" or not _patterns(model):
        return
    try:
        name = source_of(base.name_or_path)
        config = read_config(name, revision=base.revision, offline=offline).to_dict()
        found = _found(model, opened(weight_files(name, base.revision, offline), config, torch.bfloat16))
    except hub_errors(SafetensorError, FtcliError) as error:
        if promised(model.config.get_text_config().to_dict()):
            tell(_lacking(f"the weights of {base.name_or_path} cannot be read any more: {first_line(error)}"))
        return
    if found:
        add_shard(folder, FURTHER_WEIGHTS, [copied(key, file) for key, file in found.items()])


def _complete(source: ExportSource) -> bool:
    """True if the files of ``source`` lack nothing that the base has, or there is no base to look into."""
    alone = source.kind != "model" or source.classifier or source.base.init == "random"
    return alone or (source.folder / FURTHER_WEIGHTS).is_file()


def _patterns(model: PreTrainedModel) -> list[re.Pattern[str]]:
    return [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]


def _found(model: PreTrainedModel, files: Iterable[TensorFile]) -> dict[str, TensorFile]:
    stored = {key: file for file in files for key in file.entries}
    patterns = _patterns(model)
    return {key: file for key, file in stored.items() if any(pattern.search(key) for pattern in patterns)}


def _lacking(why: str) -> Finding:
    return Finding(
        "FT757",
        f"config.json promises layers that predict further tokens, and the model goes without: {why}",
        help="put the base model back and export again; or set the layers to 0 in the export's config.json "
        f"({' or '.join(_PROMISES)}) for programs that look for them, as vLLM does",
        severity="warning",
    )
