"""What `ftcli check` says of families without arithmetic, and that what it says of export comes true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.config.model import LoraConfig
from ftcli.model.lora_targets import planned_adapters
from tests.e2e.conftest import User
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def recipe(model_type: str, user: User, **change: Any) -> str:
    folder = user.folder / "base"
    build(model_type).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return user.recipe(model={"name_or_path": str(folder), "dtype": "auto"}, **change)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("mamba2", "eager"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("bloom", "eager"), ("gpt2", "sdpa"), ("qwen3_next", "sdpa"))
        ),
    ],
)
def test_the_attention_is_one_that_the_family_has(model_type: str, attention: str, user: User) -> None:
    """Issue 11, B6: `check` said sdpa of families that have none."""
    result = user.done("check", recipe(model_type, user), "--as", "h100")
    assert result["attention"] == attention
    assert {row["part"]: row["runs"] for row in result["kernel_table"]}["attention"] == attention


def test_an_attention_that_the_family_does_not_have_is_refused(user: User) -> None:
    status, document = user.run("check", recipe("mamba2", user), "--as", "h100", "--set", "model.attention=sdpa")
    assert (status, document["findings"][-1]["code"]) == (3, "FT337")


@pytest.mark.parametrize("lora", [True, *further(False)])
def test_without_a_description_the_model_is_measured(lora: bool, user: User) -> None:
    path = recipe("gpt_neox", user)
    words = [] if lora else ["--set", "lora=null"]
    result = user.done("check", path, "--as", "h100", *words)
    parts = result["memory"]["parts"]
    model = build("gpt_neox")
    language = sum(p.numel() for p in [*model.get_decoder().parameters(), *model.lm_head.parameters()])
    total = sum(p.numel() for p in model.parameters())
    trained = planned_adapters(model, LoraConfig(r=4)).parameters if lora else language
    assert trained is not None
    assert parts["weights"] == total * (2 if lora else 4)
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    assert parts["activations"] > 0
    assert result["disk"]["checkpoint_bytes"] > 12 * trained
    layers = {row["part"]: row for row in result["kernel_table"]}
    assert "about 1.5 times as long" in layers["layers"]["reason"]
    assert layers["generation"]["runs"] == "transformers"
    assert "memory" not in [item["check"] for item in result["not_made"]]
    user.capture.readouterr()
    assert main(["check", path, "--as", "h100", "--offline", "--quiet", *words]) == 0
    assert user.capture.readouterr().out.startswith("fits on h100")


@pytest.mark.long
def test_what_does_not_fit_is_refused_without_a_description(user: User, tmp_path: Path) -> None:
    from tests.small_models import config_of

    config = config_of("mixtral")
    config.update({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_local_experts": 8})
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path / "large")
    path = user.recipe(
        model={"name_or_path": str(tmp_path / "large"), "init": "random", "dtype": "auto", "tokenizer": "bytes"}
    )
    status, document = user.run("check", path, "--as", "h100")
    assert (status, document["findings"][-1]["code"]) == (3, "FT601")
    assert "weights 87." in document["findings"][-1]["message"]  # 47 billion parameters in bfloat16
    assert user.run("check", path, "--as", "b200")[0] == 0


@pytest.mark.parametrize(
    ("model_type", "certain"),
    [
        ("gpt2", False),
        pytest.param("lfm2", True, marks=pytest.mark.long),
        pytest.param("qwen3_next", True, marks=pytest.mark.long),
    ],
)
def test_what_cannot_keep_documents_apart_is_refused_where_they_share_a_row(
    model_type: str, certain: bool, user: User
) -> None:
    path = recipe(model_type, user)
    assert user.done("check", path, "--as", "h100")
    for shared in ("packing", "padding_free"):
        status, document = user.run("check", path, "--as", "h100", "--set", f"data.{shared}=true")
        if certain:
            assert (status, document["findings"][-1]["code"]) == (3, "FT443")
        else:
            assert status == 0
            assert "documents that share a row" in [item["check"] for item in document["result"]["not_made"]]


PACKED = ("--set", "data.packing=true")


def test_delta_nets_share_rows_on_the_kernels(user: User) -> None:
    path = recipe("qwen3_5", user, data={"max_seq_len": 64})
    result = user.done("check", path, "--as", "h100", *PACKED)
    table = {row["part"]: row["runs"] for row in result["kernel_table"]}
    assert "torch" in table["gated delta nets (3 layers)"]  # heads of 8 are none of the kernels'
    assert table["batches"] == "padded"  # neither are they attention's
    assert result["memory"]["parts"]["activations"] > 0


@pytest.mark.long
def test_delta_nets_share_no_rows_off_the_kernels(user: User) -> None:
    """Their memory is computed on the kernels, and measured off them."""
    path, parts = recipe("qwen3_5", user, data={"max_seq_len": 64}), {}
    for kernels in ("auto", "off"):
        found = user.done("check", path, "--as", "h100", "--set", f"model.kernels={kernels}")
        parts[kernels] = found["memory"]["parts"]
    assert parts["auto"]["weights"] == parts["off"]["weights"]
    assert 0 < parts["auto"]["activations"] < parts["off"]["activations"]
    status, document = user.run("check", path, "--as", "h100", *PACKED, "--set", "model.kernels=off")
    assert (status, document["findings"][-1]["code"]) == (3, "FT443")


@pytest.mark.long
@pytest.mark.parametrize(("method", "proposed"), [("nf4", False), ("none", True)])
def test_a_quantization_is_proposed_only_where_it_would_fit(method: str, proposed: bool, user: User) -> None:
    from tests.small_models import config_of

    config = config_of("nemotron")
    config.update({"hidden_size": 8192, "intermediate_size": 65536, "num_hidden_layers": 4})
    config.save_pretrained(user.folder / "wide")
    model = {"name_or_path": str(user.folder / "wide"), "init": "random", "dtype": "auto", "tokenizer": "bytes"}
    path = user.recipe(model=model, quantization={"method": method})
    status, document = user.run("check", path, "--as", "8GiB" if method == "none" else "2GiB")
    assert (status, document["findings"][-1]["code"]) == (3, "FT601")
    assert ("quantization.method=nf4" in document["findings"][-1]["help"]) == proposed


@pytest.mark.parametrize("model_type", ["gpt2", *further("mamba")])
def test_a_quantized_base_without_linear_layers_is_refused_before_training(model_type: str, user: User) -> None:
    status, document = user.run("check", recipe(model_type, user, quantization={"method": "nf4"}), "--as", "h100")
    if model_type == "mamba":
        assert status == 0
    else:
        assert (status, document["findings"][-1]["code"]) == (3, "FT336")
        assert "quantization.method" in document["findings"][-1]["message"]
