"""Training rows in a bucket and at a web address: fetched whole, once, again when they change, within a bound."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.config.data import DatasetConfig
from ftcli.errors import FtcliError
from ftcli.reporting import SilentReporter
from ftcli.rows.remote import RemoteData
from tests.e2e.conftest import Bucket, User

GIB = 2**30


def rows(count: int, word: str = "hi") -> str:
    chats = ([{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": word}] for n in range(count))
    return "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)


@pytest.fixture
def user(narrow: User, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.setenv("FTCLI_CACHE", str(narrow.folder / "cache"))
    return narrow


def run(user: User, *words: str) -> tuple[int, dict[str, Any]]:
    """A command that may use the network."""
    user.capture.readouterr()
    status = main([*words, "--json", "--quiet"])
    return status, json.loads(user.capture.readouterr().out)


def fetched(user: User) -> dict[str, float]:
    folder = user.folder / "cache" / "remote"
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.suffix != ".json"}


def test_a_run_reads_a_folder_of_a_bucket_and_goes_on_with_the_same_bytes(user: User, bucket: Bucket) -> None:
    bucket.put("chats/a.jsonl", rows(6))
    bucket.put("chats/b.jsonl", rows(5, "ho"))
    bucket.put("chats/_log.jsonl", "not rows")
    bucket.put("chats/readme.txt", "none either")
    kept = {"checkpoint": {"every_steps": 1}}
    recipe = user.recipe("r", data={"train": [f"{bucket.url}/chats"]}, train={"max_steps": 2}, **kept)
    status, document = run(user, "train", recipe)
    assert status == 0, document
    ledger = json.loads((user.folder / "r" / "tokens.json").read_text())["datasets"][0]
    assert (ledger["name"], ledger["rows"]) == (f"{bucket.url}/chats", 11)
    files = json.loads((user.folder / "r" / "manifest.json").read_text())["data"]
    assert [file["name"] for file in files] == [f"{bucket.url}/chats/a.jsonl", f"{bucket.url}/chats/b.jsonl"]
    held = fetched(user)
    assert len(held) == 2
    status, document = run(user, "check", recipe)
    assert status == 0
    assert fetched(user) == held, "what is here is not fetched again"
    assert user.run("train", recipe)[1]["result"]["already_complete"], "offline, from the cache"
    user.cut_off("r")
    bucket.put("chats/b.jsonl", rows(5, "hu"))
    status, document = run(user, "train", recipe)
    assert (status, document["findings"][-1]["code"]) == (2, "FT731")
    assert f"{bucket.url}/chats/b.jsonl" in document["findings"][-1]["message"]


def test_a_pattern_names_files_and_splits_are_told_apart(user: User, bucket: Bucket) -> None:
    for name in ("x/train-1.jsonl", "x/train-2.jsonl", "x/test-1.jsonl"):
        bucket.put(name, rows(4))
    change: dict[str, Any] = {"train": {"max_steps": 1}}
    recipe = user.recipe("r", data={"train": [f"{bucket.url}/x/train-*.jsonl"]}, **change)
    status, document = run(user, "train", recipe)
    assert status == 0, document
    ledger = json.loads((user.folder / "r" / "tokens.json").read_text())["datasets"][0]
    assert ledger["rows"] == 8
    status, document = run(user, "check", user.recipe("r", data={"train": [f"{bucket.url}/x"]}))
    assert (status, [f["code"] for f in document["findings"] if f["severity"] == "error"]) == (4, ["FT407"])
    named = {"path": f"{bucket.url}/x", "split": "test"}
    status, document = run(user, "check", user.recipe("r", data={"train": [named]}))
    assert status == 0, document


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server of a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            return

    folder = tmp_path / "web"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_web_address_is_read(user: User, web: tuple[str, Path]) -> None:
    address, folder = web
    (folder / "my.jsonl").write_text(rows(5))
    recipe = user.recipe("r", data={"train": [f"{address}/my.jsonl"]}, train={"max_steps": 1})
    status, document = run(user, "train", recipe)
    assert status == 0, document
    status, document = run(user, "check", user.recipe("r", data={"train": [f"{address}/none.jsonl"]}))
    (finding,) = document["findings"]
    assert (status, finding["code"]) == (4, "FT410")
    assert f"{address}/none.jsonl cannot be read from the web" in finding["message"]


@pytest.mark.parametrize("what", ["no file", "no bucket", "offline", "too large", "no cache", "not data"])
def test_what_cannot_be_fetched_is_refused(what: str, user: User, bucket: Bucket, monkeypatch: Any) -> None:
    source = bucket.put("a.jsonl", rows(5))
    data: dict[str, Any] = {"train": [source]}
    if what == "no file":
        data["train"] = [f"{bucket.url}/none.jsonl"]
    elif what == "no bucket":
        data["train"] = [f"s3://{'x' * 30}/a.jsonl"]
    elif what == "too large":
        data["remote_cache_gib"] = 1e-9
    elif what == "no cache":
        monkeypatch.setenv("FTCLI_CACHE", "off")
    elif what == "not data":
        data["train"] = [bucket.put("a.bin", "x")]
    recipe = user.recipe("r", data=data)
    status, document = user.run("check", recipe) if what == "offline" else run(user, "check", recipe)
    (finding,) = (f for f in document["findings"] if f["severity"] == "error")
    assert (status, finding["code"]) == (4, "FT402" if what == "not data" else "FT410")
    assert finding["help"]
    assert not list((user.folder / "cache").rglob(".fetching-*"))


def test_without_the_package_the_remedy_is_named(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "gcsfs" else found(name, *rest))
    status, document = run(user, "check", user.recipe("r", data={"train": ["gs://bucket/a.jsonl"]}))
    (finding,) = document["findings"]
    assert (status, finding["code"], finding["help"]) == (2, "FT253", "pip install 'ftcli[remote]'")


def test_the_cache_is_bounded_and_the_longest_unused_go_first(bucket: Bucket, tmp_path: Path) -> None:
    names = [bucket.put(f"{n}.jsonl", "x" * 1000) for n in range(4)]

    def fetch(name: str) -> Path:
        data = RemoteData(tmp_path, SilentReporter(), offline=False, most_bytes=2500)
        ((_, path),) = data.fetched(DatasetConfig(path=name)).files or ()
        return path

    first, second = fetch(names[0]), fetch(names[1])
    __import__("os").utime(second, (1, 1))
    third = fetch(names[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    assert fetch(names[0]) == first
    with pytest.raises(FtcliError) as caught:
        RemoteData(tmp_path, SilentReporter(), offline=False, most_bytes=999).fetched(DatasetConfig(path=names[3]))
    assert caught.value.findings[0].code == "FT410"


def test_check_does_not_fetch_what_is_large(bucket: Bucket, tmp_path: Path) -> None:
    source = DatasetConfig(path=bucket.put("a.jsonl", "x" * 1000))
    data = RemoteData(tmp_path, SilentReporter(), offline=False, most_bytes=GIB, largest=999)
    assert data.fetched(source).files is None
    assert not list(tmp_path.glob("remote/*-*"))


class Broken:
    """A storage whose connection ends early."""

    def isdir(self, path: str) -> bool:
        return False

    def info(self, path: str) -> dict[str, Any]:
        return {"size": 1000, "ETag": "x"}

    def get_file(self, path: str, name: str) -> None:
        Path(name).write_text("x" * 400)


def test_a_file_that_arrives_in_part_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.rows.remote.opened", lambda path: (Broken(), path))
    source = DatasetConfig(path="s3://b/a.jsonl")
    with pytest.raises(FtcliError, match="400 of 1,000 bytes arrived"):
        RemoteData(tmp_path, SilentReporter(), offline=False, most_bytes=GIB).fetched(source)
    assert not list(tmp_path.glob("remote/*-*"))
    assert not list(tmp_path.glob("remote/.fetching-*"))
