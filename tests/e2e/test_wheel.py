"""An install that is no checkout: the wheel, in a virtual environment of its own, used from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command without anything of the checkout in its environment; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without the network: hatchling is among the development packages."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder], ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment that has the wheel, and this one's packages but for ftcli."""
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", environment], environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, wheel], environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Of the folder's own .pth files, such as that of the editable install, nothing is read.
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_no_other_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        "ftcli": ROOT / "ftcli",
        "ftkernels": ROOT / "kernels" / "ftkernels",
        "ftcli/assets/recipes": ROOT / "recipes",
    }
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in sources.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"ftcli", "ftkernels"}


@pytest.mark.long
def test_an_installed_ftcli_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = "import ftcli, ftkernels; print(ftcli.__file__, ftkernels.__file__)"
    for file in run([installed / "python", "-c", where], tmp_path).stdout.split():
        assert file.startswith(str(installed.parent)), file
    ftcli = installed / "ftcli"
    listed = json.loads(run([ftcli, "recipes", "list", "--json"], tmp_path).stdout)["result"]["recipes"]
    assert {entry["name"] for entry in listed} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    run([ftcli, "recipes", "copy", "gemma2-9b"], tmp_path)
    short = ["--set", "train.warmup_steps=1", "--set", "data.train.0={path: bundled:smoke-train, max_rows: 64}"]
    cache = {"FTCLI_CACHE": str(tmp_path / "cache")}
    commands = [
        ["check", "gemma2-9b.yaml", "--as", "h100", "--offline"],
        ["recipes", "copy", "smoke", "mine.yaml"],
        ["train", "mine.yaml", "--max-steps", "2", "--offline", *short],
        ["export", "runs/mine", "--offline", "--json", "--format", "safetensors", "--format", "adapter"],
    ]
    all = f"from ftcli.cli.app import main; import sys; sys.exit(any([main(words) for words in {commands}]))"
    done = run([installed / "python", "-c", all], tmp_path, **cache)  # one process: the libraries are imported once
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    document = json.loads(done.stdout[done.stdout.index("{") :])
    assert document["ok"] is True
    # Exports are loaded again in a process of their own, which has imported no more than each takes.
    merged, adapter = (each["verification"] for each in document["result"]["exports"])
    assert "transformers" in merged["reloaded_by"]
    assert "peft" not in merged["reloaded_by"]
    assert "peft" in adapter["reloaded_by"]
    assert 1e8 < merged["reload_peak_bytes"] < 4e9
    assert merged["greedy_tokens"] == "6 of 6"
    assert (tmp_path / "runs" / "mine" / "export" / "safetensors" / "model.safetensors").is_file()
