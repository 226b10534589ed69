"""Whole GRPO steps of `ftcli grpo`: where a step's time goes, tokens a second, and the peak of memory.

    python kernels/bench/grpo_step.py --cases bf16 fp8 nf4
    python kernels/bench/grpo_step.py --cases long --steps 1        # samples 20,000 tokens a completion: minutes
    python kernels/bench/grpo_step.py --gpus 2                      # and the same with ranks, on half the micro-batches
    python kernels/bench/grpo_step.py --gpus 2 --cases 32b          # Qwen3-32B's shape, its weights sharded
    python kernels/bench/grpo_step.py --device cpu                  # does it run at all

Random weights of Llama-3.1-8B's shape, LoRA of rank 16 on all linear layers. ``bf16``, ``fp8`` and ``nf4`` are the
storage of the base, each with 8 prompts x 8 completions of 512 + 512 tokens; ``long`` has one prompt, completions of
20,000 tokens and a row in each micro-batch; ``32b-layered`` completions of 32, whose tokens gather the weights layer by
layer. The rows are those of the run's metrics.jsonl; the first step has
everything in it that is set up once.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import GIB, RECIPES, Table, ftcli, parser, require_device, settings
from rows import UNTRAINED, loaded, write_prompts

#: Completions of each prompt.
GROUP = 8
PARTS = ("rollout", "rewards", "log_probs", "training", "optimizer")


@dataclass(frozen=True)
class Case:
    """A storage of the base and the shape of a step; ``more`` settings of a case on shards."""

    storage: str
    prompts: int
    prompt: int
    completion: int
    micro_batch: int
    more: tuple[str, ...] = ()

    @property
    def recipe(self) -> Path:
        """The recipe that the settings change."""
        return RECIPES / ("smoke-grpo.yaml" if self.storage == "tiny" else "llama3.1-8b.yaml")

    def settings(self, prompts: Path, steps: int, gpus: int = 1) -> tuple[str, ...]:
        """Settings of the recipe. Rewards differ by length, so that groups have an advantage."""
        # Characters in a completion of random tokens: 248 of the ids that a vocabulary has stand for one, on average.
        mean = round(self.completion * 248 / (264 if self.storage == "tiny" else 128256))
        rewards = ", ".join(f"{{use: length, min_chars: {least}, max_chars: 1000000}}" for least in (mean, mean + 1))
        return (
            *UNTRAINED,
            "lora.r=16",
            f"quantization.method={'none' if self.storage in ('bf16', 'tiny') else self.storage}",
            f"data.train=[{prompts}]",
            "data.eval=[]",
            f"data.max_seq_len={self.prompt + self.completion}",
            f"train.max_steps={steps}",
            f"train.per_device_train_batch_size={self.micro_batch}",
            f"train.gradient_accumulation_steps={self.prompts * GROUP // self.micro_batch // gpus}",
            "train.learning_rate=1e-3",
            "train.warmup_steps=0",
            "logging.every_steps=1",
            "eval.every_steps=null",
            "eval.tasks=[]",
            f"grpo={{num_generations: {GROUP}, max_prompt_length: {self.prompt}, "
            f"max_completion_length: {self.completion}, rewards: [{rewards}]}}",
            *self.more,
        )


CASES = {
    **{storage: Case(storage, 8, 512, 512, 8) for storage in ("bf16", "fp8", "nf4")},
    "long": Case("bf16", 1, 480, 20_000, 1),
    "32b": Case("bf16", 8, 512, 512, 8, ("launch.engine=fsdp",)),
    "32b-layered": Case("bf16", 8, 512, 32, 8, ("launch.engine=fsdp", "train.memory_budget_gib=90")),
}
#: Qwen3-32B: what its config.json says of the shape.
_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "sliding_window": None, "use_sliding_window": False, "dtype": "bfloat16",
}  # fmt: skip
TINY = Case("tiny", 2, 48, 24, 8)


def measure(name: str, case: Case, steps: int, gpus: int, more: list[str], table: Table) -> None:
    """Adds a row for each step of one run."""
    with tempfile.TemporaryDirectory(prefix="ftcli-grpo-") as folder:
        scratch = Path(folder)
        prompts = scratch / "prompts.jsonl"
        prompts.write_text('{"prompt": "a"}\n')
        if name.startswith("32b"):
            (scratch / "config.json").write_text(json.dumps(_32B))
            more = [*more, f"model.name_or_path={scratch}", "model.dtype=bfloat16"]
        given = (*case.settings(prompts, steps, gpus), *more)
        write_prompts(loaded(case.recipe, *given), prompts, case.prompts, equal=True)
        words = ["grpo", str(case.recipe), *settings(*given), "--offline", "--resume", "never"]
        words += ["--output-dir", str(scratch / "run"), *(["--gpus", str(gpus)] if gpus > 1 else [])]
        answer = ftcli(words)
        metrics = scratch / "run" / "metrics.jsonl"
        lines = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.exists() else []
    for line in (line for line in lines if "loss" in line):
        parts = {part: line.get(f"seconds/{part}") for part in PARTS}
        rates = {f"{part} tok/s": line.get(f"throughput/{part}") for part in ("rollout", "training")}
        peak = line["peak_memory_bytes"] / GIB
        table.add(case=name, GPUs=gpus, step=line["step"], **parts, **rates, **{"peak GiB": peak, "metrics": line})
    if answer.status != 0:
        table.add(case=name, note=f"exit {answer.status}: {answer.said[:160]}")


def main() -> None:
    """A row for each step of each case."""
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", default=["bf16"], choices=list(CASES))
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--checkpointing", default="auto", help="a policy; auto takes the fastest that fits")
    arguments.add_argument("--gpus", type=int, default=1, help="N: a run with so many ranks after that of one")
    options = arguments.parse_args()
    require_device(options.device)
    columns = {"case": "", "GPUs": "", "step": "", **dict.fromkeys(PARTS, ".2f")}
    rates = {"rollout tok/s": ",.0f", "training tok/s": ",.0f", "peak GiB": ".2f"}
    table = Table({**columns, **rates, "note": ""})
    more = [f"train.gradient_checkpointing={options.checkpointing}"]
    for name in options.cases if options.device == "cuda" else ("tiny",):
        for gpus in dict.fromkeys((options.gpus if name.startswith("32b") else 1, options.gpus)):
            measure(name, CASES.get(name, TINY), options.steps, gpus, more, table)
            table.save(options.json)


if __name__ == "__main__":
    main()
