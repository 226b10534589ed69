"""TensorBoard: event files in ``tensorboard/`` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from ftcli.run.loggers.protocol import LoggedRun
from ftcli.run.status import State


class TensorBoardLogger:
    """Each process of a run writes a file of its own; TensorBoard shows them as one run."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What earlier files hold from `purge_step` on is not shown any more.
        purge_step = run.after_step + 1 if run.after_step else 0
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)
        if not run.continued:
            text = yaml.safe_dump(run.recipe, sort_keys=False)
            self._writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()), run.after_step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers through to the file."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, state: State) -> None:
        """Close the file."""
        self._writer.close()


def open_logger(run: LoggedRun) -> TensorBoardLogger:
    """A new event file in the run directory."""
    return TensorBoardLogger(run)
