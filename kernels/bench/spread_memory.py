"""The memory estimate of full fine-tuning with spread weights (``launch.engine: fsdp``), at shapes of many kinds.

    python kernels/bench/spread_memory.py FOLDER [--gpus 2] [--only qwen3-4b,...] [--steps 1]

Each case is `ftcli bench --gpus 2` of a model's true shape with random weights: what the estimate predicts beside what
torch's allocator held at most (``max_memory_allocated``; reserved besides). About 20 seconds a case on 2 x H200.
Status 1 where a prediction is further off than a tenth, or a case failed. ``--gpus cpu`` tries the script on the
bundled tiny model, where the peak is that of the process and is not judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus import bench

_GIB = 2**30
_TOLERANCE = 0.1


@dataclass(frozen=True)
class Case:
    """A model by its name, or its config.json; rows a GPU, tokens a row, and the checkpointing policy."""

    model: str | dict[str, Any]
    batch: int
    seq: int
    policy: str


def _llama(**shape: Any) -> dict[str, Any]:
    """Llama 3.2's config.json but for its rope scaling, which takes no memory."""
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "intermediate_size": 8192,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    }
    return {**common, **shape}


_ONE = _llama(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64)
_THREE = _llama(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128)
#: The estimate was fitted to Llama-3.1-8B at 2 x 4096 with nothing recomputed.
CASES = {
    "qwen3-4b": Case("Qwen/Qwen3-4B", 2, 4096, "false"),
    "gemma2-2b": Case("google/gemma-2-2b", 1, 8192, "false"),
    "llama3.2-1b": Case(_ONE, 4, 2048, "selective"),
    "llama3.2-3b": Case(_THREE, 1, 8192, "true"),
    "gemma2-2b-short": Case("google/gemma-2-2b", 2, 2048, "true"),
    "qwen3-4b-short": Case("Qwen/Qwen3-4B", 1, 2048, "selective"),
}


def measure(out: Path, name: str, case: Case, steps: str, cpu: bool) -> dict[str, Any]:
    """One line of the table."""
    model = case.model
    if isinstance(model, dict):
        folder = out / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        model = str(folder)
    given = {
        "lora": "null",
        "launch.engine": "fsdp",
        "train.gradient_checkpointing": case.policy,
        **({"launch.num_processes": "2", "model.kernels": "reference"} if cpu else {"model.name_or_path": model}),
    }
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    words += ["--steps", steps, "--batch", str(case.batch), "--seq", "64" if cpu else str(case.seq)]
    recipe = "recipes/smoke.yaml" if cpu else "recipes/qwen3-8b.yaml"
    began = time.perf_counter()
    found = bench(out, name, recipe, (*words, *(() if cpu else ("--gpus", "2"))))
    peaks = (found["several"] or {}).get("peak_memory_bytes_of_each") or [0]
    peak, predicted = max(peaks), found["predicted_allocated_bytes"]
    return {
        "exit": found["exit"],
        "peak_gib": peak / _GIB,
        "predicted_gib": None if predicted is None else predicted / _GIB,
        "ratio": predicted / peak if predicted and peak else None,
        "reserved_gib": (found["peak_reserved_bytes"] or 0) / _GIB,
        "used_gib": (found["device_used_bytes"] or 0) / _GIB,
        "predicted_in_all_gib": (found["predicted_peak_bytes"] or 0) / _GIB,
        "host_peak_gib": found["host_peak_bytes"] / _GIB,
        "kernels": found["kernels"],
        "tokens_per_second_of_each": found["tokens_per_second"],
        "seconds": time.perf_counter() - began,
    }


def main() -> int:
    """Measures case after case; 1 where one is not as predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="2", choices=("2", "cpu"))
    parser.add_argument("--only", default="qwen3-4b,gemma2-2b,llama3.2-1b,llama3.2-3b", help=", ".join(CASES))
    parser.add_argument("--steps", default="1", help="after the first; AdamW's state is there from the second on")
    asked = parser.parse_args()
    out: Path = asked.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cpu, found = asked.gpus == "cpu", {}
    for name in asked.only.split(","):
        found[name] = measure(out, name, CASES[name], asked.steps, cpu)
        print(json.dumps({name: found[name]}), flush=True)
        (out / "spread_memory.json").write_text(json.dumps(found, indent=1))
    return int(any(each["exit"] or not (cpu or abs(each["ratio"] - 1) <= _TOLERANCE) for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
