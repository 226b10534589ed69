"""How long an export of a large model takes and how much memory, on random weights of a model's shape.

``python docs/tools/export_scale.py FOLDER --model meta-llama/Llama-3.1-8B --formats safetensors gguf`` writes the
weights, in bfloat16 and shards of 4 GB, and a run with an adapter of rank 16 on all linear layers into FOLDER, exports
it format by format with `ftcli export`, and prints a line of JSON for each: seconds, the most memory of its own that
the process had and the most that the one had which loaded the result again, and what the verification said. What is
there of an earlier call is used again; remove FOLDER afterwards. To prove a bound, run it where there is no more:
``systemd-run --scope -p MemoryMax=8G``, or a control group of one's own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.config.model import ModelConfig
from ftcli.config.recipe import Recipe
from ftcli.config.yaml import MapNode, Origins
from ftcli.export.tensorfile import computed, write_shards
from ftcli.facts.model import read_facts
from ftcli.model.load import config_of
from ftcli.model.pretrained import hollow

RANK = 16
ROWS = 128
SHARD_BYTES = 4 * 10**9


def write_base(name: str, layers: int | None, folder: Path) -> None:
    """Random weights of a model's shape, or of its first layers, with the tokenizer of bytes."""
    facts = read_facts(ModelConfig(name_or_path=name), offline=True, origins=Origins(MapNode(None, {})))
    config = config_of(facts.raw, layers)
    model = hollow(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)

    def draw(shape: torch.Size) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16).mul_(0.02)

    tensors = {name: parameter.shape for name, parameter in model.named_parameters()}
    outputs = [
        computed(name, shape, torch.bfloat16, lambda shape=shape: draw(shape))  # type: ignore[misc]
        for name, shape in tensors.items()
    ]
    write_shards(folder, outputs, SHARD_BYTES)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.eos_token_id, config.bos_token_id, config.pad_token_id = 4, 2, 0
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(asset("tokenizers", "bytes")).save_pretrained(folder)


def write_run(base: Path, run: Path, quantization: str) -> None:
    """A run with an adapter on all linear layers of the decoder, as training leaves it."""
    from ftcli.model.pretrained import read_config

    model = hollow(read_config(str(base), revision=None, offline=True))
    tensors = {}
    torch.manual_seed(2)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, module.in_features) / module.in_features**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(module.out_features, RANK) * 0.01
    adapter = run / "adapter"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": RANK}
    said |= {"lora_alpha": 2 * RANK, "target_modules": "all-linear", "bias": "none", "lora_dropout": 0.0}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    rows = run / "rows.jsonl"  # of about 512 tokens each
    texts = [f"row {number}: the quick brown fox jumps over the lazy dog; " * 12 for number in range(ROWS)]
    rows.write_text("\n".join(json.dumps({"text": text[:500]}) for text in texts))
    data = {"train": [str(rows)], "max_seq_len": 512}
    recipe = {"version": 1, "model": {"name_or_path": str(base)}, "lora": {"r": RANK}, "data": data}
    recipe["quantization"] = {"method": quantization}
    values = Recipe.model_validate(recipe).model_dump(mode="json")
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))


def export(run: Path, name: str, *more: str) -> dict[str, object]:
    """One format, and what it took."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "ftcli", "export", str(run), "--format", name, "--json", "--offline", "--force"]
    command += more
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    told: dict[str, object] = {"format": name, "seconds": round(time.monotonic() - begin), "status": done.returncode}
    told["max_rss_gib"] = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2)
    document = json.loads(done.stdout or "{}")  # one that was killed says nothing
    exports = document.get("exports") or document.get("result", {}).get("exports") or []
    told["verification"] = exports[0]["verification"] if exports else document.get("findings")
    return told


def main() -> None:
    """Makes what is not there, and exports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--layers", type=int, help="so many layers in place of the model's")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--formats", nargs="*", default=["safetensors", "gguf"])
    parser.add_argument("--no-verify", action="store_true", help="write alone")
    asked = parser.parse_args()
    if not (asked.folder / "base").is_dir():
        write_base(asked.model, asked.layers, asked.folder / "base")
    run = asked.folder / f"run-{asked.quantization}"
    if not run.is_dir():
        write_run(asked.folder / "base", run, asked.quantization)
    for name in asked.formats:
        sys.stdout.write(json.dumps(export(run, name, *(["--no-verify"] if asked.no_verify else []))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
