"""Exports: equal to what was trained when loaded by plain transformers and PEFT, or not there at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftcli.config import ExportConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.export import safetensors as merged_format
from ftcli.export.writing import ExportResult, export_run
from ftcli.facts.device import cpu_device
from ftcli.facts.weights import EXPORT_RECORD
from tests.unit.export.conftest import Heard, Trained, edit_json, noted, write_run

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

IDS = torch.tensor([[2, 100, 101, 102, 50, 60, 70, 4], [2, 3, 30, 31, 32, 33, 34, 35]])


def export(trained: Trained, *formats: str, **options: Any) -> list[ExportResult]:
    return export_run(trained.run, formats, reporter=Heard(), offline=True, **options)


def failure(trained: Trained, *formats: str, **options: Any) -> FtcliError:
    with pytest.raises(FtcliError) as caught:
        export(trained, *formats, **options)
    assert not (trained.run.export_dir / ".tmp-safetensors").exists()
    assert not (trained.run.export_dir / ".tmp-adapter").exists()
    return caught.value


def code(error: FtcliError) -> str:
    assert not [finding for finding in error.findings if "\n" in finding.message]
    (only,) = {finding.code for finding in error.findings}
    return only


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """With plain libraries only, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    return model.float().eval()(IDS).logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.5},
    "some modules": {"target_modules": ["q_proj", "down_proj"]},
    "rank pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "embeddings trained whole": {"modules_to_save": ["embed_tokens"]},
    "head adapted": {"target_modules": ["q_proj", "lm_head"]},
}


#: gemma2 has its embedding as its head; its other variants are merged in test_merge.py.
PAIRS = [*(("llama", variant) for variant in VARIANTS), ("gemma2", "plain"), ("gemma2", "head trained whole")]


@pytest.mark.parametrize(("family", "variant"), PAIRS)
def test_a_merged_model_is_base_and_adapter(trained: Callable[..., Trained], family: str, variant: str) -> None:
    made = trained(family, **VARIANTS[variant])
    (result,) = export(made, "safetensors")
    assert result.path == made.run.export_dir / "safetensors"
    merged, apart = logits_of(result.path), logits_of(made.base, made.run.adapter_dir)
    assert distance(merged, apart) < 1e-5
    assert distance(logits_of(made.base), apart) > 0.02, "the adapter does nothing: this test proves nothing"
    assert result.verification.facts["relative_error"] < 1e-5
    assert result.verification.facts["top1_agreement"] == 1.0


def test_a_model_stored_in_bfloat16_is_merged_with_one_rounding(trained: Callable[..., Trained]) -> None:
    made = trained("gemma2", "bfloat16")
    (result,) = export(made, "safetensors")
    merged = load_file(result.path / "model.safetensors")
    base = load_file(made.base / "model.safetensors")
    adapter = load_file(made.run.adapter_dir / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    exact = base[f"{name}.weight"].double() + 2.0 * (b.double() @ a.double())
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged[f"{name}.weight"], exact.to(torch.bfloat16))
    assert 1e-4 < result.verification.facts["rounding"] < 0.05
    assert result.warnings == ()


def test_an_adapter_that_rounding_swallows_is_said_so(trained: Callable[..., Trained]) -> None:
    made, heard = noted(trained("llama", "bfloat16", size=1e-4)), Heard()
    export_run(made.run, ["safetensors"], reporter=heard, offline=True)
    assert [finding.code for finding in heard.findings] == ["FT744"]
    assert "bfloat16" in heard.findings[0].message


