"""Trackio. It keeps runs in a folder of its own; ``trackio show --project ftcli`` shows them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout

from ftcli.run.loggers.protocol import PROJECT, LoggedRun
from ftcli.run.status import State


class TrackioLogger:
    """A run of Trackio under the run's name. What Trackio prints is dropped: stdout belongs to the command's result."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=PROJECT,
                name=run.name,
                config=run.recipe,
                resume="allow" if run.continued else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers; a thread writes them."""
        with redirect_stdout(io.StringIO()):
            self._run.log(dict(numbers), step=step)

    def finish(self, state: State) -> None:
        """Wait until everything is written."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not the run's own method, after which Trackio would do this again at exit, and print


def open_logger(run: LoggedRun) -> TrackioLogger:
    """Start the run, or continue the newest one of its name."""
    return TrackioLogger(run)
