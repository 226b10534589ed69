"""Loads tokenizers and models through transformers, or builds a model of random weights from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.empty_weights import model_class
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.facts.config_file import hub_errors
from ftcli.facts.model import ModelFacts
from ftcli.model.backbone import decoder_layers
from ftcli.model.fsdp import RankShards, keep_shards
from ftcli.model.load_quantized import ModelStorage, load_quantized, random_quantized
from ftcli.model.pretrained import (
    ANSWER_ALONE,
    IMPOSSIBLE,
    hollow,
    impossible,
    load_whole,
    read_config,
    usable_attention,
)
from ftcli.model.tokenizer import source_of
from ftcli.plain import JsonMap
from ftcli.plan.execution import own_attention, wants_kernels
from ftcli.plan.precision import DtypePlan
from ftcli.plan.released import released_form
from ftcli.tables import code_of, quantizations
from ftcli.tables.families import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_model(
    model: ModelConfig,
    facts: ModelFacts,
    plan: DtypePlan,
    *,
    device: torch.device,
    seed: int,
    offline: bool,
    source: str | None = None,
    num_layers: int | None = None,
    quantization: QuantizationConfig | None = None,
    dequantized_layers: int = 0,
    trained: bool = False,
    shards: RankShards | None = None,
) -> PreTrainedModel:
    """The base model on ``device`` in ``plan.parameter`` dtype.

    Args:
        quantization: How linear layers are stored; they are quantized one by one while they are loaded or drawn.
        dequantized_layers: How many decoder layers, from the first on, are held dequantized.
        trained: The base weights are trained, by a quantization that can.
        source: Folder to load weights from instead of the recipe's (a full fine-tune's ``model/``).
        num_layers: Build only this many layers (benchmarks of random weights).
        shards: Keeps this rank's shard of each layer, where ranks share the weights.

    Raises:
        FtcliError: FT323 when the weights cannot be loaded, or do not make the model of its config; FT305 when no model
            can be built of that.
    """
    from safetensors import SafetensorError

    dtype = getattr(torch, plan.parameter)
    attention = own_attention(model, beyond_sdpa=facts.beyond_sdpa)
    holding = None
    quantizes = quantization is not None and quantizations.row(quantization.method).quantize is not None
    files = model.init != "random" and source is None
    packed = files and released_form(facts.raw) is not None  # which transformers reads by packages of its own
    if quantization is not None and (quantizes or packed or (shards is not None and model.init != "random")):
        stacks = facts.shape is not None and facts.shape.has_experts
        trained = trained or (packed and not quantizes and shards is None)  # adapters freeze them later
        holding = ModelStorage(quantization, dtype, device, dequantized_layers, trained, shards=shards, stacks=stacks)
    if model.init == "random" and source is None:
        config = config_of(facts.raw, num_layers)
        if attention == "sdpa" and model.attention == "auto":
            attention = usable_attention(attention, chosen=False, model=hollow(config))
        try:
            drawn = _random_model(config, dtype, attention, device, seed, holding)
        except IMPOSSIBLE as error:
            hollow(config)  # says so where it is the config's fault
            of_ours = isinstance(error, RuntimeError | AssertionError)  # memory, the device, or a bug
            if of_ours and "expects" not in str(error):
                raise
            raise impossible(error) from error  # of a value that weights are drawn by
        _temper_scores(drawn)
        if holding is None and shards is not None:  # drawn whole, as in one process
            keep_shards(drawn, shards)
        return _finished(drawn, holding, model)
    name, revision = source or source_of(model.name_or_path), model.revision if source is None else None
    try:
        if holding is not None:
            config = read_config(name, revision=revision, offline=offline)
            attention = usable_attention(attention, chosen=model.attention != "auto", model=hollow(config))
            loaded = _load_quantized(name, config, holding, attention, revision=revision, offline=offline)
            return _finished(loaded, holding, model)
        return load_whole(
            name,
            revision=revision,
            offline=offline,
            dtype=dtype,
            attention=attention,
            attention_chosen=model.attention != "auto",
            device_map={"": device},
        )
    except SafetensorError as error:
        raise FtcliError.single(
            "FT323",
            f"a weight file of {source or model.name_or_path} is damaged: {first_line(error)}",
            exit_code=ExitCode.PREFLIGHT,
            help="download or copy it again; a copy that was cut short is the usual reason",
        ) from error
    except hub_errors(LookupError, TypeError, AttributeError) as error:  # of an index that is rubbish, say
        raise FtcliError.single(
            "FT323",
            f"the weights of {source or model.name_or_path} cannot be loaded: {first_line(error)}",
            exit_code=ExitCode.PREFLIGHT,
            help="check the name and the network, or build from the config alone with model.init: random",
        ) from error


def _finished(model: PreTrainedModel, holding: ModelStorage | None, settings: ModelConfig) -> PreTrainedModel:
    """``model`` as its quantization leaves it where it is trained."""
    if holding is not None and holding.trained:
        training = quantizations.row(holding.settings.method).training
        if training is not None:
            kernels = wants_kernels(settings.kernels)
            code_of(training.finish)(model, kernels=kernels, settings=holding.settings)
    return model


def _random_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    seed: int,
    holding: ModelStorage | None,
) -> PreTrainedModel:
    if holding is not None:
        return random_quantized(config, holding, attention, seed)
    torch.manual_seed(seed)
    with device:  # weights are drawn where they will live: 9 billion numbers on a CPU would take minutes
        model: PreTrainedModel = model_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def _temper_scores(model: PreTrainedModel) -> None:
    """Gives scores of attention a deviation of 1 where queries and keys are normalised and nothing else scales them.

    transformers draws Gemma-4's queries' norms as 1. Of heads of 256 scores then have a deviation of 16, attention
    takes hardly more than one key, and a last place of the embeddings grows from layer to layer, until hidden states in
    bfloat16 have nothing to do with those in float32.
    """
    family = family_of(model.config.get_text_config().model_type)
    if family is None or family.value_norm is None:
        return
    with torch.no_grad():
        layers: list[Any] = list(decoder_layers(model))
        for layer in layers:
            weight: torch.Tensor = layer.self_attn.q_norm.weight
            weight.fill_(weight.numel() ** -0.5)


def _with_floats(value: Any) -> Any:
    """Numbers that JSON cannot write are ``{"__float__": "Infinity"}`` in transformers' files."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def config_of(raw: JsonMap, num_layers: int | None = None) -> PretrainedConfig:
    """transformers' config of a config.json's content, without the dtype that it names.

    Args:
        num_layers: So many layers in place of the model's.

    Raises:
        FtcliError: FT305 for values that transformers refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    values = {key: value for key, value in raw.items() if key not in ("model_type", "dtype", "torch_dtype")}
    values |= ANSWER_ALONE
    if num_layers is not None:
        text = values
        if isinstance(values.get("text_config"), Mapping):
            text = values["text_config"] = dict(values["text_config"])
        if shared := text.get("num_kv_shared_layers"):  # the last ones: those of them that are among the first
            text["num_kv_shared_layers"] = max(0, num_layers - (text["num_hidden_layers"] - shared))
        if isinstance(single := text.get("per_layer_config"), Mapping):
            text["per_layer_config"] = {at: each for at, each in single.items() if int(at) < num_layers}
        text["num_hidden_layers"] = num_layers
        if text.get("layer_types"):
            text["layer_types"] = text["layer_types"][:num_layers]
    try:
        # As from_pretrained does: a list in the file is a tuple in some configs (Mamba-2's time_step_limit).
        config: PretrainedConfig = CONFIG_MAPPING[raw["model_type"]].from_dict(_with_floats(values))
    except (StrictDataclassError, *IMPOSSIBLE) as error:
        raise impossible(error) from error
    return config


def _load_quantized(
    name: str, config: PretrainedConfig, holding: ModelStorage, attention: str, *, revision: str | None, offline: bool
) -> PreTrainedModel:
    from transformers import GenerationConfig

    model = load_quantized(name, config, holding, attention, revision=revision, offline=offline)
    with suppress(OSError):  # a model without one keeps what its config says
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision, local_files_only=offline)
    return model