def test_tokenizer_template_and_stop_tokens_come_along(trained: Callable[..., Trained]) -> None:
    made = trained()
    (result,) = export(made, "safetensors")
    written, wanted = (AutoTokenizer.from_pretrained(p) for p in (result.path, made.run.adapter_dir))
    assert written.chat_template == wanted.chat_template
    generation = json.loads((result.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == wanted.eos_token_id
    assert generation["pad_token_id"] == wanted.pad_token_id
    assert len({path.stat().st_mode for path in result.path.iterdir()}) == 1, "as readable as any other file"
    record = json.loads((result.path / EXPORT_RECORD).read_text())
    assert record["verification"]["merged"] == 14
    assert record["base"] == str(made.base)


def test_the_template_that_training_rendered_by_is_exported(trained: Callable[..., Trained], tmp_path: Path) -> None:
    made = trained()
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    made.run.recipe_path.unlink()
    made.run.path.rename(tmp_path / "moved")
    run = write_run(tmp_path / "run", made.base, lora={"r": 4}, data={"chat_template": str(template)})
    (tmp_path / "moved" / "adapter").rename(run.adapter_dir)
    for result in export(Trained(made.base, run), "adapter", "safetensors"):
        assert AutoTokenizer.from_pretrained(result.path).chat_template == template.read_text()


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_adapter_is_the_same_bit_for_bit(trained: Callable[..., Trained], variant: str) -> None:
    made = trained(**VARIANTS[variant])
    (made.run.adapter_dir / "training_args.bin").write_bytes(b"pickle")
    (result,) = export(made, "adapter")
    source = load_file(made.run.adapter_dir / "adapter_model.safetensors")
    copied = load_file(result.path / "adapter_model.safetensors")
    assert set(copied) == set(source)
    assert all(torch.equal(copied[k], source[k]) for k in source)
    assert torch.equal(logits_of(made.base, result.path), logits_of(made.base, made.run.adapter_dir))
    assert not (result.path / "training_args.bin").exists()
    assert len({path.stat().st_mode for path in result.path.iterdir()}) == 1, "as readable as any other file"
    card = (result.path / "README.md").read_text(encoding="utf-8")
    assert "More Information Needed" not in card  # PEFT's card of placeholders
    assert str(made.base) not in card


def test_what_a_killed_export_left_is_removed(trained: Callable[..., Trained]) -> None:
    run = trained()
    left = export(run, "adapter")[0].path.with_name(".trash-adapter.1")
    left.mkdir()
    (left / "weights").write_text("old")
    export(run, "adapter", force=True)
    assert not left.exists()


def test_a_model_card_that_somebody_wrote_is_kept(trained: Callable[..., Trained]) -> None:
    made = trained()
    (made.run.adapter_dir / "README.md").write_text("# Mine")
    (result,) = export(made, "adapter")
    assert (result.path / "README.md").read_text() == "# Mine"


def test_an_earlier_export_is_replaced_as_a_whole_when_asked(trained: Callable[..., Trained]) -> None:
    made = trained()
    (first,) = export(made, "adapter")
    (first.path / "stale").write_text("x")
    assert code(failure(made, "adapter")) == "FT743"
    assert (first.path / "stale").exists()
    export(made, "adapter", force=True)
    assert not (first.path / "stale").exists()
    assert [path.name for path in made.run.export_dir.iterdir()] == ["adapter"]


def test_the_same_again_is_kept_and_the_rest_written(trained: Callable[..., Trained]) -> None:
    made = trained()
    (first,) = export(made, "adapter")
    written = (first.path / "adapter_model.safetensors").stat().st_mtime_ns
    (first.path / "README.md").write_text("an evaluation's numbers")
    kept, merged = export(made, "adapter", "safetensors")
    assert (kept.path / "adapter_model.safetensors").stat().st_mtime_ns == written
    assert kept.verification.as_dict() == first.verification.as_dict()
    assert merged.path.is_dir()


@pytest.mark.parametrize("change", ["weights", "settings", "record"])
def test_an_export_of_something_else_is_not_replaced_unasked(trained: Callable[..., Trained], change: str) -> None:
    made = trained()
    (first,) = export(made, "adapter")
    options = {}
    if change == "weights":
        path = made.run.adapter_dir / "adapter_model.safetensors"
        save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)
    elif change == "settings":
        options["settings"] = ExportConfig.model_validate({"gguf": {"types": ["f16"]}})
    else:
        (first.path / EXPORT_RECORD).write_text("{")
    before = (first.path / "adapter_model.safetensors").read_bytes()
    assert code(failure(made, "safetensors", "adapter", **options)) == "FT743"
    assert (first.path / "adapter_model.safetensors").read_bytes() == before
    assert not (made.run.export_dir / "safetensors").exists(), "known before anything is written"


@pytest.mark.parametrize("name", ["adapter", "safetensors", "gguf", "ollama"])
def test_without_verification_the_record_says_so(trained: Callable[..., Trained], name: str) -> None:
    made, heard = noted(trained()), Heard()
    (result,) = export_run(made.run, [name], reporter=heard, offline=True, verify=False)
    assert [finding.code for finding in heard.findings] == ["FT754"]
    record = json.loads((result.path / EXPORT_RECORD).read_text())
    assert record["verification"] == {"compared": "nothing", "verified": "no"}
    assert code(failure(made, name)) == "FT743"  # verified is something else


def test_other_peoples_files_are_not_replaced(trained: Callable[..., Trained]) -> None:
    made = trained()
    target = made.run.export_dir / "adapter"
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("x")
    assert code(failure(made, "adapter")) == "FT743"
    assert (target / "thesis.tex").read_text() == "x"


def test_a_full_fine_tune_is_copied_and_equal(tuned: Trained) -> None:
    heard = Heard()
    (result,) = export_run(noted(tuned).run, ["adapter", "safetensors"], reporter=heard, offline=True)
    assert [finding.code for finding in heard.findings] == ["FT745"]
    assert torch.equal(logits_of(result.path), logits_of(tuned.run.model_dir))
    assert not torch.equal(logits_of(result.path), logits_of(tuned.base))


def test_a_full_fine_tune_has_no_adapter(tuned: Trained) -> None:
    assert code(failure(tuned, "adapter")) == "FT740"


def test_an_adapter_anywhere_can_be_exported(trained: Callable[..., Trained], tmp_path: Path) -> None:
    made = trained()
    folder = made.run.adapter_dir.rename(tmp_path / "mine")
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(made.base))
    (result,) = export_run(folder, ["safetensors"], reporter=Heard(), offline=True)
    assert result.path == tmp_path / "mine-export" / "safetensors"
    assert distance(logits_of(result.path), logits_of(made.base, folder)) < 1e-5


