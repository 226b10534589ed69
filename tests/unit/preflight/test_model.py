"""Rules that need config.json."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import FtcliError
from ftcli.facts.model import read_facts
from ftcli.preflight.checks import model
from ftcli.preflight.checks.context import Context
from tests import small_models

from_hub = "model: {{name_or_path: {name}}}\n{rest}"


@pytest.fixture
def findings(load: Callable[..., Any]) -> Callable[..., list[Any]]:
    """``findings(name, yaml, *overrides)``: what the model rules say."""

    def _findings(name: str, rest: str = "", *overrides: str, command: Any = "check") -> list[Any]:
        loaded = load(from_hub.format(name=name, rest=rest), *overrides)
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        return list(model.check(Context(loaded.recipe, loaded.origins, command), facts))

    return _findings


def summary(findings: list[Any]) -> list[tuple[str, str]]:
    return [(f.code, f.severity) for f in findings]


def test_a_length_beyond_the_positions_is_the_contracts_example(findings: Callable[..., list[Any]]) -> None:
    (finding,) = findings("google/gemma-2-9b", "data:\n  max_seq_len: 16384\n")
    assert finding.code == "FT301"
    assert finding.message == "data.max_seq_len 16384 exceeds what google/gemma-2-9b can attend to (8192)"
    assert finding.help == "use at most 8192"
    assert (finding.origin.line, finding.origin.column) == (4, 16)
    assert findings("google/gemma-2-9b", "data: {max_seq_len: 4096}\n") == []


def test_bench_times_lengths_that_training_refuses(findings: Callable[..., list[Any]]) -> None:
    long = "data: {max_seq_len: 343040}\n"
    for command in ("train", "check", "eval"):
        assert summary(findings("meta-llama/Llama-3.1-8B", long, command=command)) == [("FT301", "error")]
    (warning,) = findings("meta-llama/Llama-3.1-8B", long, command="bench")
    assert (warning.code, warning.severity) == ("FT301", "warning")
    assert "131072" in warning.message
    assert "rope scaling" in warning.help


@pytest.mark.parametrize(
    ("name", "rest", "why"),
    [
        ("Qwen/Qwen3-30B-A3B", "lora: {r: 4}\n", "routers are frozen"),
        ("google/gemma-2-9b", "", "there is none for gemma2"),
        ("Qwen/Qwen3-30B-A3B", "train: {method: dpo}\n", "has a loss of its own"),
        ("Qwen/Qwen3-30B-A3B", "launch: {context_parallel_size: 2}\n", "their part of the tokens"),
        ("Qwen/Qwen3-30B-A3B", "", None),
    ],
)
def test_an_auxiliary_loss_that_nothing_adds_is_refused(
    name: str, rest: str, why: str | None, findings: Callable[..., list[Any]]
) -> None:
    found = [f for f in findings(name, rest, "train.router_aux_loss_coef=0.01") if f.code == "FT355"]
    assert [why in f.message for f in found] == ([True] if why else [])
    assert not [f for f in findings(name, rest, "train.router_aux_loss_coef=0") if f.code == "FT355"]


def test_windows_and_scaled_positions_are_notes(findings: Callable[..., list[Any]]) -> None:
    assert summary(findings("google/gemma-2-9b", "data: {max_seq_len: 8192}\n")) == [("FT302", "note")]
    (note,) = findings("meta-llama/Llama-3.1-8B", "data: {max_seq_len: 16384}\n")
    assert (note.code, note.severity) == ("FT302", "note")
    assert "llama3, factor 8" in note.message
    assert findings("meta-llama/Llama-3.1-8B", "data: {max_seq_len: 8192}\n") == []


@pytest.mark.parametrize(
    ("name", "lora", "code", "words"),
    [
        ("google/gemma-2-9b", "target_modules: [q_proj, qproj]", "FT311", "qproj"),
        ("google/gemma-2-9b", "target_modules: [qkv_proj]", "FT311", "qkv_proj"),
        ("google/gemma-2-9b", "target_modules: []", "FT311", "empty"),
        ("google/gemma-2-9b", "target_modules: [lm_head]", "FT312", "lm_head"),
        ("google/gemma-2-9b", "target_modules: [embed_tokens]", "FT312", "embed_tokens"),
        ("google/gemma-2-9b", "modules_to_save: [lm_head]", "FT314", "one matrix"),
        ("google/gemma-2-9b", "modules_to_save: [embed_tokens]", "FT314", "one matrix"),
        ("meta-llama/Llama-3.1-8B", "modules_to_save: [lmhead]", "FT313", "lmhead"),
    ],
)
def test_adapters_that_fit_no_layer(
    name: str, lora: str, code: str, words: str, findings: Callable[..., list[Any]]
) -> None:
    found = findings(name, f"lora: {{{lora}}}\n")
    assert [f.code for f in found] == [code]
    assert words in found[0].message


@pytest.mark.parametrize(
    "lora",
    [
        "target_modules: all-linear",
        "target_modules: [q_proj, self_attn.v_proj, mlp.down_proj]",
        "modules_to_save: [lm_head, embed_tokens, norm]",
    ],
)
def test_adapters_that_fit(lora: str, findings: Callable[..., list[Any]]) -> None:
    assert findings("meta-llama/Llama-3.1-8B", f"lora: {{{lora}}}\n") == []


def test_a_close_target_is_suggested(findings: Callable[..., list[Any]]) -> None:
    (finding,) = findings("google/gemma-2-9b", "lora: {target_modules: [gate_prj]}\n")
    assert finding.help.startswith("did you mean gate_proj?")


def test_packed_checkpoints_are_refused(findings: Callable[..., list[Any]]) -> None:
    (finding,) = findings("microsoft/bitnet-b1.58-2B-4T")
    assert finding.code == "FT316"
    assert "bitnet" in finding.message


@pytest.mark.parametrize(("method", "every", "refused"), [("nf4", 6, True), ("nf4", 0, False), ("none", 6, False)])
def test_a_model_that_rescales_its_weights_is_not_quantized(
    method: str, every: int, refused: bool, tmp_path: Path, findings: Callable[..., list[Any]]
) -> None:
    """RWKV's forward pass ended in FT190 before, at a packed weight that cannot be divided."""
    config = {**small_models.config_of("rwkv").to_dict(), "rescale_every": every}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    found = findings(f"{tmp_path}, tokenizer: bytes", f"quantization: {{method: {method}}}\n")
    assert ("FT336" in {one.code for one in found}) == refused


