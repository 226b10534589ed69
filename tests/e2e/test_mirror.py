"""`run.mirror`: a run's copy in a bucket is complete or absent; another machine goes on from it to the same bits."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.run.mirror import Mirror
from ftcli.train.loop import TrainingLoop
from tests.e2e.conftest import Bucket, User


@pytest.fixture
def user(narrow: User) -> User:
    return narrow


def recipe_of(user: User, bucket: Bucket | None, name: str = "r", **change: Any) -> str:
    run = {"seed": 3, "output_dir": str(user.folder / name)} | (
        {} if bucket is None else {"mirror": f"{bucket.url}/runs/r"}
    )
    checkpoint = {"every_steps": 2, "keep_last": 2}
    return user.recipe(name, run=run, checkpoint=checkpoint, **change)


def train(user: User, recipe: str, *words: str) -> tuple[int, dict[str, Any]]:
    user.capture.readouterr()
    status = main(["train", recipe, "--json", "--quiet", *words])
    return status, json.loads(user.capture.readouterr().out)


def index(bucket: Bucket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bucket.get("runs/r/mirror.json"))
    return found


def held(bucket: Bucket) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in index(bucket)["files"]}


def weights(user: User, name: str) -> bytes:
    return (user.folder / name / "adapter" / "adapter_model.safetensors").read_bytes()


def killed_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine goes away while it makes the step after that: nothing is written any more."""
    whole = TrainingLoop._train_step

    def until(self: TrainingLoop) -> Any:
        if self.step == step:
            raise SystemExit(9)
        return whole(self)

    monkeypatch.setattr(TrainingLoop, "_train_step", until)
    monkeypatch.setattr(Mirror, "finish", Mirror.wait)


def test_all_of_a_run_is_there_and_nothing_else(user: User, bucket: Bucket) -> None:
    status, document = train(user, recipe_of(user, bucket))
    assert status == 0, document
    run = user.folder / "r"
    files = held(bucket)
    assert {"recipe.yaml", "manifest.json", "metrics.jsonl", "status.json", "report.html"} <= set(files)
    assert {name.split("/")[1] for name in files if name.startswith("checkpoints/")} == {
        "step-00000002",
        "step-00000004",
    }
    for name, each in files.items():
        content = bucket.get(f"runs/r/{each.get('at', name)}")
        assert content == (run / name).read_bytes()
        assert each.get("sha256", hashlib.sha256(content).hexdigest()) == hashlib.sha256(content).hexdigest()
    assert bucket.get("runs/r/adapter/adapter_model.safetensors") == weights(user, "r")
    places = {f"runs/r/{each.get('at', name)}" for name, each in files.items()}
    assert bucket.keys() == places | {"runs/r/mirror.json"}, "what is replaced is removed"
    before = index(bucket)
    assert train(user, recipe_of(user, bucket))[1]["result"]["already_complete"]
    assert index(bucket) == before


