"""Commands as a user runs them, on the bundled tiny model with a few rows and steps."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ftcli.assets import asset
from ftcli.cli.app import main
from tests.e2e.drill import Server

if TYPE_CHECKING:
    from tests.e2e.resilience import Drills

RECIPE: dict[str, Any] = {
    "version": 1,
    "run": {"seed": 3},
    "model": {"name_or_path": "bundled:tiny-gemma2", "dtype": "float32"},
    "lora": {"r": 4},
    "data": {
        "train": [{"path": "bundled:smoke-train", "max_rows": 40}],
        "eval": [{"path": "bundled:smoke-eval", "max_rows": 6}],
        "max_seq_len": 64,
    },
    "train": {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3},
    "eval": {"samples": 2, "generate": {"max_new_tokens": 2}},
    "logging": {"every_steps": 1},
}

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml takes a quarter of the time

#: The bundled tiny model's shape at a quarter of its width and half its depth, with random weights: half the time of a
#: run, for tests that ask nothing of what the model knows.
NARROW: dict[str, Any] = {
    "name_or_path": str(Path(__file__).with_name("narrow-gemma2")),
    "init": "random",
    "tokenizer": "bytes",
    "dtype": "float32",
}


def recipe_of(model: dict[str, Any], output: Path, change: dict[str, Any]) -> dict[str, Any]:
    """RECIPE with this model, run directory and change; a change that names another model has nothing of this one."""
    if "name_or_path" in (change.get("model") or {}):
        model = RECIPE["model"]
    return merged({**RECIPE, "model": model, "run": {**RECIPE["run"], "output_dir": str(output)}}, change)


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the maps of ``change`` merged into it."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    timed = ("tokens_per_second", "peak_memory_bytes", "step_time", "seconds/", "throughput/")
    return {key: value for key, value in line.items() if not key.startswith(timed)}


@dataclass(frozen=True)
class User:
    """Runs command lines in ``folder``."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    model: dict[str, Any] = field(default_factory=lambda: RECIPE["model"])

    def recipe(self, name: str = "r", **change: Any) -> str:
        """Writes a recipe whose run directory is ``<folder>/<name>``; returns its path."""
        path = self.folder / f"{name}.yaml"
        recipe = recipe_of(self.model, self.folder / name, change)
        path.write_text(yaml.dump(recipe, Dumper=_DUMPER), encoding="utf-8")
        return str(path)

    def run(self, *words: str) -> tuple[int, dict[str, Any]]:
        """Exit status and JSON document of one command."""
        self.capture.readouterr()
        status = main([*words, "--json", "--quiet", "--offline"])
        return status, json.loads(self.capture.readouterr().out)

    def done(self, *words: str) -> dict[str, Any]:
        """The result of a command that succeeds."""
        status, document = self.run(*words)
        assert status == 0, document["findings"]
        result: dict[str, Any] = document["result"]
        return result

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl."""
        text = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def cut_off(self, name: str) -> Path:
        """Takes a finished run back to when the machine goes away after its last checkpoint: no result, no end."""
        run = self.folder / name
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            (run / "adapter" / file).unlink()
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
        return run

    def goes_on_alike(self, name: str, recipe: str, command: str = "train") -> None:
        """A finished run, cut off after its last checkpoint, ends with the same numbers and weights to the last bit."""
        folder = self.folder / name
        result = next(path for path in (folder / "adapter", folder / "model") if path.is_dir())
        weights = {path.name: path.read_bytes() for path in result.glob("*.safetensors")}
        lines = [_without_times(line) for line in self.metrics(name)]
        assert weights
        assert list((folder / "checkpoints").iterdir())
        for file in ("adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json"):
            (result / file).unlink(missing_ok=True)
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
        self.done(command, recipe)
        assert [_without_times(line) for line in self.metrics(name)] == lines
        assert {path.name: path.read_bytes() for path in result.glob("*.safetensors")} == weights

    def losses(self, name: str) -> list[float]:
        """The training losses of a run, by step."""
        return [line["loss"] for line in self.metrics(name) if "loss" in line]


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_clean: None) -> User:
    """A user in an empty folder."""
    return User(tmp_path, capsys)


@pytest.fixture
def narrow(tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_clean: None) -> User:
    """A user in an empty folder whose recipes have the narrow model."""
    return User(tmp_path, capsys, NARROW)


@pytest.fixture(scope="session")
def narrow_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the narrow model with weights, for what takes them from files: merging, for one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(NARROW["name_or_path"]))
    folder = tmp_path_factory.mktemp("models") / "tiny-gemma2"
    shutil.copytree(asset("models", "tiny-gemma2"), folder)  # for its tokenizer
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def stored(narrow: User, narrow_files: Path) -> User:
    """A user in an empty folder whose recipes have the narrow model, its weights from files."""
    return User(narrow.folder, narrow.capture, {"name_or_path": str(narrow_files), "dtype": "float32"})


@pytest.fixture
def drills(tmp_path: Path, drill_server: Server) -> Drills:
    """Real runs in an empty folder."""
    from tests.e2e.resilience import Drills

    return Drills(tmp_path, drill_server)


@pytest.fixture
def shell(tmp_path: Path, drill_server: Server, narrow_files: Path) -> dict[str, str]:
    """An environment in which `ftcli` starts in a moment, trains the narrow model as the bundled one, and measures on
    a few rows of the bundled held-out data.

    `ftcli recipes copy gemma2-9b` is the installed command all the same, in a process that imports everything anew.
    """
    folder = Path(sys.executable).parent
    command = tmp_path / "bin" / "ftcli"
    command.parent.mkdir()
    command.write_text(
        "#!/bin/sh\n"
        f'case "$*" in "recipes copy gemma2-9b "*) exec {folder}/ftcli "$@" ;; esac\n'
        f'exec {" ".join(drill_server.client)} "$@"\n'
    )
    command.chmod(0o755)
    path = f"{command.parent}:{folder}:{os.environ['PATH']}"
    held_out = tmp_path / "held-out"
    held_out.mkdir()
    own = {"PATH": path, "FTCLI_CACHE": drill_server.cache, "PAUSE": "0"}
    shortcuts = [
        ["few_held_out", 12, str(held_out)],
        ["bundled_models", str(narrow_files.parent)],
        ["warm_clean", drill_server.socket],
    ]
    return {**drill_server.environment, **own, "DRILL_PREPARATIONS": json.dumps(shortcuts)}


@pytest.fixture(scope="session")
def storage() -> Iterator[str]:
    """The address of an S3 server on this machine."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket of its own, which this process reaches as a user's would."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", storage)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"b{abs(hash(tmp_path)):x}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    return Bucket(name, client)


@dataclass(frozen=True)
class Bucket:
    """A bucket and a client that looks into it."""

    name: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, content: str | bytes) -> str:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)
        return f"{self.url}/{key}"

    def keys(self) -> set[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {each["Key"] for each in found}

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content
