"""Results of single commands as text, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftcli.cli.render import result_text, table
from ftcli.plain import plain_fields
from ftcli.units import gib, size

if TYPE_CHECKING:
    from ftcli.cli.commands.doctor import Examination
    from ftcli.data.look import SurveyedSource
    from ftcli.evaluate.suite import ModelScores
    from ftcli.pipeline.bench_result import BenchResult, PredictedMemory, TimedTokens
    from ftcli.pipeline.checking import CheckResult
    from ftcli.pipeline.evaluation import EvaluationResult
    from ftcli.pipeline.sample_result import SampleResult
    from ftcli.plan.checkpointing import CheckpointingChoice
    from ftcli.plan.execution import ExecutionPart
    from ftcli.plan.memory.advice import Verdict
    from ftcli.plan.trained import PlannedAdapters


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
    if result.rows:
        lines += ["", "rows    rendered and tokenized as in a run", *(_looked_at(one) for one in result.rows)]
    if report.not_made:
        lines += ["", "not checked"]
        lines += [f"  {item.check}: {item.reason}" for item in report.not_made]
    return "\n".join(lines)


def _looked_at(source: SurveyedSource) -> str:
    count = f"{source.rows:,}" if source.whole else f"only {source.rows:,}"
    return f"  {source.key:<12}{count} of {source.source}"


def _verdict_line(result: CheckResult) -> str:
    report, outline = result.report, result.outline
    verdict, device = report.verdict, report.device.name
    if verdict is None:
        least = None if outline is None else outline.at_least
        needs = "" if least is None else f": it needs more than {size(least.total)}, which hold no activations"
        return f"no problem found on {device}; memory could not be estimated{needs}"
    words = {"fits": "fits", "tight": "fits, but only just", "unknown": "no problem found, memory unknown"}
    ranks = report.plan.ranks
    return f"{words.get(verdict.level, verdict.level)} on {f'each of {ranks} ' if ranks > 1 else ''}{device}"


def _facts(result: CheckResult) -> list[str]:
    report = result.report
    model, dtypes = report.facts, report.dtypes
    count = model.parameters if result.outline is None else result.outline.parameters
    parameters = f", {_millions(count)} parameters" if count else ""
    adapter = f", adapters {dtypes.adapter}" if dtypes.adapter else ""
    return [
        f"model      {model.name} ({model.source}){parameters}",
        f"dtype      {dtypes.compute}: {dtypes.reason}; weights {dtypes.parameter}{adapter}",
        f"attention  {result.attention or report.plan.execution.attention}",
        *_adapters(result.adapters),
        *_checkpointing(report.checkpointing),
        *([f"judges     {', '.join(result.judges)}"] if result.judges else []),
    ]


def _adapters(planned: PlannedAdapters | None) -> list[str]:
    """What would have adapters; nothing for full fine-tuning."""
    if planned is None:
        return []
    layers = ", ".join(f"{count} {name}" for name, count in planned.layers.items())
    trained = "" if planned.parameters is None else f"; {planned.parameters:,} parameters trained"
    left = ", ".join(f"{count} {name}" for name, count in planned.left.items())
    return [f"adapters   {layers}{trained}" + (f"; not adapted: {left}" if left else "")]


def _checkpointing(choice: CheckpointingChoice) -> list[str]:
    """What `auto` chose, and why. Nothing where the recipe names the policy itself."""
    return [] if choice.requested != "auto" else [f"recompute  gradient_checkpointing: {_chosen(choice)}"]


def _chosen(choice: CheckpointingChoice) -> str:
    count = choice.uncheckpointed_layers
    but = f" but in the last {count} layers" if count else ""
    return f"{str(choice.policy).lower()}{but}, {choice.reason}"


def _kernel_lines(parts: Sequence[ExecutionPart]) -> list[str]:
    """What computes each part of the model on the device, and why."""
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
        found = {name: value for name, value in plain_fields(scores.loss).items() if value is not None}
        shown |= {name.replace("_", " "): value for name, value in found.items() if name != "rows"}
    if len(scores.datasets) > 1:
        for name, part in scores.datasets.items():
            accuracy = part.token_accuracy if part.more is None else part.more.get("accuracy")
            shown |= {f"loss of {name}": part.loss, **({} if accuracy is None else {f"accuracy of {name}": accuracy})}
    for name, task in scores.tasks.items():
        shown[name] = f"{task.score:.1%} of {task.rows}" + (f", {task.cut} cut off" if task.cut else "")
    for name, metrics in scores.lm_eval.items():
        shown |= {f"{name} {metric}": value for metric, value in metrics.items()}
    return shown


def sample_text(result: SampleResult) -> str:
    """What the answers are worth, then the files."""
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
            lines.append(
                f"{written.path}: {written.rows:,} {'row' if written.rows == 1 else 'rows'}"
                + (f"; prompts left out: {left}" if left else "")
            )
    return "\n".join(lines)


def bench_text(result: BenchResult) -> str:
    """The numbers that count, then everything."""
    timing, share = result.measured.timing, result.bound.share_of_bound
    bound = f", {share:.0%} of the arithmetic bound" if share is not None else ""
    first = " in the first step, setup included" if timing.first_step_only else " a step"
    head = f"{timing.tokens_per_second:,.0f} tokens/s, {timing.step_ms:.1f} ms{first}{bound}"
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
    """What is computed besides real tokens."""
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


def doctor_text(result: Examination) -> str:
    """The machine first, then what runs on it, then versions."""
    lines = [f"ftcli {result.ftcli}, Python {result.python}, {result.platform}", ""]
    if result.device is None:
        lines.append(f"device  unknown: {result.device_problem}")
    else:
        lines += result_text({"device": result.device}).splitlines()
    lines.append(f"disk    {size(result.disk_free_bytes)} free here")
    for title, rows in (("attention", result.attention), ("kernels", result.kernels)):
        width = max((len(row.name) for row in rows), default=0)
        lines += ["", title] if rows else []
        lines += [f"  {row.name:<{width}}  {'on ' if row.runs else 'off'}  {row.reason}" for row in rows]
    missing = [name for name, found in result.packages.items() if found is None]
    lines += ["", "packages", "  " + ", ".join(f"{name} {found}" for name, found in result.packages.items() if found)]
    lines += [f"  missing: {', '.join(missing)}"] if missing else []
    lines += ["", "extras"]
    for extra in result.extras:
        state = extra.version or f"not installed: {extra.install}"
        lines.append(f"  {extra.package:<12}  {extra.use:<26}  {state}")
    if result.environment:
        lines += ["", *result_text({"environment": result.environment}).splitlines()]
    return "\n".join(lines)
