"""Steps of preference training on pairs of one shape, by `ftcli train` and by TRL's DPOTrainer: pairs a second, memory.

    python kernels/bench/preference.py                                      # bf16, and TRL where it is installed
    python kernels/bench/preference.py --cases bf16 nf4 lognormal --only ours --share auto off
    python kernels/bench/preference.py --only ours --reference live cached
    python kernels/bench/preference.py --method kto --only ours             # each pair as a good and a bad answer
    python kernels/bench/preference.py --device cpu                         # does it run at all

Llama-3.1-8B's shape with random weights, LoRA of rank 16 on all linears, prompts of 190 and answers of 330 tokens, 4
pairs a step; ``lognormal`` has lengths of these means (sigma 0.6). A row is the median of the steps after the second
one; of ``lognormal`` the mean over all of them, logged every ten steps as runs are. ``--share`` are values of
preference.share_prompts: what both answers begin with computed once, or with each of them. The reference is computed in
each step, or before the first one (``cached``), which is not in the times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from common import GIB, RECIPES, Table, ftcli, in_own_process, parser, require_device, settings
from rows import UNTRAINED, letters

#: Tokens of prompt and answer, on a GPU and for a look on a CPU.
LENGTHS, TINY = (190, 330), (24, 40)
SIGMA = 0.6
CASES = ("bf16", "nf4", "fp8", "lognormal")


def pairs(count: int, prompt: int, answer: int, *, lognormal: bool) -> list[dict[str, str]]:
    """Rows of random letters: a byte is a token."""
    rng = random.Random(0)

    def size(mean: int) -> int:
        if not lognormal:
            return mean
        return max(4, min(4 * mean, round(mean * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA))))

    return [
        {"prompt": letters(size(prompt), 3 * i), "chosen": letters(size(answer), 3 * i + 1),
         "rejected": letters(size(answer), 3 * i + 2)}
        for i in range(count)
    ]  # fmt: skip


def ours(case: str, share: str, reference: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of `ftcli train`, from its metrics."""
    with tempfile.TemporaryDirectory(prefix="ftcli-pairs-") as folder:
        data, kept = Path(folder, "pairs.jsonl"), "off" if reference == "live" else str(Path(folder, "reference"))
        lengths = LENGTHS if options.device == "cuda" else TINY
        rows = pairs(options.pairs * options.steps, *lengths, lognormal=case == "lognormal")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        recipe = RECIPES / ("smoke-dpo.yaml" if options.device == "cpu" else "llama3.1-8b.yaml")
        longest = (4 if case == "lognormal" else 1) * sum(lengths) + 16
        storage = case if case in ("nf4", "fp8") else "none"
        words = settings(
            *UNTRAINED, "lora.r=16", "lora.alpha=16", f"train.method={options.method}",
            f"data.format={'preference' if options.method == 'dpo' else 'labelled'}",
            "data.loss_on=auto", f"data.train=[{data}]", "data.eval=[]", f"data.max_seq_len={longest}", "eval.tasks=[]",
            "eval.every_steps=null", f"train.max_steps={options.steps}",
            f"logging.every_steps={10 if case == 'lognormal' and options.device == 'cuda' else 1}",
            f"train.per_device_train_batch_size={options.pairs * (1 if options.method == 'dpo' else 2)}",
            "train.gradient_accumulation_steps=1",
            "train.learning_rate=1e-5", "train.warmup_steps=0", f"quantization.method={storage}",
            f"train.gradient_checkpointing={options.checkpointing}",
            f"preference.reference_cache={kept}",
            *([f"preference.share_prompts={share}"] if options.method == "dpo" else options.settings),
        )  # fmt: skip
        run = Path(folder, "run")
        answer = ftcli(["train", str(recipe), *words, "--offline", "--resume", "never", "--output-dir", str(run)])
        metrics = run / "metrics.jsonl"
        lines = [json.loads(text) for text in metrics.read_text().splitlines()] if metrics.exists() else []
    lines = [line for line in lines if "loss" in line]
    if answer.status != 0 or len(lines) < 3:
        return {"note": f"exit {answer.status}: {answer.said[:200]}"}
    seconds = [step for before, after in pairwise(lines) for step in _steps(before, after)]
    peak = max(line["peak_memory_bytes"] for line in lines) / GIB
    computed = lines[-1]["tokens_computed"] / lines[-1]["step"]
    return {
        **_rates(seconds[1:], case, options), "peak GiB": peak, "tokens a step": computed, "loss": lines[0]["loss"],
        "last loss": lines[-1]["loss"], "steps": [1e3 * each for each in seconds[1:]],
    }  # fmt: skip