@pytest.mark.parametrize("name", ["microsoft/bitnet-b1.58-2B-4T", "microsoft/bitnet-b1.58-2B-4T-bf16"])
def test_a_model_that_was_trained_rounded_is_not_warmed_up(name: str, findings: Callable[..., list[Any]]) -> None:
    method = "quantization: {method: bitnet, lambda_warmup_steps: %d}\nexport: {formats: [bitnet]}\n"
    (finding,) = findings(name, method % 10)
    assert (finding.code, finding.severity) == ("FT340", "error")
    assert findings(name, method % 0) == []


def test_gguf_has_no_norms_of_single_layers(findings: Callable[..., list[Any]]) -> None:
    recipe = "quantization: {method: bitnet, use_rms_norm: %s}\nexport: {formats: [gguf]}\n"
    for setting, codes in (("true", ["FT756"]), ("false", [])):
        assert [f.code for f in findings("meta-llama/Llama-3.1-8B", recipe % setting) if f.code == "FT756"] == codes


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("stored", "recipe", "expected"),
    [
        (BITSANDBYTES, "lora: {}\nquantization: {method: nf4}\n", None),
        (BITSANDBYTES, "lora: {}\n", "set quantization.method: nf4"),
        ({**BITSANDBYTES, "bnb_4bit_quant_type": "fp4"}, "lora: {}\nquantization: {method: nf4}\n", "in bfloat16"),
        ({"quant_method": "gptq"}, "lora: {}\nquantization: {method: nf4}\n", "in bfloat16"),
    ],
    ids=["nf4", "nf4 without the method", "fp4", "gptq"],
)
def test_nf4_as_bitsandbytes_stores_it_is_read_with_the_method(
    stored: dict[str, Any], recipe: str, expected: str | None, folder: Callable[..., Path], context: Callable[..., Any]
) -> None:
    path = folder("stored", {**TINY, "quantization_config": stored}, tokenizer_config={})
    made = context(f"model: {{name_or_path: '{path}', tokenizer: bytes}}\n{recipe}")
    facts = read_facts(made.recipe.model, offline=True, origins=made.origins)
    found = [finding for finding in model.check(made, facts) if finding.code == "FT316"]
    found = [finding for finding in found if finding.severity == "error"]  # that it cannot be merged is a note
    assert [finding.help for finding in found if expected and expected in finding.help] == [f.help for f in found]
    assert bool(found) == (expected is not None)


