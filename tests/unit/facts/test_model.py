"""Model facts: found, read, understood, and every way in which they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.config.model import ModelConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.config_file import bundled_configs
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.facts.shape import shape_of
from ftcli.model.pretrained import hollow

BILLIONS = {
    "google/gemma-2-9b": 9.24,
    "google/gemma-2-2b": 2.61,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
    "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "mistralai/Mistral-Small-24B-Base-2501": 23.57,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-VL-8B-Instruct": 8.77,
    "zai-org/GLM-4.7-Flash": 29.94,
    "Qwen/Qwen3.5-4B": 4.54,
    "Qwen/Qwen3.5-9B": 9.41,
    "Qwen/Qwen3.5-35B-A3B": 35.11,
    "Qwen/Qwen3.5-27B": 27.36,
    "google/gemma-4-E4B-it": 7.94,
    "google/gemma-4-31B-it": 31.27,
    "google/gemma-4-26B-A4B-it": 25.81,
    "microsoft/bitnet-b1.58-2B-4T": 2.41,
    "microsoft/bitnet-b1.58-2B-4T-bf16": 2.41,
}

LANGUAGE = ("ForCausalLM", "ForConditionalGeneration")

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}

FAMILY_VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 24},
    {"model_type": "mistral"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "attention_bias": True, "head_dim": 32},
    {"model_type": "qwen3"},
    {"model_type": "gemma", "head_dim": 16},
    {"model_type": "gemma2"},
    {"model_type": "gemma3_text", "tie_word_embeddings": False},
    {"model_type": "phi3", "pad_token_id": 0},
    {"model_type": "bitnet"},
]


def facts(name: str | Path, **options: Any) -> ModelFacts:
    fetch = options.pop("fetch", no_hub)
    origins = options.pop("origins")
    offline = options.pop("offline", True)
    model = ModelConfig.model_validate({"name_or_path": str(name), **options})
    return read_facts(model, offline=offline, origins=origins, fetch=fetch)


def no_hub(repo_id: str, revision: str | None, offline: bool) -> Path:
    raise AssertionError(f"the Hub was asked for {repo_id}")


def failing(error: Exception) -> Callable[..., Path]:
    def fetch(repo_id: str, revision: str | None, offline: bool) -> Path:
        raise error

    return fetch


@pytest.fixture
def origins(load: Any) -> Any:
    return load("").origins


@pytest.mark.parametrize("name", list(BILLIONS))
def test_bundled_configs_build_in_transformers_with_the_count_that_facts_state(name: str, origins: Any) -> None:
    found = facts(name, origins=origins)
    assert found.source == "bundled config"
    count = sum(p.numel() for p in hollow(AutoConfig.from_pretrained(found.folder)).parameters())
    assert found.parameters == count
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_every_bundled_config_is_in_the_table_above() -> None:
    folders = {path for path, _ in bundled_configs().values()}
    assert {path.name.replace("--", "/", 1) for path in folders} == set(BILLIONS)


@pytest.mark.parametrize("values", FAMILY_VARIANTS, ids=lambda v: "-".join(str(x) for x in v.values()))
def test_counts_agree_with_transformers_for_every_family(values: dict[str, Any]) -> None:
    sizes = {key: value for key, value in {**TINY, **values}.items() if key != "architectures"}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of({**TINY, **values})
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layer = {
        name.removeprefix("model.layers.0."): (m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and name.startswith("model.layers.0.")
    }
    assert {linear.name: (linear.in_features, linear.out_features) for linear in shape.linears} == layer


def test_instruct_models_share_the_config_and_have_their_own_stop_tokens(origins: Any) -> None:
    base, chat = facts("google/gemma-2-9b", origins=origins), facts("google/gemma-2-9b-it", origins=origins)
    assert (base.eos_token_ids, chat.eos_token_ids) == ((1,), (1, 107))
    assert base.shape == chat.shape
    assert facts("meta-llama/Llama-3.1-8B-Instruct", origins=origins).eos_token_ids == (128001, 128008, 128009)


def test_published_values_of_gemma2(origins: Any) -> None:
    found = facts("google/gemma-2-9b", origins=origins)
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == (50.0, 30.0)
    assert (found.max_positions, found.sliding_window, found.vocab_size) == (8192, 4096, 256000)
    assert found.shape is not None
    assert found.shape.tied
    config = AutoConfig.from_pretrained(found.folder)
    assert config.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert config.query_pre_attn_scalar == 256


def test_llama31_reaches_131072_positions_by_scaling(origins: Any) -> None:
    found = facts("meta-llama/Llama-3.1-8B", origins=origins)
    assert found.max_positions == 131072
    assert found.rope_scaling is not None
    assert (found.rope_scaling.kind, found.rope_scaling.factor, found.rope_scaling.original) == ("llama3", 8.0, 8192)
    assert AutoConfig.from_pretrained(found.folder).rope_parameters["rope_type"] == "llama3"


def test_windows(origins: Any) -> None:
    assert facts("mistralai/Mistral-7B-v0.1", origins=origins).sliding_window == 4096
    assert facts("mistralai/Mistral-7B-v0.3", origins=origins).sliding_window is None
    assert facts("Qwen/Qwen3-8B", origins=origins).sliding_window is None


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 512),
        ({"rope_scaling": None}, 512),
        ({"max_position_embeddings": None, "n_positions": 256}, 256),
    ],
)
def test_rope_scaling_counts_into_positions(rope: Any, positions: int, folder: Any, origins: Any) -> None:
    assert facts(folder("m", {**TINY, **rope}), tokenizer="bytes", origins=origins).max_positions == positions


def test_a_revision_is_never_answered_from_the_bundled_config(origins: Any, folder: Any) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repo_id: str, revision: str | None, offline: bool) -> Path:
        asked.append((repo_id, revision))
        return Path(folder("hub", TINY)) / "config.json"

    found = facts("google/gemma-2-9b", revision="abc", fetch=fetch, origins=origins)
    assert asked == [("google/gemma-2-9b", "abc")]
    assert found.model_type == "llama"


def response_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind, "refused")


@pytest.mark.parametrize(
    ("error", "offline", "code", "words"),
    [
        (response_error(hub.GatedRepoError), False, "FT307", "gated"),
        (response_error(hub.RepositoryNotFoundError), False, "FT303", "no model"),
        (response_error(hub.RevisionNotFoundError), False, "FT303", "revision"),
        (response_error(hub.RemoteEntryNotFoundError), False, "FT304", "config.json"),
        (hub.LocalEntryNotFoundError("nothing cached"), True, "FT306", "--offline"),
        (hub.LocalEntryNotFoundError("no connection"), False, "FT308", "no connection"),
        (ConnectionError("does not answer"), False, "FT308", "does not answer"),
        (hub.HfHubHTTPError.__bases__[0]("cut off"), False, "FT308", "cut off"),
        (hub.HFValidationError("bad"), False, "FT303", "neither a folder here nor a Hub id"),
    ],
)
def test_what_the_hub_refuses_is_said_plainly(
    error: Exception, offline: bool, code: str, words: str, origins: Any
) -> None:
    with pytest.raises(FtcliError) as caught:
        facts("someone/some-model", fetch=failing(error), offline=offline, origins=origins)
    (finding,) = caught.value.findings
    assert (finding.code, caught.value.exit_code) == (code, ExitCode.PREFLIGHT)
    assert words in finding.message
    assert finding.help


def test_a_misspelt_hub_id_gets_a_suggestion(origins: Any) -> None:
    error = response_error(hub.RepositoryNotFoundError)
    with pytest.raises(FtcliError) as caught:
        facts("google/gema-2-9b", fetch=failing(error), offline=False, origins=origins)
    assert caught.value.findings[0].help == "did you mean google/gemma-2-9b?"


def test_an_unreachable_hub_is_noticed_at_once() -> None:
    from ftcli.facts.config_file import require_connection

    with pytest.raises(ConnectionError, match="does not answer"):
        require_connection("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({**TINY, "model_type": None}, "FT305", "no model_type"),
        ({k: v for k, v in TINY.items() if k != "hidden_size"}, "FT305", "no hidden_size"),
        ({**TINY, "num_hidden_layers": 0}, "FT305", "num_hidden_layers is 0"),
        ({**TINY, "num_hidden_layers": "12"}, "FT305", "num_hidden_layers is '12'"),
        ({**TINY, "num_hidden_layers": 2**31}, "FT305", "more than the 10,000"),
        ({**TINY, "num_key_value_heads": 3}, "FT305", "not a multiple"),
        ({**TINY, "head_dim": 10**400}, "FT305", "head_dim has 1329 bits"),
        ({**TINY, "logits_scaling": 10**400}, "FT305", "logits_scaling has 1,329 bits"),
        ({**TINY, "final_logit_softcapping": "silu"}, "FT305", "final_logit_softcapping silu is no number"),
        ({**TINY, "router_aux_loss_coef": [1]}, "FT305", "router_aux_loss_coef [1] is no number"),
        ({**TINY, "partial_rotary_factor": 1e308}, "FT305", "no part of a head"),
        ({**TINY, "rope_parameters": {"partial_rotary_factor": float("inf")}}, "FT305", "no part of a head"),
        ({**TINY, "rope_pct": float("nan")}, "FT305", "no part of a head"),
        ({**TINY, "hidden_size": 66}, "FT305", "not a multiple"),
        ({**TINY, "n_positions": 0}, "FT305", "n_positions is 0"),
        ({**TINY, "num_nextn_predict_layers": 2**31 - 1}, "FT305", "more than the 1,000 that can be"),
        ({"model_type": "qwen2_5_vl", "text_config": {**TINY, "model_type": ["x"]}}, "FT305", "is no text"),
        ({"model_type": "gemma3", "text_config": TINY, "vision_config": {"model_type": {}}}, "FT305", "is no text"),
        ({**TINY, "model_type": "frobnicator"}, "FT309", "frobnicator"),
        ({**TINY, "model_type": "x" * 300}, "FT309", "xxx"),
        ({**TINY, "architectures": ["T5ForConditionalGeneration"]}, "FT309", "T5"),
        ({**TINY, "is_encoder_decoder": True}, "FT309", "causal"),
        ({"model_type": "gemma3n", "text_config": TINY}, "FT309", "gemma3n"),
    ],
)
def test_configs_that_make_no_model(config: Any, code: str, words: str, folder: Any, origins: Any) -> None:
    with pytest.raises(FtcliError) as caught:
        facts(folder("m", config), tokenizer="bytes", origins=origins)
    (finding,) = caught.value.findings
    assert finding.code == code
    assert words in finding.message


@pytest.mark.parametrize(
    ("labels", "is_one", "helps"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "a reward model: it scores answers", "[{use: reward_model, model: "),
        ({"num_labels": 1}, "a reward model: it scores answers", "[{use: reward_model, model: "),
        ({"id2label": {"0": "no", "1": "yes"}}, "a classifier: it writes no text", "trained from"),
        ({}, "a classifier", "trained from"),
    ],
)
def test_a_reward_model_in_the_place_of_a_base_is_called_one(
    labels: Any, is_one: str, helps: str, folder: Any, origins: Any
) -> None:
    config = {**TINY, "architectures": ["LlamaForSequenceClassification"], **labels}
    with pytest.raises(FtcliError) as caught:
        facts(folder("m", config), tokenizer="bytes", origins=origins)
    (finding,) = caught.value.findings
    assert finding.code == "FT309"
    assert f"is a LlamaForSequenceClassification, {is_one}" in finding.message
    assert helps in str(finding.help)
    assert "name the language model that it was trained from" in str(finding.help)


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_a_corrupt_config_is_named(content: bytes, tmp_path: Path, origins: Any) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FtcliError) as caught:
        facts(tmp_path, tokenizer="bytes", origins=origins)
    assert caught.value.findings[0].code == "FT305"
    assert "config.json" in caught.value.findings[0].message


def test_places_that_hold_no_model(tmp_path: Path, folder: Any, origins: Any) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    cases = {
        "./not/there/at/all": "FT303",
        str(tmp_path / "weights.bin"): "FT303",
        str(folder("empty")): "FT304",
        "bundled:tiny-gema2": "FT303",
    }
    found = {}
    for name in cases:
        with pytest.raises(FtcliError) as caught:
            facts(name, origins=origins)
        found[name] = caught.value.findings[0].code
    assert found == cases
    adapter = folder("adapter", None, adapter_config={"peft_type": "LORA"})
    with pytest.raises(FtcliError) as caught:
        facts(adapter, origins=origins)
    assert "adapter" in str(caught.value.findings[0].help)


def test_a_family_without_arithmetic_is_unknown_not_wrong(folder: Any, origins: Any) -> None:
    found = facts(folder("m", {**TINY, "model_type": "qwen3_next"}), tokenizer="bytes", origins=origins)
    assert found.shape is None
    assert found.parameters is None


def test_tokenizer_files(folder: Any, origins: Any) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "<x>"}]}
    described = {"eos_token": {"content": "</s>"}, "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    found = facts(folder("m", TINY, tokenizer=tokenizer, tokenizer_config=described), origins=origins).tokenizer
    assert found is not None
    assert (found.size, found.eos_token, found.pad_token, found.has_chat_template) == (12, "</s>", "<pad>", True)
    with pytest.raises(FtcliError) as caught:
        facts(folder("bare", TINY), origins=origins)
    assert caught.value.findings[0].code == "FT321"


def test_the_bundled_byte_tokenizer_has_what_training_needs(folder: Any, origins: Any) -> None:
    found = facts(folder("m", TINY), tokenizer="bytes", origins=origins).tokenizer
    assert found is not None
    assert found.eos_token is not None
    assert found.has_chat_template
    assert found.size is not None
    assert found.size >= 256


def test_weights_in_a_folder(folder: Any, origins: Any) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    path = folder("m", TINY, **{"model.safetensors.index": index})
    (path / "model-1.safetensors").write_bytes(b"")
    weights = facts(path, tokenizer="bytes", origins=origins).weights
    assert weights is not None
    assert weights.missing == ("model-2.safetensors",)
    assert not weights.complete
    old = folder("old", TINY)
    (old / "pytorch_model.bin").write_bytes(b"")
    weights = facts(old, tokenizer="bytes", origins=origins).weights
    assert weights is not None
    assert weights.pickle_only


def test_the_bundled_model_is_complete(origins: Any) -> None:
    found = facts("bundled:tiny-gemma2", origins=origins)
    assert found.source == "bundled model"
    assert found.weights is not None
    assert found.weights.complete
    assert found.attn_logit_softcapping


def test_alias_file_names_existing_folders() -> None:
    for name, (path, overlay) in bundled_configs().items():
        assert (path / "config.json").is_file(), name
        assert set(overlay) <= {"eos_token_id"}
        assert json.loads((path / "config.json").read_text())["architectures"][0].endswith(LANGUAGE)
