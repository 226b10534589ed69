"""Findings of the last stage: does the run fit the device's and the host's memory, and the disk?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftcli.facts.device import DeviceFacts
from ftcli.paths import is_folder
from ftcli.plan.disk import DiskEstimate, existing_ancestor, why_no_folder, why_not_writable
from ftcli.plan.memory.advice import Verdict
from ftcli.plan.memory.estimate import Estimate, MemoryEstimate
from ftcli.plan.memory.host_total import HostEstimate
from ftcli.plan.memory.shards import gathered_bytes
from ftcli.plan.memory.workspaces import pinnable_bytes
from ftcli.plan.run import RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import policies
from ftcli.units import gib

_TIGHT_DISK = 0.9


def memory_findings(context: Context, estimate: MemoryEstimate, verdict: Verdict, device: DeviceFacts) -> Findings:
    """FT601 for a run that does not fit the device, FT602 for one that only just fits."""
    if verdict.level in ("fits", "unknown"):
        return
    assert verdict.available_bytes is not None
    needs = f"about {gib(verdict.needed_bytes)} GiB at its peak ({estimate.peak}: {_largest_parts(estimate)})"
    has = f"{device.name} has {gib(verdict.available_bytes)} GiB" + (" free" if device.free_bytes is not None else "")
    if verdict.level == "tight":
        yield context.warning("FT602", "model.name_or_path", f"tight: {needs}, {has}", help=_remedy(verdict))
    else:
        yield context.error("FT601", "model.name_or_path", f"does not fit: {needs}, {has}", help=_remedy(verdict))


def gathering_findings(context: Context, plan: RunPlan, estimate: MemoryEstimate) -> Findings:
    """FT366: completions are sampled on weights that do not fit a GPU whole, so that each token gathers them."""
    generates = plan.trains and plan.method_memory.generation is not None
    if not generates or plan.shard_size == 1 or plan.described is None or estimate.generator == "whole":
        return
    whole = gib(gathered_bytes(plan, estimate.dequantized_layers, whole=True))
    message = (
        f"completions are sampled slowly: each token gathers the weights layer by layer from the other GPUs, since all "
        f"of them ({whole} GiB) do not fit beside this GPU's part and the cache"
    )
    help = "shorten or thin out completions, quantize the base, or use more or larger GPUs"
    yield context.warning("FT366", "launch.engine", message, help=help)


def host_findings(context: Context, estimate: MemoryEstimate, free_bytes: int | None) -> Findings:
    """FT603: the checkpointing policy pins more memory than the host has room for."""
    pinned = estimate.pinned_host_bytes
    if free_bytes is None or pinned <= pinnable_bytes(free_bytes):
        return
    policy = policies.as_recipe(context.recipe.train.checkpointing)
    may = f"it may take {gib(pinnable_bytes(free_bytes))} of the {gib(free_bytes)} GiB that are free"
    message = f"gradient_checkpointing: {policy} keeps {gib(pinned)} GiB in host memory, and {may}"
    help = "use `true`, or lower train.per_device_train_batch_size or data.max_seq_len"
    yield context.error("FT603", "train.gradient_checkpointing", message, help=help)


def host_total_findings(context: Context, estimate: HostEstimate, free_bytes: int | None) -> Findings:
    """FT604: all ranks of the host need more of its memory at once than is free."""
    if free_bytes is None or estimate.total_bytes <= free_bytes:
        return
    path, what = "model.name_or_path", str(estimate.peak)
    if estimate.processes > 1:
        path, what = "launch.num_processes", f"{what} of {estimate.processes} processes"
    takes = f"{what} takes about {gib(estimate.total_bytes)} GiB of host memory ({_largest_parts(estimate)})"
    help = (
        "use fewer processes on this host, adapters in place of full fine-tuning, or a host with more memory: the "
        "system kills processes when there is none left"
    )
    yield context.warning("FT604", path, f"{takes}, and {gib(free_bytes)} GiB are free", help=help)


def _largest_parts(estimate: Estimate[Any]) -> str:
    largest = sorted(estimate.phases[estimate.peak], key=lambda name: -estimate.parts[name])[:3]
    return ", ".join(f"{name} {gib(estimate.parts[name])}" for name in largest)


def _remedy(verdict: Verdict) -> str:
    where = f"the smallest GPU that fits this recipe is {verdict.fitting_gpus[0]}" if verdict.fitting_gpus else ""
    if verdict.change is not None:
        change = f"{verdict.change} ({gib(verdict.change.total_bytes)} GiB)"
        return f"{change}; {where}" if where else change
    nothing = "no batch size, length or checkpointing makes it fit"
    instead = "use a smaller model" if verdict.gpus is None else f"use --gpus {verdict.gpus}, or a smaller model"
    return f"{nothing}; {instead}, or another GPU: {where}" if where else f"{nothing}; {instead}"


def output_findings(context: Context, output_dir: Path) -> Findings:
    """FT613: the output directory, or the nearest folder above it that exists, cannot be written to."""
    impossible = why_no_folder(output_dir)
    if impossible is not None:
        help = "choose another --output-dir"
        yield context.error("FT613", "run.output_dir", f"run.output_dir {output_dir}: {impossible}", help=help)
        return
    folder = existing_ancestor(output_dir)
    if not is_folder(folder):
        message = f"run.output_dir {output_dir}: {folder} is a file, not a folder"
        yield context.error("FT613", "run.output_dir", message, help="choose another --output-dir")
        return
    reason = why_not_writable(folder)
    if reason is not None:
        message = f"run.output_dir {output_dir}: {folder} cannot be written to: {reason}"
        help = "choose another --output-dir, or change the folder's permissions"
        yield context.error("FT613", "run.output_dir", message, help=help)


def disk_findings(context: Context, estimate: DiskEstimate, output_dir: Path) -> Findings:
    """FT611 for a disk that is too small, FT612 for one that is only just large enough."""
    free, needed = estimate.free_bytes, estimate.total_bytes
    if free is None or needed <= _TIGHT_DISK * free:
        return
    message = (
        f"the run writes up to {gib(needed)} GiB below {output_dir} ({estimate.checkpoints} checkpoints of "
        f"{gib(estimate.checkpoint_bytes)} GiB and the result), and {gib(free)} GiB are free"
    )
    help = "free some space, lower checkpoint.keep_last, or choose an --output-dir on another disk"
    if needed > free:
        yield context.error("FT611", "run.output_dir", message, help=help)
    else:
        yield context.warning("FT612", "run.output_dir", message, help=help)
