"""What `ftcli export --json` says of each export."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.config.load import load_recipe
from ftcli.errors import Finding, FtcliError
from ftcli.export import writing as export
from ftcli.export.verify import Verified
from ftcli.pipeline.exporting import ExportOptions, export_recipe
from ftcli.plain import plain
from ftcli.reporting import Session


def test_warnings_about_an_export_are_in_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Finding("FT744", "half of the adapter is lost in rounding", severity="warning")
    made = export.ExportResult("safetensors", tmp_path, 7, Verified("logits", {"logits": 0.1}, (lost,)))
    monkeypatch.setattr(export, "export_run", lambda *_args, **_kwargs: [made])
    recipe = tmp_path / "r.yaml"
    recipe.write_text('version: 1\nmodel: {name_or_path: "bundled:tiny-gemma2"}\ndata: {max_seq_len: 64}\n')
    result = plain(export_recipe(load_recipe(recipe), Session(offline=True), tmp_path, ExportOptions()))
    assert result["exports"][0]["warnings"] == [{"code": "FT744", "message": "half of the adapter is lost in rounding"}]


@pytest.mark.parametrize("options", [{"verify": False}, {}])
def test_nothing_is_uploaded_offline_or_unverified(tmp_path: Path, options: dict[str, bool]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('version: 1\nmodel: {name_or_path: "bundled:tiny-gemma2"}\n')
    asked = ExportOptions(repo="me/mine", **options)
    with pytest.raises(FtcliError, match="--push-to-hub me/mine") as caught:
        export_recipe(load_recipe(recipe), Session(offline=not options), tmp_path, asked)
    assert caught.value.findings[0].code == "FT755"


@pytest.mark.parametrize("repo", ["s3://bucket/mine", "a/b/c", "https://huggingface.co/me/mine", "", "me/--"])
def test_a_name_that_is_none_on_the_hub_is_refused_before_anything_is_written(tmp_path: Path, repo: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text('version: 1\nmodel: {name_or_path: "bundled:tiny-gemma2"}\n')
    with pytest.raises(FtcliError, match="no name of a repository") as caught:
        export_recipe(load_recipe(recipe), Session(), tmp_path, ExportOptions(repo=repo))
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT755", 2)
