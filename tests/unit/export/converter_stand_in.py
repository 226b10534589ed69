"""A stand-in of llama.cpp's ``convert_hf_to_gguf.py``, with its command line, for OLMoE's shape and Qwen3-VL's tower.

It writes what that one writes of them: names of the gguf library, experts stacked, filters of patches apart. The first
line of the file ``fault.txt`` beside it says what it does wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}


def language_model(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """By the file's names; experts of a layer are one tensor."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OLMOE, layers)
    found, experts = {}, {}
    for key, tensor in tensors.items():
        of_expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)\.weight", key)
        if of_expert:
            experts.setdefault(f"{of_expert[1]}.{of_expert[3]}", {})[int(of_expert[2])] = tensor
        else:
            found[table.get_name(key, (".weight",))] = tensor
    for key, each in experts.items():
        found[f"{table.get_name(key)}.weight"] = np.stack([each[at] for at in sorted(each)])
    return {name if name.endswith(".weight") else f"{name}.weight": tensor for name, tensor in found.items()}


def tower(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By their own names; filters over two frames are two."""
    found = {}
    for key, tensor in tensors.items():
        if tensor.ndim == 5:
            found |= {f"v.{key}.{at}": np.ascontiguousarray(tensor[:, :, at]) for at in range(tensor.shape[2])}
        else:
            found[f"v.{key}"] = tensor
    return found


def spoiled(found: dict[str, np.ndarray], fault: str) -> dict[str, np.ndarray]:
    name = next(name for name in found if name.endswith(("ffn_down_exps.weight", "mlp.linear_fc1.weight")))
    if fault == "a changed number":
        found[name] = found[name].copy()
        found[name].reshape(-1)[3] += 1e-3
    elif fault == "another layer":
        found = {re.sub(r"blk\.(\d)", lambda m: f"blk.{1 - int(m[1])}", key): value for key, value in found.items()}
    elif fault == "a lost tensor":
        del found[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", type=Path)
    parser.add_argument("--outtype")
    parser.add_argument("--mmproj", action="store_true")
    asked = parser.parse_args()
    said = Path(__file__).with_name("fault.txt")
    fault = said.read_text().strip() if said.is_file() else ""
    if fault == "refusal":
        sys.stderr.write("a traceback\nNotImplementedError: BPE pre-tokenizer was not recognized\n")
        sys.exit(1)
    if fault == "a missing module":
        sys.stderr.write("ModuleNotFoundError: No module named 'sentencepiece'\n")
        sys.exit(1)
    if fault == "sleep":
        time.sleep(600)
    if fault == "memory":
        bytearray(64 << 30)
    config: dict[str, Any] = json.loads((asked.model / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for path in asked.model.glob("*.safetensors"):
        tensors |= load_file(path)
    found = tower(tensors) if asked.mmproj else language_model(tensors, config["num_hidden_layers"])
    path = asked.outfile.with_name(f"mmproj-{asked.outfile.name}") if asked.mmproj else asked.outfile
    writer = gguf.GGUFWriter(path, "clip" if asked.mmproj else "olmoe")
    writer.add_file_type(TYPES[asked.outtype])
    if not asked.mmproj:
        writer.add_context_length(config["max_position_embeddings"])
        told = json.loads((asked.model / "tokenizer.json").read_text())
        ids = {**told["model"]["vocab"], **{each["content"]: each["id"] for each in told["added_tokens"]}}
        special = {each["content"] for each in told["added_tokens"]}
        pieces = sorted(ids, key=lambda piece: int(ids[piece]))
        if fault == "shuffled tokens":
            pieces[100], pieces[101] = pieces[101], pieces[100]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(pieces + [f"[PAD{at}]" for at in range(len(pieces), config["vocab_size"])])
        writer.add_token_types(
            [3 if piece in special else 1 for piece in pieces] + [5] * (config["vocab_size"] - len(pieces))
        )
    for name, tensor in spoiled(found, fault).items():
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim < 2 else asked.outtype.upper()]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        kind = kind if tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
        data = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
