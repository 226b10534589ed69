"""Training and evaluation steps of whole models on one GPU: the medians of docs/performance.md.

    python kernels/bench/step.py                                    # the cases of the shipped models
    python kernels/bench/step.py --runs 3 full full-8bit short-2048
    python kernels/bench/step.py llama --profile --json llama.json  # a further step's kernels, by time
    python kernels/bench/step.py longest --tokens 200000            # one row, on a card of 80 GB
    python kernels/bench/step.py --device cpu                       # does it run at all

Each run is `ftcli bench` in a process of its own: random weights of the true shape, nothing downloaded. A row is
printed as soon as a case is through: tokens/s of every run with the median first, milliseconds, GiB at the peak and as
predicted, and the share of the bound. ``longest`` is one optimizer step on one row with activations in host memory,
and torch's allocator held to --limit-gb; five minutes on an H200, and 84 GiB of free host memory for 343,040 tokens.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from common import GIB, TINY_STEP, Answer, Table, bench, parser, require_device, settings


@dataclass(frozen=True)
class Case:
    """A recipe, what is changed in it, and the micro-batch."""

    recipe: str
    batch: int
    seq: int
    settings: tuple[str, ...] = ()
    policy: str = "false"
    steps: int = 10
    words: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Words of `ftcli bench` after the recipe."""
        words = ["--batch", str(self.batch), "--seq", str(self.seq), "--steps", str(self.steps), *self.words]
        return [*words, *settings(f"train.gradient_checkpointing={self.policy}", *self.settings)]


_FUSED = "train.optim=adamw_torch_fused"
_QWEN3_4B = ("model.name_or_path=Qwen/Qwen3-4B", "lora=null")
_NF4_R16 = ("lora.r=16",)
_POLICIES = ("false", "selective", "true", "offload")
#: Of the shipped models, at 2 x 4096 tokens; what runs where no case is named.
SHIPPED: Mapping[str, Case] = MappingProxyType(
    {
        **{f"llama-{policy}": Case("llama3.1-8b", 2, 4096, policy=policy) for policy in _POLICIES},
        **{f"gemma2-{policy}": Case("gemma2-9b", 2, 4096, policy=policy) for policy in _POLICIES},
        # What `auto` makes of a card with 40 GB.
        "llama-auto": Case("llama3.1-8b", 2, 4096, ("train.memory_budget_gib=39.4",), "auto"),
        "gemma2-auto": Case("gemma2-9b", 2, 4096, ("train.memory_budget_gib=39.4",), "auto"),
        "llama-fp8": Case("llama3.1-8b", 2, 4096, ("quantization.method=fp8",)),
        "gemma2-fp8": Case("gemma2-9b", 2, 4096, ("quantization.method=fp8",)),
        "llama-nf4": Case("llama3.1-8b-qlora", 2, 4096),
        "gemma2-nf4": Case("gemma2-9b-qlora", 2, 4096),
        "llama-evaluation": Case("llama3.1-8b", 2, 4096, words=("--eval",)),
        "gemma2-evaluation": Case("gemma2-9b", 2, 4096, words=("--eval",)),
        "qwen3": Case("qwen3-8b", 2, 4096),
        "mistral": Case("llama3.1-8b", 2, 4096, ("model.name_or_path=mistralai/Mistral-7B-v0.3",)),
    }
)
FURTHER: Mapping[str, Case] = MappingProxyType(
    {
        "full": Case("qwen3-8b", 2, 4096, (*_QWEN3_4B, _FUSED), steps=8),
        "full-gradients": Case("qwen3-8b", 2, 4096, (*_QWEN3_4B, _FUSED, "train.bf16_gradients=true"), steps=8),
        "full-bf16": Case(
            "qwen3-8b", 2, 4096,
            (*_QWEN3_4B, _FUSED, "train.pure_bf16=true", "train.bf16_stochastic_round=true"), steps=8,
        ),
        "full-8bit": Case("qwen3-8b", 2, 4096, (*_QWEN3_4B, "train.optim=adamw_8bit"), steps=8),
        "full-8b": Case("llama3.1-8b", 1, 4096, ("lora=null", _FUSED, "train.bf16_gradients=true"), "true", 6),
        "short-512": Case("llama3.1-8b", 1, 512, steps=16),
        "short-1024": Case("llama3.1-8b", 1, 1024, steps=16),
        "short-2048": Case("llama3.1-8b", 1, 2048, steps=16),
        "short-2048-fused": Case("llama3.1-8b", 1, 2048, (_FUSED,), steps=16),
        "mix": Case("llama3.1-8b", 8, 2048, steps=400, words=("--lengths", "lognormal:380,0.8")),
        "gemma2-1024": Case("gemma2-9b", 1, 1024, steps=16),
        "nf4-2048": Case("llama3.1-8b-qlora", 1, 2048, _NF4_R16, "true", 16),
        "nf4-lean": Case("llama3.1-8b-qlora", 1, 2048, _NF4_R16, "lean", 16),
        "nf4-offload": Case("llama3.1-8b-qlora", 1, 2048, _NF4_R16, "offload", 16),
        "bitnet": Case("bitnet-2b", 4, 2048, (_FUSED,), steps=5),
        "longest": Case("llama3.1-8b-qlora", 1, 343_040, ("lora.r=32", "lora.alpha=64"), "offload", 0),
    }
)  # fmt: skip
CASES: Mapping[str, Case] = MappingProxyType({**SHIPPED, **FURTHER})


