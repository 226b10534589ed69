"""`ftcli runs` and `ftcli compare`: what runs came to, listed and side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.run.comparison import compare
from ftcli.run.history import find_runs, summarise
from ftcli.run.report.compared import render_comparison


def write_run(folder: Path, *, state: str = "completed", losses: tuple[float, ...] = (2.0, 1.0), **train: Any) -> Path:
    """A run directory as training leaves it."""
    folder.mkdir(parents=True)
    recipe = {"version": 1, "run": {"name": folder.name}, "model": {"name_or_path": "m"}, "train": train}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status = {"state": state, "started": "2026-11-22T03:00:00Z", "ended": "2026-11-22T03:01:30Z", "pid": 1}
    (folder / "status.json").write_text(json.dumps(status))
    lines = [
        {"step": step, "loss": loss, "tokens": 100 * step, "tokens_per_second": 50.0, "peak_memory_bytes": 2**30}
        for step, loss in enumerate(losses, 1)
    ]
    lines.append({"step": len(losses), "eval_loss": losses[-1] + 0.5, "eval_token_accuracy": 0.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = {"loss": losses[-1] + 0.25, "tasks": [{"name": "exact_match", "value": 0.75, "count": 4}]}
    (folder / "eval.json").write_text(json.dumps({"base": None, "run": scores, "samples": []}))
    return folder


def command(capture: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capture.readouterr()
    status = main([*words, "--json", "--quiet"])
    return status, json.loads(capture.readouterr().out)


def test_a_run_is_summed_up_from_its_directory(tmp_path: Path) -> None:
    run = summarise(write_run(tmp_path / "a"))
    assert (run.state, run.step, run.loss, run.eval_loss) == ("completed", 2, 1.0, 1.25)
    assert (run.tokens, run.tokens_per_second, run.peak_memory_bytes, run.seconds) == (200, 50.0, 2**30, 90.0)
    assert run.tasks == {"exact_match": 0.75}
    assert run.token_accuracy == 0.25  # of training's last evaluation: the result has none


def test_a_run_that_nobody_holds_is_not_running(tmp_path: Path) -> None:
    assert summarise(write_run(tmp_path / "a", state="running")).state == "killed"


@pytest.mark.parametrize("file", ["status.json", "metrics.jsonl", "eval.json"])
@pytest.mark.parametrize("content", [b"", b"rubbish\n", b"[1, 2]\n", b'{"run": 3}\n', b"\xff\xfe"])
def test_damaged_files_leave_gaps_and_no_traceback(file: str, content: bytes, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    (path / file).write_bytes(content)
    assert summarise(path).path == path


def test_runs_are_found_below_a_folder_and_not_inside_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("b", "deep/er/a")]
    write_run(runs[0] / "checkpoints" / "inner")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert list(find_runs(tmp_path)) == runs
    assert list(find_runs(runs[0])) == runs[:1]


def test_differences_are_settings_and_not_names(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", learning_rate=1e-3), write_run(tmp_path / "b", max_steps=5)]
    found = {each.key: each.values for each in compare(paths).differences}
    assert found == {"train.learning_rate": ("0.001", "0.0002"), "train.max_steps": ("null", "5")}


def test_names_are_as_long_as_it_takes(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a")]
    assert compare(paths).names == ("x/a", "y/a")
    assert compare([paths[0], paths[0]]).names == ("a #1", "a #2")


def test_the_page_escapes_what_runs_say(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "<script>alert(1)<"), write_run(tmp_path / "b", losses=(3.0, float("nan")))]
    page = render_comparison(compare(paths))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, learning_rate=rate)) for name, rate in (("a", 1e-3), ("b", 1e-4))]
    status, document = command(capsys, "runs", str(tmp_path))
    assert status == 0
    assert [run["path"] for run in document["result"]["runs"]] == paths
    page = tmp_path / "page.html"
    status, document = command(capsys, "compare", *paths, "--html", str(page))
    assert status == 0
    assert document["result"]["curves"]["loss"]["b"] == [[1, 2.0], [2, 1.0]]
    assert page.read_text().startswith("<!doctype html>")
    for words in (("runs", str(tmp_path / "none")), ("compare", str(tmp_path))):
        status, document = command(capsys, *words)
        assert (status, document["findings"][0]["code"]) == (2, "FT154")


def test_the_commands_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, learning_rate=rate)) for name, rate in (("a", 1e-3), ("b", 1e-4))]
    assert main(["runs", str(tmp_path)]) == 0
    assert "75.0%" in capsys.readouterr().out
    assert main(["compare", *paths]) == 0
    shown = capsys.readouterr().out
    assert "train.learning_rate  0.001" in shown
    assert "2 █▁ 1" in shown
    assert main(["runs", str(tmp_path / "a" / "checkpoints")]) == 2
