"""`scheme://`: no key and no option takes it for the name of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.errors import FtcliError
from ftcli.paths import expanded, make_folder, unserved


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("s3://bucket/x", "name a path of this machine"),
        (" gs://bucket/x", "name a path of this machine"),
        ("simplecache::s3://bucket/x", "name a path of this machine"),
        ("file:///data/x.jsonl", "write the path alone: /data/x.jsonl"),
        ("hf://datasets/org/name", "written hub:org/name"),
        ("https://huggingface.co/datasets/org/name/", "written hub:org/name"),
        ("https://huggingface.co/org/name", "written org/name"),
    ],
)
def test_a_storage_that_is_not_served_is_named(name: str, help: str) -> None:
    with pytest.raises(FtcliError) as caught:
        expanded(name)
    (finding,) = caught.value.findings
    assert finding.code == "FT165"
    assert help in str(finding.help)


def test_who_may_read_it_is_not_shown() -> None:
    said = unserved("https://user:secret@host/x?signature=secret")
    assert said is not None
    assert "secret" not in " ".join(said)


@pytest.mark.parametrize("name", ["org/name", "hub:org/name", "bundled:x", "./s3:/x", "data/a://b", "C:/x", "s3:x", ""])
def test_paths_stay_paths(name: str) -> None:
    assert expanded(name) == Path(name)


def test_folders_too_deep_for_python_are_an_error_of_the_system(tmp_path: Path) -> None:
    make_folder(tmp_path / "/".join("a" * 100))
    with pytest.raises(OSError, match="more than 250 folders"):
        make_folder(tmp_path / "/".join("b" * 1000))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
