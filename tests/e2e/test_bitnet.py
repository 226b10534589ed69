"""BitNet through the commands: training from scratch, conversion, resuming, and every length that failed elsewhere."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ftcli.assets import asset
from ftcli.config.evaluation import GenerateConfig
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.evaluate.generate import complete
from ftcli.generation.requests import StopCheck, StopConditions
from ftcli.model import bitnet
from ftcli.model.bitnet import round_in_norms
from ftcli.model.load_quantized import ModelStorage, load_quantized, random_quantized
from ftcli.model.pretrained import read_config
from ftcli.model.tokenizer import load_tokenizer
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from tests.e2e.conftest import User

SCRATCH: dict[str, Any] = {
    "model": {"name_or_path": "bundled:tiny-bitnet", "init": "random", "tokenizer": "bytes"},
    "quantization": {"method": "bitnet"},
}


def without_lora(path: str, **more: Any) -> str:
    values = yaml.safe_load(Path(path).read_text())
    del values["lora"]
    values.update(more)
    Path(path).write_text(yaml.safe_dump(values))
    return path


def one_layer(folder: Path, hidden: int) -> Path:
    """A config.json of BitNet's family with one small layer."""
    model = folder / f"hidden-{hidden}"
    model.mkdir()
    values: dict[str, Any] = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 264,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 4,
        "pad_token_id": 0,
    }
    (model / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize(
    "length", [512, *(pytest.param(length, marks=pytest.mark.long) for length in (2, 511, 513, 1024))]
)
def test_five_failures_of_lengths_train_20_steps_with_hidden_size_512_and_answer(user: User, length: int) -> None:
    """1024, 513 and 511 against a hidden size of 512 broke a norm elsewhere.

    The shortest length is 2: one token is seen, and one learnt. That 512 tokens are generated where 512 gave nothing is
    the next test but one.
    """
    rows = user.folder / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a river " * 300}) + "\n")
    recipe = without_lora(
        user.recipe(
            "run",
            model={**SCRATCH["model"], "name_or_path": str(one_layer(user.folder, 512))},
            quantization={"method": "bitnet"},
            data={"train": [str(rows)], "eval": [str(rows)], "max_seq_len": length, "overlong": "truncate"},
            train={"max_steps": 20, "per_device_train_batch_size": 1},
            eval={"samples": 0},  # it answers below
        )
    )
    result = user.done("train", recipe)
    assert result["tokens"] == 20 * length
    assert result["eval"]["tokens"] == length - 1
    losses = user.losses("run")
    assert losses[-1] < 0.8 * losses[0]
    said = ("--prompt", "a river " * 300, "--max-new-tokens", "32")
    answer = user.done("chat", str(user.folder / "run"), *said, "--set", "eval.generate.overflow=sliding")
    assert answer["prompt_tokens"] > 2 * 1024
    assert (answer["completion_tokens"], answer["stop"]) == (32, "max_new_tokens")
    status, document = user.run("chat", str(user.folder / "run"), *said)
    assert (status, document["findings"][-1]["code"]) == (4, "FT431")


def test_five_failures_a_length_of_1_has_nothing_to_learn_and_the_model_runs_on_it_all_the_same(
    user: User, tmp_path: Path
) -> None:
    status, document = user.run("check", user.recipe("run", **SCRATCH, data={"max_seq_len": 1}))
    assert (status, document["findings"][0]["code"]) == (2, "FT206")
    holding = ModelStorage(QuantizationConfig(method="bitnet"), torch.float32, torch.device("cpu"), trained=True)
    config = read_config(str(one_layer(tmp_path, 512)), revision=None, offline=True)
    model = random_quantized(config, holding, "sdpa", 0)
    round_in_norms(model, kernels=True)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    ids, losses = torch.arange(8, 40)[:, None], []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, 0], ids[:, 0] + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.long
def test_five_failures_of_generation_512_tokens_come_from_a_full_window(tmp_path: Path) -> None:
    """Elsewhere the token that was to be kept was overwritten, and 64 tokens that were asked for gave none."""
    settings, cpu = QuantizationConfig(method="bitnet"), torch.device("cpu")
    holding = ModelStorage(settings, torch.float32, cpu, trained=True)
    config = read_config(str(one_layer(tmp_path, 512)), revision=None, offline=True)
    fresh = random_quantized(config, holding, "sdpa", 0)
    round_in_norms(fresh, kernels=True)
    fresh.save_pretrained(tmp_path / "saved")
    saved_config = read_config(str(tmp_path / "saved"), revision=None, offline=True)
    saved = load_quantized(str(tmp_path / "saved"), saved_config, holding, "sdpa", revision=None, offline=True)
    text = list(range(8, 200)) * 3
    for model in (fresh, saved):
        model.requires_grad_(False)  # as `ftcli chat` and `eval` have it: masters are rounded once
    full = [text[:512], text[:511], [7]]
    options: dict[str, Any] = {
        "pad": 0,
        "batch_size": 3,
        "plan": DtypePlan("float32", None, "float32", False, "a test"),
        "device": cpu,
        "reporter": SilentReporter(),
        "stopping": StopCheck(StopConditions(frozenset()), None),
        "max_length": 512,
    }
    found = complete(fresh, full, GenerateConfig(max_new_tokens=512, overflow="sliding"), **options)
    assert [len(tokens) for tokens in found] == [512, 512, 512]
    (again,) = complete(saved, full[:1], GenerateConfig(max_new_tokens=32, overflow="sliding"), **options)
    assert again == found[0][:32]
    (ended,) = complete(fresh, full[1:2], GenerateConfig(max_new_tokens=512), **options)
    assert ended == found[1][:1]  # the window was full then


