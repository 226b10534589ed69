"""What commands leave in eval.json and give back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config import Recipe
from ftcli.reporting import Session
from ftcli.run.directory import RunDirectory
from ftcli.run.ledger import Evaluation, Sample, Scores, TaskScore, write_evaluation

if TYPE_CHECKING:
    from ftcli.evaluate.suite import Evaluator
    from ftcli.evaluate.tasks import Judge

#: Held-out rows that are shown in the report.
SAMPLES = 4


def complete_result(recipe: Recipe, session: Session) -> dict[str, Any]:
    """The answer when the run is there already."""
    path = Path(str(recipe.run.output_dir))
    session.reporter.info(
        f"{path} holds the finished run of this recipe; use --resume never to train again (the old run is kept)"
    )
    return {"run": str(path), "already_complete": True}


def scores(loss: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Any]]) -> Scores | None:
    """One model's results in eval.json's layout; None when nothing was measured."""
    if not loss and not tasks:
        return None
    return Scores(
        loss=loss.get("loss"),
        perplexity=loss.get("perplexity"),
        token_accuracy=loss.get("token_accuracy"),
        tokens=loss.get("tokens"),
        tasks=tuple(TaskScore(name, float(task["score"]), int(task["rows"])) for name, task in tasks.items()),
        datasets=dict(loss.get("datasets") or {}),
        lm_eval=dict(loss.get("lm_eval") or {}),
    )


def sample_rows(evaluator: Evaluator, model: Any) -> list[Sample]:
    """The first held-out rows answered by the trained model and, where adapters can be switched off, before it."""
    from ftcli.errors import FtcliError

    try:
        after = evaluator.samples(model, SAMPLES)
    except FtcliError:  # plain text has no prompt to show an answer for
        return []
    before: Sequence[Mapping[str, Any] | None] = [None] * len(after)
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            before = evaluator.samples(model, SAMPLES)
    return [
        Sample(a["prompt"], a["reference"], None if b is None else b["completion"], a["completion"])
        for a, b in zip(after, before, strict=True)
    ]


def write_train_evaluation(directory: RunDirectory, loss: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """eval.json after training: the trained model only; `ftcli eval` adds the base model and the tasks."""
    write_evaluation(directory.eval_path, Evaluation(run=scores(loss, {}), samples=tuple(samples)))


def judges_of(recipe: Recipe) -> dict[str, Judge]:
    """The user's judges, loaded before anything that takes long."""
    from ftcli.trainers.rewards.user import load_function

    return {task.file: load_function(task.file) for task in recipe.eval.tasks if task.file is not None}
