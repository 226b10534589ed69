"""`ftcli train`."""

from __future__ import annotations

from ftcli.cli import options
from ftcli.cli.request import Request, Result
from ftcli.reporting import Session


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
) -> Request:
    """Fine-tune a model.

    Trains LoRA adapters, or all weights when the recipe has no lora section. Writes a run directory with checkpoints,
    metrics, a report and the result, which plain transformers and peft load.

    \b
    Examples:
      ftcli train recipes/smoke.yaml
      ftcli train recipes/gemma2-9b.yaml --set train.learning_rate=1e-4 --set data.max_seq_len=4096
      ftcli train recipes/gemma2-9b.yaml --set model.init=random --set model.tokenizer=bytes --max-steps 5
    """

    def action(session: Session) -> Result:
        from ftcli import pipeline

        changes = options.overrides(set_, output_dir=output_dir, max_steps=max_steps, resume=resume)
        return pipeline.train(options.load(recipe, changes), session)

    return Request("train", options.common(json, quiet, offline, debug), action)