def unigram_loss(train: tuple[str, int], held_out: tuple[str, int], length: int) -> float:
    """Nats a token of held-out rows by the frequencies of tokens in the rows that are trained on."""
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-bitnet", tokenizer="bytes"), offline=True)

    def tokens(name: str, rows: int) -> Iterator[int]:
        path = next(asset("data").glob(f"{name}.jsonl*"))
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for line in text.splitlines()[:rows]:
            yield from tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=False)[1:length]

    counts = Counter(tokens(*train))
    total, size = counts.total(), 264
    found = [-math.log((counts[token] + 1) / (total + size)) for token in tokens(*held_out)]
    return sum(found) / len(found)


def test_a_model_from_scratch_beats_the_frequencies_of_bytes_and_goes_on_bit_for_bit(user: User) -> None:
    recipe = without_lora(
        user.recipe(
            "run",
            **SCRATCH,
            data={
                "train": [{"path": "bundled:tiny-pretrain", "max_rows": 400}],
                "eval": [{"path": "bundled:tiny-pretrain-eval", "max_rows": 30}],
                "max_seq_len": 64,
                "overlong": "truncate",
                "loss_on": "all",
            },
            train={"max_steps": 40, "per_device_train_batch_size": 6, "learning_rate": 5e-3, "warmup_steps": 5},
            checkpoint={"every_steps": 38},
        )
    )
    result = user.done("train", recipe)
    assert result["eval"]["loss"] < unigram_loss(("tiny-pretrain", 400), ("tiny-pretrain-eval", 30), 64) - 0.2
    user.goes_on_alike("run", recipe)
    assert Counter(layer["method"] for layer in manifest(user, "run")["quantization"]) == {"bitnet": 21}
    declared = json.loads((user.folder / "run" / "model" / "config.json").read_text())["quantization_config"]
    assert (declared["quant_method"], declared["quantization_mode"]) == ("bitnet", "online")


@pytest.mark.long
def test_a_converted_model_warms_up_resumes_and_is_evaluated_as_it_was_saved(stored: User) -> None:
    recipe = without_lora(
        stored.recipe(
            "run",
            quantization={"method": "bitnet", "lambda_warmup_steps": 4, "use_rms_norm": True},
            data={"train": [{"path": "bundled:smoke-train", "max_rows": 16}]},
            train={"max_steps": 3, "learning_rate": 1e-4},
            checkpoint={"every_steps": 2},
        )
    )
    trained = stored.done("train", recipe)["eval"]
    stored.goes_on_alike("run", recipe)  # the third step's share follows from its number
    again = stored.done("eval", recipe, "--run", str(stored.folder / "run"))["run"]
    assert again["loss"] == pytest.approx(trained["loss"], abs=1e-6)
    packed, copied = stored.done("export", str(stored.folder / "run"), "--set", "export.formats=[bitnet, safetensors]")[
        "exports"
    ]
    assert packed["verification"]["packed"] == 2 * 7
    assert packed["verification"]["top1_agreement"] >= 0.95
    assert packed["bytes"] < copied["bytes"] / 3
    rounded = ("--set", "export.formats=[gguf]", "--set", "export.gguf.types=[tq2_0]")
    status, document = stored.run("export", str(stored.folder / "run"), *rounded)
    assert (status, document["findings"][-1]["code"]) == (3, "FT756")  # llama.cpp has no such norms
    checked = stored.run("check", recipe, *rounded)[1]
    assert "FT756" in [finding["code"] for finding in checked["findings"]]


def test_masters_are_rounded_once_a_step_whatever_is_accumulated(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = bitnet.round_weight

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return plain(*args, **options)

    monkeypatch.setattr(bitnet, "round_weight", counted)
    small = {**SCRATCH["model"], "name_or_path": str(one_layer(user.folder, 32))}
    train = {"max_steps": 3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
    recipe = without_lora(user.recipe("run", **{**SCRATCH, "model": small}, data={"eval": []}, train=train))
    user.done("train", recipe)
    assert 3 * 7 <= len(made) <= 5 * 7  # and for the checks before


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "muon"])
def test_what_is_trained_is_what_is_saved_under_every_optimizer(user: User, optim: str) -> None:
    """Some write to the masters without torch's knowledge: the rounded weights of before would be trained on."""
    data = {"eval": [{"path": "bundled:smoke-eval", "max_rows": 2}]}
    change = {**SCRATCH, "data": data, "checkpoint": {"every_steps": None}}
    found = {}
    runs = {"run": optim} if optim == "muon" else {"plain": "adamw_torch", "run": optim}
    for name, wanted in runs.items():
        recipe = without_lora(
            user.recipe(name, **change, train={"max_steps": 3, "learning_rate": 1e-2, "optim": wanted})
        )
        found[name] = user.done("train", recipe)["eval"]["loss"]
    again = user.done("eval", recipe, "--run", str(user.folder / "run"))["run"]
    assert again["loss"] == pytest.approx(found["run"], abs=1e-5)
    if "plain" in runs:  # fused or not, AdamW takes the same steps
        assert user.losses("run") == pytest.approx(user.losses("plain"), abs=1e-3)


