"""What packing gains: real tokens a second of training steps on rows of the lengths of chats, padded and packed.

Lengths are lognormal (median 181 tokens, a tenth over 500), cut at the capacity. Padded batches take rows as they
come, as training does; packed ones take best-fit packs. Both see the same rows, forward and backward through ftcli's
own loss.

Usage: python kernels/bench/packing.py [--rows 512] [--capacity 1024] [--batch 8] [--device cpu] [--json FILE]
`--batch` is in rows for padded batches; packed ones hold about as many real tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.data.collate import PaddingCollator, packed_batch
from ftcli.data.pack import best_fit
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.model.loss import forward_loss
from ftcli.rows.row import Row

MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
VOCABULARY = 4096


def rows_of(count: int, capacity: int, seed: int = 0) -> list[TokenizedRow]:
    """Rows of random ids; the first half of each is masked, as a prompt is."""
    rng = Random(seed)
    rows = []
    for number in range(count):
        length = min(capacity, max(8, round(rng.lognormvariate(5.2, 0.8))))
        ids = [rng.randrange(VOCABULARY) for _ in range(length)]
        labels = [IGNORE_INDEX] * (length // 2) + ids[length // 2 :]
        rows.append(TokenizedRow(Row("bench", number + 1, {}), ids, labels))
    return rows


def batches_of(rows: list[TokenizedRow], capacity: int, batch: int, *, packed: bool) -> list[dict[str, torch.Tensor]]:
    """All rows as batches, in the order of training's first epoch with seed 0."""
    generator = torch.Generator().manual_seed(0)
    if not packed:
        order = torch.randperm(len(rows), generator=generator).tolist()
        collate = PaddingCollator(0)
        groups = [order[start : start + batch] for start in range(0, len(order), batch)]
        return [collate([{"input_ids": rows[i].input_ids, "labels": rows[i].labels} for i in g]) for g in groups]
    packs = best_fit([len(row.input_ids) for row in rows], capacity)
    order = torch.randperm(len(packs), generator=generator).tolist()
    each = max(1, round(batch * len(packs) / len(rows)))
    groups = [order[start : start + each] for start in range(0, len(order), each)]
    return [packed_batch([[rows[i] for i in packs.members(pack)] for pack in group], 0) for group in groups]


def measure(model: Any, batches: list[dict[str, torch.Tensor]], device: torch.device, items: int) -> dict[str, float]:
    """Seconds, positions computed and summed loss of one pass over ``batches``, after the first one to warm up."""
    loss = torch.zeros((), device=device)
    for number, made in enumerate([batches[0], *batches]):
        inputs = {name: value.to(device) for name, value in made.items() if name != "lengths"}
        if number == 1:
            loss.zero_()
            _wait(device)
            began = time.perf_counter()
        part = forward_loss(model, inputs, num_items=items).loss
        part.backward()
        loss += part.detach()
        model.zero_grad(set_to_none=True)
    _wait(device)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "positions": sum(b["input_ids"].numel() for b in batches), "loss": float(loss)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measures both ways, turn by turn, and prints the better of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = rows_of(options.rows, options.capacity)
    real = sum(len(row.input_ids) for row in rows)
    items = sum(label != IGNORE_INDEX for row in rows for label in row.labels)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, max_position_embeddings=options.capacity, **MODEL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).to(device)
    made = {
        name: batches_of(rows, options.capacity, options.batch, packed=name == "packed")
        for name in ("padded", "packed")
    }
    rounds = [{name: measure(model, made[name], device, items) for name in made} for _ in range(options.rounds)]
    best = {name: min((r[name] for r in rounds), key=lambda found: found["seconds"]) for name in made}
    for name, found in best.items():
        found["tokens_per_second"] = real / found["seconds"]
        found["padding"] = 1 - real / found["positions"]
        speed = f"{found['tokens_per_second']:,.0f} tokens/s"
        print(f"{name}: {speed}, {found['padding']:.1%} padding, loss {found['loss']:.6f}")
    gain = best["packed"]["tokens_per_second"] / best["padded"]["tokens_per_second"]
    print(f"gain: {gain:.2f}x ({options.rows} rows, {real:,} tokens, {torch.get_num_threads()} threads)")
    if options.json:
        options.json.write_text(json.dumps({**best, "gain": gain, "rows": options.rows, "tokens": real}, indent=2))


if __name__ == "__main__":
    main()
