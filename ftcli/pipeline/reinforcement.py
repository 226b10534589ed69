"""`ftcli grpo`: prompts and rewards in, adapter or model out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftcli.config import GrpoConfig, Recipe
from ftcli.config.load import LoadedRecipe
from ftcli.data.template import Renderer
from ftcli.errors import ExitCode, FtcliError
from ftcli.judges import judges_of
from ftcli.pipeline.fit import fit
from ftcli.pipeline.lifecycle import RunContext, checked_run, keep_inputs
from ftcli.pipeline.results import complete_result
from ftcli.reporting import Session
from ftcli.rows.prompts import Prompt, prompts_of
from ftcli.rows.reading import read_rows

if TYPE_CHECKING:
    from ftcli.evaluate.suite import Evaluator


def run(loaded: LoadedRecipe, session: Session) -> dict[str, Any]:
    """GRPO on the recipe's prompts into its run directory; held-out tasks are scored before and after.

    Raises FtcliError FT782 (exit 2) when the recipe has no grpo section.
    """
    recipe = loaded.recipe
    if recipe.grpo is None:
        raise FtcliError.single(
            "FT782",
            "this recipe has no grpo section",
            exit_code=ExitCode.RECIPE,
            help="add one with num_generations and rewards; `ftcli recipes show smoke-grpo` is an example",
        )
    with checked_run(loaded, session, "grpo") as context:
        if context is None:
            return complete_result(recipe, session)
        return _grpo(recipe.grpo, session, context)


def _grpo(grpo: GrpoConfig, session: Session, context: RunContext) -> dict[str, Any]:
    from ftcli.evaluate.suite import Evaluator
    from ftcli.pipeline import build
    from ftcli.trainers.grpo import build_grpo_trainer

    started = time.perf_counter()
    recipe, report = context.recipe, context.report
    functions = judges_of(recipe)
    with context.phase("preparing data"):
        texts = build.texts_of(recipe, report, session)
        prompts = _prompts(recipe)
        session.reporter.info(f"data.train: {len(prompts)} prompts, {grpo.num_generations} completions each")
    with context.phase("loading the model"):
        built = build.with_adapters(build.build_base(recipe, report, session, texts), recipe, report)
        evaluator = Evaluator(
            recipe, texts.tokenizer, texts.stops, [], report.plan, built.device, session.reporter, functions
        )
    keep_inputs(context, build.inputs_of(recipe, report, texts, built))
    before = _scores(context, evaluator, built.model, "before") if context.opened.resume_step == 0 else {}
    renderer = Renderer(texts.tokenizer, recipe.data.chat_template)
    summary = fit(
        recipe,
        context,
        texts,
        built,
        lambda hooks, scratch: build_grpo_trainer(
            recipe,
            grpo,
            built.model,
            texts.tokenizer,
            prompts,
            [renderer.prompt(prompt) for prompt in prompts],
            report.plan,
            hooks,
            device=built.device,
            scratch_dir=scratch,
            stops=texts.stops,
        ),
        (lambda: _task_scores(evaluator, built.model)) if recipe.eval.tasks else None,
    )
    after = _scores(context, evaluator, built.model, "after")
    return {**summary, "before": before, "after": after, "seconds": time.perf_counter() - started}


def _prompts(recipe: Recipe) -> list[Prompt]:
    prompts: list[Prompt] = []
    for source in recipe.data.train:
        prompts += prompts_of(read_rows(source), recipe.data.format)
    return prompts


def _scores(context: RunContext, evaluator: Evaluator, model: Any, when: str) -> dict[str, float]:
    with context.phase("evaluating"):
        found = _task_scores(evaluator, model)
    for name, score in found.items():
        context.session.reporter.info(f"held-out {name} {when} training: {score:.1%}")
    return found


def _task_scores(evaluator: Evaluator, model: Any) -> dict[str, float]:
    return {name: float(task["score"]) for name, task in evaluator.tasks(model).items()}
