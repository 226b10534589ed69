"""Whether a command runs in this process or in several, and with which GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftcli.cli import children as workers
from ftcli.cli.app import main
from ftcli.cli.commands import train as ranks
from ftcli.cli.options import EndedElsewhere


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int, tuple[str, ...]]]:
    """What was started, in place of starting it; there are four GPUs."""
    found: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = []

    def run(words: Sequence[str], count: int, devices: Sequence[str], run: Path, threads: str | None) -> EndedElsewhere:
        found.append((tuple(words), count, tuple(devices)))
        return EndedElsewhere(6)

    monkeypatch.setattr(workers, "run_ranks", run)
    monkeypatch.setattr(ranks, "_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text(
        "version: 1\nmodel: {name_or_path: 'bundled:tiny-gemma2'}\ndata: {train: ['bundled:smoke-train']}\n"
    )
    return str(path)


def test_ranks_are_started_with_the_same_words_and_tell_the_outcome_themselves(
    started: list[object], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", recipe, "--gpus", "2", "--json"]
    assert main(words) == 6
    assert main(["bench", recipe, "--gpus", "auto"]) == 6
    assert main(["train", recipe, "--set", "launch.num_processes=3"]) == 6
    assert started == [
        (tuple(words), 2, ("0", "1")),
        (("bench", recipe, "--gpus", "auto"), 4, ("0", "1", "2", "3")),
        (("train", recipe, "--set", "launch.num_processes=3"), 3, ("0", "1", "2")),
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("gpus", "status", "code"), [("5", 3, "FT516"), ("some", 2, "FT150"), ("0", 2, "FT150")])
def test_what_is_not_there_is_refused(
    gpus: str, status: int, code: str, started: list[object], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--gpus", gpus, "--json"]) == status
    assert [finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]] == [code]
    assert started == []


def test_a_machine_without_gpus_takes_no_more_processes_than_cores(
    started: list[object], recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_count", lambda: 0)
    monkeypatch.setattr("ftcli.facts.device.usable_cores", lambda: 8)
    assert main(["train", recipe, "--set", "launch.num_processes=1000000"]) == 3
    assert (
        "error[FT516]: launch.num_processes 1,000,000: there is no GPU here, and 8 CPU cores" in capsys.readouterr().err
    )
    assert main(["train", recipe, "--set", "launch.num_processes=8"]) == 6
    assert started[0][1:] == (8, ())  # type: ignore[index]
    monkeypatch.setattr("ftcli.cli.children.count_gpus", lambda: 0)
    assert main(["train", recipe, "--gpus", "4"]) == 6
    assert started[1][1:] == (4, ())  # type: ignore[index]
    assert main(["train", recipe, "--gpus", "9"]) == 3
    assert "--gpus 9: error[FT516]: launch.num_processes 9: there is no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "refused"), [("3", True), ("2", False)])
def test_check_refuses_as_many_processes_as_train(
    gpus: str, refused: bool, recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftcli.facts.device.usable_cores", lambda: 1)
    words = ["check", recipe, "--offline", "--gpus", gpus, "--set", "data.max_seq_len=64"]
    main(words)
    assert ("--gpus 3: error[FT516]: launch.num_processes 3" in capsys.readouterr().err) is refused
    assert main([*words, "--as", "h100"]) == 0


def test_the_gpus_that_are_visible_are_those_that_ranks_get(
    started: list[object], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert main(["train", recipe, "--gpus", "auto"]) == 6
    assert started[0][1:] == (2, ("6", "7"))  # type: ignore[index]