def test_another_machine_goes_on_to_the_same_bits(user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(user, recipe_of(user, None, "whole"))[0] == 0
    with monkeypatch.context() as patch:
        killed_after(5, patch)
        train(user, recipe_of(user, bucket))
    shutil.rmtree(user.folder / "r")
    status, document = train(user, recipe_of(user, bucket))
    assert status == 0, document
    assert weights(user, "r") == weights(user, "whole")
    steps = [line["step"] for line in user.metrics("r") if "loss" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert user.losses("r") == user.losses("whole")
    status_file = json.loads((user.folder / "r" / "status.json").read_text())
    assert status_file["resumed_from"].endswith("step-00000004")


def test_a_machine_that_is_behind_keeps_its_run_beside(
    user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(user, bucket)
    with monkeypatch.context() as patch:
        killed_after(3, patch)
        train(user, recipe)
    behind = user.folder / "behind"
    shutil.copytree(user.folder / "r", behind)
    assert train(user, recipe)[0] == 0
    ended = weights(user, "r")
    shutil.rmtree(user.folder / "r")
    behind.rename(user.folder / "r")
    status, document = train(user, recipe)
    assert status == 0
    assert document["result"]["already_complete"]
    assert weights(user, "r") == ended
    assert (user.folder / "r.previous-1" / "checkpoints" / "step-00000002").is_dir()


def test_a_machine_that_was_killed_before_the_list_was_written_goes_on_with_its_own(
    user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(user, bucket)
    import s3fs

    whole = s3fs.S3FileSystem._pipe_file

    async def broken(self: Any, path: str, value: bytes, **settings: Any) -> None:
        if path.endswith("mirror.json") and b"step-00000004" in value:
            raise OSError("the machine goes away")
        await whole(self, path, value, **settings)

    with monkeypatch.context() as patch:
        s3fs.S3FileSystem.clear_instance_cache()
        patch.setattr("s3fs.S3FileSystem._pipe_file", broken)
        killed_after(5, patch)
        train(user, recipe)
    s3fs.S3FileSystem.clear_instance_cache()
    assert "checkpoints/step-00000004/complete.json" not in held(bucket)
    assert (user.folder / "r" / "checkpoints" / "step-00000004").is_dir()
    assert train(user, recipe)[0] == 0
    assert not (user.folder / "r.previous-1").exists()
    assert "checkpoints/step-00000004/complete.json" in held(bucket)


def test_a_damaged_checkpoint_is_passed_over_and_a_damaged_list_refused(
    user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(user, bucket)
    with monkeypatch.context() as patch:
        killed_after(5, patch)
        train(user, recipe)
    shutil.rmtree(user.folder / "r")
    whole = bucket.get("runs/r/checkpoints/step-00000004/adapter_model.safetensors")
    bucket.put("runs/r/checkpoints/step-00000004/adapter_model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
    with monkeypatch.context() as patch:
        killed_after(2, patch)
        _, document = train(user, recipe)
    assert "FT726" in [f["code"] for f in document["findings"]]
    assert json.loads((user.folder / "r" / "status.json").read_text())["resumed_from"].endswith("step-00000002")
    shutil.rmtree(user.folder / "r")
    manifest = held(bucket)["manifest.json"]["at"]
    bucket.put(f"runs/r/{manifest}", "{}")
    status, document = train(user, recipe)
    assert (status, [f["code"] for f in document["findings"] if f["severity"] == "error"]) == (3, ["FT776"])
    assert not (user.folder / "r").exists()


@pytest.mark.parametrize("what", ["another writer", "never", "no bucket", "web"])
def test_what_is_refused(what: str, user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(user, bucket)
    expected: tuple[int, str] = (2, "FT777")
    words: list[str] = []
    if what == "another writer":
        taken = Mirror._snapshot

        def overtaken(self: Mirror) -> Any:
            bucket.put("runs/r/mirror.json", json.dumps({"format": 1, "id": "x", "files": [{"name": "a"}]}))
            return taken(self)

        monkeypatch.setattr(Mirror, "_snapshot", overtaken)
    elif what == "never":
        assert train(user, recipe)[0] == 0
        words = ["--resume", "never"]
    elif what == "no bucket":
        words, expected = ["--set", f"run.mirror=s3://{'x' * 30}/r"], (3, "FT776")
    else:
        words, expected = ["--set", "run.mirror=https://x.y/r"], (2, "FT250")
    status, document = train(user, recipe, *words)
    codes = [f["code"] for f in document["findings"] if f["severity"] == "error"]
    assert (status, codes) == (expected[0], [expected[1]])


def test_training_goes_on_while_the_storage_is_away(
    user: User, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Mirror, *_: Any) -> None:
        raise OSError("no route to host")

    recipe = recipe_of(user, bucket)
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_put", away)
        status, document = train(user, recipe)
    codes = {f["severity"]: f["code"] for f in document["findings"] if f["code"] == "FT776"}
    assert (status, codes) == (3, {"warning": "FT776", "error": "FT776"})
    assert json.loads((user.folder / "r" / "status.json").read_text())["state"] == "completed"
    assert bucket.keys() == set()
    assert train(user, recipe)[0] == 0, "the same command copies the run"
    assert "adapter/adapter_model.safetensors" in held(bucket)


def test_a_copy_without_its_list_is_none(user: User, bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("runs/r/adapter/adapter_model.safetensors", b"half")
    assert train(user, recipe_of(user, bucket))[0] == 0
    assert bucket.get("runs/r/adapter/adapter_model.safetensors") == weights(user, "r")
