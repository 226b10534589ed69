"""How much of a model is to be downloaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ftcli.facts.config_file import missing_bytes, sizes_on_hub

COMMIT = "c" * 40
FILES = {
    "config.json": 5, "model-00001-of-00002.safetensors": 1000, "model-00002-of-00002.safetensors": 300,
    "original/model.safetensors": 70_000, "pytorch_model.bin": 9_000, "adapter_model.safetensors": 80,
}  # fmt: skip


def test_only_weights_that_are_not_in_the_cache_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert missing_bytes("a/b", None, sizes=lambda *_: (FILES, COMMIT)) == 1300
    folder = tmp_path / "models--a--b" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x")
    assert missing_bytes("a/b", None, sizes=lambda *_: (FILES, COMMIT)) == 300


def test_a_hub_that_does_not_answer_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert sizes_on_hub("a/b", None) == ({}, None)
    assert missing_bytes("a/b", None, sizes=lambda *_: ({}, None)) == 0


def test_a_proxy_that_does_not_answer_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://127.0.0.1:9"})
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9"))
    assert sizes_on_hub("a/b", None) == ({}, None)
