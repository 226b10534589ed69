"""Times reading a model as it is released, from packed files on the local disk: seconds, and peaks of memory.

    python kernels/bench/loading.py FOLDER --methods none nf4
    python kernels/bench/loading.py FOLDER --model Qwen--Qwen3-30B-A3B --methods none nf4
    python kernels/bench/loading.py FOLDER --device cpu            # does it run at all

FOLDER gets files of random numbers, once: 13 GiB of gpt-oss-20b in MXFP4, or one of the other bundled configs in fp8
with a scale for each 128 x 128, a tensor an expert (30B: 29 GiB). Before each reading they are dropped from the page
cache. Each reading has a process of its own: ``host GiB`` is the largest resident set of that, Python and libraries
included, ``GPU GiB`` the peak of torch's allocator.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import GIB, Table, parser, require_device

TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "layer_types": None, "pad_token_id": 0,
    "num_experts": 8, "moe_intermediate_size": 64,
}  # fmt: skip
MXFP4 = "openai--gpt-oss-20b"
IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def in_blocks(name: str, shape: tuple[int, ...], device: str) -> dict[str, Any]:
    """A matrix in eight bits and its scales; of a stack, those of each expert's projections."""
    import torch

    if len(shape) == 3:
        stem, _, leaf = name.rpartition(".")
        parts = {"gate_proj": shape[1] // 2, "up_proj": shape[1] // 2} if leaf == "gate_up_proj" else {leaf: shape[1]}
        each = [
            (f"{stem}.{at}.{part}.weight", (rows, shape[2])) for at in range(shape[0]) for part, rows in parts.items()
        ]
        return {key: tensor for part in each for key, tensor in in_blocks(*part, device).items()}
    drawn = (torch.randn(shape, device=device) * 64).to(torch.float8_e4m3fn)
    grid = tuple(-(-size // 128) for size in shape)
    return {name: drawn.cpu(), f"{name}_scale_inv": torch.rand(grid, dtype=torch.bfloat16) * 3e-4}


def write_model(folder: Path, device: str, model: str) -> None:
    """A file for each layer and one for the rest, as the bundled config says, drawn on ``device``."""
    import torch
    from safetensors.torch import save_file

    from ftcli.assets import asset
    from ftcli.model.load import config_of
    from ftcli.model.pretrained import hollow

    raw = json.loads((asset("configs", model) / "config.json").read_text(encoding="utf-8"))
    raw |= TINY if device == "cpu" else {}
    raw |= {} if model == MXFP4 else {"quantization_config": IN_BLOCKS}
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in hollow(config_of(plain), dtype=torch.bfloat16).named_parameters():
        parts = name.split(".")
        file = f"model-{parts[2]}.safetensors" if parts[1] == "layers" else "model-rest.safetensors"
        files.setdefault(file, {})[name] = parameter
    weight_map = {}
    for file, parameters in files.items():
        tensors: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if model != MXFP4 and parameter.dim() > 1 and name.endswith(("_proj.weight", "_proj")):
                tensors |= in_blocks(name, tuple(parameter.shape), device)
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                experts, columns, rows = parameter.shape
                groups = (experts, rows, columns // 32)
                tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, device=device)
                tensors[f"{name}_scales"] = torch.randint(118, 123, groups, dtype=torch.uint8, device=device)
            else:
                tensors[name] = torch.randn(parameter.shape, dtype=torch.bfloat16, device=device) * 0.02
        weight_map |= dict.fromkeys(tensors, file)
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(raw))


def forget(folder: Path) -> None:
    """Drops the files from the page cache, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def read(folder: Path, method: str, device: str) -> dict[str, Any]:
    """One reading, as a run loads its base."""
    import torch

    from ftcli.config.model import ModelConfig, QuantizationConfig
    from ftcli.config.yaml import MapNode, Origins
    from ftcli.facts.model import read_facts
    from ftcli.model.load import load_model
    from ftcli.plan.precision import DtypePlan

    model = ModelConfig(name_or_path=str(folder), tokenizer="bytes")
    facts = read_facts(model, offline=True, origins=Origins(MapNode(None, {})))
    plan, on = DtypePlan("bfloat16", "float32", "bfloat16", autocast=True, reason="a bench"), torch.device(device)
    torch.zeros(1, device=on)
    began = time.perf_counter()
    quantization = QuantizationConfig(method=method)  # type: ignore[arg-type]
    loaded = load_model(model, facts, plan, device=on, seed=0, offline=True, quantization=quantization)
    if on.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del loaded
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    gpu = torch.cuda.max_memory_allocated() / GIB if on.type == "cuda" else None
    return {"method": method, "seconds": seconds, "host GiB": host, "GPU GiB": gpu}


def main() -> None:
    """A row for each way of holding the weights."""
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--methods", nargs="+", default=["none", "nf4"], choices=["none", "nf4", "fp8"])
    arguments.add_argument("--model", default=MXFP4, help="folder of ftcli/assets/configs")
    arguments.add_argument("--read", metavar="METHOD", help="read once, in this process")
    options = arguments.parse_args()
    if options.read:
        print(json.dumps(read(options.folder, options.read, options.device)))
        return
    require_device(options.device)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "config.json").is_file():
        write_model(options.folder, options.device, options.model)
    table = Table({"method": "", "seconds": ".1f", "host GiB": ".2f", "GPU GiB": ".2f"})
    for method in options.methods:
        forget(options.folder)
        again = [sys.executable, __file__, str(options.folder), "--read", method, "--device", options.device]
        said = subprocess.run(again, capture_output=True, text=True, check=True).stdout  # noqa: S603
        table.add(**json.loads(said.splitlines()[-1]))
        table.save(options.json)


if __name__ == "__main__":
    main()