@pytest.mark.parametrize("method", ["none", "nf4", "fp8"])
@pytest.mark.parametrize(("model_type", "known"), [("gpt_oss", True), ("llama", False)])
def test_experts_in_mxfp4_are_read_with_every_method_where_their_layout_is_known(
    model_type: str, known: bool, method: str, folder: Callable[..., Path], context: Callable[..., Any]
) -> None:
    config = small_models.config_of(model_type).to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    path = folder("stored", config, tokenizer_config={})
    text = f"model: {{name_or_path: '{path}', tokenizer: bytes}}\nlora: {{}}\nquantization: {{method: {method}}}\n"
    for command in ("check", "export"):
        made = context(f"{text}export: {{formats: [adapter, safetensors]}}\n", command=command)
        facts = read_facts(made.recipe.model, offline=True, origins=made.origins)
        assert bool([f for f in model.check(made, facts) if f.code == "FT316"]) is not known


def test_an_adapter_is_not_merged_into_stored_nf4(folder: Callable[..., Path], context: Callable[..., Any]) -> None:
    path = folder("stored", {**TINY, "quantization_config": BITSANDBYTES})
    text = f"model: {{name_or_path: '{path}', tokenizer: bytes}}\nlora: {{}}\nquantization: {{method: nf4}}\n"
    for formats, expected in (("[adapter, safetensors]", ["FT316"]), ("[adapter]", [])):
        made = context(f"{text}export: {{formats: {formats}}}\n", command="export")
        facts = read_facts(made.recipe.model, offline=True, origins=made.origins)
        assert [f.code for f in model.check(made, facts) if f.code == "FT316"] == expected
        made = context(f"{text}export: {{formats: {formats}}}\n", command="check")
        notes = [f for f in model.check(made, facts) if f.code == "FT316"]
        assert [(f.code, f.severity) for f in notes] == [(code, "note") for code in expected]  # known before training


def test_a_packed_layer_is_not_trained_whole(findings: Callable[..., list[Any]]) -> None:
    lora = "lora: {modules_to_save: [lm_head, q_proj]}\n"
    (finding,) = findings("meta-llama/Llama-3.1-8B", f"{lora}quantization: {{method: nf4}}\n")
    assert finding.code == "FT271"
    assert "q_proj" in finding.message
    assert findings("meta-llama/Llama-3.1-8B", lora) == []


TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def tokenizer(**described: Any) -> dict[str, Any]:
    return {"tokenizer": {"model": {"vocab": {"a": 0, "z": 299}}}, "tokenizer_config": described}


