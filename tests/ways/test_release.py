"""What is outside of the package: images and CI files, read as far as that goes without a daemon or a forge."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from ftcli import __version__

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ["Dockerfile", "Dockerfile.cpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, comments and joined lines resolved."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_pinned_runs_as_an_ordinary_user_and_asks_doctor(name: str) -> None:
    told = instructions(name)
    for rest in (rest for word, rest in told if word == "FROM"):
        assert re.match(r"python:\d+\.\d+\.\d+-slim-\w+( AS \w+)?$", rest), rest
    users = [rest for word, rest in told if word == "USER"]
    assert users == ["10001"]
    assert ("ENTRYPOINT", '["ftcli"]') in told
    (health,) = (rest for word, rest in told if word == "HEALTHCHECK")
    words = json.loads(health[health.index("CMD ") + 4 :])
    assert words[-3:] == ["ftcli", "doctor", "--quiet"]
    assert told.index(("USER", "10001")) < told.index(("ENTRYPOINT", '["ftcli"]'))
    for rest in (rest for word, rest in told if word == "RUN" and "pip install" in rest):
        for part in rest.split("&&"):
            if "pip install" in part:
                assert "-c /tmp/constraints.txt" in part
                _every_package_is_pinned(part)


def _every_package_is_pinned(command: str) -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    words = command.split()[command.split().index("install") + 1 :]
    skipped = {words.index(option) + 1 for option in ("-c", "--index-url") if option in words}
    for number, word in enumerate(words):
        if word.startswith(("-", "/tmp/wheels")) or number in skipped:
            continue
        assert "==" in word or word.lower() in pinned, word


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(name: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(name):
        if word != "COPY" or "--from" in rest:
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source in allowed


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_has_nothing_against_an_image(name: str) -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint has no wheel for this platform")
    done = subprocess.run([program, ROOT / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_forge_runs_what_there_is() -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert files
    subprocess.run([checker, "--builtin-schema", "vendor.github-workflows", *files], check=True, capture_output=True)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [
        step["run"]
        for file in files
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    asked = {line.split()[1] for step in steps for line in step.splitlines() if line.startswith("make ")}
    assert {"check", "release"} <= asked <= targets
    for step in steps:
        for file in re.findall(r"-f (\S+)", step):
            assert (ROOT / file).is_file()


def test_the_version_is_the_changelogs_and_the_pages() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(__version__)}\b", text, re.MULTILINE)
    assert f"ftcli-{__version__}-" in (ROOT / "docs" / "install.md").read_text()
    assert len(text[: text.index("\n## 0.2.0")].splitlines()) < 10 * 40  # screens of what a user must know


def test_the_sdist_has_what_its_tests_and_images_need() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name).exists() for name in told)
    assert {"Dockerfile", "Dockerfile.cpu", ".dockerignore", ".github", "launch", "constraints.txt"} <= set(told)
    assert shutil.which("make")
