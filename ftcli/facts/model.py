"""Facts of a model before anything is loaded: its config.json, read and understood. No torch, no weights."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.assets import asset, bundled
from ftcli.config.model import ModelConfig
from ftcli.errors import FtcliError, Origin
from ftcli.facts.config_file import (
    LOCAL_SOURCES,
    RESTORE,
    ConfigSource,
    Fetch,
    fetch_from_hub,
    find_config,
    looks_local,
    preflight_error,
    read_json,
)
from ftcli.facts.language import has_other_parts, multimodal_of, text_values
from ftcli.facts.shape import ModelShape, shape_of, window_of
from ftcli.facts.tokenizer import TokenizerFacts, inspect_tokenizer
from ftcli.facts.weights import WeightFiles, inspect_weights
from ftcli.paths import expanded, is_file, is_folder
from ftcli.plain import JsonMap, JsonObject
from ftcli.tables.architecture import Family
from ftcli.tables.families import MULTIMODAL, family_of

if TYPE_CHECKING:
    from ftcli.config.yaml import Origins

#: The configs' names for what logits are multiplied by, and for what they are capped at. That no family has another one
#: is checked when a model is built: :mod:`ftcli.model.selfcheck`.
LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_SOFTCAPS = ("attn_logit_softcapping", *LOGIT_CAPS)
#: Architectures that give a row numbers in place of words.
_CLASSIFIER = ("ForSequenceClassification", "RewardModel")
#: Layers that predict further tokens; models have a few.
_MOST_FURTHER = 1000
#: No model has a larger constant; float32 still holds it.
_LARGEST = 1e30
#: Positions are scaled from ``original_max_position_embeddings`` by ``factor`` in these; others scale the limit itself.
_ROPE_FROM_ORIGINAL = ("llama3", "yarn", "longrope", "su")


def activation_of(config: JsonMap, family: Family | None) -> str | None:
    """transformers' name of the MLP's activation; None where neither config.json's content nor the family says."""
    stated = config.get("hidden_activation") or config.get("hidden_act")
    return str(stated) if stated else family.activation if family is not None else None


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """``rope_scaling`` of a config: positions beyond ``original`` are reached by scaling."""

    kind: str
    factor: float | None
    original: int | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its config.json describes it.

    ``raw`` is the file's content; ``language`` is what it says of the language model, and ``text_type`` that one's
    ``model_type``, which is another in multimodal models. ``shape`` is None for a family without arithmetic.
    ``max_positions`` is what the model can attend to in tokens, rope scaling counted in (None: the config does not
    say). ``eos_token_ids`` are those of config.json and of the generation_config.json beside it. ``tokenizer`` and
    ``weights`` are None where their files are not on this machine, so nothing was looked at.
    """

    name: str
    source: str
    folder: Path
    raw: JsonObject
    model_type: str
    text_type: str
    language: JsonObject
    shape: ModelShape | None
    max_positions: int | None
    sliding_window: int | None
    rope_scaling: RopeScaling | None
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    vocab_size: int | None
    quantization: str | None
    tokenizer: TokenizerFacts | None
    weights: WeightFiles | None

    @property
    def parameters(self) -> int | None:
        """Parameter count, or None for an unknown family."""
        return self.shape.parameters if self.shape is not None else None

    @property
    def active_parameters(self) -> int | None:
        """Those that a token goes through, where a model has experts that it does not."""
        return self.shape.active_parameters if self.shape is not None and self.shape.has_experts else None

    @property
    def family(self) -> Family | None:
        """The family's row; None where there is none."""
        return family_of(self.text_type)

    @property
    def is_local(self) -> bool:
        """True if the weights must be in ``folder``: there is nowhere else to look for them."""
        return self.source in LOCAL_SOURCES

    @property
    def senses(self) -> str | None:
        """The purpose of a multimodal checkpoint's frozen parts, such as ``vision``; None for a model of text."""
        row = multimodal_of(self.raw)
        return None if row is None else row.senses

    @property
    def activation(self) -> str | None:
        """transformers' name of the MLP's activation; None where neither config nor family says."""
        return activation_of(self.language, self.family)

    @property
    def beyond_sdpa(self) -> bool:
        """True if attention caps its scores or has sinks, which SDPA cannot do."""
        return bool(self.attn_logit_softcapping) or (self.family is not None and self.family.sinks)

    @property
    def drops_attention(self) -> bool:
        """True if training drops probabilities of attention (``attention_dropout``)."""
        return bool(self.language.get("attention_dropout"))

    @property
    def drops_residual(self) -> bool:
        """True if training drops elements of what each half of a layer adds (``residual_dropout``)."""
        return bool(self.language.get("residual_dropout"))


def read_facts(model: ModelConfig, *, offline: bool, origins: Origins, fetch: Fetch = fetch_from_hub) -> ModelFacts:
    """The facts of ``model``; at most one small file is downloaded, and none with ``offline``.

    Raises FtcliError (exit 3): FT303-FT308 from :func:`ftcli.facts.config_file.find_config`, FT305 also for values that
    make no model, FT309 for a model that is not a causal language model known to transformers, FT321 for a folder
    without a tokenizer.
    """
    found = find_config(model, offline=offline, origin=origins.at("model.name_or_path"), fetch=fetch)
    return facts_of(found, model, origins)


