"""`ftcli eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.cli.render import table
from ftcli.reporting import Session
from ftcli.units import is_share, score

if TYPE_CHECKING:
    from ftcli.evaluate.suite import ModelScores
    from ftcli.pipeline.evaluation import EvaluationResult


def evaluation_text(result: EvaluationResult) -> str:
    """One column for the base model and one for the run; a row for each measure and each task."""
    models = {"base": result.base, "run": result.run}
    columns = {name: _measures(scores) for name, scores in models.items() if scores is not None}
    rows = dict.fromkeys(measure for values in columns.values() for measure in values)
    records = [{"measure": row, **{name: values.get(row) for name, values in columns.items()}} for row in rows]
    return "\n".join(table(records))


def _measures(scores: ModelScores) -> dict[str, str | float]:
    shown: dict[str, str | float] = {}
    if scores.loss is not None:
        shown |= {name.replace("_", " "): value for name, value in scores.loss.numbers.items() if name != "rows"}
        by_length = [] if scores.loss.margins is None else scores.loss.margins.by_length()
        for each in by_length if len(by_length) > 1 else ():
            shown[f"accuracy, {each['length']}, {each['pairs']:,} pairs"] = each["accuracy"]
    if len(scores.datasets) > 1:
        for name, part in scores.datasets.items():
            accuracy = part.token_accuracy if part.more is None else part.more.get("accuracy")
            shown |= {f"loss of {name}": part.loss, **({} if accuracy is None else {f"accuracy of {name}": accuracy})}
    for name, task in scores.tasks.items():
        of_rows = f"of {task.rows}" if is_share(task.score) else f"over {task.rows} rows"
        shown[name] = f"{score(task.score)} {of_rows}" + (f", {task.cut} cut off" if task.cut else "")
    for name, metrics in scores.lm_eval.items():
        shown |= {f"{name} {metric}": value for metric, value in metrics.items()}
    return shown


@options.command("eval", evaluation_text)
def evaluate(
    session: Session,
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="A finished run, compared with its base model.",
            autocompletion=names.run_folders,
        ),
    ] = None,
    checkpoint: options.CheckpointOption = None,
) -> EvaluationResult:
    """Evaluate the base model, or a run beside it.

    Loss, perplexity, token accuracy and the tasks of the recipe on held-out data.

    \b
    Examples:
      ftcli eval recipes/smoke.yaml
      ftcli eval recipes/smoke.yaml --run runs/smoke --json
      ftcli eval recipes/smoke.yaml --run runs/smoke --checkpoint best
    """

    from ftcli.run.signals import stoppable

    loaded = options.load(recipe, options.overrides(set_))
    run_dir = options.run_directory(run, "--run") if run is not None else None
    if checkpoint is not None and run_dir is None:
        raise options.without_run(checkpoint)
    with stoppable("evaluating"):
        from ftcli.pipeline.evaluation import evaluate_recipe

        return evaluate_recipe(loaded, session, run_dir, checkpoint)
