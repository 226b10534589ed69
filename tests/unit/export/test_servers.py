"""What vLLM and llama.cpp make of an adapter, by their rules: said of every export, and warned of where they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.export.adapter import judged
from ftcli.export.writing import export_run
from ftcli.tables.exports import ADAPTER_SERVERS
from tests.unit.export.conftest import Heard, Trained

KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": ({}, "", ""),
    "rslora": ({"use_rslora": True}, "", "alpha / rank"),
    "dora": ({"use_dora": True}, "DoRA", "DoRA"),
    "head trained whole": ({"modules_to_save": ["lm_head"]}, "trained whole (lm_head)", "trained whole (lm_head)"),
    "embeddings": ({"target_modules": ["embed_tokens", "q_proj"]}, "lora_embedding", "lora_embedding"),
    "rank pattern": ({"rank_pattern": {"q_proj": 2}}, "one scale", ""),
    "alpha pattern": ({"alpha_pattern": {"q_proj": 2}}, "one scale", "alpha / rank"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_other_programs_make_of_an_adapter(kind: str, trained: Callable[..., Trained]) -> None:
    options, of_vllm, of_llama_cpp = KINDS[kind]
    heard = Heard()
    (result,) = export_run(trained(**options).run, ["adapter"], reporter=heard, offline=True)
    told = result.verification.facts
    for name, reason in (("vLLM", of_vllm), ("llama.cpp", of_llama_cpp)):
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
    vllm, llama_cpp = (judged(server, {"r": rank, "rank_pattern": {}}, names) for server in ADAPTER_SERVERS)
    assert said in vllm[0]
    assert bool(vllm[1]) == (rank == 600)
    assert not llama_cpp[1]
