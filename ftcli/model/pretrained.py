"""Models from their files, whole or not at all.

transformers fills up what a checkpoint lacks with random numbers, and passes over what it has no place for. Here every
tensor that is missing, left over or of another shape is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ftcli.empty_weights import Undrawn, model_class
from ftcli.errors import FtcliError, first_line
from ftcli.facts.weights import WEIGHTS_INDEX
from ftcli.plain import JsonMap

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Stored by old versions of transformers and computed since.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$|attn\.bias$|rotary_emb\.original_inv_freq$")
_NAMED = 3
#: What transformers and torch raise for values of a config.json that no model can be built of.
IMPOSSIBLE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ArithmeticError),
    AssertionError,  # of torch's embedding, for a pad token outside of it
)

#: What a config.json may ask for beside a model's answer, or in its place: nothing here reads it, it takes memory, and
#: SDPA has none; and without names the answer is a tuple.
ANSWER_ALONE = MappingProxyType({"output_attentions": False, "output_hidden_states": False, "return_dict": True})


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


def without_memory(model: Any) -> None:
    """Gives a model on ``meta`` tensors of a CPU without memory, inside of torch's ``FakeTensorMode``: autocast and
    attention look at the device.
    """
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


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
            name, revision=revision, local_files_only=offline, trust_remote_code=False, **ANSWER_ALONE
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
            model, loading_info = model_class(config).from_pretrained(
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
    problems = differences(loading_info)
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
    """Missing tensors by their names in files, where those are not the model's own."""
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


def differences(loading_info: JsonMap) -> list[str]:
    """One line for each tensor that transformers reports as missing, left over or of another shape."""
    problems = [f"{name} is not stored" for name in sorted(loading_info["missing_keys"])]
    problems += [
        f"{name} is stored with shape {tuple(stored)} and must be {tuple(wanted)}"
        for name, stored, wanted in sorted(loading_info["mismatched_keys"])
    ]
    unexpected = sorted(name for name in loading_info["unexpected_keys"] if not COMPUTED.search(name))
    return problems + [f"the model has no place for the stored tensor {name}" for name in unexpected]


def first_few(problems: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return "; ".join(problems[:_NAMED]) + more


def _not_whole(name: str, problems: list[str]) -> FtcliError:
    return FtcliError.single(
        "FT323",
        f"the weights of {name} do not make the model of its config.json: {first_few(problems)}",
        help="download or copy the model again, weights and config.json from the same place",
    )


def impossible(error: BaseException) -> FtcliError:
    """FT305 for values of a config.json that no model can be built of."""
    return FtcliError.single(
        "FT305",
        f"no model can be built of this config.json: {type(error).__name__}: {first_line(error)}",
        help="restore config.json from where the model came",
    )
