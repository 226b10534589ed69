"""Model folders that no model, or no tokenizer, can be made of; and adapters that are cut, missing or another's."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.assets import asset
from tests.fuzz import folders, recipes
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run

#: What a config.json may also say; some of it makes transformers load more than the model.
_EXTRA = (
    "_attn_implementation", "attn_implementation", "_attn_implementation_internal", "_experts_implementation", "quantization_config",
    "auto_map", "text_config", "vision_config", "rope_scaling", "rope_parameters", "torch_dtype", "dtype", "id2label", "num_labels",
    "architectures", "pruned_heads", "tie_word_embeddings", "layer_types", "base_model_tp_plan", "kernel_config", "use_kernels",
    "is_encoder_decoder", "head_dim", "hidden_act", "sub_configs", "generation_config", "transformers_version",
)  # fmt: skip
_OF_CONFIG = (
    ("_attn_implementation", st.sampled_from(["a/b", "flash_attention_2", "paged|sdpa", "a/b:c", "kernels-community/x"])),
    ("hidden_activation", st.sampled_from(["nothing", "gelu", 3, None, ["silu"], "xielu"])),
    ("dtype", st.sampled_from(["int8", "float8_e4m3fn", "nothing", 16, None, "complex64", "bool", "auto", {"a": "float32"}])),
    ("model_type", st.sampled_from(["llama", "gemma", "gemma3", "bert", "gpt2", "mamba", "x", "../x", 3, None, "mistral"])),
    ("rope_parameters", st.sampled_from([{"rope_type": kind} for kind in ("yarn", "dynamic", "llama3", "linear", "x", 3)])),
    ("rope_scaling", st.sampled_from([{"type": "linear", "factor": 0}, {"rope_type": "yarn", "factor": "x"}, "x", 3])),
    ("quantization_config", st.sampled_from([{"quant_method": "x"}, {"quant_method": "gptq", "bits": 3}, {"load_in_4bit": True}, {}])),
    ("eos_token_id", st.sampled_from([-1, 10**6, [], [4, -5], "x", 2**70, 1.5, [[4]]])),
    ("pad_token_id", st.sampled_from([-1, 263, 264, 10**6, "x", 2**70])),
    ("num_hidden_layers", st.sampled_from([0, 1, 3, 5, 10**5, 2**31, -1, 2.5])),
    ("vocab_size", st.sampled_from([0, 1, 263, 265, 2**31, -1, 2**70])),
    ("hidden_size", st.sampled_from([0, 1, 255, 257, 2**31, -1])),
    ("head_dim", st.sampled_from([0, 1, 63, 128, 2**31, -1])),
    ("num_attention_heads", st.sampled_from([0, 3, 5, 2**31, -4])),
    ("num_key_value_heads", st.sampled_from([0, 3, 8, 2**31, -2])),
)  # fmt: skip


@pytest.fixture(scope="module")
def root(shared_reload: None) -> Iterator[Path]:
    """A folder with a whole model, ``whole``, and a run of it, ``kept``, once everything is imported."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shutil.copytree(asset("models") / "tiny-gemma2", root / "whole")
        _recipe(root, "whole")
        assert run(root, "train", "r.yaml", "--offline", "--json").status == 0
        shutil.copytree(root / "out", root / "kept")
        yield root


def _recipe(root: Path, model: str) -> None:
    data = {**recipes.TRAINS["data"], "eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]}
    recipe = {**recipes.TRAINS, "model": {"name_or_path": f"./{model}", "dtype": "float32"}, "data": data}
    (root / "r.yaml").write_bytes(recipes.written({**recipe, "run": {"output_dir": "out"}}))


def _fresh(root: Path) -> Path:
    folder = root / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "whole", folder)
    _recipe(root, "model")
    return folder


@st.composite
def _configs(draw: st.DrawFn, content: str) -> bytes:
    """A config.json with values that cannot be."""
    value: dict[str, Any] = json.loads(content)
    for key, fitting in draw(st.lists(st.sampled_from(_OF_CONFIG), max_size=2)):
        value[key] = draw(fitting)
    return draw(folders.changed_json(json.dumps(value), _EXTRA)) if draw(st.booleans()) else json.dumps(value).encode()


_COMMANDS = st.sampled_from(
    [("check", "--show-sample", "1"), ("eval",), ("bench", "--steps", "1"), ("train", "--resume", "never")]
)


@examples(4, 30)
@given(data=st.data(), words=_COMMANDS, random=st.booleans())
def test_configs_that_cannot_be(root: Path, data: st.DataObject, words: tuple[str, ...], random: bool) -> None:
    folder = _fresh(root)
    (folder / "config.json").write_bytes(data.draw(_configs((folder / "config.json").read_text()), label="config"))
    more = ("--set", "model.init=random") if random else ()
    outcome = run(root, words[0], "r.yaml", *words[1:], *more, "--offline", "--json")
    hold(outcome, looks_only=words[0] == "check")


@examples(4, 30)
@given(data=st.data(), words=_COMMANDS)
def test_model_folders_with_damaged_files(root: Path, data: st.DataObject, words: tuple[str, ...]) -> None:
    folder = _fresh(root)
    hurt = data.draw(folders.damage(folder, folders.files_of(folder)), label="damage")
    folders.apply(folder, hurt)
    hold(run(root, words[0], "r.yaml", *words[1:], "--offline", "--json"), looks_only=words[0] == "check")


@examples(3, 30)
@given(data=st.data(), words=st.sampled_from([("eval", "r.yaml", "--run", "out"), ("export", "out")]))
def test_adapters_that_cannot_be(root: Path, data: st.DataObject, words: tuple[str, ...]) -> None:
    _recipe(root, "whole")
    shutil.rmtree(root / "out", ignore_errors=True)  # other properties train into it
    shutil.copytree(root / "kept", root / "out")
    folder = root / "out" / "adapter"
    names = folders.files_of(folder)
    if data.draw(st.booleans()):
        text = (folder / "adapter_config.json").read_text()
        hurt: dict[str, bytes | None] = {"adapter_config.json": data.draw(folders.changed_json(text), label="config")}
    else:
        hurt = data.draw(folders.damage(folder, names), label="damage")
    folders.apply(folder, hurt)
    hold(run(root, *words, "--offline", "--json"), looks_only=False)
