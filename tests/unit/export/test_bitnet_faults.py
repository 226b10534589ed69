"""What goes wrong in packing ternary weights, or with the packed files, is found before they are called an export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ftcli.config.evaluation import ExportConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.export import bitnet
from ftcli.export.writing import export_run
from tests.unit.export.conftest import Heard, Trained, edit_json
from tests.unit.export.test_gguf_ternary import rounded_run

LAYER = "model.layers.0.self_attn.k_proj"


def export(made: Trained) -> None:
    """Passes where nothing is wrong: test_packed_weights_are_read_layer_by_layer exports the same run."""
    export_run(made.run, ["bitnet"], reporter=Heard(), offline=True, settings=ExportConfig())


def edited(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Writes one tensor otherwise; None leaves it out."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        new = change(tensors.pop(name))
        save_file(tensors if new is None else {**tensors, name: new}, folder / "model.safetensors", {"format": "pt"})

    return damage


def flipped(packed: Tensor) -> Tensor:
    found = packed.clone()
    found[0, 0] ^= 2  # two bits a value: 0, 1 and 2 stand for -1, 0 and 1
    return found


def rows_in_another_order(packed: Tensor) -> Tensor:
    """A key's rows as llama.cpp wants them, or as near as four rows to a byte come to that."""
    return torch.cat(packed.tensor_split(2)[::-1]).contiguous()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


def divided(folder: Path) -> None:
    """transformers divides by the scale then, and the file has what is to be multiplied by."""
    declared: dict[str, Any] = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    edit_json(
        folder / "config.json",
        quantization_config={**declared, "linear_class": "bitlinear", "quantization_mode": "offline"},
    )


FAULTS: dict[str, Callable[[Path], None]] = {
    "a flipped sign": edited(f"{LAYER}.weight", flipped),
    "another scale": edited(f"{LAYER}.weight_scale", lambda scale: scale * 1.01),
    "a scale's sign": edited(f"{LAYER}.weight_scale", torch.neg),
    "rows in another order": edited(f"{LAYER}.weight", rows_in_another_order),
    "a missing tensor": edited(f"{LAYER}.weight", lambda _: None),
    "another norm": edited("model.norm.weight", lambda norm: norm * 1.5),
    "a file cut off": cut,
    "another template": other_template,
    "a scale divided by": divided,
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_damage_is_caught_and_removed(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    verify = bitnet._verify

    def damaged(source: Any, folder: Path, *rest: Any, **how: Any) -> Any:
        FAULTS[fault](folder)
        return verify(source, folder, *rest, **how)

    monkeypatch.setattr(bitnet, "_verify", damaged)
    made = rounded_run(tmp_path, "llama")
    with pytest.raises(FtcliError) as caught:
        export(made)
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert caught.value.exit_code is ExitCode.BUG
    assert not (made.run.export_dir / "bitnet").exists()


def test_too_little_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = rounded_run(tmp_path, "llama")
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(FtcliError) as caught:
        export(made)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT724", 3)


def test_a_disk_that_fills_up_meanwhile_is_no_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = rounded_run(tmp_path, "llama")

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", full)
    with pytest.raises(FtcliError) as caught:
        export(made)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT724", 3)
    assert list(made.run.export_dir.iterdir()) == []


def test_values_that_are_packed_wrongly_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files and what they are first compared with agree, and neither is what was trained."""
    pack = bitnet.pack_ternary
    monkeypatch.setattr(bitnet, "pack_ternary", lambda data: pack(-data))
    with pytest.raises(FtcliError, match="not those of its masters") as caught:
        export(rounded_run(tmp_path, "llama"))
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
