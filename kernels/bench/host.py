"""What a training step costs the host, with CUDA graphs and without: time, launches, allocations.

    python kernels/bench/host.py recipes/llama3.1-8b.yaml --batch 1 --seq 512

The step is that of `ftcli bench`. `host ms` is the time between the ends of two steps as the host sees it, which is
ahead of the GPU where nothing waits for it; `launches` counts what the host sends to the GPU (a graph is one),
`kernels` what the GPU runs; `allocations` are requests to torch's allocator. Numbers per layer are those of a step over
its layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from ftcli.config.load import load_recipe
from ftcli.config.overrides import Override
from ftcli.job import open_job
from ftcli.methods.sft.objective import build_sft
from ftcli.pipeline.benchmark import bench_recipe
from ftcli.pipeline.checking import checked
from ftcli.pipeline.options import BenchOptions
from ftcli.reporting import Session, SilentReporter
from ftcli.train import assembly
from ftcli.train.bench import synthetic_tokens
from ftcli.train.loop import StepWatcher, TrainerHooks

#: What the profiler calls a launch.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class Marks(StepWatcher):
    """Times the host at the end of each step; profiles the last one."""

    def __init__(self, last: int) -> None:
        self.seconds: list[float] = []
        self.allocations: list[int] = []
        self.last = last
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        )

    def begin(self, step: int) -> None:
        if step + 1 == self.last:
            torch.cuda.synchronize()
            self.profile.start()

    def stepped(self, step: int) -> None:
        self.seconds.append(time.perf_counter())
        self.allocations.append(torch.cuda.memory_stats()["allocation.all.allocated"])
        if step == self.last:
            torch.cuda.synchronize()
            self.profile.stop()

    def counts(self) -> tuple[int, int]:
        """Launches by the host, kernels on the GPU."""
        averages = self.profile.key_averages()
        launches = sum(e.count for e in averages if e.key.startswith(LAUNCHES))
        kernels = sum(e.count for e in averages if e.device_type.name == "CUDA" and not e.is_user_annotation)
        return launches, kernels


def measure(path: Path, options: BenchOptions, settings: list[str]) -> tuple[float, int, int, float, int]:
    """(host ms, launches, kernels, allocations, layers) of a step."""
    loaded = load_recipe(path, [Override(text=text, label=f"--set {text}") for text in settings])
    session = Session(SilentReporter(), offline=True)
    report = checked(replace(loaded, recipe=bench_recipe(loaded.recipe, options)), session, "bench")
    job = open_job(report, session)
    model = assembly.build_trainable(job)
    train, seq = job.recipe.train, job.recipe.data.max_seq_len
    rows = synthetic_tokens(train.per_device_train_batch_size * (options.steps + 1), seq, job.vocab_size, 0)
    assembly.put_on_kernels(job, model, rows)
    marks = Marks(options.steps + 1)
    loop = build_sft(job, model, rows, TrainerHooks(None, 1, None))
    loop.watchers.append(marks)
    loop.run(None)
    steady = slice(3, options.steps)  # the first ones compile and capture, the last one is profiled
    milliseconds = [1000 * (b - a) for a, b in pairwise(marks.seconds[steady])]
    allocations = [b - a for a, b in pairwise(marks.allocations[steady])]
    assert job.facts.shape is not None
    return (
        statistics.median(milliseconds),
        *marks.counts(),
        statistics.median(allocations),
        job.facts.shape.num_layers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--set", action="append", default=["train.gradient_checkpointing=false"], dest="settings")
    given = parser.parse_args()
    options = BenchOptions(batch=given.batch, seq=given.seq, steps=given.steps)
    print("| graphs | host ms | launches | kernels | allocations | host ms a layer | kernels a layer |")
    print("|---|---|---|---|---|---|---|")
    for graphs in ("false", "true"):
        found = measure(given.recipe, options, [*given.settings, f"train.cuda_graphs={graphs}"])
        milliseconds, launches, kernels, allocations, layers = found
        print(
            f"| {graphs} | {milliseconds:.1f} | {launches:,} | {kernels:,} | {allocations:,.0f} "
            f"| {milliseconds / layers:.2f} | {kernels / layers:.0f} |",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
