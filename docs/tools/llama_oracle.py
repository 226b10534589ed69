"""What llama.cpp makes of GGUF files that ftcli wrote, beside what transformers makes of the same model.

Run outside of CI, once for a version of llama.cpp. In an environment of its own, which compiles llama.cpp:

    python -m venv oracle && CMAKE_ARGS="-DLLAVA_BUILD=OFF" oracle/bin/pip install --no-binary llama-cpp-python \
        llama-cpp-python numpy

then, with ftcli's Python, which asks that environment's for each file and prints one line of a table:

    python docs/tools/llama_oracle.py --python oracle/bin/python BASE ADAPTER FILE.gguf ...

BASE is the model's folder and ADAPTER PEFT's (or ``-`` for none; of a model of ternary weights BASE is the run's
``model/``, whose activations transformers rounds as training did). Compared are the tokens of fixed texts and
the logits of fixed prompts of 40 tokens, or as many as the file says that the model takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXTS = (
    "Name three rivers of Europe, and say where each one ends.",
    "def add(a, b):\n    return a + b\n\n\n\t# 1234567 + 89 = ?\n",
    "  Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; I'll say: WE'VE won! 数字 3.14 🚀🚀 नमस्ते",
)
LENGTH = 40


def ask(file: Path, question: dict[str, Any], adapter: Path | None) -> dict[str, Any]:
    """In the other environment: tokens and logits of llama.cpp."""
    import ctypes

    import llama_cpp as ll
    import numpy as np

    silent = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    parameters = ll.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False  # AMX and repacked weights: other sums, made for larger matrices
    model = ll.llama_model_load_from_file(str(file).encode(), parameters)
    if not model:
        return {"error": "llama.cpp cannot load it"}
    vocabulary = ll.llama_model_get_vocab(model)

    def tokens(text: str, *, special: bool) -> list[int]:
        data = text.encode()
        room = (ll.llama_token * (len(data) + 16))()
        count = ll.llama_tokenize(vocabulary, data, len(data), room, len(room), special, True)
        return list(room[:count])

    context_parameters = ll.llama_context_default_params()
    context_parameters.n_ctx, context_parameters.n_batch, context_parameters.n_threads = 256, 256, 1
    context_parameters.flash_attn_type = 0
    context_parameters.type_k = context_parameters.type_v = 0  # float32
    size = ll.llama_vocab_n_tokens(vocabulary)
    found = []
    longest = ll.llama_model_n_ctx_train(model)
    for ids in [ids[:longest] for ids in question["ids"]]:
        context = ll.llama_init_from_model(model, context_parameters)
        if adapter is not None:
            lora = ll.llama_adapter_lora_init(model, str(adapter).encode())
            if not lora:
                return {"error": "llama.cpp cannot load the adapter"}
            ll.llama_set_adapter_lora(context, lora, 1.0) if hasattr(ll, "llama_set_adapter_lora") else (
                ll.llama_set_adapters_lora(
                    context, (ll.llama_adapter_lora_p_ctypes * 1)(lora), 1, (ctypes.c_float * 1)(1.0)
                )
            )
        batch = ll.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        if ll.llama_decode(context, batch):
            return {"error": "llama.cpp cannot compute it"}
        rows = [np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (size,)).tolist() for i in range(len(ids))]
        found.append(rows)
        ll.llama_free(context)
    return {
        "tokens": [tokens(text, special=False) for text in question["texts"]],
        "with_bos": tokens(question["texts"][0], special=True),
        "eog": [i for i in range(size) if ll.llama_vocab_is_eog(vocabulary, i)],
        "logits": found,
    }


def compare(python: str, base: Path, adapter: str, file: Path, lora: Path | None) -> str:
    """A line of the table."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    config = json.loads((base / "config.json").read_text())
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model: Any = auto.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if adapter != "-":
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    model.eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(base if adapter == "-" else adapter)
    rows = torch.randint(0, len(tokenizer), (3, LENGTH), generator=torch.Generator().manual_seed(1))
    question = {"texts": TEXTS, "ids": rows.tolist()}
    answer = _answer(python, file, question, lora)
    name = f"{file.parents[2].name}/{file.name}" if len(file.parents) > 2 else file.name
    if "error" in answer:
        return f"| {name} | {answer['error']} |"
    with torch.no_grad():
        found = torch.tensor(answer["logits"])
        rows = rows[:, : found.shape[1]]
        wanted = torch.stack([model(input_ids=row[None]).logits[0].float() for row in rows])
    wanted, found = (t - t.mean(-1, keepdim=True) for t in (wanted, found))
    error = float((found - wanted).norm() / wanted.norm())
    same = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    equal = [
        tokenizer(t, add_special_tokens=False)["input_ids"] == got
        for t, got in zip(TEXTS, answer["tokens"], strict=True)
    ]
    bos = tokenizer(TEXTS[0])["input_ids"] == answer["with_bos"]
    cells = (
        name,
        f"{error:.1e}",
        f"{same:.3f}",
        f"{sum(equal)} of {len(equal)}",
        "yes" if bos else "no",
        answer["eog"],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _answer(python: str, file: Path, question: dict[str, Any], lora: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "asked.json"), Path(folder, "told.json")
        asked.write_text(json.dumps(question))
        words = [python, __file__, "--ask", str(asked), str(told), str(file), *([str(lora)] if lora else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        if not told.is_file():
            return {"error": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}
        answer: dict[str, Any] = json.loads(told.read_text())
        return answer


def main() -> None:
    """The command line."""
    if sys.argv[1] == "--ask":
        asked, told, file, *lora = map(Path, sys.argv[2:])
        told.write_text(json.dumps(ask(file, json.loads(asked.read_text()), lora[0] if lora else None)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment that has llama-cpp-python")
    parser.add_argument("--lora", type=Path, help="an adapter as GGUF, put on each file")
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter")
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    for file in given.files:
        line = compare(given.python, given.base, given.adapter, file, given.lora)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
