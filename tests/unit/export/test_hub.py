"""Uploads: what was verified, as it lies there, and nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from ftcli.errors import FtcliError
from ftcli.export.verify import Verified, not_asked
from ftcli.export.writing import ExportResult, push


class Hub:
    """A Hub that remembers, or refuses."""

    calls: list[tuple[Any, ...]]
    refusal: Exception | None

    def create_repo(self, repo: str, **options: Any) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(("create", repo, options))
        return f"https://hub/{repo}"

    def upload_folder(self, **options: Any) -> None:
        self.calls.append(("upload", options["repo_id"], Path(options["folder_path"]).name, options["path_in_repo"]))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.calls, Hub.refusal = [], None
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def result(name: str, verified: Verified | None = None) -> ExportResult:
    return ExportResult(name, Path("exports", name), 1, verified or Verified("all", {"tensors": 1}))


def test_exports_go_where_they_belong(hub: type[Hub]) -> None:
    assert push([result("gguf")], "me/mine") == "https://hub/me/mine"
    push([result("adapter"), result("gguf")], "me/both")
    made = {"exist_ok": True, "private": True}
    assert hub.calls == [
        ("create", "me/mine", made),
        ("upload", "me/mine", "gguf", None),
        ("create", "me/both", made),
        ("upload", "me/both", "adapter", "adapter"),
        ("upload", "me/both", "gguf", "gguf"),
    ]


def test_what_was_not_verified_is_not_uploaded(hub: type[Hub]) -> None:
    with pytest.raises(FtcliError, match="--no-verify") as caught:
        push([result("adapter"), result("gguf", not_asked())], "me/mine")
    assert caught.value.findings[0].code == "FT755"
    assert hub.calls == []


def test_a_hub_that_refuses_is_ft755(hub: type[Hub]) -> None:
    hub.refusal = ConnectionError("no route\nto host")
    with pytest.raises(FtcliError, match="no route") as caught:
        push([result("gguf")], "me/mine")
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT755", 3)


def test_a_hub_that_cannot_be_reached_is_ft755(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client's own errors, which are those of its HTTP library."""
    api = partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9", token="hf_none")
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    with pytest.raises(FtcliError, match="nothing more is uploaded") as caught:
        push([result("gguf")], "me/mine")
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT755", 3)
