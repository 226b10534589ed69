"""A step of adapters by `ftcli bench`, by Unsloth and by transformers with PEFT, layer for layer on one machine.

    pip install unsloth==2026.10.9 unsloth-zoo==2026.10.9 trl==1.15.0       # what is missing is said
    python kernels/bench/peers.py qwen3-30b-a3b --layers 8
    python kernels/bench/peers.py qwen3-30b-a3b --layers 16 --checkpointing --only ours unsloth
    python kernels/bench/peers.py qwen3.5-9b --layers 16                    # transformers takes FLA where it is there
    python kernels/bench/peers.py smoke --device cpu                        # does it run at all

The first layers of a recipe's model with random weights, rank 16 on all linears and experts, a base in bfloat16, AdamW
of torch, no padding. Unsloth loads a checkpoint that is written for it, as it loads any; of models that see, both peers
train the language model alone. Every contender has a process of its own; a row is its median step after the first six,
within which peers compile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import GIB, RECIPES, TINY_STEP, Table, bench, in_own_process, parser, require_device, settings

CONTENDERS = ("ours", "unsloth", "transformers")
_FIRST, _RANK = 6, 16
_LINEARS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down", "gate_up")]
_DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """The row of `ftcli bench`."""
    changes = settings(
        f"train.gradient_checkpointing={str(options.checkpointing).lower()}", "quantization.method=none",
        f"lora.r={_RANK}", f"lora.alpha={_RANK}", "train.gradient_accumulation_steps=1",
    )  # fmt: skip
    words = ["--batch", str(options.batch), "--seq", str(options.seq)]
    words += [] if options.layers is None else ["--layers", str(options.layers)]
    words = words if options.device == "cuda" else [*TINY_STEP]
    answer = bench(options.recipe, *words, *changes, "--steps", str(options.steps))
    if answer.status != 0:
        return {"note": f"exit {answer.status}: {answer.said[:160]}"}
    found = answer.result
    return {
        "step ms": found["step_ms"],
        "tokens/s": found["tokens_per_second"],
        "peak GiB": found["peak_memory_bytes"] / GIB,
    }


def config_of(options: argparse.Namespace) -> Any:
    """transformers' configuration of the recipe's model, of its first layers alone."""
    from transformers import AutoConfig

    from ftcli.config.load import load_recipe
    from ftcli.facts.config_file import bundled_configs

    name = load_recipe(RECIPES / f"{options.recipe}.yaml").recipe.model.name_or_path
    folder = RECIPES.parent / "ftcli/assets/models" / name.removeprefix("bundled:")
    if not name.startswith("bundled:"):
        folder, _ = bundled_configs()[name]
    raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    raw.pop("quantization_config", None)
    text = raw.get("text_config", raw)
    if options.layers is not None:
        text["num_hidden_layers"] = options.layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][: options.layers]
    return AutoConfig.for_model(**raw)


def build(config: Any, device: str) -> Any:
    """transformers' model of random weights in bfloat16; float32 on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = hasattr(config, "vision_config")
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config, dtype=dtype)


def by_transformers(options: argparse.Namespace) -> Any:
    """transformers' layers with PEFT's adapters."""
    from peft import LoraConfig, get_peft_model

    model = build(config_of(options).get_text_config(), options.device)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    there = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    stacks = [
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    ends = sorted({".".join(name.split(".")[-3:]) for name in stacks})
    targets = [name for name in (*_LINEARS, *_DELTA_NET) if name in there]
    lora = LoraConfig(r=_RANK, lora_alpha=_RANK, target_modules=targets, target_parameters=ends or None)
    return get_peft_model(model, lora)


def by_unsloth(options: argparse.Namespace) -> Any:
    """The model as Unsloth loads and patches it. It has to be imported before transformers is used."""
    unsloth = import_module("unsloth").FastLanguageModel
    import torch

    way = "unsloth" if options.checkpointing else False
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        made = in_own_process("--write", folder)
        model, _ = unsloth.from_pretrained(
            folder, max_seq_length=options.seq, dtype=torch.bfloat16, load_in_4bit=False,
            use_gradient_checkpointing=way, text_only=made["sees"], local_files_only=True,
        )  # fmt: skip
    targets = [*_LINEARS, *(_DELTA_NET if "qwen3.5" in options.recipe else [])]
    return unsloth.get_peft_model(
        model, r=_RANK, lora_alpha=_RANK, lora_dropout=0, bias="none", target_modules=targets,
        use_gradient_checkpointing=way, random_state=0,
    )  # fmt: skip


def write(options: argparse.Namespace) -> dict[str, Any]:
    """Writes the checkpoint that Unsloth loads, with a small tokenizer."""
    config = config_of(options)
    build(config, options.device).save_pretrained(options.write, max_shard_size="5GB")
    for path in (RECIPES.parent / "ftcli/assets/models/tiny-gemma2").iterdir():
        if "token" in path.name or "chat" in path.name:
            shutil.copy(path, options.write)
    return {"sees": hasattr(config, "vision_config")}


def timed(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Steps by autocast, gradient norm clipped to 1 and torch's fused AdamW."""
    import torch

    on_gpu = options.device == "cuda"
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(model.config.get_text_config().vocab_size, (options.batch, options.seq), device=options.device)
    ends = []
    for step in range(_FIRST + options.steps + 1):
        if on_gpu and step == _FIRST:
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(options.device, torch.bfloat16, enabled=on_gpu):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    middle = statistics.median(after - before for before, after in zip(ends[_FIRST:], ends[_FIRST + 1 :], strict=False))
    return {
        "step ms": 1e3 * middle, "tokens/s": options.batch * options.seq / middle,
        "peak GiB": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "trained": sum(parameter.numel() for parameter in trained),
    }  # fmt: skip


def main() -> None:
    """A row a contender; what is not installed, or fails, is said in its row."""
    arguments = parser(__doc__)
    arguments.add_argument("recipe", nargs="?", default="llama3.1-8b", help="a shipped one by its name")
    arguments.add_argument("--layers", type=int)
    arguments.add_argument("--checkpointing", action="store_true")
    arguments.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--seq", type=int, default=4096)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--work", choices=CONTENDERS[1:], help=argparse.SUPPRESS)
    arguments.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    require_device(options.device)
    if options.device == "cpu":
        options.batch, options.seq, options.steps = 2, 64, 2
    if options.write:
        print(json.dumps(write(options)))
        return
    if options.work:
        model = by_unsloth(options) if options.work == "unsloth" else by_transformers(options)
        print(json.dumps(timed(model, options)))
        return
    table = Table({"by": "", "tokens/s": ",.0f", "step ms": ".1f", "peak GiB": ".2f", "trained": ",.0f", "note": ""})
    for contender in options.only:
        if contender == "unsloth" and find_spec("unsloth") is None:
            table.add(by=contender, note="not installed")
            continue
        table.add(by=contender, **(ours(options) if contender == "ours" else in_own_process("--work", contender)))
    table.save(options.json)


if __name__ == "__main__":
    main()
