"""Results of single commands as text, the most important first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcli.cli.render import result_text, table
from ftcli.reporting import Result
from ftcli.units import gib, size


def check_text(result: Result) -> str:
    """The verdict, then what it rests on, then what was not checked."""
    lines = [_verdict_line(result), "", *_facts(result), *_kernel_lines(result.get("kernel_table") or ())]
    memory = result.get("memory")
    if memory is not None:
        lines += ["", f"memory  {_of(result['verdict'])} at its peak ({memory['peak']})"]
        lines += _sizes(memory["parts"])
        lines += _sizes({"pinned, on the host": memory.get("pinned_host_bytes", 0)})
    disk = result.get("disk")
    if disk is not None:
        free = "" if disk["free_bytes"] is None else f", {size(disk['free_bytes'])} free"
        lines += ["", f"disk    {size(disk['total_bytes'])}{free}"]
        lines += _sizes({f"checkpoints ({disk['checkpoints']})": disk["checkpoint_bytes"] * disk["checkpoints"]})
        lines += _sizes({"result": disk["result_bytes"]})
    if result.get("not_made"):
        lines += ["", "not checked"]
        lines += [f"  {item['check']}: {item['reason']}" for item in result["not_made"]]
    return "\n".join(lines)


def _verdict_line(result: Result) -> str:
    verdict, device = result.get("verdict"), result["device"]["name"]
    if verdict is None:
        return f"no problem found on {device}; memory could not be estimated"
    words = {"fits": "fits", "tight": "fits, but only just", "unknown": "no problem found, memory unknown"}
    return f"{words.get(verdict['level'], verdict['level'])} on {device}"


def _facts(result: Result) -> list[str]:
    model, dtypes = result["model"], result["dtypes"]
    count = model.get("parameters")
    parameters = f", {_millions(count)} parameters" if count else ""
    adapter = f", adapters {dtypes['adapter']}" if dtypes.get("adapter") else ""
    return [
        f"model      {model['name']} ({model['source']}){parameters}",
        f"dtype      {dtypes['compute']}: {dtypes['reason']}; weights {dtypes['parameter']}{adapter}",
        f"attention  {result['attention']}",
        *_adapters(result.get("adapters")),
        *_checkpointing(result.get("checkpointing")),
    ]


def _adapters(planned: dict[str, Any] | None) -> list[str]:
    """What would have adapters; nothing for full fine-tuning."""
    if planned is None:
        return []
    layers = ", ".join(f"{count} {name}" for name, count in planned["layers"].items())
    count = planned["parameters"]
    trained = "" if count is None else f"; {count:,} parameters trained"
    left = ", ".join(f"{count} {name}" for name, count in planned["left"].items())
    return [f"adapters   {layers}{trained}" + (f"; not adapted: {left}" if left else "")]


def _checkpointing(choice: dict[str, Any] | None) -> list[str]:
    """What `auto` chose, and why. Nothing where the recipe names the policy itself."""
    if choice is None or choice["requested"] != "auto":
        return []
    count = choice["uncheckpointed_layers"]
    but = f" but in the last {count} layers" if count else ""
    return [f"recompute  gradient_checkpointing: {str(choice['policy']).lower()}{but}, {choice['reason']}"]


def _kernel_lines(rows: Sequence[dict[str, str]]) -> list[str]:
    """What computes each part of the model on the device, and why."""
    width = max((len(row["part"]) for row in rows), default=0)
    lines = [f"  {row['part']:<{width}}  {row['runs']}: {row['reason']}" for row in rows]
    return ["", "kernels", *lines] if lines else []


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.2f} million"


def _of(verdict: dict[str, Any]) -> str:
    needed = gib(verdict["needed_bytes"])
    available = verdict.get("available_bytes")
    return f"{needed} of {gib(available)} GiB" if available is not None else f"{needed} GiB"


def _sizes(parts: dict[str, float]) -> list[str]:
    shown = {name: count for name, count in parts.items() if count}
    width = max((len(name) for name in shown), default=0)
    return [f"  {name:<{max(width, 20)}}  {size(count):>10}" for name, count in shown.items()]


def evaluation_text(result: Result) -> str:
    """One column for the base model and one for the run; a row for each measure and each task."""
    columns = {name: _measures(result[name]) for name in ("base", "run") if result.get(name)}
    rows = dict.fromkeys(measure for values in columns.values() for measure in values)
    records = [{"measure": row, **{name: values.get(row) for name, values in columns.items()}} for row in rows]
    return "\n".join(table(records))


def _measures(scores: dict[str, Any]) -> dict[str, Any]:
    names = ("loss", "perplexity", "token_accuracy", "tokens")
    shown = {name.replace("_", " "): scores.get(name) for name in names}
    datasets = scores.get("datasets") or {}
    if len(datasets) > 1:
        for name, part in datasets.items():
            shown |= {f"loss of {name}": part["loss"], f"accuracy of {name}": part["token_accuracy"]}
    for name, task in (scores.get("tasks") or {}).items():
        shown[name] = f"{task['score']:.1%} of {task['rows']}"
    for name, metrics in (scores.get("lm_eval") or {}).items():
        shown |= {f"{name} {metric}": value for metric, value in metrics.items()}
    return {name: value for name, value in shown.items() if value is not None}


def bench_text(result: Result) -> str:
    """The numbers that count, then everything."""
    share = result.get("share_of_bound")
    bound = f", {share:.0%} of the arithmetic bound" if share is not None else ""
    first = " in the first step, with all that is set up in it" if result.get("first_step_only") else " a step"
    head = f"{result['tokens_per_second']:,.0f} tokens/s, {result['step_ms']:.1f} ms{first}{bound}"
    return "\n".join([head, *_peaks(result), "", result_text(result)])


def _peaks(result: Result) -> list[str]:
    """The measured peak and its prediction: of torch's allocator on a GPU, of the whole process on a CPU."""
    peak, whole = result.get("peak_memory_bytes"), result.get("predicted_peak_bytes")
    if peak is None or whole is None:
        return []
    allocated = result.get("predicted_allocated_bytes")
    if allocated is None:
        return [f"{size(peak)} resident at the peak, {size(whole)} predicted"]
    return [
        f"{size(peak)} allocated at the peak, {size(allocated)} predicted; {size(whole)} with what CUDA takes itself"
    ]


def doctor_text(result: Result) -> str:
    """The machine first, then what runs on it, then versions."""
    lines = [f"ftcli {result['ftcli']}, Python {result['python']}, {result['platform']}", ""]
    if result["device"] is None:
        lines.append(f"device  unknown: {result['device_problem']}")
    else:
        lines += result_text({"device": result["device"]}).splitlines()
    lines.append(f"disk    {size(result['disk_free_bytes'])} free here")
    for title in ("attention", "kernels"):
        rows = result.get(title, ())
        width = max((len(row["name"]) for row in rows), default=0)
        lines += ["", title] if rows else []
        lines += [f"  {row['name']:<{width}}  {'on ' if row['runs'] else 'off'}  {row['reason']}" for row in rows]
    packages = result["packages"]
    missing = [name for name, found in packages.items() if found is None]
    lines += ["", "packages", "  " + ", ".join(f"{name} {found}" for name, found in packages.items() if found)]
    lines += [f"  missing: {', '.join(missing)}"] if missing else []
    lines += ["", "extras"]
    for extra in result["extras"]:
        state = extra["version"] or f"not installed: {extra['install']}"
        lines.append(f"  {extra['package']:<12}  {extra['for']:<26}  {state}")
    if result["environment"]:
        lines += ["", *result_text({"environment": result["environment"]}).splitlines()]
    return "\n".join(lines)
