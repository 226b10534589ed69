"""`ftcli check`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.cli.environment import style_for
from ftcli.cli.render import Style, clean, table, terminal_text
from ftcli.errors import FtcliError, Origin, first_line
from ftcli.paths import expanded
from ftcli.plain import JsonObject
from ftcli.reporting import Session
from ftcli.units import duration, gib, size

if TYPE_CHECKING:
    from ftcli.data.survey import SampledRow, SurveyedSource
    from ftcli.pipeline.checking import CheckResult, EveryGpu, GpuVerdict, Prices
    from ftcli.plan.checkpointing import CheckpointingChoice
    from ftcli.plan.execution import ExecutionPart
    from ftcli.plan.forecast import Forecast
    from ftcli.plan.memory.advice import Verdict
    from ftcli.plan.trained import PlannedAdapters
    from ftcli.preflight.checks.another_model import AskedModel

#: What ``--as`` says for every GPU of the table.
EVERY_GPU = "all"

_TRAINED = "1;32"
_MASKED = "2"
#: Around trained text where there are no colours.
_MARKS = ("[[", "]]")


def _text(result: CheckResult | EveryGpu) -> str:
    from ftcli.pipeline.checking import EveryGpu

    if isinstance(result, EveryGpu):
        return terminal_text(every_gpu_text(result))
    shown = samples_text(result.samples, style_for(sys.stdout))
    return "\n\n".join(part for part in (terminal_text(check_text(result)), shown) if part)


def read_prices(text: str) -> Prices:
    """A price for all GPUs, or those in a file, by their names in ``--as``. Raises FtcliError FT150 or FT506."""
    import yaml

    from ftcli.facts.device import named_device
    from ftcli.pipeline.checking import Prices

    with contextlib.suppress(ValueError):
        return Prices(_price(float(text), text))
    try:
        found = yaml.safe_load(expanded(text).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no map of names to prices")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        message = f"--price {text} is neither a number nor a file of prices: {first_line(error)}"
        help = "write a number such as 2.49, or a YAML file with lines like `h100: 2.49`"
        raise FtcliError.single("FT150", message, origin=Origin("command line"), help=help) from error
    return Prices(None, {named_device(str(name), "--price").name: _price(value, name) for name, value in found.items()})


def _price(value: object, name: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise FtcliError.single("FT150", f"--price: {name} is no price of an hour", origin=Origin("command line"))
    return float(value)


def every_gpu_text(result: EveryGpu) -> str:
    """A line for each GPU; below the table the cheapest, and what each of the others is refused for."""
    priced = any(each.cost is not None for each in result.gpus)
    records: list[JsonObject] = [
        {
            "gpu": each.gpu,
            "verdict": each.verdict,
            "needed": _needed(each),
            "dtype": each.dtype or "",
            "gradient_checkpointing": each.gradient_checkpointing or "",
            "most_rows": "" if each.most_rows is None else str(each.most_rows),
            **(_priced(each) if priced else {}),
        }
        for each in result.gpus
    ]
    reasons = [f"{each.gpu}  {each.reason}" for each in result.gpus if each.reason]
    told = [] if result.cheapest is None else [f"cheapest that fits: {result.cheapest}"]
    told += [] if result.unknown is None else [f"no time and cost: {result.unknown}"]
    return "\n".join([*table(records), *(["", *told] if told else []), *(["", *reasons] if reasons else [])])


def _priced(gpu: GpuVerdict) -> JsonObject:
    time = "" if gpu.seconds is None else f"{duration(gpu.seconds)} ±{gpu.within:.0%}"
    return {"time": time, "cost": "" if gpu.cost is None else f"{gpu.cost:,.2f}"}


def _needed(gpu: GpuVerdict) -> str:
    available = "" if gpu.available_bytes is None else f"{gib(gpu.available_bytes)} GiB"
    return available if gpu.peak_bytes is None else f"{gib(gpu.peak_bytes)} of {available}"


def check_text(result: CheckResult) -> str:
    """The verdict, then what it rests on, then what was not checked."""
    report = result.report
    lines = [_verdict_line(result), "", *_facts(result), *_kernel_lines(report.parts)]
    memory, disk = report.memory, report.disk
    if memory is not None:
        ranks = report.plan.ranks
        each = f" on each of {ranks} {'GPUs' if report.device.kind == 'cuda' else 'processes'}" if ranks > 1 else ""
        lines += ["", f"memory  {_of(memory.total_bytes, report.verdict)} at its peak ({memory.peak}){each}"]
        lines += _sizes(memory.parts)
        lines += _sizes({"pinned, on the host": memory.pinned_host_bytes})
        lines += _sizes({"paged optimizer": memory.paged_bytes})
    if report.host is not None:
        lines += ["", f"host    {gib(report.host.total_bytes)} GiB of memory at its peak ({report.host.peak})"]
        lines += _sizes({name: report.host.parts[name] for name in report.host.phases[report.host.peak]})
    if disk is not None:
        free = "" if disk.free_bytes is None else f", {size(disk.free_bytes)} free"
        lines += ["", f"disk    {size(disk.total_bytes)}{free}"]
        lines += _sizes({f"checkpoints ({disk.checkpoints})": disk.checkpoint_bytes * disk.checkpoints})
        lines += _sizes({"result": disk.result_bytes})
    if result.forecast is not None:
        lines += ["", *_forecast(result.forecast)]
    if result.rows:
        lines += ["", "rows    rendered and tokenized as in a run", *(_looked_at(one) for one in result.rows)]
    if report.not_made:
        lines += ["", "not checked"]
        lines += [f"  {item.check}: {item.reason}" for item in report.not_made]
    return "\n".join(lines)


def _forecast(told: Forecast) -> list[str]:
    low, high = (told.cost * (1 + sign * told.within) for sign in (-1, 1))
    about = "" if told.exact else " (reckoned from the rows that were looked at)"
    return [
        f"time    about {duration(told.seconds)} (±{told.within:.0%}) at {told.tokens_per_second:,.0f} tokens/s: "
        f"{told.steps:,} steps, {told.tokens:,} tokens{about}",
        f"cost    about {told.cost:,.2f} ({low:,.2f} to {high:,.2f}) at {told.price:g} an hour, without downloads, "
        "loading and tasks",
    ]


def _looked_at(source: SurveyedSource) -> str:
    count = f"{source.rows:,}" if source.whole else f"only {source.rows:,}"
    return f"  {source.key:<12}{count} of {source.source}"


def _verdict_line(result: CheckResult) -> str:
    report = result.report
    verdict, device = report.verdict, report.device.name
    if verdict is None:
        return f"no problem found on {device}; memory could not be estimated"
    words = {"fits": "fits", "tight": "fits, but only just", "unknown": "no problem found, memory unknown"}
    ranks = report.plan.ranks
    return f"{words.get(verdict.level, verdict.level)} on {f'each of {ranks} ' if ranks > 1 else ''}{device}"


def _facts(result: CheckResult) -> list[str]:
    report = result.report
    model, dtypes = report.facts, report.dtypes
    parameters = f", {_millions(report.plan.sizes.parameters)} parameters"
    if (active := report.facts.active_parameters) is not None:
        parameters += f", {_millions(active)} of them for each token"
    adapter = f", adapters {dtypes.adapter}" if dtypes.adapter else ""
    chosen = report.checkpointing.requested == "auto"
    return [
        f"model      {model.name} ({model.source}){parameters}",
        f"dtype      {dtypes.compute}: {dtypes.reason}; weights {dtypes.parameter}{adapter}",
        f"attention  {result.attention or report.plan.execution.attention}",
        *_adapters(result.adapters),
        *_asked(report.asked),
        *([f"recompute  gradient_checkpointing: {_chosen(report.checkpointing)}"] if chosen else []),
        *([f"judges     {', '.join(result.judges)}"] if result.judges else []),
    ]


def _adapters(planned: PlannedAdapters | None) -> list[str]:
    """Lines on the planned adapters; none for full fine-tuning."""
    if planned is None:
        return []
    layers = ", ".join(f"{count} {name}" for name, count in planned.layers.items())
    trained = "" if planned.parameters is None else f"; {planned.parameters:,} parameters trained"
    left = ", ".join(f"{count} {name}" for name, count in planned.left.items())
    return [f"adapters   {layers}{trained}" + (f"; not adapted: {left}" if left else "")]


def _asked(other: AskedModel | None) -> list[str]:
    """The line on another model that is asked before training; nothing if none is."""
    if other is None:
        return []
    size = _millions(other.plan.sizes.parameters)
    memory = "" if other.needed_bytes is None else f", {gib(other.needed_bytes)} GiB"
    source = f"{other.facts.name} ({other.facts.source}), {size} parameters"
    return [f"reference  {source}; scored before the model is loaded{memory}"]


def _chosen(choice: CheckpointingChoice) -> str:
    count = choice.uncheckpointed_layers
    but = f" but in the last {count} layers" if count else ""
    return f"{str(choice.policy).lower()}{but}, {choice.reason}"


def _kernel_lines(parts: Sequence[ExecutionPart]) -> list[str]:
    """The code that computes each part of the model on the device, and why."""
    width = max((len(row.part) for row in parts), default=0)
    lines = [f"  {row.part:<{width}}  {row.runs}: {row.reason}" for row in parts]
    return ["", "kernels", *lines] if lines else []


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.2f} million"


def _of(needed: int, verdict: Verdict | None) -> str:
    available = None if verdict is None else verdict.available_bytes
    return f"{gib(needed)} of {gib(available)} GiB" if available is not None else f"{gib(needed)} GiB"


def _sizes(parts: Mapping[str, int]) -> list[str]:
    shown = {name: count for name, count in parts.items() if count}
    width = max((len(name) for name in shown), default=0)
    return [f"  {name:<{max(width, 20)}}  {size(count):>10}" for name, count in shown.items()]


def samples_text(samples: Sequence[SampledRow], style: Style) -> str:
    """Each row under a line that names and counts it; line breaks of the text are shown as ``\\n`` and kept."""
    if not samples:
        return ""
    plain = style.paint("x", _TRAINED) == "x"
    key = f"{style.paint('trained', _TRAINED)}, {style.paint('masked', _MASKED)}"
    if plain:
        key = f"trained text stands in {_MARKS[0]}double brackets{_MARKS[1]}"
    return "\n\n".join([key, *("\n".join(_sample(sample, style, plain=plain)) for sample in samples)])


def _sample(sample: SampledRow, style: Style, *, plain: bool) -> Iterator[str]:
    fate = "" if sample.fate == "kept" else f", {sample.fate}"
    count = f"{sample.trained:,} of {len(sample.tokens):,} tokens trained"
    layout = sample.layout if sample.label is None else f"{sample.layout}, {sample.label}"
    yield style.paint(f"{clean(str(sample.origin))}: {layout}, {count}{fate}", "1")
    if sample.template is not None:
        yield f"rendered by {clean(sample.template)}"
    runs = groupby(sample.tokens, key=lambda token: token.trained)
    text = "".join(_run("".join(token.text for token in tokens), style, on, plain) for on, tokens in runs)
    yield text.rstrip("\n")


def _run(text: str, style: Style, trained: bool, plain: bool) -> str:
    """A stretch of tokens of one kind. Lines are coloured one by one, so that pagers keep up."""
    lines = [clean(line) for line in text.split("\n")]
    shown = [line + ("\\n" if number < len(lines) - 1 else "") for number, line in enumerate(lines)]
    if plain:
        joined = "\n".join(shown)
        return f"{_MARKS[0]}{joined}{_MARKS[1]}" if trained else joined
    return "\n".join(style.paint(line, _TRAINED if trained else _MASKED) for line in shown)


@options.command("check", _text, verbatim=True)
def check(
    session: Session,
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    as_gpu: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="GPU",
            help="Answer for another machine: t4, l4, a10, rtx4090, a100-40gb, a100-80gb, h100, h200, b200 or cpu; "
            "`all` compares the GPUs.",
            autocompletion=names.machines,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Answer for N of them (launch.num_processes)."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            "--price",
            metavar="P",
            help="Price of a GPU for an hour, or a YAML file of prices by GPU: adds time and cost; with `--as all` the "
            "cheapest is named.",
        ),
    ] = None,
    show_sample: Annotated[
        int,
        typer.Option(
            "--show-sample",
            metavar="N",
            min=0,
            max=1_000_000,
            help="Show N rows of each training source as tokens: what is trained, what is masked.",
        ),
    ] = 0,
) -> CheckResult | EveryGpu:
    """Say whether a recipe can work here.

    Looks at keys, model, data, GPU, memory and disk. Downloads no weights and builds nothing.

    \b
    Examples:
      ftcli check recipes/gemma2-9b.yaml
      ftcli check recipes/gemma2-9b.yaml --as h100 --offline
      ftcli check recipes/llama3.1-8b.yaml --as h100 --gpus 8
      ftcli check recipes/smoke.yaml --as h100 --price 2.49
      ftcli check recipes/llama3.1-8b.yaml --as all
      ftcli check recipes/smoke.yaml --show-sample 3
    """

    loaded = options.load(recipe, options.overrides(set_, gpus=gpus))
    prices = None if price is None else read_prices(price)
    from ftcli.pipeline.checking import check_every_gpu, check_recipe

    if as_gpu is not None and as_gpu.strip().lower() == EVERY_GPU:
        if show_sample:
            help = "leave one of them out"
            raise FtcliError.single("FT150", "`--as all` looks at no rows, and --show-sample shows them", help=help)
        return check_every_gpu(loaded, session, prices)
    return check_recipe(loaded, session, as_gpu, show_sample, prices)
