"""`ftcli train`, and the commands of training methods that have one of their own."""

from __future__ import annotations

from collections.abc import Callable

from ftcli.cli import options
from ftcli.cli.request import AnyRequest, Request
from ftcli.reporting import Session
from ftcli.tables.methods import Method


def training_command(method: Method) -> Callable[..., AnyRequest]:
    """The command of a training method, with the method's help."""

    def train(
        recipe: options.RecipeArgument,
        set_: options.SetOption = None,
        output_dir: options.OutputDirOption = None,
        max_steps: options.MaxStepsOption = None,
        resume: options.ResumeOption = None,
        json: options.JsonOption = False,
        quiet: options.QuietOption = False,
        offline: options.OfflineOption = False,
        debug: options.DebugOption = False,
    ) -> AnyRequest:
        def action(session: Session) -> object:
            from ftcli import pipeline

            changes = options.overrides(set_, output_dir=output_dir, max_steps=max_steps, resume=resume)
            return pipeline.train(options.load(recipe, changes), session, method.command)

        return Request(method.command, options.common(json, quiet, offline, debug), action)

    train.__doc__ = method.help
    return train
