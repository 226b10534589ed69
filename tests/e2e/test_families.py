"""A small random model of each family through train, eval and export, as its owner would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.export.writing import export_run
from ftcli.reporting import SilentReporter
from ftcli.run.directory import RunDirectory
from ftcli.tables.gguf import architecture_of
from tests.e2e.conftest import User
from tests.small_models import GEMMA4_MIXTURE, MULTIMODAL, TEXT, build, config_of
from tests.tiers import further, telling
from tests.unit.export.conftest import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's remarks on some families

#: For a test that asks nothing about memory, which takes longer than all else it does: layers of a family without a
#: description run without memory, in each command's preflight. tests/unit/model/test_models_page.py has each family so,
#: with adapters and in full.
unmeasured = pytest.mark.usefixtures("_unmeasured")


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.model.measure._activations_or_reason", lambda question: (None, "not measured here"))


def folder_of(model_type: str, path: Path, **change: Any) -> Path:
    build(model_type, **change).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def recipe(user: User, base: Path, **change: Any) -> str:
    values: dict[str, Any] = {
        "model": {"name_or_path": str(base), "dtype": "float32"},
        "data": {"eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]},
        "train": {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2},
        "export": {"formats": ["safetensors"]},
    }
    values |= change
    values["train"] = {"gradient_checkpointing": False, **values["train"]}  # what fits, which is not always measured
    return user.recipe(**values)


@unmeasured
@pytest.mark.parametrize("model_type", ["gpt2", "gemma3"])
def test_trained_sampled_and_merged(model_type: str, user: User, tmp_path: Path) -> None:
    """Issue 11, B2 and B4: sampling after training failed, and export refused what training had made.

    Every family, in all formats, has `make test-families`.
    """
    through_train_eval_and_export(model_type, user, tmp_path)


@unmeasured
@pytest.mark.parametrize("method", ["nf4", *further("fp8")])
@pytest.mark.parametrize("model_type", ["gemma3", *further("qwen3_moe", "glm4_moe_lite")])
def test_on_a_quantized_base(model_type: str, method: str, user: User, tmp_path: Path) -> None:
    through_train_eval_and_export(model_type, user, tmp_path, quantization={"method": method})
    manifest = json.loads((user.folder / "r" / "manifest.json").read_text())
    layers = [entry["layer"] for entry in manifest["quantization"]]
    assert layers
    assert not [name for name in layers if "vision" in name or "multi_modal" in name]


@unmeasured
@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("phi3", "nf4"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("qwen3_5", "none"),
                ("phi3", "none"),
                ("phi3", "fp8"),
                ("glm4", "nf4"),
                ("qwen3_5", "nf4"),
                ("qwen3_5", "fp8"),
                ("gemma4_unified", "nf4"),
                ("gemma4", "none"),
                ("gemma4", "nf4"),
            )
        ),
    ],
)
def test_joined_projections_on_the_kernels_train_as_off_them(
    model_type: str, method: str, user: User, tmp_path: Path
) -> None:
    """q, k and v, or gate and up, or queries and their gates, are one linear with one adapter; losses of every step,
    and what was trained.
    """
    base = {"name_or_path": str(folder_of(model_type, tmp_path / "base")), "dtype": "float32"}
    runs = {}
    for kernels in ("off", "reference"):
        change = {"model": {**base, "kernels": kernels}, "quantization": {"method": method}}
        change["run"] = {"output_dir": str(user.folder / kernels)}
        path = recipe(user, tmp_path / "base", **change)
        user.done("train", path)
        runs[kernels] = user.folder / kernels
    table = json.loads((runs["reference"] / "manifest.json").read_text())["kernels"]
    layers = config_of(model_type).get_text_config().num_hidden_layers
    assert [entry["layer"] for entry in table if entry["on"]] == [*(f"layers.{at}" for at in range(layers)), "norm"]
    assert user.losses("reference") == pytest.approx(user.losses("off"), rel=1e-5)
    found, wanted = (load_file(run / "adapter" / "adapter_model.safetensors") for run in runs.values())
    assert found.keys() == wanted.keys()
    assert all(float((found[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) for name, tensor in wanted.items())
    assert user.run("eval", path, "--run", str(runs["reference"]))[0] == 0
    (export,) = user.done("export", str(runs["reference"]))["exports"]
    assert export["verification"]["relative_error"] < 1e-5


def through_train_eval_and_export(
    model_type: str, user: User, tmp_path: Path, built: Mapping[str, Any] = MappingProxyType({}), **change: Any
) -> None:
    base = folder_of(model_type, tmp_path / "base", **built)
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    path = recipe(user, base, **change)
    planned = user.done("check", path)["adapters"]
    assert user.run("train", path)[0] == 0
    adapter = load_file(user.folder / "r" / "adapter" / "adapter_model.safetensors")
    assert planned["parameters"] == sum(tensor.numel() for tensor in adapter.values())
    assert user.run("eval", path, "--run", str(user.folder / "r"))[0] == 0
    status, document = user.run("export", str(user.folder / "r"))
    assert status == 0, [each["message"] for each in document["findings"]]
    merged = user.folder / "r" / "export" / "safetensors"
    assert (merged / "preprocessor_config.json").read_text() == '{"do_resize": true}'
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert set(after) == set(before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    frozen = ("vision", "visual", "multi_modal", "embed", "norm", "router", ".gate.weight", "conv.conv", "conv1d")
    assert not any(part in name for name in changed for part in frozen)


@unmeasured
@pytest.mark.parametrize("method", [*further("none", "nf4")])
def test_a_mixture_beside_the_mlp(method: str, user: User, tmp_path: Path) -> None:
    """Gemma-4-26B's layers: experts and the MLP read the same, and both have adapters."""
    model = {"name_or_path": str(tmp_path / "base"), "dtype": "float32", "kernels": "reference"}
    quantization = {"method": method}
    through_train_eval_and_export("gemma4_text", user, tmp_path, GEMMA4_MIXTURE, model=model, quantization=quantization)
    table = json.loads((user.folder / "r" / "manifest.json").read_text())["kernels"]
    assert all(entry["on"] for entry in table)


