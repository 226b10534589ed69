"""Finds and loads the source of an export as a user would, with plain transformers and PEFT on the CPU."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError

from ftcli.config.evaluation import ExportConfig
from ftcli.config.load import load_recipe
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.empty_weights import fill_with_nan
from ftcli.errors import ExitCode, Finding, FtcliError, Origin, first_line
from ftcli.export.clean.process import Reload, ask_once
from ftcli.facts.config_file import hub_errors
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.model.load_quantized import compute_buffers
from ftcli.model.lora import load_adapter
from ftcli.model.pretrained import hollow, load_whole, read_config, weight_files
from ftcli.model.score_head import TASK_TYPE
from ftcli.model.tokenizer import load_tokenizer, read_tokenizer, require_stop, source_of, stop_token_ids
from ftcli.plain import JsonObject
from ftcli.run.atomic import irregular_file, json_object_in, read_json_object
from ftcli.run.directory import RunDirectory
from ftcli.run.inputs import base_inputs
from ftcli.run.integrity import hold_base, not_held
from ftcli.tables.methods import method_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_WEIGHTS = "adapter_model.safetensors"
#: Settings of PEFT's LoRA under which merging is another formula.
_OTHER_FORMULAS = (
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
)
#: Beginnings of an adapter that leave the base as it is; the others (PiSSA, OLoRA, LoftQ) train beside a changed base.
_ON_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "eye")
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)


@dataclass(frozen=True, slots=True)
class ExportSource:
    """The source of an export.

    Attributes:
        kind: ``adapter`` (PEFT's layout, belongs to ``base``) or ``model`` (transformers' layout, complete).
        origins: Where the recipe names things, for messages.
        chat_template: The recipe's `data.chat_template`, by which the data was rendered; None: the tokenizer's own.
        destination: Folder that holds one folder per exported format.
        of_result: Whether it is a run's result, and no checkpoint of it.
        run: The run's folder, which knows the base's weights by content, and its seed; None for an adapter in any
            other folder, of which nothing more is known.
        llama_cpp: Files for llama.cpp are to be run in it, too (``ftcli.export.gguf.verify``).
        quantization: How training held the base weights.
        compute: The dtype of training's products, into which quantized weights were dequantized.
        vocabulary: How many tokens the adapter's embeddings have, where the base has another number.
        classifier: Whether it scores rows in place of answering (:mod:`ftcli.model.score_head`).
        files: What ``folder`` holds, by digests (``ftcli.run.integrity.result_files``).
    """

    kind: Literal["adapter", "model"]
    folder: Path
    base: ModelConfig
    origins: Origins
    chat_template: str | None
    destination: Path
    run: tuple[Path, int] | None = None
    of_result: bool = True
    settings: ExportConfig = field(default_factory=ExportConfig)
    offline: bool = False
    verify: bool = True
    reload: Reload = ask_once
    llama_cpp: bool = False
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    compute: str = "bfloat16"
    vocabulary: int | None = None
    files: Sequence[JsonObject] = ()
    classifier: bool = False


def resolve_source(
    source: RunDirectory | Path, destination: Path | None = None, checkpoint: Path | None = None
) -> ExportSource:
    """Find what a run directory or the folder of an adapter holds.

    Args:
        checkpoint: Of a run, the folder of a checkpoint to take in place of its result.
        destination: Where the formats' folders go; ``<run>/export``, or ``<adapter>-export`` beside an adapter.

    Raises FtcliError FT740 when there is nothing to export, FT742 when an adapter's config cannot be used.
    """
    if isinstance(source, RunDirectory):
        found = _from_run(source, destination, checkpoint)
    else:
        found = _from_adapter(source, destination)
    irregular = irregular_file(found.folder)
    if irregular:
        raise unusable(found.folder, irregular)
    return found


def _from_run(run: RunDirectory, destination: Path | None, checkpoint: Path | None) -> ExportSource:
    if not run.recipe_path.is_file():
        raise _nothing(run.path, "it is not a run directory")
    loaded = load_recipe(run.recipe_path)
    kind: Literal["adapter", "model"] = "model" if loaded.recipe.lora is None else "adapter"
    result = run.adapter_dir if kind == "adapter" else run.model_dir
    folder = checkpoint if checkpoint is not None else result
    if not folder.is_dir():
        raise _nothing(run.path, f"{folder.name}/ is not there, so the run has not finished")
    if kind == "adapter":
        read_adapter_config(folder)
    recipe = loaded.recipe
    target = destination or (run.export_dir if checkpoint is None else run.export_dir / checkpoint.name)
    template, known = recipe.data.chat_template, (run.path, recipe.run.seed)
    return ExportSource(
        kind,
        folder,
        recipe.model,
        loaded.origins,
        template,
        target,
        known,
        checkpoint is None,
        quantization=recipe.quantization,
        compute=_compute_dtype(run),
        classifier=method_of(recipe, "train").classifier,
    )


def _compute_dtype(run: RunDirectory) -> str:
    """The dtype that the run's manifest names; bfloat16 where it names none."""
    plan = read_json_object(run.manifest_path).get("dtype_plan")
    named = plan.get("compute") if isinstance(plan, dict) else None
    return named if named in ("bfloat16", "float16", "float32") else "bfloat16"