def _steps(before: dict[str, Any], after: dict[str, Any]) -> list[float]:
    """Seconds of each step between two lines."""
    steps, tokens = after["step"] - before["step"], after["tokens"] - before["tokens"]
    return [tokens / after["tokens_per_second"] / steps] * steps


def _rates(seconds: list[float], case: str, options: argparse.Namespace) -> dict[str, Any]:
    middle = statistics.fmean(seconds) if case == "lognormal" else statistics.median(seconds)
    return {"pairs/s": options.pairs / middle, "step ms": 1e3 * middle}


def by_trl(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of TRL's DPOTrainer on transformers' model with PEFT's adapters."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from ftcli.config.model import ModelConfig
    from ftcli.model.tokenizer import load_tokenizer

    on_gpu, ends = options.device == "cuda", []
    lengths = LENGTHS if on_gpu else TINY
    rows = Dataset.from_list(pairs(options.pairs * options.steps, *lengths, lognormal=case == "lognormal"))

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2", tokenizer="bytes"), offline=True)
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, max_length=None, use_cpu=not on_gpu, bf16=on_gpu, optim="adamw_torch_fused",
            per_device_train_batch_size=options.pairs, max_steps=options.steps,
            gradient_checkpointing=options.checkpointing == "true", save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        made = {"args": config, "train_dataset": rows, "processing_class": tokenizer, "callbacks": [Ends()]}
        DPOTrainer(adapted(options.device), **made).train()
    seconds = [after - before for before, after in pairwise(ends)]
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else None
    return {**_rates(seconds[1:], case, options), "peak GiB": peak}


def adapted(device: str) -> Any:
    """transformers' model with random weights and PEFT's adapters on all linears; a small one on a CPU."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from ftcli.assets import asset

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=300, max_position_embeddings=128, **small)
    if device == "cuda":
        config = AutoConfig.from_pretrained(asset("configs", "meta-llama--Llama-3.1-8B"))
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")).train()


def main() -> None:
    """A row for each case of each contender."""
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=["bf16"])
    arguments.add_argument("--only", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    arguments.add_argument("--share", nargs="+", choices=["auto", "off"], default=["auto"])
    arguments.add_argument("--reference", nargs="+", choices=["live", "cached"], default=["live"])
    arguments.add_argument("--method", choices=["dpo", "kto"], default="dpo")
    arguments.add_argument("--settings", nargs="+", default=[], help="KTO's, such as preference.kl_rows=2")
    arguments.add_argument("--pairs", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--checkpointing", default="false", help="of TRL true or false")
    arguments.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    require_device(options.device)
    if options.device == "cpu":
        options.pairs, options.steps = 2, 4
    if options.work:
        contender, case, share, reference = options.work
        print(json.dumps(ours(case, share, reference, options) if contender == "ours" else by_trl(case, options)))
        return
    table = Table({
        "by": "", "case": "", "share": "", "reference": "", "pairs/s": ".2f", "step ms": ".1f", "peak GiB": ".2f",
        "tokens a step": ".0f", "last loss": ".4f", "note": "",
    })  # fmt: skip
    for case in options.cases:
        each = product(options.share, options.reference)
        contenders = [("ours", *ways) for ways in each] if "ours" in options.only else []
        by_dpo = options.method == "dpo" and case not in ("nf4", "fp8")
        if "trl" in options.only and find_spec("trl") is not None and by_dpo:
            contenders.append(("trl", "off", "live"))
        for contender, share, reference in contenders:
            row = {"by": contender, "case": case, "share": share, "reference": reference}
            table.add(**row, **in_own_process("--work", contender, case, share, reference))
    table.save(options.json)


if __name__ == "__main__":
    main()
