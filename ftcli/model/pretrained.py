"""Models from their files, whole or not at all.

transformers fills up what a checkpoint lacks with random numbers, and passes over what it has no place for. Here every
tensor that is missing, left over or of another shape is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.facts.adapters import Expression, at_end, before_index, endless
from ftcli.facts.weights import ADAPTER_CONFIG, WEIGHTS_INDEX
from ftcli.plain import JsonMap
from ftcli.undrawn import Undrawn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

#: Stored by old versions of transformers and computed since.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$|attn\.bias$|rotary_emb\.original_inv_freq$")
#: PEFT says so of patterns that are meant for parameters, which it applies them to all the same.
PATTERNS_UNMATCHED = r"The following (rank|alpha)_pattern keys did not match"
_NAMED = 3
#: What transformers and torch raise for values of a config.json that no model can be built of.
IMPOSSIBLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ArithmeticError)


def model_class(config: PretrainedConfig) -> Any:
    """transformers' auto class for text generation with the whole model.

    A model that also takes images has its language model's config inside its own. ``AutoModelForCausalLM`` would build
    some of those without their other parts.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText


def hollow(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of ``config`` without memory.

    Raises:
        FtcliError: FT305 (exit 3) when no model can be built of the config's values.
    """
    try:
        with torch.device("meta"), Undrawn():
            # Every model has eager attention. What a config.json names may be code on a hub.
            options = {"attn_implementation": "eager", **options}
            model: PreTrainedModel = model_class(config).from_config(config, **options)
    except IMPOSSIBLE as error:
        raise impossible(error) from error
    return model


def usable_attention(wanted: str, *, chosen: bool, model: PreTrainedModel) -> str:
    """``wanted``, or ``eager`` where ``model`` has no SDPA and nobody asked for it in so many words (``chosen``)."""
    return wanted if chosen or wanted != "sdpa" or model._supports_sdpa else "eager"


def read_config(name: str, *, revision: str | None, offline: bool) -> PretrainedConfig:
    """The config in a folder or on the Hub.

    Raises:
        FtcliError: FT305 (exit 3) for values that transformers refuses.
        OSError: there is none.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, revision=revision, local_files_only=offline, trust_remote_code=False
        )
    except (StrictDataclassError, *IMPOSSIBLE) as error:
        raise impossible(error) from error
    return config


def load_whole(
    name: str,
    *,
    revision: str | None = None,
    offline: bool,
    attention: str = "eager",
    attention_chosen: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """The model in a folder or on the Hub, with every tensor from its files.

    Args:
        attention, attention_chosen: As :func:`usable_attention` takes them.
        options: For ``from_pretrained``.

    Raises:
        FtcliError: FT305 (exit 3) for a config that makes no model, FT323 (exit 3) for files that lack a tensor, hold
            one that the model has no place for, or one of another shape.
        OSError, ValueError, safetensors.SafetensorError: the files are not there, or damaged.
    """
    config = read_config(name, revision=revision, offline=offline)
    outline = hollow(config)
    # Set and handed over: what config.json says of attention would win over the argument, and may be code on a hub.
    config._attn_implementation = usable_attention(attention, chosen=attention_chosen, model=outline)
    try:
        with _unreported():
            model, told = model_class(config).from_pretrained(
                name,
                config=config,
                revision=revision,
                local_files_only=offline,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                attn_implementation=config._attn_implementation,
                **options,
            )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # stacks of experts that cannot be put together
        unlike = _names_unlike(outline, weight_files(name, revision, offline))
        raise _not_whole(name, unlike or [first_line(error)]) from error
    problems = differences(told)
    if problems:
        raise _not_whole(name, problems)
    loaded: PreTrainedModel = model
    return loaded


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """A block in which transformers does not write its table of tensors that do not fit: it says that all is well."""

    def keep(record: logging.LogRecord) -> bool:
        return record.module != "loading_report"

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _names_unlike(outline: PreTrainedModel, files: list[Path]) -> list[str]:
    """What is not stored, by the names that the tensors have in files, where those are not the model's own."""
    from safetensors import safe_open
    from transformers.core_model_loading import revert_weight_conversion

    stored: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    wanted = set(revert_weight_conversion(outline, dict(outline.state_dict())))
    return [
        f"{name} is not stored" for name in sorted(wanted - stored) if name not in (outline._tied_weights_keys or ())
    ]


def weight_files(name: str, revision: str | None, offline: bool) -> list[Path]:
    """The safetensors files of a model in a folder or on the Hub.

    Raises:
        OSError: there are none.
    """
    from transformers.utils.hub import cached_file

    def find(file: str, *, needed: bool) -> Path | None:
        path = cached_file(
            name, file, revision=revision, local_files_only=offline, _raise_exceptions_for_missing_entries=needed
        )
        return None if path is None else Path(path)

    index = find(WEIGHTS_INDEX, needed=False)
    if index is None:
        shards = {"model.safetensors"}
    else:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [path for shard in sorted(shards) if (path := find(shard, needed=True)) is not None]


def differences(told: JsonMap) -> list[str]:
    """What transformers tells of a load, one line for each tensor that is not as it should be."""
    problems = [f"{name} is not stored" for name in sorted(told["missing_keys"])]
    problems += [
        f"{name} is stored with shape {tuple(stored)} and must be {tuple(wanted)}"
        for name, stored, wanted in sorted(told["mismatched_keys"])
    ]
    unexpected = sorted(name for name in told["unexpected_keys"] if not COMPUTED.search(name))
    return problems + [f"the model has no place for the stored tensor {name}" for name in unexpected]


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the adapter saved in ``folder`` attached, not trainable.

    Modules that were trained whole are in the dtype that they are stored in.

    Raises:
        FtcliError: FT334 (exit 3) when the adapter is damaged, is not this model's, lacks a tensor (PEFT would go on
            with random numbers in its place), or names modules by an expression that takes for ever.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _require_expressions(model, folder)
    try:
        stored = {name: tensor for path in _weights(folder) for name, tensor in load_file(path).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below, with their names
            warnings.filterwarnings("ignore", message=PATTERNS_UNMATCHED)
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except torch.OutOfMemoryError:
        raise
    except (OSError, ImportError, *IMPOSSIBLE, SafetensorError) as error:
        raise _unusable(folder, [first_line(error)]) from error
    held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    problems = [f"it lacks {name}" for name in sorted(set(held) - set(stored))]
    problems += [f"{name} belongs to nothing in this model" for name in sorted(set(stored) - set(held))]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)} and must have {tuple(tensor.shape)}"
        for name, tensor in held.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if problems:
        raise _unusable(folder, problems)
    _take_saved_modules(adapted, stored)
    return adapted


