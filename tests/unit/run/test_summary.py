"""`ftcli runs` and `ftcli compare`: what runs came to, listed and side by side."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.run.directory import RunDirectory
from ftcli.run.report import render_report
from ftcli.run.report.page import compare, render_comparison
from ftcli.run.summary import find_runs, summarise


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
    found = compare(paths).differences
    assert found == {"train.learning_rate": ["0.001", "0.0002"], "train.max_steps": ["null", "5"]}


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
    for words in (("runs", str(tmp_path / "none")), ("compare", paths[0]), ("compare", paths[0], str(page))):
        status, document = command(capsys, *words)
        assert (status, document["findings"][-1]["code"]) == (2, "FT154")


def test_the_commands_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_run(tmp_path / name, learning_rate=rate)) for name, rate in (("a", 1e-3), ("b", 1e-4))]
    assert main(["runs", str(tmp_path)]) == 0
    assert "75.0%" in capsys.readouterr().out
    assert main(["compare", *paths]) == 0
    shown = capsys.readouterr().out
    assert "train.learning_rate  0.001" in shown
    assert "2 █▁ 1" in shown
    assert main(["runs", str(tmp_path / "a" / "checkpoints")]) == 2


def test_a_comparison_takes_what_a_glob_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `compare runs/*` where a sweep has been: its folder, its page, and what else lies there."""
    for name in ("a", "rates/lr=1", "rates/lr=2"):
        write_run(tmp_path / name)
    (tmp_path / "rates" / "comparison.html").write_text("<!doctype html>")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    status, document = command(capsys, "compare", *map(str, sorted(tmp_path.iterdir())))
    assert status == 0
    assert [run["name"] for run in document["result"]["runs"]] == ["a", "lr=1", "lr=2"]
    left_out = [(each["severity"], each["message"].split(" is ")[0]) for each in document["findings"]]
    assert left_out == [("note", str(tmp_path / name)) for name in ("empty", "notes.txt")]
    status, document = command(capsys, "compare", *map(str, sorted((tmp_path / "rates").iterdir())))
    assert (status, len(document["result"]["runs"])) == (0, 2)
    status, document = command(capsys, "compare", str(tmp_path / "rates"), str(tmp_path / "no-such"))
    assert (status, document["findings"][0]["severity"]) == (0, "warning")


ODD_FILES = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "no data": lambda path: path.symlink_to("/dev/null"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "rubbish": lambda path: path.write_bytes(b"\xff\0{\n"),
    "a number": lambda path: path.write_bytes(b"1e308\n"),
    "larger than memory": lambda path: (path.touch(), os.truncate(path, 5 << 30)),
}


@pytest.mark.parametrize("file", ["status.json", "metrics.jsonl", "eval.json", "manifest.json", "recipe.yaml"])
@pytest.mark.parametrize("what", ODD_FILES)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    what: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    hurt = paths[1] / file
    hurt.unlink(missing_ok=True)
    ODD_FILES[what](hurt)
    for words in (("runs", str(tmp_path)), ("compare", *map(str, paths))):
        status, document = command(capsys, *words)
        assert status == 0
        assert len(document["result"]["runs"]) == 3
        assert [(each["code"], each["severity"]) for each in document["findings"]] == [("FT727", "warning")]
        assert f"{paths[1]} is damaged: {file}: " in document["findings"][0]["message"]
        whole = next(run for run in document["result"]["runs"] if run["path"] == str(paths[0]))
        assert (whole["state"], whole["loss"], whole["damage"]) == ("completed", 1.0, [])
    assert main(["runs", str(tmp_path)]) == 0
    assert ", damaged" in next(line for line in capsys.readouterr().out.splitlines() if str(paths[1]) in line)
    render_report(RunDirectory(paths[1]))


@pytest.mark.parametrize(
    "values",
    [
        {"started": 5},
        {"started": [1]},
        {"ended": 1e308, "message": {"a": 1}},
        {"exit_code": "x", "pid": "y"},
        {"earlier_seconds": 1e308, "pid": 10**40},
    ],
)
def test_a_status_with_odd_values(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_run(tmp_path / name) for name in ("a", "b")]
    status = json.loads((paths[0] / "status.json").read_text())
    (paths[0] / "status.json").write_text(json.dumps({**status, **values}))
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["compare", str(tmp_path)]) == 0
    assert "completed, damaged" in capsys.readouterr().out or "earlier_seconds" in values
    render_report(RunDirectory(paths[0]))


def test_a_bomb_of_aliases_is_no_recipe(tmp_path: Path) -> None:
    """A recipe that is dumped has no aliases; nine of them each ten times the last are a billion values."""
    levels = "".join(f"x{n}: &x{n} {{{', '.join(f'k{i}: *x{n - 1}' for i in range(10))}}}\n" for n in range(1, 10))
    path = write_run(tmp_path / "a")
    (path / "recipe.yaml").write_text("x0: &x0 {a: 1}\n" + levels)
    assert any("alias" in text for text in summarise(path).damage)
    assert compare([path, path]).differences == {}


STEERING = "\x1b]0;mine\x07\x1b[31mred\x9b2J\u202e"


def test_names_and_messages_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_run(tmp_path / f"{name}{STEERING}") for name in ("a", "b")]
    status = json.loads((paths[0] / "status.json").read_text())
    (paths[0] / "status.json").write_text(json.dumps({**status, "message": STEERING, "pid": STEERING}))
    tasks = {"run": {"tasks": [{"name": f"task{STEERING}\n", "value": 0.5, "count": 2}]}}
    (paths[0] / "eval.json").write_text(json.dumps(tasks))
    for words in (("runs", str(tmp_path)), ("compare", *map(str, paths)), ("compare", str(paths[0]))):
        main([*words])
        main([*words, "--json"])
    said = capsys.readouterr()
    assert "red" in said.out
    assert not set("\x1b\x07\x9b\u202e") & set(said.out + said.err)


def test_the_page_is_written_where_it_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_run(tmp_path / name) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)

    def written(target: str) -> tuple[int, str]:
        status, document = command(capsys, "compare", "a", "b", "--html", target)
        return status, "".join(finding["code"] for finding in document["findings"])

    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("metrics.jsonl", "recipe.yaml", "report.html", "manifest.json", "adapter/page.html"):
        assert written(f"a/{name}") == (2, "FT153")
    (tmp_path / "link.html").symlink_to("b/metrics.jsonl")
    (tmp_path / "notes.md").write_text("mine")
    assert written("link.html") == (2, "FT153")
    assert written("notes.md") == (2, "FT153")
    assert {path: path.read_bytes() for path in before} == before
    assert not (paths[0] / "manifest.json").exists()

    device = Path("/dev/null").stat()
    assert written("/dev/null") == (0, "")
    assert (Path("/dev/null").stat().st_mode, Path("/dev/null").stat().st_ino) == (device.st_mode, device.st_ino)
    os.mkfifo(tmp_path / "pipe")
    assert written("pipe") == (2, "FT155")  # nobody reads
    assert written("a") == (2, "FT155")
    assert written("no/page.html") == (2, "FT155")
    assert written("a\0") == (2, "FT155")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("talk")
        assert written("talk") == (2, "FT155")
    assert written("a/comparison.html") == (0, "")
    assert written("a/comparison.html") == (0, "")  # an earlier page
    (tmp_path / "page.html").touch(0o640)
    (tmp_path / "to-page.html").symlink_to("page.html")
    assert written("to-page.html") == (0, "")
    assert (tmp_path / "to-page.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640
