"""`ftcli sample`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.sample_rows import SampleResult


class Kept(StrEnum):
    """Files of rows to write."""

    SFT = "sft"
    PAIRS = "pairs"
    ALL = "all"


class Truncated(StrEnum):
    """Use of answers that were cut off."""

    DROP = "drop"
    REJECT = "reject"
    KEEP = "keep"


def sample_text(result: SampleResult) -> str:
    """Scores of the answers, then the files."""
    found = result.summary
    each = found.answers // max(found.prompts, 1)
    rate = "" if result.tokens_per_second is None else f", {result.tokens_per_second:,.0f} tokens/s"
    lines = [f"{found.answers:,} answers to {found.prompts:,} prompts ({each} each){rate}"]
    if found.mean_score is not None and found.mean_best_score is not None:
        judges, best = ", ".join(result.judges), found.mean_best_score
        lines.append(f"score      {found.mean_score:.4g} on average, {best:.4g} the best of {each} ({judges})")
    if found.pass_at_1 is not None and found.pass_at_n is not None:
        lines.append(f"passed     pass@1 {found.pass_at_1:.1%}, pass@{each} {found.pass_at_n:.1%}")
    lines.append(f"spread     {found.without_spread:.1%} of the prompts have equally good answers only")
    counts = {"cut off": found.truncated, "empty": found.empty, "not judged": found.not_judged}
    said = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    lines += [f"unusable   {said}"] if said else []
    for written in (found.sft, found.pairs):
        if written is not None:
            left = ", ".join(f"{count:,} {reason}" for reason, count in written.left_out.items())
            rows = "row" if written.rows == 1 else "rows"
            lines.append(f"{written.path}: {written.rows:,} {rows}" + (f"; prompts left out: {left}" if left else ""))
    return "\n".join(lines)


@options.command("sample", sample_text)
def sample(
    session: Session,
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    kept: Annotated[
        Kept, typer.Option("--as", help="sft: the best answers; pairs: better and worse ones, for DPO; all: both.")
    ] = Kept.ALL,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="DIR", help="A finished run that answers; else the base model.",
            autocompletion=names.run_folders,
        ),
    ] = None,
    checkpoint: options.CheckpointOption = None,
    num_generations: Annotated[
        int | None,
        typer.Option(
            "--num-generations", "-n", metavar="N", min=1, max=1024, help="Answers per prompt (grpo's, or 8)."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", min=0.0, max=10.0, help="Of sampling (the recipe's).")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", min=0.0001, max=1.0, help="Sample from this share of the probability."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", min=0, help="Sample from the K likeliest tokens; 0: all.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer in tokens.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Of sampling (run.seed).")
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option("--max-prompts", metavar="N", min=1, help="The first prompts of data.train only.")
    ] = None,
    min_score: Annotated[
        float | None,
        typer.Option(
            "--min-score", metavar="S", help="Least score of an answer to learn; built-in judges: all have to pass."
        ),
    ] = None,
    min_margin: Annotated[
        float, typer.Option("--min-margin", metavar="M", min=0.0, help="Least difference of the scores of a pair.")
    ] = 0.0,
    per_prompt: Annotated[
        int, typer.Option("--per-prompt", metavar="K", min=1, max=1024, help="Most rows of a prompt, in each file.")
    ] = 1,
    truncated: Annotated[
        Truncated,
        typer.Option(
            "--truncated",
            help="Answers that were cut off: drop them, let them be the worse of a pair (reject), or keep them.",
        ),
    ] = Truncated.DROP,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="The folder for the rows (samples/NAME).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace samples of something else.")] = False,
) -> SampleResult:  # fmt: skip
    """Sample answers, judge them, and write rows to train on.

    Answers to the prompts of data.train are judged by the recipe's rewards or tasks. sft.jsonl gets the best of each
    prompt (rejection sampling), pairs.jsonl the best beside the worst. The same command goes on where it was stopped.

    \b
    Examples:
      ftcli sample recipes/smoke-grpo.yaml --output samples/pick
      ftcli train recipes/smoke-dpo.yaml --set data.train=[samples/pick/pairs.jsonl]
      ftcli sample recipes/smoke-dpo.yaml --run runs/smoke-dpo --as pairs -n 16 --min-margin 0.5
    """

    from ftcli.run.signals import stoppable

    loaded = options.load(recipe, options.overrides(set_))
    run_dir = options.run_directory(run, "--run") if run is not None else None
    if checkpoint is not None and run_dir is None:
        raise options.without_run(checkpoint)
    with stoppable("sampling"):
        from ftcli.pipeline.sample_rows import SampleOptions
        from ftcli.pipeline.sampling import sample_recipe

        chosen = SampleOptions(
            kept=kept.value,
            num_generations=num_generations,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            max_prompts=max_prompts,
            min_score=min_score,
            min_margin=min_margin,
            per_prompt=per_prompt,
            truncated=truncated.value,
            checkpoint=checkpoint,
            output=options.named(output, "--output"),
            force=force,
        )
        return sample_recipe(loaded, session, run_dir, chosen)
