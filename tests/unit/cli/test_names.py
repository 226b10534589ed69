"""Names that are nearly right lead to what was meant; a remedy of many rows stands once; files are written whole."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli import files
from ftcli.cli.app import main
from ftcli.cli.render import Style, findings_text
from ftcli.cli.reporters import CollectingReporter
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.rows.row import BROKEN_HELP


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with a run and a recipe in the usual places."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "recipe.yaml").write_text("version: 1\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("version: 1\nmodel: {name_or_path: 'bundled:tiny-gemma2'}\n")
    return tmp_path


@pytest.mark.parametrize("words", ["train smoke", "check smoke.yaml", "export smoke", "chat smoke"])
def test_a_recipe_of_the_package_is_meant_whatever_else_lies_there(
    here: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    for name in ("r.yaml", "smoker.yaml"):
        (here / name).write_text("version: 1\n")
    assert main(words.split()) == 2
    assert "`ftcli recipes copy smoke` writes the recipe" in capsys.readouterr().err
    assert main(["train", "smokes"]) == 2
    assert "did you mean smoker.yaml?" in capsys.readouterr().err
    assert main(["train", "zzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "help"),
    [
        ("train smoke", "`ftcli recipes copy smoke` writes the recipe"),
        ("train smoke.yaml", "`ftcli recipes copy smoke` writes the recipe"),
        ("check gemma2-9bb", "`ftcli recipes copy gemma2-9b` writes"),
        ("check recipes/smoke-grpo.yaml", "`ftcli recipes copy smoke-grpo` writes"),
        ("train mine", "did you mean recipes/mine.yaml?"),
        ("train zzzzzz", "`ftcli recipes list`"),
        ("export runs/frist", "did you mean runs/first?"),
        ("export first", "did you mean runs/first?"),
        ("eval recipes/mine.yaml --run first", "did you mean runs/first?"),
        ("compare firs", "did you mean runs/first?"),
        ("smoke", "`ftcli recipes copy smoke`, then `ftcli train smoke.yaml`"),
        ("runs/first", "that is a run: `ftcli export runs/first`"),
        ("recipes smoke", "did you mean `ftcli recipes show smoke`?"),
        ("eval recipes/mine.yaml runs/first", "write --run runs/first"),
        ("train --config recipes/mine.yaml", "without an option: `ftcli train RECIPE`"),
        ("check recipes/mine.yaml --gpu t4", "did you mean --as"),
        ("train recipes/mine.yaml --lr 3", "--set train.learning_rate=VALUE"),
        ("train recipes/mine.yaml --max_steps 3", "did you mean --max-steps?"),
        ("train recipes/mine.yaml --output_dir x", "did you mean --output-dir?"),
        ("train recipes/mine.yaml --epochs 3", "--set train.num_train_epochs=VALUE"),
    ],
)
def test_near_misses(here: Path, capsys: pytest.CaptureFixture[str], words: str, help: str) -> None:
    assert main(words.split()) == 2
    assert help in capsys.readouterr().err


def row(number: int, code: str = "FT403", help: str | None = BROKEN_HELP) -> Finding:
    return Finding(code, "not JSON", Origin("d.jsonl", number), help)


def test_the_remedy_of_many_rows_stands_once() -> None:
    others = (replace(row(n), message=f"not JSON: {'x' * n}") for n in range(3, 101))
    found = [row(1), row(2, "FT412", "other"), *others]
    lines = findings_text(found, Style(color=False)).splitlines()
    assert sum(BROKEN_HELP in line for line in lines) == 1
    assert BROKEN_HELP in lines[-1]
    assert sum("other" in line for line in lines) == 1
    assert len(lines) == 102
    recipe = [Finding("FT201", "x", Origin("r.yaml", n, 1, "a: b"), "remove it") for n in (1, 2)]
    assert findings_text(recipe, Style(color=False)).count("remove it") == 2, "findings in a recipe keep theirs"


def test_rows_that_are_told_one_by_one_have_their_remedy_once(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    reporter = CollectingReporter(sys.stderr, Style(color=False), quiet=False)
    for number in range(5):
        reporter.finding(row(number + 1))
    assert capsys.readouterr().err.count(BROKEN_HELP) == 1
    assert [finding.help for finding in reporter.findings] == [BROKEN_HELP] * 5, "--json has them all"


def test_a_recipe_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "r.yaml"
    target.write_text("old")

    real = Path.open
    for force, left in ((True, "old"), (False, None)):
        if not force:
            target.unlink()

        def broken(self: Path, *args: Any, **kwargs: Any) -> Any:
            stream = real(self, *args, **kwargs)
            stream.write(b"half of it")
            stream.flush()
            return Full(stream)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", broken)
            with pytest.raises(FtcliError, match="FT155"):
                files.write_new("new", target, force=force)
        assert (target.read_text() if target.exists() else None) == left
        assert list(tmp_path.iterdir()) == ([target] if left else [])


class Full:
    """A stream on a disk that is full."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    target, link = tmp_path / "r.yaml", tmp_path / "link.yaml"
    files.write_new("one", target, force=False)
    with pytest.raises(FtcliError, match="FT153"):
        files.write_new("two", target, force=False)
    link.symlink_to(target)
    files.write_new("three", link, force=True)
    assert (target.read_text(), link.is_symlink()) == ("three", True)
    dangling = tmp_path / "dangling.yaml"
    dangling.symlink_to(tmp_path / "nowhere.yaml")
    with pytest.raises(FtcliError, match="FT153"):
        files.write_new("four", dangling, force=False)
    with pytest.raises(FtcliError, match="FT155"):
        files.write_new("five", tmp_path / "no" / "r.yaml", force=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling.yaml", "link.yaml", "r.yaml"]