def test_a_packed_export_is_trained_on_from_the_same_ternary_values(user: User) -> None:
    small = {**SCRATCH["model"], "name_or_path": str(one_layer(user.folder, 32))}
    recipe = without_lora(user.recipe("run", **{**SCRATCH, "model": small}, data={"eval": []}, train={"max_steps": 1}))
    user.done("train", recipe)
    (done,) = user.done("export", str(user.folder / "run"), "--set", "export.formats=[bitnet]")["exports"]
    assert done["verification"]["relative_error"] < 1e-5
    assert done["verification"]["top1_agreement"] == 1.0
    packed = user.folder / "run" / "export" / "bitnet"
    again = without_lora(
        user.recipe(
            "again",
            model={"name_or_path": str(packed), "tokenizer": "bytes"},
            quantization={"method": "bitnet"},
            data={"eval": []},
            train={"max_steps": 1, "learning_rate": 1e-12},
        )
    )
    user.done("train", again)
    user.done("export", str(user.folder / "again"), "--set", "export.formats=[bitnet]")
    name = "model.safetensors"
    one, two = load_file(packed / name), load_file(user.folder / "again" / "export" / "bitnet" / name)
    ternary = [key for key, tensor in one.items() if tensor.dtype == torch.uint8]
    assert len(ternary) == 7
    assert all(torch.equal(one[key], two[key]) for key in ternary)


@pytest.mark.long  # tests/unit/export/test_gguf_ternary.py holds the values
def test_a_gguf_file_is_trained_on_from_its_ternary_values(user: User) -> None:
    pytest.importorskip("gguf")
    small = {**SCRATCH["model"], "name_or_path": str(one_layer(user.folder, 256))}
    recipe = without_lora(user.recipe("run", **{**SCRATCH, "model": small}, data={"eval": []}, train={"max_steps": 1}))
    user.done("train", recipe)
    user.done("export", str(user.folder / "run"), "--set", "export.formats=[bitnet, gguf]",
              "--set", "export.gguf.types=[tq2_0]")  # fmt: skip
    (file,) = (user.folder / "run" / "export" / "gguf").glob("*.gguf")
    published = user.folder / "published"
    published.mkdir()
    (published / file.name).write_bytes(file.read_bytes())
    (published / "config.json").write_bytes((Path(small["name_or_path"]) / "config.json").read_bytes())
    values: dict[str, Any] = {
        "model": {"name_or_path": str(published), "tokenizer": "bytes"},
        "quantization": {"method": "bitnet"},
        "data": {"eval": []},
        "train": {"max_steps": 1, "learning_rate": 1e-12},
    }
    again = without_lora(user.recipe("again", **values))
    user.done("train", again)
    user.done("export", str(user.folder / "again"), "--set", "export.formats=[bitnet]")
    name = "export/bitnet/model.safetensors"
    one, two = (load_file(user.folder / run / name) for run in ("run", "again"))
    ternary = [key for key, tensor in one.items() if tensor.dtype == torch.uint8]
    assert len(ternary) == 7
    assert all(torch.equal(one[key], two[key]) for key in ternary)
    plain = without_lora(user.recipe("plain", **{**values, "quantization": {"method": "none"}}))
    status, document = user.run("check", plain)
    assert (status, document["findings"][0]["code"]) == (3, "FT317")
    (published / file.name).write_bytes(file.read_bytes()[:-9000])
    status, document = user.run("train", again, "--set", f"run.output_dir={user.folder / 'cut'}")
    assert (status, document["findings"][-1]["code"]) == (3, "FT323")


def test_adapters_on_frozen_ternary_weights_are_trained_and_not_merged(stored: User) -> None:
    recipe = stored.recipe("run", quantization={"method": "bitnet"}, train={"max_steps": 2}, lora={"r": 2})
    stored.done("train", recipe)
    assert {layer["method"] for layer in manifest(stored, "run")["quantization"]} == {"bitnet"}
    status, document = stored.run("export", str(stored.folder / "run"), "--set", "export.formats=[safetensors]")
    assert (status, document["findings"][-1]["code"]) == (3, "FT339")
    stored.done("export", str(stored.folder / "run"), "--set", "export.formats=[adapter]")


def manifest(user: User, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((user.folder / name / "manifest.json").read_text())
    return found
