"""`ftcli bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import options
from ftcli.cli.commands.train import exit_code, run_as_ranks
from ftcli.cli.environment import results_only_on_stdout
from ftcli.cli.render import result_text
from ftcli.reporting import Session
from ftcli.units import size

if TYPE_CHECKING:
    from ftcli.pipeline.bench_result import BenchResult, PredictedMemory, TimedTokens


def bench_text(result: BenchResult) -> str:
    """The numbers that count, then everything."""
    timing, share = result.measured.timing, result.bound.share_of_bound
    bound = f", {share:.0%} of the arithmetic bound" if share is not None else ""
    first = " in the first step, setup included" if timing.first_step_only else " a step"
    pairs = "" if timing.pairs_per_second is None else f"{timing.pairs_per_second:,.2f} pairs/s, "
    head = f"{pairs}{timing.tokens_per_second:,.0f} tokens/s, {timing.step_ms:.1f} ms{first}{bound}"
    peaks = _peaks(timing.peak_memory_bytes, result.predicted)
    several = result.measured.several
    if several is not None:
        together = f"{several.tokens_per_second_in_all:,.0f} tokens/s on {several.gpus} GPUs"
        share_alone = several.share_of_single_gpus
        whole = "which share each row or the weights"
        alone = whole if share_alone is None else f"{share_alone:.1%} of what they achieve each alone"
        head = f"{together}, {alone}; on each {head}"
    return "\n".join([head, _computed(result.measured.computing), *peaks, "", result_text(result)])


def _computed(computing: TimedTokens) -> str:
    """Text on computed tokens that are not real ones."""
    kind = "padding" if computing.layout == "padded" else "filler"
    shapes = f"{computing.shapes} shape{'s' * (computing.shapes != 1)}"
    rate = f"{computing.computed_tokens_per_second:,.0f} computed tokens/s"
    return f"{rate}, {computing.filler_share:.1%} of them {kind}; rows {computing.layout}, {shapes}"


def _peaks(peak: int | None, predicted: PredictedMemory) -> list[str]:
    """The measured peak and its prediction: of torch's allocator on a GPU, of the whole process on a CPU."""
    whole, allocated = predicted.predicted_peak_bytes, predicted.predicted_allocated_bytes
    if peak is None or whole is None:
        return []
    if allocated is None:
        return [f"{size(peak)} resident at the peak, {size(whole)} predicted"]
    return [
        f"{size(peak)} allocated at the peak, {size(allocated)} predicted; {size(whole)} with what CUDA takes itself"
    ]


@options.command("bench", bench_text, exit_code=exit_code, owns_stdout=True)
def bench(
    session: Session,
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", min=1, help="Rows, or pairs of them, in each step.")
    ] = None,
    seq: Annotated[int | None, typer.Option("--seq", metavar="N", min=2, help="Tokens in each row.")] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", metavar="N", min=1, help="Of pairs: tokens of the prompt (a third).")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="MIX",
            help="Rows of different lengths, cut at --seq: lognormal:MEAN,SIGMA.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, help="Use the first N layers only.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, max=10000, help="Steps to time; 0 reports the first.")
    ] = 10,
    profile: Annotated[bool, typer.Option("--profile", help="Record one more step: its kernels by time.")] = False,
    gpus: options.GpusOption = None,
) -> BenchResult | options.EndedElsewhere:
    """Time the training step.

    The real step of `ftcli train` on synthetic tokens and random weights. Downloads nothing.

    \b
    Examples:
      ftcli bench recipes/gemma2-9b.yaml --batch 1 --seq 2048 --layers 4
      ftcli bench recipes/llama3.1-8b.yaml --batch 8 --lengths lognormal:380,0.8 --steps 400
      ftcli bench recipes/smoke.yaml --steps 5 --json
      ftcli bench recipes/llama3.1-8b-dpo.yaml --batch 4 --seq 520 --prompt 190
      ftcli bench recipes/llama3.1-8b.yaml --gpus 2
    """

    changes = options.overrides(set_)
    loaded = run_as_ranks(lambda more: options.load(recipe, (*changes, *more)), gpus, session)
    if isinstance(loaded, options.EndedElsewhere):
        return loaded
    from ftcli.pipeline.bench_result import BenchOptions
    from ftcli.pipeline.benchmark import bench

    wanted = BenchOptions(batch, seq, prompt, lengths, layers, steps, profile)
    with results_only_on_stdout():
        return bench(loaded, session, wanted)
