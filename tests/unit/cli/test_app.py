"""The command as a whole: help, statuses, what goes to which stream, and what every kind of failure becomes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli import __version__
from ftcli.cli import app
from ftcli.cli.app import main
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.reporting import Session

COMMANDS = ("train", "eval", "grpo", "export", "chat", "serve-check", "sample", "check", "bench", "recipes", "doctor")
RECIPE = "version: 1\nmodel: {name_or_path: m}\n"


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Session], dict[str, Any]]], None]:
    """Gives `ftcli doctor` another action, so that a command can end in any way."""

    def put(action: Callable[[Session], dict[str, Any]]) -> None:
        monkeypatch.setattr(app.doctor, "examine", action)
        monkeypatch.setattr(app.doctor, "doctor_text", lambda result: json.dumps(result))

    return put


def raising(error: BaseException) -> Callable[[Session], dict[str, Any]]:
    def action(_: Session) -> dict[str, Any]:
        raise error

    return action


def test_help_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(name in out for name in COMMANDS)
    assert "Examples:" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"ftcli {name} " in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("recipes", "doctor")])
def test_every_command_on_a_recipe_takes_the_common_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([name, "--help"])
    out = capsys.readouterr().out
    assert all(option in out for option in ("--set KEY=VALUE", "--json", "--quiet", "--offline", "--debug"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ftcli {__version__}\n"


def test_finding_of_a_failure_goes_to_stderr_with_its_status(
    doing: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    doing(raising(FtcliError([Finding("FT999", "late", help="come earlier")], ExitCode.PREEMPTED)))
    assert main(["doctor"]) == 75
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "ftcli: error[FT999]: late\n  help: come earlier\n"


def test_result_goes_to_stdout_and_words_to_stderr(
    doing: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def action(session: Session) -> dict[str, Any]:
        session.reporter.info("some words")
        session.reporter.warn("careful")
        print("a library prints")  # noqa: T201
        return {"loss": 1.0}

    doing(action)
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out == '{"loss": 1.0}\n'
    assert err.splitlines() == ["some words", "warning: careful", "a library prints"]
    assert main(["doctor", "--quiet"]) == 0
    assert "some words" not in capsys.readouterr().err


def test_json_is_one_document_with_the_warnings_that_were_told(
    doing: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def action(session: Session) -> dict[str, Any]:
        session.reporter.finding(Finding("FT259", "no effect", severity="warning"))
        print("a library prints")  # noqa: T201
        return {"loss": float("nan"), "path": Path("x")}

    doing(action)
    assert main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["ok"] is True
    assert document["result"] == {"loss": None, "path": "x"}
    assert [finding["code"] for finding in document["findings"]] == ["FT259"]
    assert "warning[FT259]" in err


def test_ctrl_c(doing: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    doing(raising(KeyboardInterrupt()))
    assert main(["doctor"]) == 130
    assert "FT191" in capsys.readouterr().err


def test_a_bug_leaves_its_traceback_in_a_file(
    doing: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    doing(raising(RuntimeError("shapes do not match\nsecond line")))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "error[FT190]: this is a bug in ftcli: RuntimeError: shapes do not match\n" in err
    assert "Traceback" not in err
    (crash,) = tmp_path.glob("ftcli-crash-*.txt")
    assert str(crash) in err
    assert "Traceback" in crash.read_text()
    assert "second line" in crash.read_text()


def test_a_bug_shows_its_traceback_with_debug(doing: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    doing(raising(RuntimeError("broken")))
    assert main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


OutOfMemoryError.__module__ = "torch"


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_lack_of_memory(error: BaseException, doing: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    doing(raising(error))
    assert main(["doctor"]) == 5
    err = capsys.readouterr().err
    assert "FT192" in err
    assert "per_device_train_batch_size" in err


def test_full_disk(doing: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    doing(raising(OSError(errno.ENOSPC, "No space left on device", "/data/x")))
    assert main(["doctor"]) == 3
    assert "error[FT193]: no space left on the disk at /data/x" in capsys.readouterr().err


def test_offline_reaches_the_libraries_only_while_the_command_runs(
    doing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    seen = []

    def action(session: Session) -> dict[str, Any]:
        seen.append((session.offline, os.environ.get("HF_HUB_OFFLINE")))
        return {}

    doing(action)
    main(["doctor", "--offline"])
    main(["doctor"])
    assert seen == [(True, "1"), (False, None)]
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main(["doctor"])
    assert seen[-1] == (True, "1")


def test_session_masks_secrets_and_records_only_harmless_variables(
    doing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sessions = []

    def action(session: Session) -> dict[str, Any]:
        sessions.append(session)
        return {}

    doing(action)
    main(["doctor", "--quiet"])
    assert sessions[0].environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "HF_TOKEN" not in sessions[0].environment
    assert sessions[0].command == ("ftcli", "doctor", "--quiet")
    assert sessions[0].quiet


def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    code = "import sys; from ftcli.cli.app import main; sys.exit(main(['recipes', 'schema']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert err == b""
    assert process.returncode == 141


def test_output_for_a_terminal_without_unicode(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + "run: {name: 漢字}\n", encoding="utf-8")
    code = "import sys; from ftcli.cli.app import main; sys.exit(main(['check', 'r.yaml']))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=600
    )
    assert done.returncode == 2
    assert b"error[FT208]" in done.stderr
