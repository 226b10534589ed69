"""Model folders with values and files that cannot be: coded errors, and nothing of a hub is asked for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.assets import asset
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.model.pretrained import load_whole
from ftcli.model.tokenizer import load_tokenizer, read_tokenizer
from tests.quantized import load
from tests.small_models import config_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(asset("models") / "tiny-gemma2", tmp_path / "model")


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize("value", ["a/b", {"": "a/b"}, "paged|a/b", "flash_attention_2", True, ["a/b"]])
def test_attention_that_config_json_names_is_not_loaded(
    folder: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would load ``a/b`` as code from the Hub, whatever the caller says."""
    asked: list[object] = []
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.")]:
        for name in ("get_kernel", "load_and_register_attn_kernel", "lazy_load_kernel"):
            if name in vars(module):
                monkeypatch.setattr(module, name, lambda *words, **_: asked.append(words))
    edit(folder / "config.json", **{key: value})
    model = load_whole(str(folder), offline=True)
    assert model.config._attn_implementation == "eager"
    assert asked == []


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_activation": 3},
        {"hidden_activation": None},
        {"dtype": "nothing"},
        {"layer_types": [[], {}, 1, "x"]},
        {"layer_types": ["full_attention"]},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_parameters": 3},
        {"eos_token_id": 1.5},
        {"final_logit_softcapping": {}},
        {"num_attention_heads": 3},
        {"sub_configs": {}},
    ],
)
def test_values_that_no_config_can_have(folder: Path, values: dict[str, Any]) -> None:
    edit(folder / "config.json", **values)
    with pytest.raises(FtcliError) as caught:
        load_whole(str(folder), offline=True)
    assert (caught.value.exit_code, caught.value.findings[0].code) == (ExitCode.PREFLIGHT, "FT305")
    assert len(caught.value.findings[0].message) < 700


def test_values_of_which_no_model_can_be_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With random weights an outline of the model is built first only where it may lack the attention that is meant."""
    plain = QuantizationConfig()
    with monkeypatch.context() as patch:
        patch.delattr("ftcli.model.load.hollow")
        assert load(folder, plain, init="random").config._attn_implementation == "eager"
    edit(folder / "config.json", hidden_activation="nothing")
    with pytest.raises(FtcliError) as caught:
        load(folder, plain, init="random")
    assert (caught.value.exit_code, caught.value.findings[0].code) == (ExitCode.PREFLIGHT, "FT305")


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_pad_token_that_the_embedding_has_not_is_refused(folder: Path, init: str) -> None:
    edit(folder / "config.json", pad_token_id=-(2**31))
    with pytest.raises(FtcliError, match="Padding_idx must be within") as caught:
        load(folder, QuantizationConfig(), init=init)
    assert (caught.value.exit_code, caught.value.findings[0].code) == (ExitCode.PREFLIGHT, "FT305")


@pytest.mark.parametrize("value", [True, ["x"]])
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_what_a_config_asks_for_beside_an_answer_is_left_out(
    folder: Path, init: str, value: Any, tmp_path: Path
) -> None:
    """SDPA has no probabilities of attention: such a model failed when it generated, or when it was saved. An answer
    without names (``return_dict``) was a tuple, and FT190.
    """
    edit(folder / "config.json", output_attentions=value, output_hidden_states=value, return_dict=False)
    model = load(folder, QuantizationConfig(), init=init)
    with torch.no_grad():
        found = model(input_ids=torch.zeros((1, 3), dtype=torch.long))
    assert (found.attentions, found.hidden_states) == (None, None)
    model.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("value", [["x"], "x", -1])
def test_values_by_which_no_weights_can_be_drawn(tmp_path: Path, value: Any) -> None:
    """transformers reads them for the first time when it draws."""
    config_of("recurrent_gemma").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", w_init_variance_scale=value)
    with pytest.raises(FtcliError) as caught:
        load(tmp_path, QuantizationConfig(), init="random")
    assert (caught.value.exit_code, caught.value.findings[0].code) == (ExitCode.PREFLIGHT, "FT305")


TOKENIZERS: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "a model of a kind that nobody knows": {"model": {"type": "Nothing", "vocab": {}}},
    "a vocabulary of text": {"model": {"type": "BPE", "vocab": "x", "merges": []}},
    "ids that are text": {"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}},
    "merges of what is not there": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    "a post-processor that is none": {"post_processor": {"type": "Nothing"}},
    "a pre-tokenizer that is none": {"pre_tokenizer": [[]]},
    "a regex that is none": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    "tokens that are none": {"added_tokens": [{"id": -1, "content": 3}]},
    "words without unknown ones": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_is_refused(folder: Path, name: str) -> None:
    edit(folder / "tokenizer.json", **TOKENIZERS[name])
    with pytest.raises(FtcliError) as caught:
        load_tokenizer(ModelConfig(name_or_path=str(folder)), offline=True)
    [finding] = caught.value.findings
    assert (caught.value.exit_code, finding.code) == (ExitCode.PREFLIGHT, "FT321")
    assert str(folder) in finding.message
    assert finding.help


@pytest.mark.parametrize(
    "values",
    [
        {"tokenizer_class": {"a": 1}},
        {"tokenizer_class": ["x"]},
        {"extra_special_tokens": 3.5},
        {"added_tokens_decoder": {"x": 3}},
        {"model_max_length": "x", "eos_token": {"content": 3}},
    ],
)
def test_a_tokenizer_config_that_cannot_be_is_refused(folder: Path, values: dict[str, Any]) -> None:
    edit(folder / "tokenizer_config.json", **values)
    with pytest.raises(FtcliError, match="FT321"):
        read_tokenizer(str(folder), offline=True)


def test_ctrl_c_is_no_fault_of_the_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_tokenizer(str(folder), offline=True)