@pytest.mark.parametrize(
    ("config", "described", "expected"),
    [
        ({}, {"eos_token": "</s>", "pad_token": "<pad>"}, []),
        ({"vocab_size": 301}, {"eos_token": "a", "pad_token": "<new>"}, []),
        ({"vocab_size": 301}, {"eos_token": "<new>", "pad_token": {"content": "<newer>"}}, [("FT315", "error")]),
        ({"vocab_size": 300}, {"eos_token": "a", "pad_token": "z", "image_token": "<new>"}, []),
        ({"vocab_size": 256}, {"eos_token": "</s>", "pad_token": "<pad>"}, [("FT315", "error")]),
        ({}, {"pad_token": "<pad>"}, [("FT322", "error")]),
        ({}, {"eos_token": "</s>"}, [("FT324", "note")]),
        ({}, {"eos_token": "</s>", "pad_token": "</s>"}, [("FT324", "note")]),
        ({"eos_token_id": [2, 500]}, {"eos_token": "</s>", "pad_token": "<pad>"}, [("FT325", "error")]),
        ({"pad_token_id": 384}, {"eos_token": "</s>", "pad_token": "<pad>"}, [("FT325", "error")]),
        ({"pad_token_id": -1}, {"eos_token": "</s>", "pad_token": "<pad>"}, []),
        ({"pad_token_id": -(2**31)}, {"eos_token": "</s>", "pad_token": "<pad>"}, [("FT325", "error")]),
        ({"head_dim": 33}, {"eos_token": "</s>", "pad_token": "<pad>"}, [("FT319", "error")]),
    ],
)
def test_tokens_and_heads(
    config: Any, described: Any, expected: Any, folder: Callable[..., Path], findings: Callable[..., list[Any]]
) -> None:
    path = folder("m", {**TINY, **config}, **tokenizer(**described))
    assert summary(findings(str(path), "", "model.init=random")) == expected


def test_sdpa_where_transformers_computes_the_model_without_it(findings: Callable[..., list[Any]]) -> None:
    sdpa = "model.attention=sdpa"
    assert summary(findings("google/gemma-2-9b", "", sdpa)) == [("FT250", "error")]
    assert findings("google/gemma-2-9b", "", sdpa, command="export") == []
    assert findings("google/gemma-2-9b", "", "model.attention=eager") == []
    assert findings("meta-llama/Llama-3.1-8B", "", sdpa) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "rope factor inf"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": math.nan}}, "rope factor nan"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "rope factor -2.0"),
        ({"attention_dropout": -1}, "attention_dropout -1"),
        ({"attn_pdrop": 1.5}, "attn_pdrop 1.5"),
        ({"hidden_dropout": math.nan}, "hidden_dropout nan"),
        ({"rope_theta": math.inf}, "rope_theta inf"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps inf"),
        ({"sliding_window": 0.0}, "sliding_window 0.0 is not"),
        ({"final_logit_softcapping": 10**400}, "final_logit_softcapping"),
    ],
)
def test_numbers_that_nothing_is_computed_with(
    config: dict[str, Any], said: str, folder: Callable[..., Path], findings: Callable[..., list[Any]]
) -> None:
    with pytest.raises(FtcliError, match="FT305") as caught:
        findings(str(folder("m", {**TINY, **config}, **tokenizer(eos_token="a"))))
    assert said in caught.value.findings[0].message


