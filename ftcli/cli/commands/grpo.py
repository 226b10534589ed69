"""`ftcli grpo`."""

from __future__ import annotations

from ftcli.cli import options
from ftcli.cli.request import Request, Result
from ftcli.reporting import Session


def grpo(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    output_dir: options.OutputDirOption = None,
    max_steps: options.MaxStepsOption = None,
    resume: options.ResumeOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> Request:
    """Fine-tune by rewards (GRPO).

    The rewards are those of the recipe's grpo section: built-in ones, or Python functions of yours.

    \b
    Examples:
      ftcli grpo recipes/smoke-grpo.yaml
      ftcli grpo recipes/mistral-7b-grpo.yaml --set grpo.num_generations=4 --max-steps 20
    """

    def action(session: Session) -> Result:
        from ftcli import pipeline

        changes = options.overrides(set_, output_dir=output_dir, max_steps=max_steps, resume=resume)
        return pipeline.grpo(options.load(recipe, changes), session)

    return Request("grpo", options.common(json, quiet, offline, debug), action)