def held_to(limit_gb: float) -> dict[str, str]:
    """The environment under which torch's allocator and CUDA's context, for which 1 GB is left, stay within a limit.

    Host memory is pinned by 8 threads: 1 to 2 GB/s by one. Pages of freed blocks can serve blocks of any size.
    """
    conf = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    total = int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) << 20  # noqa: S603
    share = min(1.0, (limit_gb - 1) * 1e9 / total)
    return {"PYTORCH_CUDA_ALLOC_CONF": f"{conf},per_process_memory_fraction:{share:.4f}"}


def row(name: str, answers: list[Answer]) -> dict[str, Any]:
    """The row of a case's runs."""
    failed = next((answer for answer in answers if answer.status != 0), None)
    if failed is not None:
        return {"case": name, "note": f"exit {failed.status}: {failed.said[:120]}"}
    found = [answer.result for answer in answers]
    speeds = [each["tokens_per_second"] for each in found]
    every = f" ({', '.join(f'{speed:,.0f}' for speed in speeds)})" if len(speeds) > 1 else ""
    predicted = found[0].get("predicted_allocated_bytes") or found[0].get("predicted_peak_bytes")
    return {
        "case": name,
        "tokens/s": f"{statistics.median(speeds):,.0f}{every}",
        "step ms": statistics.median(each["step_ms"] for each in found),
        "peak GiB": max(each["peak_memory_bytes"] or 0 for each in found) / GIB,
        "predicted": None if predicted is None else predicted / GIB,
        "of the bound": statistics.median(each.get("share_of_bound") or 0 for each in found),
        "note": f"first {found[0]['first_step_seconds']:.1f} s, graphs: {found[0]['cuda_graphs']}",
        "results": found,
    }


def main() -> None:
    """A row a case."""
    arguments = parser(__doc__)
    arguments.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    arguments.add_argument("--runs", type=int, default=1)
    arguments.add_argument("--profile", action="store_true", help="of each first run a further step's kernels, by time")
    arguments.add_argument("--tokens", type=int, default=343_040, help="of the case `longest`")
    arguments.add_argument("--limit-gb", type=float, default=80.0, help="of the case `longest`, in 10^9 bytes")
    options = arguments.parse_args()
    if unknown := set(options.cases) - set(CASES):
        arguments.error(f"no such cases: {sorted(unknown)}")
    require_device(options.device)
    columns = {"case": "", "tokens/s": "", "step ms": ".1f", "peak GiB": ".2f", "predicted": ".2f"}
    table = Table({**columns, "of the bound": ".1%", "note": ""})
    if options.device == "cpu":
        table.add(**row("smoke", [bench("smoke", "--steps", "2", *TINY_STEP) for _ in range(options.runs)]))
        table.save(options.json)
        return
    for name in options.cases or SHIPPED:
        case, env = CASES[name], {}
        if name == "longest":
            case, env = replace(case, seq=options.tokens), held_to(options.limit_gb)
        answers = [
            bench(case.recipe, *case.command, *(["--profile"] if options.profile and not run else []), env=env)
            for run in range(options.runs)
        ]
        table.add(**row(name, answers))
        table.save(options.json)
        for kernel in (answers[0].result.get("profile") or []) if options.profile else []:
            print(f"{kernel['ms']:9.3f} ms {kernel['calls']:6d}  {kernel['name'][:110]}", flush=True)


if __name__ == "__main__":
    main()