@unmeasured
@pytest.mark.parametrize("model_type", ["cohere", *further("qwen3_next", "mamba2", "olmoe", "gemma4")])
def test_a_merge_in_bfloat16_is_held_to_what_was_trained(model_type: str, user: User, tmp_path: Path) -> None:
    """Issue 11: these carry a rounding on more than others, and their exports failed."""
    base = tmp_path / "base"
    build(model_type).to(torch.bfloat16).save_pretrained(base)
    tokenizer().save_pretrained(base)
    path = recipe(user, base, model={"name_or_path": str(base), "dtype": "bfloat16"})
    assert user.run("train", path)[0] == 0
    (export,) = user.done("export", str(user.folder / "r"))["exports"]
    assert export["verification"]["relative_error"] < 1e-5 < export["verification"]["rounding"]


@pytest.mark.parametrize("method", ["nf4", *further("none")])
def test_qwens_flat_config_is_read(method: str, user: User, tmp_path: Path) -> None:
    """Issue 11, B4: as Qwen2-VL and Qwen2.5-VL are released, they were refused as no language models."""
    base = folder_of("qwen2_5_vl", tmp_path / "base")
    raw = json.loads((base / "config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **raw, "rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    (base / "config.json").write_text(json.dumps(flat))
    path = recipe(user, base, quantization={"method": method})
    assert user.done("check", path, "--as", "h100")["memory"] is not None
    user.done("train", path)
    user.done("export", str(user.folder / "r"))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (base, user.folder / "r" / "export" / "safetensors")
    )
    assert set(after) == set(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if "visual" in name)


@unmeasured
@pytest.mark.parametrize(
    ("lora", "formats"),
    telling({"adapters": (True, ["safetensors", "fp8"]), "all weights": (False, ["safetensors"])}, "adapters"),
)
def test_heads_that_transformers_passes_over_are_in_what_is_exported(
    lora: bool, formats: list[str], user: User, tmp_path: Path
) -> None:
    """Qwen3.5's for further tokens (`mtp.*`), without which vLLM does not load what config.json promises."""
    base = folder_of("qwen3_5", tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    heads = {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.randn(32).to(torch.bfloat16)}
    save_file({**stored, **heads}, base / "model.safetensors", metadata={"format": "pt"})
    path = recipe(user, base, export={"formats": formats})
    if not lora:
        Path(path).write_text(Path(path).read_text().replace("lora:\n  r: 4\n", ""))
    user.done("train", path)
    if not lora:  # the run has kept its own
        changed = {key: tensor + 1.0 for key, tensor in heads.items()}
        save_file({**stored, **changed}, base / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("auto", "bfloat16") if lora else ("bfloat16",):
        words = ["--set", f"export.dtype={dtype}", "--output", str(tmp_path / dtype)]
        user.done("export", path, *words)
        for name in formats:
            files = sorted((tmp_path / dtype / name).glob("*.safetensors"))
            found = {key: tensor for file in files for key, tensor in load_file(file).items()}
            assert all(torch.equal(found[key], tensor) for key, tensor in heads.items())
            assert set(stored) <= set(found)
            if len(files) > 1:
                index = json.loads((tmp_path / dtype / name / "model.safetensors.index.json").read_text())
                assert set(index["weight_map"]) == set(found)


@unmeasured
@pytest.mark.parametrize("method", ["nf4", *further("none", "full")])
def test_the_layer_for_further_tokens_goes_with_a_mixture(method: str, user: User, tmp_path: Path) -> None:
    """GLM-4.7-Flash's layer 47, whose experts are in files of their own as those of the others are."""
    base = folder_of("glm4_moe_lite", tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    inner = {key.partition(".layers.2.")[2]: tensor for key, tensor in stored.items() if ".layers.2." in key}
    assert any(".experts.3.up_proj" in key for key in inner)
    layer = {f"model.layers.47.{key}": torch.randn_like(tensor) for key, tensor in inner.items()}
    layer["model.layers.47.eh_proj.weight"] = torch.randn(32, 64).to(torch.bfloat16)
    save_file({**stored, **layer}, base / "model.safetensors", metadata={"format": "pt"})
    path = recipe(user, base, quantization={"method": "none" if method == "full" else method})
    if method == "full":
        Path(path).write_text(Path(path).read_text().replace("lora:\n  r: 4\n", ""))
    user.done("train", path)
    (export,) = user.done("export", str(user.folder / "r"))["exports"]
    assert export["verification"]["relative_error"] < 1e-4
    files = (user.folder / "r" / "export" / "safetensors").glob("*.safetensors")
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert found.keys() == {**stored, **layer}.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in layer.items())
    assert not all(torch.equal(found[key], tensor) for key, tensor in stored.items())


@unmeasured
@pytest.mark.long
@pytest.mark.parametrize("promised", [1, *further(0)])
def test_that_a_checkpoints_heads_for_further_tokens_are_gone_with_its_base_is_said(
    promised: int, user: User, tmp_path: Path
) -> None:
    """Checkpoints of a full fine-tune do not repeat them, and take them from the base when they are exported."""
    base = folder_of("qwen3_5", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = promised
    (base / "config.json").write_text(json.dumps(config))
    stored, heads = load_file(base / "model.safetensors"), {"mtp.fc.weight": torch.randn(32, 64)}
    save_file({**stored, **heads}, base / "model.safetensors", metadata={"format": "pt"})
    path = recipe(user, base, checkpoint={"every_steps": 1})
    Path(path).write_text(Path(path).read_text().replace("lora:\n  r: 4\n", ""))
    user.done("train", path)
    run = RunDirectory(user.folder / "r")
    assert {"mtp.fc.weight"} == set(load_file(run.model_dir / "model-further.safetensors"))
    assert not list((run.path / "checkpoints").glob("*/model-further.safetensors"))

    def exported(name: str) -> tuple[list[str], set[str]]:
        (result,) = export_run(
            run,
            ["safetensors"],
            reporter=SilentReporter(),
            offline=True,
            destination=tmp_path / name,
            checkpoint=run.path / "checkpoints" / "step-00000001",
        )
        found = {key for file in result.path.glob("*.safetensors") for key in load_file(file)}
        return [each.message for each in result.warnings if each.code == "FT757"], found

    said, found = exported("there")
    assert not said
    assert set(heads) <= found
    (base / "model.safetensors").unlink()
    said, found = exported("gone")
    assert not set(heads) & found
    assert len(said) == promised
    assert all("predict further tokens" in each and str(base) in each for each in said)


@unmeasured
@pytest.mark.parametrize("model_type", ["gemma3", *further("mixtral", "qwen3_moe")])
def test_a_full_fine_tune_keeps_its_config_and_what_is_frozen(model_type: str, user: User, tmp_path: Path) -> None:
    base = folder_of(model_type, tmp_path / "base")
    path = recipe(user, base)
    Path(path).write_text(Path(path).read_text().replace("lora:\n  r: 4\n", ""))
    assert user.run("train", path)[0] == 0
    assert user.run("export", str(user.folder / "r"))[0] == 0
    saved = user.folder / "r" / "export" / "safetensors"
    assert_same_config(base, saved)
    tensors, originals = load_file(saved / "model.safetensors"), load_file(base / "model.safetensors")
    for name in originals:
        if "vision" in name or "multi_modal" in name:
            assert torch.equal(tensors[name], originals[name]), name


@unmeasured
@pytest.mark.parametrize("model_type", ["llama", *further("qwen3_moe")])
def test_a_full_fine_tune_by_grpo_keeps_its_config(model_type: str, user: User, tmp_path: Path) -> None:
    """Issue 11: `use_cache: false` was saved, with which generation is slow wherever the model is loaded."""
    base = folder_of(model_type, tmp_path / "base")
    grpo = {"num_generations": 4, "max_prompt_length": 48, "max_completion_length": 4}
    path = recipe(
        user,
        base,
        data={"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 8}], "eval": []},
        train={"max_steps": 1, "per_device_train_batch_size": 4},
        grpo={**grpo, "rewards": [{"use": "regex", "pattern": "[0-9]"}]},
    )
    Path(path).write_text(Path(path).read_text().replace("lora:\n  r: 4\n", ""))
    user.done("grpo", path)
    assert_same_config(base, user.folder / "r" / "model")


def assert_same_config(base: Path, saved: Path) -> None:
    """All but the special tokens, which are the tokenizer's, and what transformers writes of itself."""
    ours = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "dtype"}

    def told(config: dict[str, Any]) -> dict[str, Any]:
        return {k: told(v) if isinstance(v, dict) else v for k, v in config.items() if k not in ours}

    before, after = (told(json.loads((folder / "config.json").read_text())) for folder in (base, saved))
    assert after == before


def test_a_base_that_asks_for_the_auxiliary_loss_is_told_and_sampled(user: User, tmp_path: Path) -> None:
    base = folder_of("mixtral", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    status, document = user.run("train", recipe(user, base))
    assert status == 0
    assert "FT318" in json.dumps(document["findings"])


@unmeasured
@pytest.mark.long
def test_the_auxiliary_loss_of_a_full_fine_tune_is_asked_for_by_config_or_recipe(user: User, tmp_path: Path) -> None:
    """The first losses of the same rows tell: config.json's factor, none, and the recipe's, with nothing to be told."""
    base, losses = folder_of("mixtral", tmp_path / "base"), []
    config = json.loads((base / "config.json").read_text()) | {"router_aux_loss_coef": 0.25}
    for asked, stated in ((False, None), (True, None), (True, 0.0), (False, 0.5)):
        (base / "config.json").write_text(json.dumps({**config, "output_router_logits": asked}))
        train = {"max_steps": 1, "router_aux_loss_coef": stated}
        path = recipe(user, base, lora=None, data={"eval": []}, train=train)
        status, document = user.run("train", path, "--resume", "never")
        assert status == 0
        assert "FT318" not in json.dumps(document["findings"])
        losses.append(user.losses("r")[0])
    none, of_config, refused, of_recipe = losses
    assert none == refused
    assert of_recipe - none == pytest.approx(2 * (of_config - none), rel=1e-4)
    assert of_config - none > 0.25  # of a choice of two experts the loss is 2 where tokens are spread evenly


def test_check_refuses_a_target_that_matches_nothing_in_any_family(user: User, tmp_path: Path) -> None:
    base = folder_of("opt", tmp_path / "base")
    status, document = user.run("check", recipe(user, base, lora={"target_modules": ["fc9"]}))
    assert status == 3
    assert document["findings"][-1]["code"] == "FT311"


@unmeasured
@pytest.mark.parametrize("model_type", ["qwen2", *further("qwen3_5", "llama")])
def test_the_byte_tokenizer_survives_an_export(model_type: str, user: User, tmp_path: Path) -> None:
    """Issue 11, B5: beside Qwen2's config.json transformers takes Qwen2's tokenizer class, which added a token."""
    build(model_type).save_pretrained(tmp_path / "base")
    model = {"name_or_path": str(tmp_path / "base"), "dtype": "float32", "tokenizer": "bytes"}
    path = user.recipe(model=model, data={"eval": []}, train={"max_steps": 1}, export={"formats": ["safetensors"]})
    assert user.run("train", path)[0] == 0
    status, document = user.run("export", str(user.folder / "r"))
    assert status == 0, [each["message"] for each in document["findings"]]


@pytest.mark.parametrize("model_type", ["mamba2", *further("qwen3_next", "gpt_oss")])
def test_packing_that_leaks_is_refused_for_training_and_for_evaluation(
    model_type: str, user: User, tmp_path: Path
) -> None:
    path = recipe(user, folder_of(model_type, tmp_path / "base"), data={"packing": True})
    for command in ("train", "eval"):
        status, document = user.run(command, path)
        assert status == 3
        assert document["findings"][-1]["code"] == "FT443"


#: Families of llama.cpp's whose small model is one that it computes otherwise (tests/unit/export/test_gguf.py).
COMPUTED_OTHERWISE = ("bitnet", "qwen3_moe", "cohere2", "exaone4")


def formats_of(model_type: str) -> list[str]:
    """All that a trained adapter of this family can be exported to."""
    config, model = config_of(model_type), build(model_type)
    text = config.get_text_config()
    formats = ["adapter", "safetensors"]
    stacks = any(parameter.dim() == 3 and ".experts." in name for name, parameter in model.named_parameters())
    formats += [] if stacks else ["fp8"]
    served = architecture_of(text.model_type, str(getattr(text, "hidden_act", ""))) is not None
    return formats + (["gguf", "ollama"] if served and model_type not in COMPUTED_OTHERWISE else [])


@unmeasured
@pytest.mark.families
@pytest.mark.parametrize("model_type", sorted({*TEXT, *MULTIMODAL}))
def test_every_family_in_every_format(model_type: str, user: User, tmp_path: Path) -> None:
    """Each is loaded again and compared with what was trained: `export` ends with 0 where all of that holds."""
    formats = formats_of(model_type)
    # Beside a config.json of Qwen2's, transformers takes the tokenizer of bytes for Qwen2's, and adds a token.
    model = {"name_or_path": str(tmp_path / "base"), "dtype": "float32", "tokenizer": "bytes"}
    export = {"formats": formats, "gguf": {"types": ["f32"]}}
    # After steps of two rows fp8's rounding moves mamba's logits by 0.56 of their size, where 0.5 is allowed.
    train = {"max_steps": 2, "learning_rate": 1e-2}
    through_train_eval_and_export(model_type, user, tmp_path, model=model, train=train, export=export)
    for name in formats:
        record = json.loads((user.folder / "r" / "export" / name / "ftcli_export.json").read_text())
        assert "verified" not in record["verification"], "which says that it was not"
