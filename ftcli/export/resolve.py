"""Finds what is to be exported: a run's adapter or model, or an adapter in any folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ftcli.config import ExportConfig, ModelConfig, QuantizationConfig
from ftcli.config.load import load_recipe
from ftcli.config.origins import Origins
from ftcli.config.tree import MapNode
from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.export.clean.process import Reload, ask_once
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.plain import JsonObject
from ftcli.run.atomic import irregular_file, json_object_in, read_json_object
from ftcli.run.directory import RunDirectory

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


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is exported.

    Attributes:
        kind: ``adapter`` (PEFT's layout, belongs to ``base``) or ``model`` (transformers' layout, complete).
        folder: Where its files lie.
        base: The model it was trained from.
        origins: Where the recipe names things, for messages.
        chat_template: The recipe's `data.chat_template`, by which the data was rendered; None: the tokenizer's own.
        destination: Folder that holds one folder per exported format.
        of_result: Whether it is a run's result, and no checkpoint of it.
        run: The run's folder, which knows the base's weights by content, and its seed; None for an adapter in any
            other folder, of which nothing more is known.
        settings: What is asked of the formats.
        verify: Whether what is written is compared with what was trained.
        reload: Loads what was written again, in a process of its own.
        llama_cpp: What there is of llama.cpp on the machine (``ftcli.export.gguf.llama``).
        quantization: How training held the base weights.
        compute: The dtype of training's products, into which quantised weights were dequantised.
        vocabulary: How many tokens the adapter's embeddings have, where the base has another number.
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
    verify: bool = True
    reload: Reload = ask_once
    llama_cpp: str | None = None
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    compute: str = "bfloat16"
    vocabulary: int | None = None
    files: Sequence[JsonObject] = ()


def resolve_source(
    source: RunDirectory | Path, destination: Path | None = None, checkpoint: Path | None = None
) -> ExportSource:
    """Find what a run directory or the folder of an adapter holds.

    Args:
        checkpoint: Of a run, the folder of a checkpoint to take in place of its result.
        destination: Where the formats' folders go; ``<run>/export``, or ``<adapter>-export`` beside an adapter.

    Raises:
        FtcliError: FT740 when there is nothing to export, FT742 when an adapter's config cannot be used.
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
    return ExportSource("adapter", folder, model, origins, None, target)


def read_adapter_config(folder: Path) -> JsonObject:
    """The adapter's config, checked to be LoRA or DoRA: nothing else can be merged here.

    Raises:
        FtcliError: FT742 when it is missing, damaged or of another method.
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
    """SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nothing(path: Path, reason: str) -> FtcliError:
    return FtcliError.single(
        "FT740",
        f"there is nothing to export in {path}: {reason}",
        exit_code=ExitCode.RECIPE,
        help="train first, or name a finished run's directory or a folder with a PEFT adapter",
    )


def unusable(path: Path, reason: str) -> FtcliError:
    """FT742: what is to be exported is damaged, or of a kind that ftcli does not export."""
    return FtcliError.single(
        "FT742",
        f"{path} cannot be exported: {reason}",
        exit_code=ExitCode.RECIPE,
        help="export from the run directory in which it was trained, or train it again",
    )
