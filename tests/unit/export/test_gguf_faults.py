"""GGUF files that are not what was trained: each fault is caught, and the file is never left behind."""

from __future__ import annotations

import dataclasses
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.errors import FtcliError
from ftcli.export.gguf import file as gguf_file
from ftcli.export.gguf import write as adapter_file
from ftcli.export.gguf import write as gguf_format
from ftcli.export.gguf.file import ExpectedFile
from ftcli.export.gguf.verify import verify_file
from ftcli.export.gguf.write import write_type
from ftcli.gguf import numbers_in_file, to_file
from tests.small_models import build
from tests.tiers import further
from tests.unit.export.gguf_runs import adapt, export

gguf = pytest.importorskip("gguf")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings(
        "ignore:The following (rank|alpha)_pattern keys"
    ),  # PEFT's own patterns, of stacks of experts
]


@pytest.fixture(scope="module")
def file(shared: ExpectedFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    write_type(shared, path, "q8_0")
    assert not verify_file(path, "q8_0", shared).problems
    return path


def data_at(path: Path, tensor: str) -> int:
    reader = gguf.GGUFReader(path)
    return int(next(each.data_offset for each in reader.tensors if each.name == tensor))


def flip_a_scale(path: Path) -> None:
    place, data = data_at(path, "blk.1.ffn_up.weight"), bytearray(path.read_bytes())
    (scale,) = struct.unpack_from("<e", data, place)
    struct.pack_into("<e", data, place, -scale)
    path.write_bytes(bytes(data))


def cut_the_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def empty_the_file(path: Path) -> None:
    path.write_bytes(b"")


def other_template(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"<start_of_turn>model\\n", b"<start_of_turn>Model\\n"))


def other_number(key: str, number: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        place = data.index(key.encode()) + len(key) + 4
        struct.pack_into("<f" if isinstance(number, float) else "<I", data, place, number)
        path.write_bytes(bytes(data))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped scale": (flip_a_scale, "blk.1.ffn_up.weight differs"),
    "a truncated file": (cut_the_file, "cannot be read"),
    "a truncated header": (cut_the_header, "cannot be read"),
    "an empty file": (empty_the_file, "cannot be read"),
    "another template": (other_template, "chat_template differs"),
    "another rotation": (other_number("llama.rope.freq_base", 9000.0), "llama.rope.freq_base differs"),
    "another epsilon": (other_number("llama.attention.layer_norm_rms_epsilon", 0.5), "rms_epsilon differs"),
    "another eos": (other_number("tokenizer.ggml.eos_token_id", 7), "eos_token_id differs"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_caught(damage: str, shared: ExpectedFile, file: Path, tmp_path: Path) -> None:
    path = tmp_path / file.name
    shutil.copyfile(file, path)
    spoil, said = DAMAGE[damage]
    spoil(path)
    problems = verify_file(path, "q8_0", shared).problems
    assert problems
    assert said in problems[0]


def test_what_the_metadata_means_is_computed(shared: ExpectedFile, tmp_path: Path) -> None:
    """Values that were meant as they are, and are wrong: the model that the file describes answers otherwise."""
    said = {**shared.description.values, "rope.freq_base": 9000.0}
    wrong = dataclasses.replace(shared, description=dataclasses.replace(shared.description, values=said))
    path = tmp_path / "model.gguf"
    write_type(wrong, path, "f32")
    (problem, *_) = verify_file(path, "f32", wrong).problems
    assert "logits differ" in problem


def not_permuted(stored: str, tensor: torch.Tensor, heads: Any, architecture: Any) -> torch.Tensor:
    return to_file(stored, tensor, {} if "attn_k" in stored else heads, architecture)


def permuted_by_the_other_heads(stored: str, tensor: torch.Tensor, heads: Any, architecture: Any) -> torch.Tensor:
    swapped = {"attn_q": heads["attn_k"], "attn_k": heads["attn_q"]} if heads else {}
    return to_file(stored, tensor, swapped, architecture)


@pytest.mark.parametrize("fault", [not_permuted, permuted_by_the_other_heads])
def test_a_wrong_permutation_is_caught_and_removed(fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapt(tmp_path, build("llama"))
    monkeypatch.setattr(gguf_format, "to_file", fault)
    with pytest.raises(FtcliError, match="attn_k") as caught:
        export(made, "f32")
    assert {finding.code for finding in caught.value.findings} == {"FT741"}
    assert not list(made.run.export_dir.iterdir())


@pytest.mark.parametrize(
    "part", ["attn_qkv", "ssm_a", "ssm_out", *further("attn_gate", "ssm_alpha", "ssm_dt", "ssm_conv1d")]
)
def test_value_heads_in_the_models_order_are_caught(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped(stored: str, tensor: torch.Tensor, heads: Any, architecture: Any) -> torch.Tensor:
        if f".{part}" not in stored:
            return to_file(stored, tensor, heads, architecture)
        return numbers_in_file(stored, tensor, architecture)

    made = adapt(tmp_path, build("qwen3_5_text"))
    with torch.no_grad():  # drawn alike for all heads, they would be in any order
        base = load_file(made.base / "model.safetensors")
        drawn = {name: torch.randn_like(each) if "dt_bias" in name else each for name, each in base.items()}
        save_file(drawn, made.base / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(gguf_format, "to_file", grouped)
    with pytest.raises(FtcliError, match=rf"blk\.0\.{part}\S* differs") as caught:
        export(made, "f32")
    assert {finding.code for finding in caught.value.findings} == {"FT741"}


def test_a_missing_tensor_is_caught(shared: ExpectedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file = gguf_format.write_file

    def without_one(path: Path, name: str, values: Any, tensors: Any) -> None:
        write_file(path, name, values, {k: v for k, v in tensors.items() if k != "blk.0.attn_v.weight"})

    monkeypatch.setattr(gguf_format, "write_file", without_one)
    path = tmp_path / "model.gguf"
    write_type(shared, path, "f32")
    assert verify_file(path, "f32", shared).problems == ("blk.0.attn_v.weight is missing",)


def test_swapped_halves_of_experts_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up have one shape: only the numbers tell them apart."""
    made = adapt(tmp_path, build("mixtral"))
    monkeypatch.setattr(gguf_file.FileShapes, "read", lambda self, name: swapped(self, name))
    with pytest.raises(FtcliError, match="logits differ"):
        export(made, "f32")


def swapped(weights: Any, name: str) -> torch.Tensor:
    plain, _, half = name.partition(":")
    tensor: torch.Tensor = weights.whole.read(plain)
    return tensor.chunk(2, dim=1)[half == "gate"].contiguous() if half else tensor


@pytest.mark.parametrize("fault", ["alpha", "permutation", "cut"])
def test_a_wrong_adapter_is_caught(
    fault: str, shared: ExpectedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapter.gguf"
    if fault == "permutation":
        monkeypatch.setattr(adapter_file, "rows_in_file_order", lambda stored, b, *_: b)
    adapter_file.write_adapter(shared, path, "run", 8.0)
    if fault == "alpha":
        other_number("adapter.lora.alpha", 9.0)(path)
    if fault == "cut":
        cut_the_file(path)
    problems, _ = adapter_file.verify_gguf_adapter(shared, path)
    assert ("cannot be read" if fault == "cut" else "logits differ") in problems[0]
