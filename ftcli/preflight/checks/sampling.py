"""Rules of `ftcli sample`: somebody has to judge what is drawn."""

from __future__ import annotations

from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import code_of


def check(context: Context) -> Findings:
    """FT284 for a recipe without a judge; what is wrong with rewards, as the method that they belong to says."""
    recipe = context.recipe
    if context.command != "sample":
        return
    if not recipe.rewards and not recipe.eval.tasks:
        yield context.error(
            "FT284",
            "",
            "the recipe has neither rewards (grpo.rewards) nor tasks (eval.tasks), so nothing judges what is sampled",
            help="add a task, such as `eval: {tasks: [{use: exact_match}]}`, or `- file: judges.py:score` for your own",
        )
    if context.method.reward_rules is not None:
        yield from code_of(context.method.reward_rules)(context)
