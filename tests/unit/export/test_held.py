"""Whether a run's result and its base are what training had: what differs is refused, what cannot be told is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.model import ModelConfig
from ftcli.errors import FtcliError
from ftcli.export.writing import export_run
from ftcli.plain import plain
from ftcli.run.inputs import Inputs, weight_identities
from ftcli.run.integrity import hold_base
from tests.unit.export.conftest import Heard, Trained, edit_json, noted

Change = Callable[[Path], object]


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refusal(made: Trained, *formats: str) -> FtcliError:
    with pytest.raises(FtcliError) as caught:
        export_run(made.run, formats, reporter=Heard(), offline=True)
    assert not made.run.export_dir.exists()
    return caught.value


def told(source: object, *formats: str) -> list[str]:
    heard = Heard()
    export_run(source, formats, reporter=heard, offline=True)  # type: ignore[arg-type]
    return [f"{each.code}: {each.message}" for each in heard.findings]


BASE: dict[str, Change] = {
    "config.json": lambda base: edit_json(base / "config.json", rms_norm_eps=1e-2),
    "generation_config.json": lambda base: edit_json(base / "generation_config.json", eos_token_id=[4, 5]),
    "tokenizer.json": lambda base: (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n"),
    "chat_template.jinja": lambda base: (base / "chat_template.jinja").write_text("{{ messages }}"),
    "model.safetensors": lambda base: flip(base / "model.safetensors", 40_000),
}


@pytest.mark.parametrize("name", BASE)
def test_another_base_is_refused(trained: Callable[..., Trained], name: str) -> None:
    made = noted(trained())
    BASE[name](made.base)
    error = refusal(made, "safetensors")
    assert (error.findings[0].code, error.exit_code) == ("FT735", 2)
    assert name in error.findings[0].message


RESULT: dict[str, Change] = {
    "adapter_model.safetensors": lambda folder: flip(folder / "adapter_model.safetensors"),
    "adapter_config.json": lambda folder: edit_json(folder / "adapter_config.json", lora_alpha=999),
    "tokenizer_config.json": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "added_tokens.json": lambda folder: (folder / "added_tokens.json").write_text("{}"),
}


@pytest.mark.parametrize("name", RESULT)
def test_a_result_that_was_changed_is_refused(trained: Callable[..., Trained], name: str) -> None:
    made = noted(trained())
    RESULT[name](made.run.adapter_dir)
    error = refusal(made, "adapter")
    assert (error.findings[0].code, error.exit_code) == ("FT771", 2)
    assert name in error.findings[0].message


def test_a_changed_full_fine_tune_is_refused(tuned: Trained) -> None:
    flip(noted(tuned).run.model_dir / "model.safetensors")
    assert refusal(tuned, "safetensors").findings[0].code == "FT771"


def test_what_was_not_changed_is_exported_in_silence(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    (made.run.adapter_dir / "README.md").write_text("a card of somebody's")
    assert told(made.run, "adapter", "safetensors") == []


def test_an_adapter_beside_its_run_is_anybodys(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    edit_json(made.run.adapter_dir / "adapter_config.json", lora_alpha=9, base_model_name_or_path=str(made.base))
    (said,) = told(made.run.adapter_dir, "safetensors")
    assert said.startswith("FT770")


def test_a_damaged_manifest_is_said(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    made.run.manifest_path.write_text(made.run.manifest_path.read_text()[:-9])
    (said,) = told(made.run, "safetensors")
    assert said.startswith("FT770")
    assert "manifest.json" in said


def test_a_recipe_of_holes_is_not_read(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    with made.run.recipe_path.open("wb") as file:
        file.truncate(1 << 40)
    edit_json(made.run.manifest_path, inputs={"weights": plain(weight_identities(made.base))})
    now = Inputs(weights=weight_identities(made.base))
    assert hold_base(made.run.path, ModelConfig(name_or_path=str(made.base)), 0, now) == []


@pytest.mark.parametrize("damage", [5, [5], [{"name": "model.safetensors"}]], ids=str)
@pytest.mark.parametrize("key", ["weights", "files"])
def test_a_damaged_list_in_the_manifest_is_said(trained: Callable[..., Trained], key: str, damage: Any) -> None:
    made = noted(trained())
    manifest = json.loads(made.run.manifest_path.read_text())
    manifest["inputs"][key] = damage
    made.run.manifest_path.write_text(json.dumps(manifest))
    (said,) = told(made.run, "safetensors")
    assert said.startswith("FT770")


def test_a_damaged_status_is_said(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    made.run.status_path.write_text("{")
    (said,) = told(made.run, "adapter")
    assert said.startswith("FT770")
    assert "status.json" in said


def test_a_run_of_the_first_version_is_held_by_what_it_noted(trained: Callable[..., Trained]) -> None:
    made = noted(trained())
    manifest, status = json.loads(made.run.manifest_path.read_text()), json.loads(made.run.status_path.read_text())
    weights = [{"sha256": each.pop("samples_sha256"), **each} for each in manifest["inputs"]["weights"]]
    made.run.manifest_path.write_text(json.dumps({"inputs": {"weights": weights, "commit": None}}))
    status["trained"]["files"] = {each["name"]: each["bytes"] for each in status["trained"]["files"]}
    made.run.status_path.write_text(json.dumps(status))
    result, base = told(made.run, "safetensors")
    assert "sizes" in result
    assert "config.json" in base
    flip(made.base / "model.safetensors", 40_000)
    with pytest.raises(FtcliError) as caught:
        export_run(made.run, ["safetensors"], reporter=Heard(), offline=True, force=True)
    assert caught.value.findings[0].code == "FT735"


def test_an_earlier_export_of_another_adapter_config_is_not_the_same(trained: Callable[..., Trained]) -> None:
    made = trained()
    export_run(made.run, ["adapter"], reporter=Heard(), offline=True)
    edit_json(made.run.adapter_dir / "adapter_config.json", lora_alpha=999)
    with pytest.raises(FtcliError) as caught:
        export_run(made.run, ["adapter"], reporter=Heard(), offline=True)
    assert caught.value.findings[0].code == "FT743"
