"""Configs of every family with values that may not be: without weights, on every GPU, and with layers run for a step."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import folders, recipes, values
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run
from tests.small_models import FURTHER, MULTIMODAL, TEXT, config_of

_FAMILIES = st.sampled_from(sorted({*TEXT, *MULTIMODAL, *FURTHER}))
#: What the configs of families say beyond those of Llama, and others of them do not.
_SHARED = (
    "layer_types", "sliding_window", "sliding_window_pattern", "max_window_layers", "use_sliding_window", "no_rope_layers",
    "no_rope_layer_interval", "layer_rope_theta", "partial_rotary_factor", "rope_pct", "rope_parameters", "rope_scaling",
    "num_experts", "num_local_experts", "num_experts_per_tok", "mlp_only_layers", "attention_bias", "attn_logit_softcapping",
    "final_logit_softcapping", "logits_scaling", "residual_multiplier", "embedding_multiplier", "query_pre_attn_scalar",
    "tie_word_embeddings", "hidden_act", "hidden_activation", "num_key_value_heads", "head_dim", "model_type", "text_config",
    "use_qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn", "use_bias", "norm_epsilon", "rms_norm_eps",
    "layer_norm_eps", "max_position_embeddings", "attention_chunk_size", "mtp_num_layers", "num_nextn_predict_layers",
)  # fmt: skip
_odd = st.one_of(
    values.numbers,
    st.sampled_from([0, 1, 2, 3, 5, 7, 33, 0.5, True, False, None, "x", [], {}, [0, 1], ["full_attention"] * 2]),
    st.sampled_from([["sliding_attention"], ["x", "y"], {"rope_type": "yarn", "factor": 0}, "silu", "gelu_new", "relu2"]),
)  # fmt: skip


@cache
def _config(model_type: str) -> str:
    text: str = config_of(model_type).to_json_string(use_diff=False)
    return text


@st.composite
def _configs(draw: st.DrawFn) -> bytes:
    """A family's config.json with values changed, at the top or in its parts."""
    value: dict[str, Any] = json.loads(_config(draw(_FAMILIES)))
    for _ in range(draw(st.integers(0, 2))):
        own = [way for way in folders.paths_of(value) if len(way) <= 2 and way[0] != "vision_config"]
        value = folders.replaced(value, draw(st.sampled_from(own)), draw(_odd | st.just(...)))
    for key in draw(st.lists(st.sampled_from(_SHARED), max_size=1)):
        place = value["text_config"] if isinstance(value.get("text_config"), dict) and draw(st.booleans()) else value
        place[key] = draw(_odd)
    return json.dumps(value).encode()


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A folder for a model without weights, and recipes for it, once everything is imported."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for method, base in recipes.BASES.items():
            model = {"name_or_path": "./model", "dtype": "float32", "init": "random", "tokenizer": "bytes"}
            recipe = {**base, "model": model, "run": {"output_dir": "out"}}
            (root / f"{method}.yaml").write_bytes(recipes.written(recipe))
        _put(root, _config("qwen3_moe").encode())
        assert run(root, "check", "dpo.yaml", "--offline", "--json").status == 0
        assert run(root, "bench", "sft.yaml", "--steps", "1", "--offline", "--json").status == 0
        yield root


def _put(root: Path, config: bytes) -> None:
    shutil.rmtree(root / "model", ignore_errors=True)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_bytes(config)


_CHANGES = st.sampled_from(
    ["quantization.method=nf4", "quantization.method=fp8", "lora=null", "data.packing=true", "model.attention=sdpa",
     "model.kernels=reference", "train.gradient_checkpointing=on", "model.dtype=bfloat16", "launch.num_processes=2", "lora.r=4"]
)  # fmt: skip


@pytest.mark.long
@examples(10, 100)
@given(
    config=_configs(),
    method=st.sampled_from(list(recipes.BASES)),
    device=st.sampled_from(["h100", "cpu", "24GiB", "t4", "all"]),
    changes=st.lists(_CHANGES, max_size=2),
)
def test_families_are_looked_at_or_refused(
    root: Path, config: bytes, method: str, device: str, changes: list[str]
) -> None:
    _put(root, config)
    words = [word for change in changes for word in ("--set", change)]
    hold(run(root, "check", f"{method}.yaml", "--as", device, *words, "--offline", "--json"))


@pytest.mark.long
@examples(2, 20)
@given(
    config=_configs(),
    method=st.sampled_from(["sft", "dpo", "kto", "reward", "grpo"]),
    changes=st.lists(_CHANGES, max_size=1),
)
def test_families_are_trained_or_refused(root: Path, config: bytes, method: str, changes: list[str]) -> None:
    _put(root, config)
    words = [word for change in changes if "processes" not in change for word in ("--set", change)]
    command = "grpo" if method == "grpo" else "train"
    outcome = run(
        root, command, f"{method}.yaml", "--resume", "never", "--max-steps", "1", *words, "--offline", "--json"
    )
    hold(outcome, looks_only=False)