def facts_of(found: ConfigSource, model: ModelConfig, origins: Origins) -> ModelFacts:
    """The facts in a config that was found. Raises as :func:`read_facts` does."""
    origin = origins.at("model.name_or_path")
    raw = found.values
    model_type = _supported_type(raw, model.name_or_path, origin)
    shape = _shape(raw, found, origin)
    text = text_values(raw)
    _require_finite(text, found, origin)
    _require_counts(text, found, origin)
    family = family_of(str(text["model_type"])) or Family()
    return ModelFacts(
        name=model.name_or_path,
        source=found.kind,
        folder=found.folder,
        raw=raw,
        model_type=model_type,
        text_type=str(text["model_type"]),
        language=text,
        shape=shape,
        max_positions=_max_positions(text),
        sliding_window=window_of(text, family),
        rope_scaling=_rope_scaling(text),
        attn_logit_softcapping=_number(text, "attn_logit_softcapping", family.attention_softcap),
        final_logit_softcapping=_number(text, "final_logit_softcapping", family.final_softcap),
        bos_token_id=_token_id(text.get("bos_token_id")),
        eos_token_ids=tuple(dict.fromkeys([*_ids(text.get("eos_token_id")), *_generation_stops(found.folder, origin)])),
        pad_token_id=_token_id(text.get("pad_token_id")),
        vocab_size=_token_id(text.get("vocab_size")),
        quantization=_quantization(raw),
        tokenizer=_tokenizer(model, found, origins),
        weights=inspect_weights(found.folder) if found.is_local else None,
    )


def _generation_stops(folder: Path, origin: Origin | None) -> list[int]:
    """The stop tokens of generation_config.json, which has more of them than config.json (gpt-oss, Qwen, Llama)."""
    path = folder / "generation_config.json"
    return _ids(read_json(path, origin).get("eos_token_id")) if path.is_file() else []


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]


def _supported_type(raw: JsonMap, name: str, origin: Origin | None) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise preflight_error("FT305", f"config.json of {name} has no model_type", origin, help=RESTORE)
    for key, part in raw.items():
        inner = part.get("model_type") if isinstance(part, dict) and key.endswith("_config") else None
        if not isinstance(inner, str | None):
            message = f"config.json of {name}: {key}.model_type {str(inner)[:40]} is no text"
            raise preflight_error("FT305", message, origin, help=RESTORE)
    architectures = raw.get("architectures")
    names = [str(a) for a in architectures] if isinstance(architectures, list) else []
    causal = not names or any(n.endswith(("ForCausalLM", "LMHeadModel")) for n in names)
    trained = multimodal_of(raw) is not None if has_other_parts(raw) else causal
    if raw.get("is_encoder_decoder") or not trained:
        what = names[0] if names else model_type
        if what.endswith(_CLASSIFIER):
            raise _of_a_classifier(raw, name, what, origin)
        message = f"{name} is a {what}; ftcli trains causal language models, and those inside {', '.join(MULTIMODAL)}"
        help = "choose a text model, such as google/gemma-2-2b-it"
        raise preflight_error("FT309", message, origin, help=help)
    folders = _code_folders(model_type)
    if folders and not any(map(is_folder, folders)):
        message = f"the installed transformers knows no model_type {model_type!r} ({name})"
        help = "upgrade transformers; models that need trust_remote_code are not supported"
        raise preflight_error("FT309", message, origin, help=help)
    return model_type


def _of_a_classifier(raw: JsonMap, name: str, what: str, origin: Origin | None) -> FtcliError:
    """FT309 for a reward model, or another classifier, in the place of a language model."""
    labels = raw.get("id2label")
    one = len(labels) == 1 if isinstance(labels, dict) else raw.get("num_labels") == 1
    kind = "a reward model: it scores answers and writes none" if one else "a classifier: it writes no text"
    judge = f"grpo: {{rewards: [{{use: reward_model, model: {name}}}]}}"
    base = "name the language model that it was trained from"
    message = f"{name} is a {what}, {kind}"
    help = f"{base}; to judge answers by it: {judge}" if one else base
    return preflight_error("FT309", message, origin, help=help)


def _code_folders(model_type: str) -> list[Path]:
    """Folders in which transformers may have a model's code; none where it is not installed. Importing its own table
    of models would take seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return []
    models = Path(next(iter(spec.submodule_search_locations))) / "models"
    stem = model_type.replace("-", "_").lower()
    return [models / name for name in (stem, stem.removesuffix("_text"))]


def takes_sdpa(model_type: str) -> bool:
    """True if transformers has the model's attention as SDPA, which neither caps scores nor has sinks."""
    return "_supports_sdpa = False" not in _code_of(model_type)


def has_classifier(model_type: str) -> bool:
    """True if transformers has a sequence classifier of the model, or if its code is not found."""
    code = _code_of(model_type)
    return not code or "ForSequenceClassification(" in code


