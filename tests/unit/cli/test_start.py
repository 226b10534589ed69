"""The first moments of a command: Ctrl-C is answered in our words, and nothing in the working folder is a package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.cli import options
from ftcli.cli.app import failure_of, main
from ftcli.errors import ExitCode, Unwinding
from ftcli.preflight.checks.support import is_installed

ROOT = Path(__file__).resolve().parents[3]

#: The one line.
INTERRUPTED = "ftcli: note[FT191]: interrupted\n"

INTERRUPTED_IMPORT = """
import sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Finder())
sys.argv = ["ftcli", "check", "x.yaml"]
from ftcli.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["ftcli.cli.app", "typer", "ftcli.cli.environment", "ftcli.config.load", "yaml"])
def test_ctrl_c_while_modules_are_loaded_is_130_and_no_traceback(tmp_path: Path, module: str) -> None:
    code = INTERRUPTED_IMPORT.format(module=module)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, INTERRUPTED)


def test_nothing_is_imported_before_ctrl_c_is_ours() -> None:
    """What comes before is Python's own start: 9 ms on the machine where it was measured, and 4 of pip's script."""
    code = "import sys; before = set(sys.modules); import ftcli.__main__; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ftcli", "ftcli.__main__"]


SIGNALLED = """
import atexit, os, signal, sys
from importlib.abc import MetaPathFinder

def interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        pass  # as Python itself in callbacks of weak references

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            interrupt()
        return None

sys.meta_path.insert(0, Finder())
if {module!r} == "the end":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
# As a terminal starts it, whatever started the tests.
signal.signal(signal.SIGINT, signal.SIG_IGN if {ignored} else signal.default_int_handler)
sys.argv = ["ftcli", "--version"]
from ftcli.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["ftcli.cli.app", "typer", "the end"])
@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_is_neither_lost_nor_shown_before_and_after_the_command(
    tmp_path: Path, module: str, ignored: bool
) -> None:
    """A real signal, and whoever catches everything does not hold it up; `nohup` and a shell's `&` ignore it."""
    command = [sys.executable, "-c", SIGNALLED.format(module=module, ignored=ignored)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    over = ignored or module == "the end"  # all is written then, and the status is that of what was done
    assert (done.returncode, done.stderr) == ((0, "") if over else (130, INTERRUPTED))
    assert bool(done.stdout) == over


def test_ctrl_c_while_the_command_line_is_parsed_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "CommonOptions", interrupt)
    assert main(["check", "x.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("cause", [KeyboardInterrupt, Unwinding])
@pytest.mark.parametrize("chained", [True, False])
def test_what_a_library_makes_of_ctrl_c_is_no_bug(cause: type[BaseException], chained: bool) -> None:
    try:
        try:
            raise cause
        except BaseException as error:
            if chained:
                raise RuntimeError("Failed to import transformers.x") from error
            raise RuntimeError("Failed to import transformers.x")  # noqa: B904
    except RuntimeError as error:
        found = failure_of(error, command=["ftcli"], debug=False)
    assert (found.findings[0].code, found.exit_code) == ("FT191", ExitCode.INTERRUPTED)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the results of other tools, one of which looks like a package."""
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / "__init__.py").write_text("raise RuntimeError('the folder was taken for the package')\n")
    (tmp_path / "typer.py").write_text("raise RuntimeError('the file was taken for the package')\n")
    return tmp_path


def test_folders_in_the_working_folder_pass_for_no_package(workplace: Path) -> None:
    recipe = workplace / "r.yaml"
    recipe.write_text(
        "version: 1\nmodel: {name_or_path: 'bundled:tiny-gemma2'}\nlora: {}\n"
        "data: {train: ['bundled:smoke-train'], eval: ['bundled:smoke-eval'], max_seq_len: 64}\n"
        "eval: {lm_eval: [some_task]}\nlogging: {wandb: true}\n"
    )
    places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin", "HOME": str(workplace)}
    command = [sys.executable, "-m", "ftcli", "check", "r.yaml", "--offline"]
    done = subprocess.run(command, cwd=workplace, env=places, capture_output=True, text=True, check=False)
    assert "was taken for the package" not in done.stderr
    installed = [name for name in ("wandb", "lm_eval") if is_installed(name)]
    assert done.stderr.count("FT253") == 2 - len(installed), done.stderr
    if not installed:
        assert done.returncode == 2


def test_a_folder_without_code_is_no_package(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "somebodys_results").mkdir()
    monkeypatch.syspath_prepend(workplace)
    assert not is_installed("somebodys_results")
    assert is_installed("yaml")


def test_a_checkout_that_is_not_installed_still_runs(tmp_path: Path) -> None:
    (tmp_path / "ftcli").symlink_to(ROOT / "ftcli")
    program = "import runpy, sys; sys.argv = ['ftcli', '--version']; sys.path.insert(0, ''); "
    program += "runpy.run_module('ftcli', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "ftcli")