def _from_adapter(folder: Path, destination: Path | None) -> ExportSource:
    if not (folder / ADAPTER_CONFIG).is_file():
        raise _nothing(folder, f"it holds neither recipe.yaml nor {ADAPTER_CONFIG}")
    config = read_adapter_config(folder)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise unusable(folder, f"{ADAPTER_CONFIG} names no base model")
    model = ModelConfig(name_or_path=base, revision=config.get("revision"))
    origins = Origins(MapNode(Origin(str(folder / ADAPTER_CONFIG)), {}))
    target = destination or folder.with_name(f"{folder.resolve().name}-export")
    return ExportSource(
        "adapter", folder, model, origins, None, target, classifier=config.get("task_type") == TASK_TYPE
    )


def read_adapter_config(folder: Path) -> JsonObject:
    """The adapter's config, checked to be LoRA or DoRA: nothing else can be merged here.

    Raises FtcliError FT742 when it is missing, damaged or of another method.
    """
    try:
        config = json_object_in(folder / ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise unusable(folder, f"{ADAPTER_CONFIG} cannot be read ({error})") from error
    if config.get("peft_type") != "LORA":
        raise unusable(folder, f"{ADAPTER_CONFIG} does not describe a LoRA adapter")
    for key in _OTHER_FORMULAS:
        if config.get(key):
            raise unusable(folder, f"{key} is set, which ftcli does not export")
    if config.get("init_lora_weights") not in _ON_THE_BASE:
        raise unusable(
            folder, f"it belongs to a base that init_lora_weights: {config['init_lora_weights']} has changed"
        )
    if config.get("bias") not in (None, "none"):
        raise unusable(folder, f"bias: {config['bias']} is set, which ftcli does not export")
    return config


def sha256(path: Path) -> str:
    """SHA-256 of a file's content. Raises OSError: it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nothing(path: Path, reason: str) -> FtcliError:
    help = "train first, or name a finished run's directory or a folder with a PEFT adapter"
    return FtcliError.single("FT740", f"there is nothing to export in {path}: {reason}", help=help)


def unusable(path: Path, reason: str) -> FtcliError:
    """FT742: what is to be exported is damaged, or of a kind that ftcli does not export."""
    help = "export from the run directory in which it was trained, or train it again"
    return FtcliError.single("FT742", f"{path} cannot be exported: {reason}", help=help)


def load_written(folder: Path) -> PreTrainedModel:
    """The model in a local folder, in the dtype that it is stored in. Raises FtcliError FT741 where it is damaged."""
    try:
        return load_whole(str(folder), dtype="auto", offline=True).eval()
    except FtcliError as error:
        raise not_verified(folder, [finding.message for finding in error.findings]) from error
    except _LOAD_ERRORS as error:
        raise not_verified(folder, [f"transformers cannot load it: {first_line(error)}"]) from error


def base_files(source: ExportSource) -> list[Path]:
    """The weight files of the model that the adapter belongs to. Raises FtcliError FT323 when there are none."""
    model = source.base
    try:
        return weight_files(source_of(model.name_or_path), model.revision, source.offline)
    except hub_errors() as error:
        raise _no_base(source, error) from error


def held_base(source: ExportSource) -> list[Finding]:
    """FT770 where the base cannot be held against the one that ``source`` was trained on.

    Raises FtcliError FT323 when it is not there, FT735 when it is another one.
    """
    if source.run is None:
        return [
            not_held(str(source.folder), "it is in no run directory, and names its base without saying its content")
        ]
    run, seed = source.run
    facts = base_facts(source)
    adapter = source.kind == "adapter"
    commit = None
    try:
        if adapter and source.base.init == "pretrained":
            name = source_of(source.base.name_or_path)
            config = read_config(name, revision=source.base.revision, offline=source.offline)
            commit = getattr(config, "_commit_hash", None)
        now = base_inputs(facts, source.base, commit, weights=None if adapter else ())
    except hub_errors() as error:
        raise _no_base(source, error) from error
    return hold_base(run, source.base, seed, now, weights=adapter)


def _no_base(source: ExportSource, error: BaseException) -> FtcliError:
    message = f"the weights of {source.base.name_or_path} cannot be loaded: {first_line(error)}"
    help = "merging needs the base model: check the name and the network, or export the adapter alone"
    return FtcliError.single("FT323", message, origin=source.origins.at("model.name_or_path"), help=help)


def local_config(folder: Path) -> PretrainedConfig:
    """transformers' config of the model in a local folder. Raises FtcliError as ``read_config``."""
    return read_config(str(folder), revision=None, offline=True)


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` without what it says of quantized files: transformers would look for the package that wrote them."""
    if getattr(config, "quantization_config", None) is None:
        return config
    plain = deepcopy(config)
    del plain.quantization_config
    return plain


def unwritten(config: PretrainedConfig) -> PreTrainedModel:
    """A model of ``config`` whose parameters take no memory, NaN in float32, and whose buffers are right."""
    model = hollow(plain_config(config), dtype=torch.float32)
    compute_buffers(model, torch.device("cpu"))
    fill_with_nan(model)
    return model.eval()


def attach(base: PreTrainedModel, folder: Path) -> PeftModel:
    """``base`` with the adapter in ``folder``, not merged. The adapter is in float32, whatever the base's dtype.

    Raises FtcliError FT742 when PEFT cannot load the adapter into this model.
    """
    try:
        with warnings.catch_warnings():
            # PEFT warns of tied embeddings with one side adapted; merging unties them (ftcli.export.merge).
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            adapted = load_adapter(base, folder)
    except FtcliError as error:
        raise unusable(folder, "; ".join(finding.message for finding in error.findings)) from error
    return adapted.float().eval()  # modules that were trained whole come in the dtype that they are stored in


def base_facts(source: ExportSource) -> ModelFacts:
    """The facts of the model that ``source`` was trained from. Raises FtcliError FT30x where they cannot be read."""
    return read_facts(source.base, offline=source.offline, origins=source.origins)


def source_stops(source: ExportSource, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn; the first is eos."""
    return stop_token_ids(base_facts(source), tokenizer)


def source_tokenizer(source: ExportSource) -> PreTrainedTokenizerBase:
    """The tokenizer of training, with the chat template that the data was rendered with. Raises FtcliError FT321 or
    FT322 when the run kept none and the base model's cannot be used; FT424 when the template cannot be read.
    """
    from ftcli.data.template import read_template

    if (source.folder / "tokenizer_config.json").is_file():
        tokenizer = read_tokenizer(str(source.folder), offline=True)
    else:
        tokenizer = load_tokenizer(source.base, offline=source.offline)
    require_stop(tokenizer, str(source.folder))
    if source.chat_template is not None:
        tokenizer.chat_template = read_template(source.chat_template)
    return tokenizer


def not_verified(folder: Path, problems: list[str]) -> FtcliError:
    """FT741: what was written differs from what it should be. Whoever raises it leaves nothing behind."""
    findings = [Finding("FT741", f"the export failed its verification: {problem}") for problem in problems]
    remedy = f"it was removed again from {folder.parent}; please report this with all that is said here"
    return FtcliError([*findings[:-1], replace(findings[-1], help=remedy)], ExitCode.BUG)