def _require_expressions(model: PreTrainedModel, folder: Path) -> None:
    """Refuses an adapter whose expressions are none, or take for ever on this model's names (FT334)."""
    try:
        if not (folder / ADAPTER_CONFIG).is_file():  # a pipe would be waited for
            raise ValueError("it is missing, or no regular file")
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        slow = endless(_expressions(config), [name for name, _ in model.named_modules()])
    except (OSError, ValueError, TypeError, AttributeError, re.error, OverflowError, RecursionError) as error:
        raise _unusable(folder, [f"{ADAPTER_CONFIG}: {first_line(error)}"]) from error
    if slow is not None:
        raise _unusable(folder, [f"{slow[0]}: the expression {slow[1].pattern} takes too long on its modules' names"])


def _expressions(config: JsonMap) -> Iterator[Expression]:
    """What PEFT makes regular expressions of."""
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str):
            yield key, re.compile(config[key])
    layers = config.get("layers_pattern") or ()
    for each in (layers,) if isinstance(layers, str) else layers:
        yield "layers_pattern", re.compile(before_index(each))
    for key in ("rank_pattern", "alpha_pattern"):
        for each in config.get(key) or ():
            yield key, re.compile(at_end(each))
    for each in config.get("modules_to_save") or ():
        yield "modules_to_save", re.compile(rf"(^|.*\.){each}($|\..*)")


def _take_saved_modules(adapted: PeftModel, stored: Mapping[str, torch.Tensor]) -> None:
    """Modules that were trained whole as they are stored: PEFT rounds them to the base's dtype."""
    from ftcli.model.lora import hold_saved_modules

    marker = f".modules_to_save.{adapted.active_adapter}"
    trained = {name.replace(marker, ""): p for name, p in adapted.named_parameters() if marker in name}
    if not trained:
        return
    hold_saved_modules(adapted, next(stored[name].dtype for name in trained))
    for name, parameter in trained.items():
        parameter.data.copy_(stored[name])


def _weights(folder: Path) -> list[Path]:
    found = sorted(folder.glob("adapter_model*.safetensors"))
    if not found:
        raise OSError("adapter_model.safetensors is not there")
    return found


def first_few(problems: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return "; ".join(problems[:_NAMED]) + more


def _not_whole(name: str, problems: list[str]) -> FtcliError:
    return FtcliError.single(
        "FT323",
        f"the weights of {name} do not make the model of its config.json: {first_few(problems)}",
        exit_code=ExitCode.PREFLIGHT,
        help="download or copy the model again, weights and config.json from the same place",
    )


def _unusable(folder: Path, problems: list[str]) -> FtcliError:
    return FtcliError.single(
        "FT334",
        f"the adapter in {folder} cannot be put on this model: {first_few(problems)}",
        exit_code=ExitCode.PREFLIGHT,
        help="name the recipe that it was trained with, or train it again",
    )


def impossible(error: BaseException) -> FtcliError:
    """FT305 for values of a config.json that no model can be built of."""
    return FtcliError.single(
        "FT305",
        f"no model can be built of this config.json: {type(error).__name__}: {first_line(error)}",
        exit_code=ExitCode.PREFLIGHT,
        help="restore config.json from where the model came",
    )
