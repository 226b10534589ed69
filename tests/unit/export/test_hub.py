"""Uploads: what was verified, as it lies there, and nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
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

    def create_branch(self, repo: str, **options: Any) -> None:
        self.calls.append(("branch", repo, options))

    def create_commit(self, repo: str, operations: list[Any], **options: Any) -> Any:
        files = [(one.path_in_repo, Path(one.path_or_fileobj).read_text()) for one in operations]
        self.calls.append(("commit", repo, files, options["revision"]))
        return SimpleNamespace(commit_url=f"https://hub/{repo}/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.calls, Hub.refusal = [], None
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def result(name: str, verified: Verified | None = None, folder: Path = Path("exports")) -> ExportResult:
    return ExportResult(name, folder / name, 1, verified or Verified("all", {"tensors": 1}))


def test_exports_go_where_they_belong_by_one_commit(hub: type[Hub], tmp_path: Path) -> None:
    """Whole or not at all: a commit for each format left some where a later one failed."""
    for name in ("adapter", "gguf"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "README.md").write_text(name)
        (tmp_path / name / "sub" / "x").write_text("x")
    both = [result(name, folder=tmp_path) for name in ("adapter", "gguf")]
    assert push(both[1:], "me/mine@v2/a") == "https://hub/me/mine/commit/1"
    push(both, "me/both")
    made = {"exist_ok": True, "private": True}
    assert hub.calls == [
        ("create", "me/mine", made),
        ("branch", "me/mine", {"branch": "v2/a", "exist_ok": True}),
        ("commit", "me/mine", [("README.md", "gguf"), ("sub/x", "x")], "v2/a"),
        ("create", "me/both", made),
        (
            "commit",
            "me/both",
            [
                (f"{name}/{file}", text)
                for name in ("adapter", "gguf")
                for file, text in (("README.md", name), ("sub/x", "x"))
            ],
            None,
        ),
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
    with pytest.raises(FtcliError, match="nothing is uploaded") as caught:
        push([result("gguf")], "me/mine")
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT755", 3)
