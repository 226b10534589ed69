"""What vLLM and llama.cpp make of an adapter, by their rules: said of every export, and warned of where they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import FtcliError
from ftcli.export.adapter import judged
from ftcli.export.writing import export_run
from ftcli.tables.exports import ADAPTER_SERVERS
from tests.small_models import build
from tests.unit.export.conftest import Heard, Trained
from tests.unit.export.gguf_runs import adapt

KINDS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "plain": ({}, "", "", ""),
    "rslora": ({"use_rslora": True}, "", "alpha / rank", "alpha / rank"),
    "dora": ({"use_dora": True}, "DoRA", "DoRA", "DoRA"),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, *["trained whole (lm_head)"] * 3),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, *["lora_embedding"] * 3),
    "rank pattern": ({"rank_pattern": {"q_proj": 2}}, "one scale", "alpha / rank", ""),
    "alpha pattern": ({"alpha_pattern": {"q_proj": 2}}, "one scale", "alpha / rank", "alpha / rank"),
    "an expression": ({"target_modules": r".*\.q_proj"}, "", "target_modules is an expression", ""),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_other_programs_make_of_an_adapter(kind: str, trained: Callable[..., Trained]) -> None:
    options, of_vllm, of_sglang, of_llama_cpp = KINDS[kind]
    heard = Heard()
    (result,) = export_run(trained(**options).run, ["adapter"], reporter=heard, offline=True)
    told = result.verification.facts
    for name, reason in (("vLLM", of_vllm), ("SGLang", of_sglang), ("llama.cpp", of_llama_cpp)):
        warned = [f for f in heard.findings if f.message.startswith(f"{name} does not take")]
        assert [f.code for f in warned] == (["FT757"] if reason else [])
        assert reason in str(told[name])
        assert str(told[name]).startswith("does not take it" if reason else "takes it")
        assert str(told[name]).endswith("(by names and config; not run)")


@pytest.mark.parametrize(
    ("rank", "said"), [(16, "takes it (by"), (20, "--max-lora-rank 32"), (320, "320"), (600, "512")]
)
def test_the_rank_that_vllm_must_be_told(rank: int, said: str) -> None:
    names = ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    vllm, sglang, llama_cpp = (judged(server, {"r": rank, "rank_pattern": {}}, names) for server in ADAPTER_SERVERS)
    assert said in vllm[0]
    assert bool(vllm[1]) == (rank == 600)
    assert not sglang[1]
    assert not llama_cpp[1]


def exported(made: Trained, heard: Heard) -> dict[str, Any]:
    """The record of the adapter of a run."""
    (result,) = export_run(made.run, ["adapter"], reporter=heard, offline=True)
    return dict(result.verification.facts)


def test_modules_are_counted_in_the_class_that_servers_load(trained: Callable[..., Trained]) -> None:
    made, heard = trained(), Heard()
    assert exported(made, heard)["modules"] == "14 of 14 are those of Gemma2ForCausalLM"
    assert [finding.code for finding in heard.findings] == ["FT770"]


def test_a_class_that_transformers_lacks_is_told(trained: Callable[..., Trained]) -> None:
    made = trained()
    name_class(made, "NoSuchForCausalLM")
    assert exported(made, Heard())["modules"] == "14, not compared with a server's class"


def test_an_adapter_of_which_no_module_is_the_served_class_s_is_refused(tmp_path: Path) -> None:
    made = adapt(tmp_path, build("qwen3_5"))
    name_class(made, "Qwen3_5ForCausalLM")
    with pytest.raises(FtcliError, match="0 of 16 are those of Qwen3_5ForCausalLM, which servers load") as refused:
        exported(made, Heard())
    assert refused.value.findings[0].code == "FT742"


def test_modules_of_towers_are_told(tmp_path: Path) -> None:
    heard = Heard()
    told = exported(adapt(tmp_path, build("qwen3_vl"), target_modules=["q_proj", "qkv"]), heard)
    assert told["modules"].endswith("are those of Qwen3VLForConditionalGeneration")
    for server in ADAPTER_SERVERS:
        assert "modules (model.visual.blocks.0.attn.qkv) belong to others" in told[server.name]
    assert [finding.code for finding in heard.findings] == ["FT770", *["FT757"] * 3]


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")
def test_stacks_of_experts_are_told(tmp_path: Path) -> None:
    told = exported(adapt(tmp_path, build("qwen3_moe")), Heard())
    assert told["modules"] == "10 of 10 are those of Qwen3MoeForCausalLM"
    for server in ADAPTER_SERVERS:
        assert "experts are adapted as stacks" in told[server.name]


def name_class(made: Trained, name: str) -> None:
    """The base's config.json names another class."""
    path = made.base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
