"""Training steps of several recipes in one process, each a number of times: the medians of docs/performance.md.

    python kernels/bench/steps.py --runs 3 full full-8bit short-2048
    python kernels/bench/steps.py --profile full

Each run is `ftcli bench` with a model of its own; only what Triton has compiled is shared. A line is printed as soon as
a case is through: tokens/s of every run with the median first, milliseconds, GiB at the peak and as predicted, and the
share of the bound. `--profile` records a further step of the first run, and lists its kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from ftcli.config.load import load_recipe
from ftcli.config.overrides import Override
from ftcli.pipeline.bench_result import BenchResult
from ftcli.pipeline.benchmark import bench_step
from ftcli.pipeline.options import BenchOptions
from ftcli.reporting import Session, SilentReporter

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Case:
    """A recipe, what is changed in it, and the micro-batch."""

    recipe: str
    batch: int
    seq: int
    settings: tuple[str, ...] = ("train.gradient_checkpointing=false",)
    steps: int = 12
    lengths: str | None = None


_QWEN3_4B = ("model.name_or_path=Qwen/Qwen3-4B", "lora=null", "train.gradient_checkpointing=false")
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "full": Case("qwen3-8b", 2, 4096, (*_QWEN3_4B, "train.optim=adamw_torch_fused"), 8),
        "full-gradients": Case(
            "qwen3-8b", 2, 4096, (*_QWEN3_4B, "train.optim=adamw_torch_fused", "train.bf16_gradients=true"), 8
        ),
        "full-bf16": Case(
            "qwen3-8b", 2, 4096, (*_QWEN3_4B, "train.optim=adamw_torch_fused", "train.pure_bf16=true",
            "train.bf16_stochastic_round=true"), 8,
        ),
        "full-8b": Case(
            "llama3.1-8b", 1, 4096, ("lora=null", "train.gradient_checkpointing=true", "train.optim=adamw_torch_fused",
            "train.bf16_gradients=true"), 6,
        ),
        "full-8bit": Case("qwen3-8b", 2, 4096, (*_QWEN3_4B, "train.optim=adamw_8bit"), 8),
        "llama": Case("llama3.1-8b", 2, 4096, steps=8),
        "qwen3": Case("qwen3-8b", 2, 4096, steps=8),
        "short-512": Case("llama3.1-8b", 1, 512, steps=16),
        "short-1024": Case("llama3.1-8b", 1, 1024, steps=16),
        "short-2048": Case("llama3.1-8b", 1, 2048, steps=16),
        "short-2048-fused": Case("llama3.1-8b", 1, 2048, (*Case.settings, "train.optim=adamw_torch_fused"), 16),
        "mix": Case("llama3.1-8b", 8, 2048, steps=400, lengths="lognormal:380,0.8"),
        "gemma2-1024": Case("gemma2-9b", 1, 1024, steps=16),
        "nf4-2048": Case("llama3.1-8b-qlora", 1, 2048, ("train.gradient_checkpointing=true", "lora.r=16"), 16),
        "nf4-lean": Case("llama3.1-8b-qlora", 1, 2048, ("train.gradient_checkpointing=lean", "lora.r=16"), 16),
        "nf4-offload": Case("llama3.1-8b-qlora", 1, 2048, ("train.gradient_checkpointing=offload", "lora.r=16"), 16),
    }
)  # fmt: skip


def bench(case: Case, *, profile: bool = False) -> BenchResult:
    """One run of a case, whose model may stay on the device until garbage is collected."""
    settings = [Override(text=text, label=f"--set {text}") for text in case.settings]
    loaded = load_recipe(RECIPES / f"{case.recipe}.yaml", settings)
    options = BenchOptions(batch=case.batch, seq=case.seq, lengths=case.lengths, steps=case.steps, profile=profile)
    return bench_step(loaded, Session(SilentReporter(), offline=True), options)


def run(case: Case, *, profile: bool = False) -> BenchResult:
    """One run of a case; nothing of it stays on the device."""
    try:
        return bench(case, profile=profile)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def line(name: str, results: list[BenchResult]) -> str:
    """The row of a case."""
    timings = [result.measured.timing for result in results]
    speeds = [timing.tokens_per_second for timing in timings]
    peaks = [timing.peak_memory_bytes or 0 for timing in timings]
    predicted, share = results[0].predicted.predicted_allocated_bytes, results[0].bound.share_of_bound
    shown = [
        name,
        f"{statistics.median(speeds):,.0f} ({', '.join(f'{speed:,.0f}' for speed in speeds)})",
        f"{statistics.median(timing.step_ms for timing in timings):.1f}",
        f"{max(peaks) / 2**30:.2f} ({(predicted or 0) / 2**30:.2f})",
        "" if share is None else f"{statistics.median(r.bound.share_of_bound or 0 for r in results):.1%}",
        f"first {timings[0].first_step_seconds:.1f} s, graphs {results[0].measured.cuda_graphs}",
    ]
    return f"| {' | '.join(shown)} |"


def kernels(result: BenchResult) -> str:
    """The kernels of the step that was recorded."""
    found = result.measured.profiled
    if found is None or found.profile is None:
        return "nothing was recorded"
    rows = [f"{row.ms:9.3f} ms {row.calls:6d}  {row.name[:110]}" for row in found.profile]
    if found.gpu_time is not None:
        rows.append(f"first to last {found.gpu_time.span_ms:.1f} ms, busy {found.gpu_time.busy_ms:.1f} ms")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for name in given.cases:
        results = [run(CASES[name], profile=given.profile and not index) for index in range(given.runs)]
        print(line(name, results), flush=True)
        if given.profile:
            print(kernels(results[0]), flush=True)


if __name__ == "__main__":
    main()