def _code_of(model_type: str) -> str:
    """transformers' code of a model as text, which takes milliseconds; importing it would take seconds."""
    paths = (folder / f"modeling_{folder.name}.py" for folder in _code_folders(model_type))
    return "".join(path.read_text(encoding="utf-8") for path in paths if is_file(path))


def _shape(raw: JsonObject, found: ConfigSource, origin: Origin | None) -> ModelShape | None:
    path = found.folder / "config.json"
    try:
        return shape_of(raw)
    except KeyError as missing:
        raise preflight_error("FT305", f"{path} has no {missing.args[0]}", origin, help=RESTORE) from missing
    except ValueError as problem:
        raise _damaged(found, str(problem), origin) from problem


def _damaged(found: ConfigSource, what: str, origin: Origin | None) -> FtcliError:
    return preflight_error("FT305", f"{found.folder / 'config.json'}: {what}", origin, help=RESTORE)


def _require_finite(text: JsonMap, found: ConfigSource, origin: Origin | None) -> None:
    """Raises FtcliError FT305 for NaN and infinity, which Python's JSON reads, and for what is no scale. What is read
    of every family is a number in each, even where transformers does not look at it.
    """
    for key in (*LOGIT_MULTIPLIERS, "logits_scaling", *_SOFTCAPS, "router_aux_loss_coef", "initializer_range"):
        value = text.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _damaged(found, f"{key} {str(value)[:40]} is no number to compute with", origin)
    rope = _rope(text)
    used = {key: text.get(key) for key in ("rope_theta", "rms_norm_eps", *_SOFTCAPS)}
    used |= {f"rope {key}": rope.get(key) for key in ("factor", "rope_theta")}
    shares = {key: value for key, value in text.items() if "dropout" in key or key.endswith("pdrop")}
    for key, value in {**used, **shares}.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not 0 <= value <= (1 if key in shares else _LARGEST) or (value == 0 and key == "rope factor"):
            raise _damaged(found, f"{key} {value} is no number to compute with", origin)


def _require_counts(text: JsonMap, found: ConfigSource, origin: Origin | None) -> None:
    """Raises FtcliError FT305 for no positions, for windows that are no whole numbers, for whole numbers beyond every
    float, and for more layers for further tokens than can be, of which transformers' configs make lists.
    """
    positions = text.get("n_positions")  # of families that learn them: a row for each
    if isinstance(positions, int) and positions < 1:
        raise _damaged(found, f"n_positions is {positions}, not a positive whole number", origin)
    for key in ("sliding_window", "attention_chunk_size"):  # transformers' caches cut keys by them, whatever the family
        window = text.get(key)
        if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
            raise _damaged(found, f"{key} {str(window)[:40]} is not a whole number", origin)
    for key, value in text.items():
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            message = (
                f"{found.folder / 'config.json'}: {key} has {value.bit_length():,} bits, more than any number here"
            )
            raise preflight_error("FT305", message, origin, help=RESTORE)
        if ("nextn" in key or "mtp" in key) and isinstance(value, int) and abs(value) > _MOST_FURTHER:
            raise _damaged(found, f"{key} is {value:,}, more than the {_MOST_FURTHER:,} that can be", origin)


def _rope(raw: JsonMap) -> JsonObject:
    # transformers 4 wrote rope_scaling, transformers 5 writes rope_parameters; Gemma-3 has one set a layer type.
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if isinstance(value, dict):
            return value["full_attention"] if isinstance(value.get("full_attention"), dict) else value
    return {}


def _rope_scaling(raw: JsonMap) -> RopeScaling | None:
    rope = _rope(raw)
    kind = rope.get("rope_type") or rope.get("type")
    if not isinstance(kind, str) or kind == "default":
        return None
    original = rope.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    return RopeScaling(kind, _number(rope, "factor"), original if isinstance(original, int) else None)


def _max_positions(raw: JsonMap) -> int | None:
    stated = raw.get("max_position_embeddings") or raw.get("n_positions")
    limit = stated if isinstance(stated, int) and stated > 0 else None
    scaling = _rope_scaling(raw)
    if limit is None or scaling is None or scaling.factor is None:
        return limit
    if scaling.kind in _ROPE_FROM_ORIGINAL:
        return max(limit, int((scaling.original or 0) * scaling.factor))
    return int(limit * scaling.factor)


def _quantization(raw: JsonMap) -> str | None:
    value = raw.get("quantization_config")
    if not isinstance(value, dict):
        return None
    return str(value.get("quant_method") or "unknown")


def _tokenizer(model: ModelConfig, found: ConfigSource, origins: Origins) -> TokenizerFacts | None:
    named = model.tokenizer
    if named == "bytes":
        folder = asset("tokenizers", "bytes")
    elif named is not None and (ships := bundled(named, "models")) is not None:
        folder = ships
    elif named is not None and looks_local(named):
        folder = expanded(named)
    elif named is None and found.is_local:
        folder = found.folder
    else:
        return None
    return inspect_tokenizer(folder, origins.at("model.tokenizer" if named is not None else "model.name_or_path"))


def _token_id(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(raw: JsonMap, key: str, default: float | None = None) -> float | None:
    if key not in raw:
        return default
    value = raw[key]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