def test_a_random_base_cannot_be_merged_but_its_adapter_is_exported(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    made = trained()
    made.run.path.rename(tmp_path / "old")
    run = write_run(tmp_path / "run", made.base, lora={"r": 4})
    (tmp_path / "old" / "adapter").rename(run.adapter_dir)
    text = run.recipe_path.read_text().replace("init: pretrained", "init: random")
    run.recipe_path.write_text(text)
    (made.base / "model.safetensors").unlink()
    random = Trained(made.base, run)
    error = failure(random, "safetensors")
    assert code(error) == "FT747"
    assert error.exit_code is ExitCode.RECIPE
    assert [result.format for result in export(random, "adapter")] == ["adapter"]


def test_too_little_memory_is_said_before_merging(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained()
    monkeypatch.setattr(merged_format, "cpu_device", lambda: dataclasses.replace(cpu_device(), free_bytes=100))
    error = failure(made, "safetensors")
    assert code(error) == "FT748"
    assert error.exit_code is ExitCode.PREFLIGHT


def test_an_unfinished_run_is_refused(trained: Callable[..., Trained], tmp_path: Path) -> None:
    made = trained()
    made.run.adapter_dir.rename(tmp_path / "away")
    assert code(failure(made, "adapter")) == "FT740"
    with pytest.raises(FtcliError) as caught:
        export_run(tmp_path, ["adapter"], reporter=Heard(), offline=True)
    assert code(caught.value) == "FT740"


def test_a_missing_base_is_ft323_where_it_is_needed(trained: Callable[..., Trained]) -> None:
    made = trained()
    (made.base / "model.safetensors").unlink()
    assert code(failure(made, "safetensors")) == "FT323"


def test_an_unwritable_destination_is_ft723(trained: Callable[..., Trained]) -> None:
    made = trained()
    made.run.export_dir.write_text("a file in the way")
    with pytest.raises(FtcliError) as caught:
        export(made, "adapter")
    assert code(caught.value) == "FT723"
