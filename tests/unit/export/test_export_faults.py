"""Wrong merges, files that are damaged on the way, and damaged adapters: each is caught and leaves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.errors import ExitCode
from ftcli.export import adapter as adapter_format
from ftcli.export import safetensors as merged_format
from ftcli.export.merge import AdapterUpdates
from ftcli.export.tensorfile import TensorToWrite, write_shards
from tests.tiers import in_turn
from tests.unit.export.conftest import Trained, edit_json
from tests.unit.export.test_export import code, export, failure

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    merged = AdapterUpdates.merged

    def broken(self: AdapterUpdates, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1.001 * (merged(self, name, weight) - weight)

    patch.setattr(AdapterUpdates, "merged", broken)


def flipped_scale(patch: pytest.MonkeyPatch) -> None:
    merged = AdapterUpdates.merged
    patch.setattr(AdapterUpdates, "merged", lambda self, name, weight: 2 * weight - merged(self, name, weight))


def one_layer_left_out(patch: pytest.MonkeyPatch) -> None:
    merged = AdapterUpdates.merged

    def broken(self: AdapterUpdates, name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight if name == "model.layers.1.mlp.down_proj.weight" else merged(self, name, weight)

    patch.setattr(AdapterUpdates, "merged", broken)


def another_weight_touched(patch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path, planned: Any, size: int) -> None:
        write_shards(folder, [touched(each) if each.key == "model.norm.weight" else each for each in planned], size)

    def touched(output: TensorToWrite) -> TensorToWrite:
        data = bytearray(b"".join(output.pieces()))
        data[3] ^= 1
        return dataclasses.replace(output, pieces=lambda: iter([bytes(data)]))

    patch.setattr(merged_format, "write_shards", broken)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    in_turn(
        [wrong_scale, flipped_scale, one_layer_left_out, another_weight_touched],
        ["float32", "bfloat16"],
        ids=lambda value: getattr(value, "__name__", value),
    ),
)
def test_a_wrong_merge_is_caught_and_removed(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch, fault: Any, dtype: str
) -> None:
    made = trained("gemma2", dtype)
    fault(monkeypatch)
    error = failure(made, "safetensors")
    assert code(error) == "FT741"
    assert error.exit_code is ExitCode.BUG
    assert not (made.run.export_dir / "safetensors").exists()


def flip_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(bytes(data))


def cut_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def lose_the_stop_token(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=1)


def lose_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swap_the_permutation(folder: Path) -> None:
    """The rows of k as llama.cpp wants them."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = tensors[name]
    tensors[name] = rows.view(2, 2, -1, rows.shape[-1]).transpose(1, 2).reshape(rows.shape).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<start_of_turn>model", "<start_of_turn>Model"))


@pytest.mark.parametrize(
    ("damage", "kind"),
    in_turn(
        [
            flip_a_weight,
            cut_the_file,
            lose_the_template,
            other_template,
            lose_the_stop_token,
            lose_a_tensor,
            swap_the_permutation,
        ],
        ["adapter merged", "full fine-tune"],
        ids=lambda value: getattr(value, "__name__", value),
    ),
)
def test_damage_after_writing_is_caught(
    trained: Callable[..., Trained],
    tuned: Trained,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: Any,
    kind: str,
) -> None:
    if kind == "full fine-tune":
        made, name, write = tuned, "copy_model", merged_format.copy_model
    else:
        tuned.run.path.rename(tmp_path / "other")
        made, name, write = trained(), "write_merged", merged_format.write_merged

    def damaged(source: Any, folder: Path, *rest: Any) -> Any:
        result = write(source, folder, *rest)
        damage(folder)
        return result

    monkeypatch.setattr(merged_format, name, damaged)
    assert code(failure(made, "safetensors")) == "FT741"
    assert not (made.run.export_dir / "safetensors").exists()


def test_a_failed_export_keeps_the_earlier_one(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained()
    (first,) = export(made, "safetensors")
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    wrong_scale(monkeypatch)
    assert code(failure(made, "safetensors", force=True)) == "FT741"
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before


@pytest.mark.parametrize("damage", ["truncated", "nan", "empty", "dora", "pissa", "resized", "no json", "wrong shape"])
@pytest.mark.parametrize("name", ["adapter", "safetensors"])
def test_a_damaged_adapter_is_ft742(trained: Callable[..., Trained], damage: str, name: str) -> None:
    made = trained()
    weights, config = (made.run.adapter_dir / f for f in ("adapter_model.safetensors", "adapter_config.json"))
    tensors = load_file(weights)
    first = next(iter(tensors))
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "nan":
        save_file({**tensors, first: torch.full_like(tensors[first], torch.nan)}, weights)
    elif damage == "empty":
        weights.unlink()
    elif damage == "dora":
        edit_json(config, use_dora=True)
    elif damage == "pissa":
        edit_json(config, init_lora_weights="pissa")
    elif damage == "resized":
        save_file({**tensors, "base_model.model.model.embed_tokens.weight": torch.zeros(300, 32)}, weights)
    elif damage == "wrong shape":
        save_file({**tensors, first: torch.zeros(4, 7)}, weights)
    else:
        config.write_text("{")
    assert code(failure(made, name)) == "FT742"


def other_scale(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", lora_alpha=-8)


def other_matrix(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(key for key in tensors if "q_proj.lora_B" in key)
    save_file({**tensors, name: -tensors[name]}, folder / "adapter_model.safetensors")


def lose_a_matrix(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[next(key for key in tensors if "q_proj.lora_B" in key)]
    save_file(tensors, folder / "adapter_model.safetensors")


def cut_the_adapter(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [other_scale, other_matrix, lose_a_matrix, cut_the_adapter, other_template])
def test_an_adapter_damaged_on_the_way_is_caught(
    damage: Callable[[Path], None], trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copy = trained(), adapter_format.copy_adapter

    def damaged(source: Any, folder: Path, *rest: Any) -> None:
        copy(source, folder, *rest)
        damage(folder)

    monkeypatch.setattr(adapter_format, "copy_adapter", damaged)
    assert code(failure(made, "adapter")) == "FT741"
    assert not (made.run.export_dir / "adapter").exists()
