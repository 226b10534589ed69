"""Calibration: the rows, what linear layers are given, factors, and GPTQ against its definition."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from ftcli.config.evaluation import ExportConfig, GgufConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.export.calibration import Calibrated, calibrate, calibration_rows
from ftcli.export.compressed import _rounded
from ftcli.export.integers import W8A8, compensated, gptq
from ftcli.export.safetensors import plan_model
from ftcli.export.scheme import Calibration, Scheme, Smoothing
from ftcli.export.source import ExportSource, attach, resolve_source, source_tokenizer
from ftcli.export.writing import export_run
from ftcli.model.pretrained import hollow
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.conftest import Heard, Trained, edit_json, with_rows
from tests.unit.export.gguf_runs import adapt
from tests.unit.export.test_export import code, export

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
#: Weights are left as they are, and so is everything that the next layer sees.
PLAIN = dataclasses.replace(
    W8A8, encode=lambda weight, _: {"weight": weight}, decode=lambda parts: parts["weight"], calibration=Calibration()
)


def source_of(made: Trained) -> ExportSource:
    source = dataclasses.replace(resolve_source(made.run), offline=True)
    recipe = yaml.safe_load(made.run.recipe_path.read_text())
    return dataclasses.replace(source, settings=type(source.settings).model_validate(recipe["export"]))


def run(made: Trained, scheme: Scheme, folder: Path) -> Calibrated:
    source = source_of(made)
    plan = plan_model(source)
    folder.mkdir()
    return calibrate(source, plan, _rounded(hollow(plan.config), plan.base), scheme, folder, lambda _: None)


def model_of(made: Trained, family: str, **shape: int) -> Any:
    """Base and adapter as PEFT has them, in float32."""
    whole = type(build(family, **shape)).from_pretrained(made.base, dtype=torch.float32).eval()
    return attach(whole, made.run.adapter_dir)


@torch.no_grad()
def largest_inputs(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """The largest input of each of transformers' linear layers, row by row."""
    found: dict[str, float] = {}

    def look(name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
        found[name] = max(found.get(name, 0.0), float(given[0].abs().max()))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or hasattr(module, "base_layer"):
            module.register_forward_pre_hook(partial(look, f"{name.removeprefix('base_model.model.')}.weight"))
    for row in rows:
        model(input_ids=torch.tensor([row]), use_cache=False)
    return found


SHAPES: dict[str, dict[str, int]] = {"gemma4_text": {"hidden_size_per_layer_input": 32}}


@pytest.mark.parametrize("family", ["gemma2", *further("llama", "phi3", "qwen3_5_text", "gemma4_text", "cohere2")])
def test_each_layer_is_given_what_it_is_given_in_the_whole_model(family: str, tmp_path: Path) -> None:
    """Rows of other lengths go through together, in several batches, without a mask."""
    made = with_rows(adapt(tmp_path, build(family, **SHAPES.get(family, {}))), rows=40, row_tokens=200)
    found = run(made, PLAIN, tmp_path / "layers")
    wanted = largest_inputs(model_of(made, family, **SHAPES.get(family, {})), calibration_rows(source_of(made)))
    assert len(found.given) >= 8
    for name, given in found.given.items():
        assert given.largest == pytest.approx(wanted[name], rel=1e-3), name
    assert found.facts["calibration_rows"] == 40


@pytest.mark.parametrize("family", ["gemma2", *further("llama", "qwen3", "cohere2", "olmo2", "phi3")])
def test_factors_leave_the_model_what_it_was(family: str, tmp_path: Path) -> None:
    """Norms with weights from zero and from one; without rounding, the logits stay."""
    made = with_rows(adapt(tmp_path, outlying(family)))
    calibration = Calibration(smoothing=Smoothing("largest", lambda w: torch.round(w * 4) / 4))
    scheme = dataclasses.replace(PLAIN, calibration=calibration)
    coarse = dataclasses.replace(scheme, decode=lambda parts: torch.round(parts["weight"] * 4) / 4)
    found = run(made, coarse, tmp_path / "layers")
    assert bool(found.norms) == (family != "olmo2"), "OLMo 2 has no norm in front of its linear layers"
    assert (len(found.rows) > 0) == (family != "phi3")
    model = model_of(made, family).merge_and_unload()
    ids = torch.tensor([[2, 100, 101, 102, 50, 60, 70, 4]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        moved = 0
        for name, parameter in model.named_parameters():
            new = found.smoothed(name, parameter.data)
            moved += int(not torch.equal(new, parameter.data))
            parameter.copy_(new)
        after = model(input_ids=ids).logits
    assert moved >= 4
    assert (after - before).norm() / before.norm() < 1e-4


def outlying(family: str) -> Any:
    """A model of which some features are much larger than others, as in models that were trained long."""
    model = build(family, hidden_size=64, intermediate_size=64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.shape == (64,):
                parameter[5] += 30.0
            elif name.endswith("embed_tokens.weight"):
                parameter[:, 9] *= 8.0
    return model


@pytest.mark.parametrize(("name", "share"), [("w8a8", 0.7), *[pytest.param("awq", 0.9, marks=pytest.mark.long)]])
def test_factors_help_where_some_features_are_large(name: str, share: float, tmp_path: Path) -> None:
    (result,) = export(with_rows(adapt(tmp_path, outlying("llama"))), name)
    facts = result.verification.facts
    assert facts["output_error"] < share * facts["output_error_uncalibrated"]


def by_definition(weight: Tensor, scale: Tensor, products: Tensor) -> Tensor:
    """Optimal brain quantization in the order of GPTQ: after each column the others are the best ones given it."""
    order = products.diagonal().argsort(descending=True)
    damped = products.double() + 0.01 * float(products.diagonal().mean()) * torch.eye(len(products))
    left, codes = weight.double().clone(), torch.zeros_like(weight)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        unit = scale[:, column].double()
        codes[:, column] = torch.clamp((left[:, column] / unit).round(), -8, 7).float()
        error = left[:, column] - codes[:, column] * unit
        left[:, rest] -= error[:, None] * inverse[0] / inverse[0, 0]
    return codes


def test_gptq_is_what_it_is_defined_to_be() -> None:
    """Over more columns than a block has; the integers are those of the plain formula in float64, but for ties."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((8, 192), generator=generator)
    x = torch.randn((512, 192), generator=generator) @ torch.randn((192, 192), generator=generator)
    scale = (weight.unflatten(1, (-1, 64)).abs().amax(-1) / 7).repeat_interleave(64, 1)
    products = x.T @ x / len(x)
    found, wanted = compensated(weight, scale, products), by_definition(weight, scale, products)
    assert float((found == wanted).float().mean()) > 0.99
    nearest = torch.clamp((weight / scale).round(), -8, 7)
    errors = [float(((codes * scale - weight) @ x.T).square().sum()) for codes in (found, wanted, nearest)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.5 * errors[2]


def test_gptq_rounds_to_the_nearest_what_it_has_never_seen() -> None:
    weight = torch.randn((4, 32), generator=torch.Generator().manual_seed(4))
    scale = torch.full_like(weight, 0.4)
    nearest = torch.clamp((weight / scale).round(), -8, 7)
    assert torch.equal(compensated(weight, scale, torch.zeros((32, 32))), nearest)
    one = torch.zeros((32, 32))
    one[3, 3] = 5.0
    assert torch.equal(compensated(weight, scale, one), nearest)


def test_rows_are_those_of_training_drawn_by_its_seed(trained: Any) -> None:
    made = with_rows(trained("llama"), rows=10, row_tokens=30)
    source = source_of(made)
    rows = calibration_rows(source)
    assert (len(rows), max(len(row) for row in rows)) == (10, 30)
    assert rows == calibration_rows(source)
    assert source.run is not None
    assert rows != calibration_rows(dataclasses.replace(source, run=(source.run[0], 7)))
    text = source_tokenizer(source).decode(rows[0])
    assert "user" in text, "the template's marks are among them"


def test_rows_that_were_held_out_are_not_among_them(trained: Any) -> None:
    made = with_rows(trained("llama"), rows=1000)
    every = {tuple(row) for row in calibration_rows(source_of(made))}
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    raw["data"]["held_out"] = 0.4
    made.run.recipe_path.write_text(yaml.safe_dump(raw))
    some = {tuple(row) for row in calibration_rows(source_of(made))}
    assert some < every
    assert 0.3 < len(some) / len(every) < 0.9


def test_rows_of_prompts_are_prompts(trained: Any) -> None:
    made = with_rows(trained("llama"), "bundled:smoke-grpo-train", rows=4)
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    raw["grpo"] = {"rewards": [{"use": "exact_match"}]}
    made.run.recipe_path.write_text(yaml.safe_dump(raw))
    assert len(calibration_rows(source_of(made))) == 4


def test_rows_of_pairs_are_both_answers(trained: Any) -> None:
    made = with_rows(trained("llama"), "bundled:smoke-dpo-train", rows=6)
    raw = yaml.safe_load(made.run.recipe_path.read_text())
    raw["train"]["method"], raw["data"]["format"] = "dpo", "preference"
    made.run.recipe_path.write_text(yaml.safe_dump(raw))
    assert len(calibration_rows(source_of(made))) == 6


@pytest.mark.long
def test_a_full_fine_tune_is_calibrated(tuned: Trained) -> None:
    (result,) = export(with_rows(tuned), "w8a8")
    assert result.verification.facts["relative_error"] < 0.1


def test_without_rows_it_is_refused(trained: Any) -> None:
    made = trained("llama")
    with pytest.raises(FtcliError, match=r"names no data\.train") as caught:
        export(made, "w8a8")
    assert (code(caught.value), caught.value.exit_code) == ("FT778", ExitCode.RECIPE)
    edit_json(made.run.adapter_dir / "adapter_config.json", base_model_name_or_path=str(made.base))
    with pytest.raises(FtcliError, match="is in no run directory") as caught:
        export_run(made.run.adapter_dir, ["w8a8"], reporter=Heard(), offline=True)
    assert code(caught.value) == "FT778"
    assert not (made.run.path / "adapter-export" / "w8a8").exists()


def test_few_tokens_are_said_to_be_few(tmp_path: Path) -> None:
    made = with_rows(adapt(tmp_path, build("llama", hidden_size=64, intermediate_size=64)), rows=2, row_tokens=8)
    (result,) = export(made, "gptq", settings=source_of(made).settings)
    assert [warning.code for warning in result.warnings] == ["FT779"]
    assert result.verification.facts["calibration_tokens"] == 16
    said = json.loads((result.path / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["actorder"] == "static"


def test_an_importance_matrix_has_the_squares_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's llama-quantize reads it, and given to it: the sums are those of transformers' model."""
    gguf = pytest.importorskip("gguf")
    made = with_rows(adapt(tmp_path, build("qwen3")), rows=6, row_tokens=50)
    program = tmp_path / "llama-quantize"
    program.write_text(f"#!/bin/sh\ncp $2 {tmp_path}/seen.gguf\nexit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    settings = source_of(made).settings.model_copy(update={"gguf": GgufConfig(types=("iq4_xs",))})
    with pytest.raises(FtcliError, match="failed \\(exit 7\\)"):
        export(made, "gguf", settings=settings)
    file = gguf.GGUFReader(tmp_path / "seen.gguf")
    assert file.fields["general.type"].contents() == "imatrix"
    found = {tensor.name: torch.tensor(tensor.data) for tensor in file.tensors}
    model, rows = model_of(made, "qwen3"), calibration_rows(source_of(made))
    sums: dict[str, Tensor] = {}

    def add(name: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
        sums[name] = sums.get(name, torch.zeros(())) + given[0].float().square().sum((0, 1))

    layer = "base_model.model.model.layers.1"
    for name, place in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj"), ("ffn_up", "mlp.up_proj")):
        model.get_submodule(f"{layer}.{place}").register_forward_pre_hook(partial(add, name))
    with torch.no_grad():
        for row in rows:
            model(input_ids=torch.tensor([row]), use_cache=False)
    for name, wanted in sums.items():
        assert torch.allclose(found[f"blk.1.{name}.weight.in_sum2"].flatten(), wanted, rtol=1e-3)
        assert found[f"blk.1.{name}.weight.counts"].tolist() == [[sum(map(len, rows))]]
    assert not list(made.run.export_dir.glob("*"))


@pytest.mark.skipif(shutil.which("llama-quantize") is None, reason="needs llama.cpp's llama-quantize on the PATH")
@pytest.mark.parametrize("kind", ["q4_k_m", "iq4_xs", "iq2_m"])
def test_llama_quantize_rounds_by_the_matrix(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made = with_rows(adapt(tmp_path, build("llama", hidden_size=256, intermediate_size=256)))
    settings = ExportConfig.model_validate({"gguf": {"types": [kind], "imatrix": True}})
    (result,) = export(made, "gguf", settings=settings)
    (path,) = result.path.glob("*.gguf")
    assert gguf.GGUFReader(path).fields["quantize.imatrix.entries_count"].contents() == 14
    assert result.verification.facts["imatrix_tokens"] > 1000
    assert not (result.path / ".imatrix.gguf").exists()


def test_layers_that_no_row_reaches_are_named(tmp_path: Path) -> None:
    made = with_rows(adapt(tmp_path, build("llama", hidden_size=64, intermediate_size=64)))
    source = source_of(made)
    plan = plan_model(source)
    (tmp_path / "layers").mkdir()
    names = {"elsewhere.weight": "model.elsewhere.weight"}
    with pytest.raises(FtcliError, match=r"do not reach model\.elsewhere\.weight"):
        calibrate(source, plan, names, gptq(frozenset({64})), tmp_path / "layers", lambda _: None)
