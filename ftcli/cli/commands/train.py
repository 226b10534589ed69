"""`ftcli train`, and the commands of training methods that have one of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ftcli.cli import options, ranks
from ftcli.cli.environment import results_only_on_stdout
from ftcli.cli.options import AnyRequest, Invocation
from ftcli.reporting import Session
from ftcli.tables import code_of
from ftcli.tables.methods import Method


def training_command(method: Method) -> Callable[..., AnyRequest]:
    def train(
        recipe: options.RecipeArgument,
        set_: options.SetOption = None,
        output_dir: options.OutputDirOption = None,
        max_steps: options.MaxStepsOption = None,
        resume: options.ResumeOption = None,
        gpus: options.GpusOption = None,
        dry_rewards: options.DryRewardsOption = False,
        json: options.JsonOption = False,
        quiet: options.QuietOption = False,
        offline: options.OfflineOption = False,
        debug: options.DebugOption = False,
    ) -> AnyRequest:
        def action(session: Session) -> object:
            from ftcli.pipeline.launch import train

            changes = options.overrides(set_, output_dir=output_dir, max_steps=max_steps, resume=resume)
            if dry_rewards and method.dry is not None:
                with results_only_on_stdout():
                    result: object = code_of(method.dry)(options.load(recipe, changes), session)
                return result
            started = ranks.run_as_ranks(lambda more: options.load(recipe, (*changes, *more)), gpus, session)
            if isinstance(started, options.EndedElsewhere):
                return started
            with results_only_on_stdout():
                return train(started, session, method.command)

        common = options.common(json, quiet, offline, debug)
        return Invocation(method.command, common, action, exit_code=ranks.exit_code, owns_stdout=True)

    if method.dry is None:
        signature = inspect.signature(train, eval_str=True)
        kept = [each for name, each in signature.parameters.items() if name != "dry_rewards"]
        train.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    train.__doc__ = method.help
    return train
