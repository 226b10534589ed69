"""Forward passes of spread weights in which not all ranks compute: one is short of memory, or rank 0 alone generates.

    python kernels/bench/spread_passes.py FOLDER [--model meta-llama/Llama-3.1-8B] [--method nf4] [--tokens 64]

Two processes with a GPU each hold a model of random weights together. The loss of a batch and greedy tokens are those
of the whole model before it was spread; a batch for which rank 1 has no memory is given up there and computed on rank
0, and the next one is computed on both. Writes FOLDER/spread_passes.json, with the milliseconds of a token that rank 0
generates; the script's own status is 1 where something differs. ``--cpu`` runs the narrow model of the tests on two CPU
processes, and says that memory has run out where it has not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from ftcli.config import LoraConfig, ModelConfig, QuantizationConfig
from ftcli.config.origins import Origins
from ftcli.config.tree import MapNode
from ftcli.evaluate.share import led_by_first
from ftcli.facts.model import read_facts
from ftcli.facts.precision import DtypePlan
from ftcli.generation.generator import open_generator
from ftcli.generation.requests import GenerationRequest
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.fsdp import RankShards, shard
from ftcli.model.load import load_model
from ftcli.model.lora import apply_lora
from ftcli.model.loss import loss_of
from ftcli.model.patch import patch
from ftcli.model.shards import reshard_model, try_forward
from ftcli.ranks import Place
from ftcli.reporting import SilentReporter
from ftcli.run.process_group import RankGroup

_NARROW = str(Path(__file__).resolve().parents[2] / "tests/e2e/narrow-gemma2")
#: Rows of a batch that does not fit, and what rank 1 may take beyond what it holds: embedding and head are put together
#: before the first layer (3.9 GiB of Llama-3.1-8B, gathered and taken apart), and that must still go.
_MANY, _SPARE_BYTES = 16, 6 << 30
#: Random weights in bfloat16: products in another order.
_CLOSE = 2e-2


def built(asked: argparse.Namespace, device: torch.device) -> tuple[Any, DtypePlan]:
    """The model with adapters, whole and on the kernels."""
    dtype = "float32" if asked.cpu else "bfloat16"
    plan = DtypePlan(dtype, dtype, dtype, autocast=False, reason="")
    named = ModelConfig(name_or_path=_NARROW if asked.cpu else asked.model, init="random", tokenizer="bytes")
    facts = read_facts(named, offline=True, origins=Origins(MapNode(None, {})))
    settings = QuantizationConfig(method=asked.method)
    base = load_model(named, facts, plan, device=device, seed=0, offline=True, quantization=settings)
    model, _ = apply_lora(base, LoraConfig(r=16), plan, seed=1)
    patch(model, "reference" if asked.cpu else "auto", joins=False)
    return model.eval(), plan


def loss(model: Any, rows: int, width: int, device: torch.device) -> Callable[[], float]:
    """Computes the summed loss of random tokens."""

    def compute() -> float:
        made = torch.Generator().manual_seed(rows)
        ids = torch.randint(5, 256, (rows, width), generator=made).to(device)
        with torch.no_grad():
            return float(loss_of(model, {"input_ids": ids}, ids).loss)

    return compute


def answers(
    model: Any, plan: DtypePlan, device: torch.device, tokens: int
) -> Callable[[], tuple[list[list[int]], float]]:
    """Generates for two prompts, twice; the tokens, and the seconds of the second time."""

    def compute() -> tuple[list[list[int]], float]:
        opened = open_generator(
            model, plan, device, rows=2, longest=32 + tokens, pad=0, own_settings=False, merge=False
        )
        requests = [GenerationRequest(list(range(5 + at, 30 + at)), tokens, (at,)) for at in range(2)]
        opened.generator.complete(requests)
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        found = opened.generator.complete(requests)
        return [one[0].tokens for one in found], time.perf_counter() - began

    return compute


def short(model: Any, rank: int, device: torch.device) -> Callable[[], None]:
    """Takes memory away from rank 1; gives it back when called."""
    if rank != 1:
        return lambda: None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _SPARE_BYTES) / total, device)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0, device)

    def scarce(*_: object) -> None:
        raise torch.OutOfMemoryError

    layers = decoder_layers(base_of(model))
    return layers[len(layers) // 2].register_forward_pre_hook(scarce).remove


def work(rank: int, asked: argparse.Namespace) -> None:
    """One of the two processes."""
    device = torch.device("cpu") if asked.cpu else torch.device("cuda", rank)
    if not asked.cpu:
        torch.cuda.set_device(device)
    model, plan = built(asked, device)
    width = 32 if asked.cpu else 2048
    few = loss(model, 1, width, device)
    whole = few()
    generate = answers(model, plan, device, asked.tokens)
    known, seconds_whole = generate()
    group = RankGroup(Place(rank, 2, rank, 2, folder=asked.folder), SilentReporter())
    group.form(device, 1)
    shard(model, group.mesh(device), RankShards(rank, 2, joins=True), plan)
    together = try_forward(model, few)
    answered = led_by_first(group, model, generate)
    give_back = short(model, rank, device)
    many = try_forward(model, loss(model, _MANY, width * 4, device))
    give_back()
    group.agree("tried")
    again = try_forward(model, few)
    reshard_model(model)
    found: dict[str, Any] = {"whole": whole, "together": together, "again": again, "many": many}
    checks = {
        "loss": together is not None and abs(together - whole) <= _CLOSE * abs(whole),
        "short": (many is None) == (rank == 1),
        "again": again == together,
    }
    if answered is not None:
        tokens, seconds = answered
        same = sum(a == b for one, other in zip(tokens, known, strict=True) for a, b in zip(one, other, strict=True))
        found |= {"same_tokens": same, "ms_a_token": 1e3 * seconds / asked.tokens}
        found |= {"ms_a_token_whole": 1e3 * seconds_whole / asked.tokens}
        checks["tokens"] = len(tokens[0]) == asked.tokens and (same == 2 * asked.tokens or not asked.cpu)
    (asked.folder / f"rank-{rank}.json").write_text(json.dumps({**found, "checks": checks}))
    group.close(orderly=True)


def main() -> int:
    """Runs both processes and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--method", default="nf4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(work, (asked,), nprocs=2)
    ranks = [json.loads((asked.folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    (asked.folder / "spread_passes.json").write_text(json.dumps(ranks, indent=1))
    sys.stdout.write(json.dumps(ranks) + "\n")
    return 0 if all(all(rank["checks"].values()) for rank in ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
