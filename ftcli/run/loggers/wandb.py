"""Weights & Biases. Its files lie in ``wandb/`` of the run directory; `wandb sync` uploads those of an offline run."""

from __future__ import annotations

from collections.abc import Mapping

from ftcli.run.loggers.protocol import LoggedRun
from ftcli.run.status import State

#: Seconds to wait for somebody to log in on a terminal.
_LOGIN_SECONDS = 60


class WandbLogger:
    """A run of W&B under the run's own id, which it keeps when it is resumed."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        said = run.recipe.get("logging", {}).get("wandb")
        where = said if isinstance(said, dict) else {}
        self._run = wandb.init(
            # W&B reads WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP for what the recipe does not say.
            project=where.get("project"),
            entity=where.get("entity"),
            group=where.get("group"),
            name=run.name,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=run.recipe,
            mode="offline" if run.offline else None,
            settings=wandb.Settings(silent=True, console="off", login_timeout=_LOGIN_SECONDS),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers; W&B sends them in a process of its own."""
        self._run.log(dict(numbers), step=step)

    def finish(self, state: State) -> None:
        """Wait until everything is sent."""
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "completed" else 1)


def open_logger(run: LoggedRun) -> WandbLogger:
    """Start or continue the run of that id."""
    return WandbLogger(run)
