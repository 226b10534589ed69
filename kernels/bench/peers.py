"""The same training step by other trainers beside `ftcli bench`, on the same machine, shape and batch.

    pip install liger-kernel==0.8.5 trl                             # whichever are wanted; what is missing is said
    python kernels/bench/peers.py --model Qwen/Qwen3-4B --full --steps 6 --only ours liger
    python kernels/bench/peers.py --model meta-llama/Llama-3.1-8B --rank 16 --checkpointing
    python kernels/bench/peers.py --device cpu                      # does it run at all

Contenders: ``ours`` (`ftcli bench`); ``transformers``, a bare loop over transformers and PEFT with torch's attention
and fused AdamW; ``liger``, the same patched by Liger's own function for the model; ``trl``, TRL's SFTTrainer on the
same model with rows of random tokens. Weights are random. Full fine-tuning keeps float32 parameters under bfloat16
autocast, or everything in bfloat16 with --pure-bf16; adapters have rank --rank on all linears and a base in bfloat16.
Every contender has a process of its own; a row is its median step after the first two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

from common import GIB, TINY_STEP, Table, bench, in_own_process, parser, require_device, settings

NEEDED = {"liger": "liger_kernel", "trl": "trl"}
CONTENDERS = ("ours", "transformers", *NEEDED)
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """The row of `ftcli bench`."""
    changes = ["lora=null", "train.optim=adamw_torch_fused"] if options.full else [f"lora.r={options.rank}"]
    changes += ["train.pure_bf16=true", "train.bf16_stochastic_round=true"] if options.pure_bf16 else []
    changes.append(f"train.gradient_checkpointing={str(options.checkpointing).lower()}")
    words = ["--batch", str(options.batch), "--seq", str(options.seq), "--steps", str(options.steps)]
    if options.device == "cpu":
        answer = bench("smoke", "--steps", str(options.steps), *TINY_STEP)
    else:
        changes.append(f"model.name_or_path={options.model}")
        answer = bench("qwen3-8b", *words, *settings(*changes))
    if answer.status != 0:
        return {"note": f"exit {answer.status}: {answer.said[:160]}"}
    found = answer.result
    rates = {"step ms": found["step_ms"], "tokens/s": found["tokens_per_second"]}
    return {**rates, "peak GiB": (found["peak_memory_bytes"] or 0) / GIB}


def config_of(options: argparse.Namespace) -> Any:
    """The model's configuration, from what ships with ftcli; a small Llama on a CPU."""
    from transformers import AutoConfig

    if options.device == "cpu":
        small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
        return AutoConfig.for_model("llama", vocab_size=300, max_position_embeddings=128, **small)
    from ftcli.facts.config_file import bundled_configs

    folder, _ = bundled_configs()[options.model]
    return AutoConfig.from_pretrained(folder)


def build(options: argparse.Namespace, *, liger: bool = False) -> Any:
    """transformers' model with random weights, with PEFT's adapters unless it is trained whole."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(options)
    if liger:
        getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{config.model_type}")()
    dtype = torch.float32 if options.full and not options.pure_bf16 else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(options.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if not options.full:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=_TARGETS))
    return model.train()


def bare_loop(model: Any, options: argparse.Namespace) -> list[float]:
    """Seconds of steps by autocast, gradient norm clipped to 1 and torch's fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.seq), device=options.device)
    seconds = []
    for _ in range(options.steps + 2):
        began = now(options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=not options.pure_bf16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now(options.device) - began)
    return seconds


def trl_seconds(
    trainer: Any, config: Any, model: Any, rows: Any, options: argparse.Namespace, **more: Any
) -> list[float]:
    """Seconds of all steps but the first of a trainer of TRL's, with fused AdamW and bytes as tokens."""
    from transformers import TrainerCallback

    from ftcli.config.model import ModelConfig
    from ftcli.model.tokenizer import load_tokenizer

    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now(options.device))

    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder, max_length=None, use_cpu=options.device == "cpu", optim="adamw_torch_fused",
            save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True, **more,
        )  # fmt: skip
        tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2", tokenizer="bytes"), offline=True)
        trainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[Ends()]).train()
    return [after - before for before, after in pairwise(ends)]


def by_trl(options: argparse.Namespace) -> list[float]:
    """Seconds of the steps of TRL's SFTTrainer on rows of random tokens."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = build(options)
    count = options.batch * (options.steps + 2)
    rows = Dataset.from_dict({"input_ids": torch.randint(model.config.vocab_size, (count, options.seq)).tolist()})
    return trl_seconds(
        SFTTrainer, SFTConfig, model, rows, options,
        per_device_train_batch_size=options.batch, max_steps=options.steps + 2, max_grad_norm=1.0,
        bf16=options.device == "cuda" and not options.pure_bf16, gradient_checkpointing=options.checkpointing,
    )  # fmt: skip


def now(device: str) -> float:
    """Seconds, once the device has done what it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def work(contender: str, options: argparse.Namespace) -> None:
    """In a process of its own: prints one contender's row as JSON in the last line."""
    if contender == "ours":
        print(json.dumps(ours(options)))
        return
    import torch

    ways: dict[str, Callable[[], list[float]]] = {
        "transformers": lambda: bare_loop(build(options), options),
        "liger": lambda: bare_loop(build(options, liger=True), options),
        "trl": lambda: by_trl(options),
    }
    found = ways[contender]()
    middle = statistics.median(found[-options.steps :])
    peak = torch.cuda.max_memory_allocated() / GIB if options.device == "cuda" else None
    tokens = options.batch * options.seq / middle
    print(json.dumps({"step ms": 1e3 * middle, "tokens/s": tokens, "peak GiB": peak}))


def main() -> None:
    """A row a contender; what is not installed, or fails, is said in its row."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="Qwen/Qwen3-4B", help="a model whose config.json ships with ftcli")
    arguments.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments.add_argument("--full", action="store_true", help="full fine-tuning instead of adapters")
    arguments.add_argument("--pure-bf16", action="store_true")
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--seq", type=int, default=4096)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--checkpointing", action="store_true")
    arguments.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    require_device(options.device)
    if options.device == "cpu":
        options.batch, options.seq, options.steps = 2, 64, 2
    if options.work:
        work(options.work, options)
        return
    table = Table({"by": "", "tokens/s": ",.0f", "step ms": ".1f", "peak GiB": ".2f", "note": ""})
    for contender in options.only:
        package = NEEDED.get(contender)
        if package is not None and importlib.util.find_spec(package) is None:
            table.add(by=contender, note="not installed")
            continue
        table.add(by=contender, **in_own_process("--work", contender))
    table.save(options.json)


if __name__ == "__main__":
    main()
