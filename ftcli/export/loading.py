"""Loads models and tokenizers as a user of an export would: with plain transformers and PEFT, on the CPU."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.export.resolve import ExportSource, unusable
from ftcli.facts.config_file import hub_errors
from ftcli.facts.model import read_facts
from ftcli.model.load_quantized import compute_buffers
from ftcli.model.lora import load_adapter
from ftcli.model.pretrained import hollow, load_whole, read_config, weight_files
from ftcli.model.tokenizer import load_tokenizer, read_tokenizer, require_stop, source_of
from ftcli.run.inputs import base_inputs
from ftcli.run.integrity import hold_base, not_held

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)


def load_written(folder: Path, **options: Any) -> PreTrainedModel:
    """The model in a local folder, made of that folder's files alone, in the dtype that they are stored in.

    Args:
        options: For ``from_pretrained``.

    Raises:
        FtcliError: FT741 when transformers cannot load it.
    """
    try:
        return _from_pretrained(str(folder), offline=True, **options)
    except FtcliError as error:
        raise not_verified(folder, [finding.message for finding in error.findings]) from error
    except _LOAD_ERRORS as error:
        raise not_verified(folder, [f"transformers cannot load it: {first_line(error)}"]) from error


def base_files(source: ExportSource, *, offline: bool) -> list[Path]:
    """The weight files of the model that the adapter belongs to. Raises FtcliError FT323 when there are none."""
    model = source.base
    try:
        return weight_files(source_of(model.name_or_path), model.revision, offline)
    except hub_errors() as error:
        raise _no_base(source, error) from error


def held_base(source: ExportSource, *, offline: bool) -> list[Finding]:
    """FT770 where the base cannot be held against the one that ``source`` was trained on.

    Raises:
        FtcliError: FT323 when it is not there, FT735 when it is another one.
    """
    if source.run is None:
        return [
            not_held(str(source.folder), "it is in no run directory, and names its base without saying its content")
        ]
    run, seed = source.run
    facts = read_facts(source.base, offline=offline, origins=source.origins)
    adapter = source.kind == "adapter"
    commit = None
    try:
        if adapter and source.base.init == "pretrained":
            name = source_of(source.base.name_or_path)
            config = read_config(name, revision=source.base.revision, offline=offline)
            commit = getattr(config, "_commit_hash", None)
        now = base_inputs(facts, source.base, commit)
    except hub_errors() as error:
        raise _no_base(source, error) from error
    return hold_base(run, source.base, seed, now, weights=adapter)


def _no_base(source: ExportSource, error: BaseException) -> FtcliError:
    return FtcliError.single(
        "FT323",
        f"the weights of {source.base.name_or_path} cannot be loaded: {first_line(error)}",
        exit_code=ExitCode.PREFLIGHT,
        origin=source.origins.at("model.name_or_path"),
        help="merging needs the base model: check the name and the network, or export the adapter alone",
    )


def _from_pretrained(name: str, **options: Any) -> PreTrainedModel:
    # Eager attention is exact for every model, score capping included, and the same on both sides of a comparison.
    return load_whole(name, **{"dtype": "auto", **options}).eval()


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` without what it says of quantised files: transformers would look for the package that wrote them."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = deepcopy(config)
    del plain.quantization_config
    return plain


def unwritten(config: PretrainedConfig) -> PreTrainedModel:
    """A model of ``config`` whose parameters take no memory, float32 of the right shape, and whose buffers are right.

    Each element of a parameter is the same NaN: whoever computes with one that was not read in time gets no answer,
    and not a wrong one.
    """
    model = hollow(plain_config(config), dtype=torch.float32)
    compute_buffers(model, torch.device("cpu"))
    nothing = torch.full((), torch.nan)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)
    return model.eval()


def attach(base: PreTrainedModel, folder: Path) -> PeftModel:
    """``base`` with the adapter in ``folder``, not merged. The adapter is in float32, whatever the base's dtype.

    Raises:
        FtcliError: FT742 when PEFT cannot load the adapter into this model.
    """
    try:
        with warnings.catch_warnings():
            # PEFT warns of tied embeddings with one side adapted; merging unties them (ftcli.export.merge).
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            adapted = load_adapter(base, folder)
    except FtcliError as error:
        raise unusable(folder, "; ".join(finding.message for finding in error.findings)) from error
    adapted.eval()
    return adapted


def load_own_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved in ``folder``; None where there is none. Raises FtcliError FT321 for one that is damaged."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    return read_tokenizer(str(folder), offline=True)


def source_tokenizer(source: ExportSource, *, offline: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of training, with the chat template that the data was rendered with.

    Raises:
        FtcliError: FT321 or FT322 when the run kept none and the base model's cannot be used; FT424 when the
            template cannot be read.
    """
    from ftcli.data.template import read_template

    tokenizer = load_own_tokenizer(source.folder) or load_tokenizer(source.base, offline=offline)
    require_stop(tokenizer, str(source.folder))
    if source.chat_template is not None:
        tokenizer.chat_template = read_template(source.chat_template)
    return tokenizer


def not_verified(folder: Path, problems: list[str]) -> FtcliError:
    """FT741: what was written differs from what it should be. Whoever raises it leaves nothing behind."""
    findings = [Finding("FT741", f"the export failed its verification: {problem}") for problem in problems]
    remedy = f"it was removed again from {folder.parent}; please report this with all that is said here"
    return FtcliError([*findings[:-1], replace(findings[-1], help=remedy)], ExitCode.BUG)
