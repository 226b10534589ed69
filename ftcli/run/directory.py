"""The files of a run directory, by name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.paths import RUN_RECIPE
from ftcli.run.checkpoint import Checkpoints
from ftcli.run.lock import LOCK_NAME

#: Files and folders of a run, by name.
NAMES = frozenset(
    (RUN_RECIPE, "manifest.json", "metrics.jsonl", "checkpoints", "adapter", "model", "export", "eval.json")
) | {"margins.json", "tokens.json", "completions", "report.html", "status.json", "tensorboard", ".lock"}


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run. Making one touches no disk."""

    path: Path

    @property
    def recipe_path(self) -> Path:
        """The recipe as resolved; a folder with this file is a run directory."""
        return self.path / RUN_RECIPE

    @property
    def manifest_path(self) -> Path:
        """Versions, device, seeds, dtype plan, kernels, data fingerprints."""
        return self.path / "manifest.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON line per logging step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the resumable states."""
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> Checkpoints:
        """The resumable states."""
        return Checkpoints(self.checkpoints_dir)

    @property
    def adapter_dir(self) -> Path:
        """The trained adapter in PEFT's layout (LoRA)."""
        return self.path / "adapter"

    @property
    def model_dir(self) -> Path:
        """The trained model in transformers' layout (full fine-tuning)."""
        return self.path / "model"

    @property
    def result_dir(self) -> Path | None:
        """``adapter/`` or ``model/``, whichever is there; None before training has ended."""
        return next((folder for folder in (self.adapter_dir, self.model_dir) if folder.is_dir()), None)

    @property
    def export_dir(self) -> Path:
        """Folder of the exported formats."""
        return self.path / "export"

    @property
    def eval_path(self) -> Path:
        """Evaluation results and samples."""
        return self.path / "eval.json"

    @property
    def margins_path(self) -> Path:
        """Held-out pairs, or labelled answers, one by one."""
        return self.path / "margins.json"

    @property
    def completions_dir(self) -> Path:
        """Folder of the completions of training by rewards, step by step."""
        return self.path / "completions"

    @property
    def tokens_path(self) -> Path:
        """Tokens kept, cut and masked per dataset."""
        return self.path / "tokens.json"

    @property
    def report_path(self) -> Path:
        """The report for people."""
        return self.path / "report.html"

    @property
    def status_path(self) -> Path:
        """The run's state, for scripts."""
        return self.path / "status.json"


def holds_run(run: RunDirectory) -> bool:
    """True if the folder has a recipe.yaml and something else of a run: one with nothing but a recipe is never renamed.

    Raises:
        OSError: the folder cannot be read.
    """
    ours = (run.status_path, run.path / LOCK_NAME, run.checkpoints_dir)
    return run.recipe_path.is_file() and any(path.exists() for path in ours)


def run_that_owns(path: Path) -> Path | None:
    """The run directory of which ``path`` would be a file, or lie in a folder; None where it is no run's."""
    for folder in path.parents:
        if path.relative_to(folder).parts[0] in NAMES and is_run_directory(folder):
            return folder
    return None


def is_run_directory(path: Path) -> bool:
    """True if ``path`` is a folder with a recipe.yaml that ftcli wrote."""
    with contextlib.suppress(OSError):
        return holds_run(RunDirectory(path))
    return False


def no_run(path: Path, reason: str) -> FtcliError:
    """FT722: the folder is not a run."""
    return FtcliError.single(
        "FT722",
        f"{path} is not a run directory: {reason}",
        exit_code=ExitCode.RECIPE,
        help="choose another --output-dir; ftcli does not mix its files with others",
    )


def unreadable_file(path: Path, error: Exception) -> FtcliError:
    """FT727: a file of the run cannot be read."""
    return FtcliError.single(
        "FT727",
        f"{path} cannot be read: {first_line(error)}",
        exit_code=ExitCode.RECIPE,
        help="restore the file, or start over with --resume never, which keeps the old run beside it",
    )