@pytest.mark.parametrize("key", ["model.name_or_path", "model.tokenizer"])
def test_a_folder_that_nobody_may_look_into_is_named(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, findings: Callable[..., list[Any]]
) -> None:
    closed = tmp_path / "closed" / "model"
    listdir = os.listdir

    def refused(path: Any) -> list[str]:
        if str(path).startswith(str(closed)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    for name, reason in ((str(closed), "Permission denied"), ("./" + "x" * 300, "File name too long")):
        with pytest.raises(FtcliError) as caught:
            findings("google/gemma-2-9b", "", f"{key}={name}")
        (finding,) = caught.value.findings
        assert finding.code == ("FT303" if key == "model.name_or_path" else "FT321")
        assert f"cannot be read: {reason}" in finding.message


def test_weights_must_be_there_unless_they_are_drawn(
    folder: Callable[..., Path], findings: Callable[..., list[Any]]
) -> None:
    path = folder("m", TINY, **tokenizer(eos_token="e", pad_token="p"))
    assert summary(findings(str(path))) == [("FT317", "error")]
    assert findings(str(path), "", "model.init=random") == []
    assert findings(str(path), command="bench") == []
    (path / "model.safetensors").write_bytes(b"")
    assert findings(str(path)) == []


def _closed(path: Path, patch: pytest.MonkeyPatch) -> None:
    """As a mode of 000 does it to whoever is not root."""
    path.write_bytes(b"")
    opened = Path.open

    def refused(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *args, **options)

    patch.setattr(Path, "open", refused)


UNREADABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "cannot be read (Permission denied)": _closed,
    "cannot be read (No such file or directory)": lambda path, _: path.symlink_to("nowhere"),
    "is no regular file": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("reason", UNREADABLE)
def test_weights_that_cannot_be_read_are_named(
    reason: str, folder: Callable[..., Path], findings: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder("m", TINY, **tokenizer(eos_token="e", pad_token="p"))
    UNREADABLE[reason](path / "model.safetensors", monkeypatch)
    (finding,) = findings(str(path))
    assert finding.code == "FT317"
    assert f"model.safetensors {reason}" in finding.message
    assert "chmod u+r" in finding.help


def test_what_was_not_looked_at_is_said(load: Callable[..., Any]) -> None:
    loaded = load("model: {name_or_path: google/gemma-2-9b}\n")
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    unmade = {item.check for item in model.not_made(Context(loaded.recipe, loaded.origins, "check"), facts)}
    assert unmade == {"vocabulary against the tokenizer", "pad and stop tokens", "chat template", "weights"}


def test_what_export_refuses_of_random_weights_is_known_before_training(findings: Callable[..., list[Any]]) -> None:
    name, random = "meta-llama/Llama-3.1-8B", "model.init=random"
    assert summary(findings(name, "lora: {}\n", random)) == [("FT747", "note")]
    assert findings(name, "lora: {}\nexport: {formats: [adapter]}\n", random) == []
    assert findings(name, "lora: {}\n", random, command="bench") == []
    assert findings(name, "", random) == []  # a full fine-tune is copied


def test_that_experts_have_no_place_in_fp8_is_known_before_training(findings: Callable[..., list[Any]]) -> None:
    asked = "lora: {}\nexport: {formats: [fp8]}\n"
    found = [(f.code, f.severity) for f in findings("Qwen/Qwen3-30B-A3B", asked) if f.code == "FT740"]
    assert found == [("FT740", "note")]
    for name, text in (("meta-llama/Llama-3.1-8B", asked), ("Qwen/Qwen3-30B-A3B", "lora: {}\n")):
        assert "FT740" not in [finding.code for finding in findings(name, text)]


def test_what_llama_cpp_does_not_build_is_known_before_training(
    findings: Callable[..., list[Any]], folder: Callable[..., Path]
) -> None:
    asked = "lora: {}\nexport: {formats: [gguf]}\n"
    assert "FT756" not in [finding.code for finding in findings("meta-llama/Llama-3.1-8B", asked)]
    unbuilt = str(folder("m", {**TINY, "model_type": "helium"}, **tokenizer(eos_token="z")))

    def told(formats: str, command: str = "train", **gguf: str) -> list[tuple[str, str]]:
        text = f"lora: {{}}\nexport: {{formats: [{formats}], gguf: {gguf}}}\n"
        return [(f.code, f.severity) for f in findings(unbuilt, text, command=command) if f.code in ("FT756", "FT758")]

    assert told("gguf") == [("FT758", "note")]  # llama.cpp's own converter may know it, and is not here
    assert told("gguf", "export") == [("FT758", "error")]
    assert told("ollama") == [("FT756", "note")]
    there = folder("llama.cpp")
    (there / "convert_hf_to_gguf.py").write_text("")
    assert told("gguf", "export", converter=str(there)) == []


def test_ternary_types_are_for_ternary_weights(findings: Callable[..., list[Any]]) -> None:
    def found(method: str, types: str, command: str = "check") -> list[tuple[str, str]]:
        text = f"quantization: {{method: {method}}}\nexport: {{formats: [gguf], gguf: {{types: [{types}]}}}}\n"
        told = findings("meta-llama/Llama-3.1-8B", text, command=command)
        return [(f.severity, f.message.split()[0]) for f in told if f.code == "FT339"]

    assert found("none", "q8_0, tq1_0") == [("note", "tq1_0")]
    assert found("none", "tq2_0", "export") == [("error", "tq2_0")]
    assert found("bitnet", "tq2_0") == found("none", "q8_0") == []


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}


def compressed(*weights: dict[str, Any], **change: Any) -> dict[str, Any]:
    groups = {f"group_{at}": {"targets": ["Linear"], "weights": each} for at, each in enumerate(weights)}
    return {**COMPRESSED, "config_groups": groups, **change}


READ: list[tuple[dict[str, Any], str]] = [
    (BLOCKS, "fp8 (a scale for each 128 x 128)"),
    ({"quant_method": "fp8"}, "fp8 (a scale for each 128 x 128)"),
    ({"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "fp8 (a scale for each 1 x 32)"),
    ({**BLOCKS, "weight_block_size": None, "activation_scheme": "static"}, "fp8 (a scale for each matrix)"),
    (compressed(WEIGHTS), "fp8 (a scale for each row)"),
    (compressed({**WEIGHTS, "strategy": "tensor"}), "fp8 (a scale for each matrix)"),
    (
        compressed({**WEIGHTS, "strategy": "block", "block_structure": [128, 128]}, sparsity_config={}),
        "fp8 (a scale for each 128 x 128)",
    ),
]


@pytest.mark.parametrize(("stored", "words"), READ)
def test_what_a_model_in_eight_bits_is_trained_as(
    stored: dict[str, Any], words: str, folder: Callable[..., Path], context: Callable[..., Any]
) -> None:
    path = folder("stored", {**TINY, "quantization_config": stored}, tokenizer_config={})
    for method, said in (("none", "trained in model.dtype, exactly"), ("nf4", "once more, to nf4"), ("fp8", "to fp8")):
        text = f"model: {{name_or_path: '{path}', tokenizer: bytes}}\nlora: {{}}\nquantization: {{method: {method}}}\n"
        made = context(text, command="check")
        found = list(model.check(made, read_facts(made.recipe.model, offline=True, origins=made.origins)))
        assert {each.code for each in found if each.severity == "error"} <= {"FT317"}  # there are no weights
        (note,) = [each for each in found if each.code == "FT327"]
        assert f"stored in {words}: " in note.message
        assert said in note.message
        assert ("nf4" in (note.help or "")) == (method == "none")
    drawn = f"model: {{name_or_path: '{path}', tokenizer: bytes, init: random}}\n"
    for other, command in ((drawn, "check"), (text, "export")):
        made = context(other, command=command)
        facts = read_facts(made.recipe.model, offline=True, origins=made.origins)
        assert not [each for each in model.check(made, facts) if each.code in ("FT316", "FT327")]


@pytest.mark.parametrize(
    "stored",
    [
        {**BLOCKS, "expert_dtype": "fp4"},
        {**BLOCKS, "weight_block_size": [128]},
        {**BLOCKS, "weight_block_size": [0, 128]},
        {**BLOCKS, "weight_block_size": "128"},
        {"quant_method": "fbgemm_fp8"},
        compressed(),
        compressed({**WEIGHTS, "num_bits": 4}),
        compressed({**WEIGHTS, "type": "int"}),
        compressed({**WEIGHTS, "symmetric": False}),
        compressed({**WEIGHTS, "strategy": "group", "group_size": 32}),
        compressed(WEIGHTS, {**WEIGHTS, "strategy": "tensor"}),
        compressed(WEIGHTS, format="pack-quantized"),
        compressed(WEIGHTS, transform_config={"config_groups": {"R1": {}}}),
        compressed(WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}),
        compressed(WEIGHTS, quantization_status="frozen"),
    ],
)
def test_forms_without_an_exact_reading_are_refused(
    stored: dict[str, Any], folder: Callable[..., Path], context: Callable[..., Any]
) -> None:
    path = folder("stored", {**TINY, "quantization_config": stored}, tokenizer_config={})
    made = context(f"model: {{name_or_path: '{path}', tokenizer: bytes}}\nlora: {{}}\n", command="check")
    facts = read_facts(made.recipe.model, offline=True, origins=made.origins)
    found = [each for each in model.check(made, facts) if each.code in ("FT316", "FT327")]
    assert [(each.code, each.severity) for each in found] == [("FT316", "error")]
