"""Writes first-run.ipynb from this file: cells in order, text and code. A test runs them on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

CELLS = [
    ("markdown", """# A first run on a free T4

Fine-tunes Qwen3-1.7B in 4 bits (float16, which a T4 has and bfloat16 it has not), measures it on rows held out, talks to it and
exports it. On Colab or Kaggle choose a machine with a T4 first. Change `MODEL` and `DATA` in the next cell for your own."""),
    ("code", """import os

MODEL = os.environ.get("FTCLI_NOTEBOOK_MODEL", "Qwen/Qwen3-1.7B")
DATA = os.environ.get("FTCLI_NOTEBOOK_DATA", "bundled:sample-chat")  # or my.jsonl, hub:ORG/NAME, s3://...
STEPS = os.environ.get("FTCLI_NOTEBOOK_STEPS", "60")"""),
    ("markdown", "Installs ftcli, unless it is here. Give the wheel of a release, or the repository's address."),
    ("code", """!command -v ftcli || pip install --quiet "${FTCLI_SOURCE:-ftcli[bitsandbytes]}"
!ftcli doctor"""),
    ("markdown", """Writes a recipe for the GPU that is there. `--method auto` takes a base in 16 bits where that fits, and in 4 bits
otherwise. A share of the rows is held out."""),
    ("code", """!ftcli recipes new --model $MODEL --data $DATA --gpu here --method auto --output mine.yaml --force
!cat mine.yaml"""),
    ("markdown", "Says whether it fits before anything is downloaded, and shows what is trained."),
    ("code", "!ftcli check mine.yaml --show-sample 1 --set data.held_out=0.1"),
    ("code", """!ftcli train mine.yaml --set data.held_out=0.1 --max-steps $STEPS --set train.warmup_steps=0 --set eval.every_steps=20 --resume never"""),
    ("markdown", "The run's report: curves, samples before and after, settings."),
    ("code", """from IPython.display import HTML

HTML(open("runs/mine/report.html").read())"""),
    ("code", """!ftcli chat runs/mine --prompt "What is the capital of France?" """),
    ("markdown", "The adapter, and a merged model that plain transformers load; each is loaded again and compared. Add `--format gguf` for llama.cpp and Ollama."),
    ("code", "!ftcli export runs/mine --force"),
]  # fmt: skip


def notebook() -> dict[str, object]:
    """The notebook, as nbformat 4.5 has it."""
    cells = []
    for number, (kind, text) in enumerate(CELLS):
        lines = [line + "\n" for line in text.splitlines()]
        lines[-1] = lines[-1].rstrip("\n")
        more = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({"cell_type": kind, "id": f"cell-{number:02d}", "metadata": {}, "source": lines, **more})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "accelerator": "GPU", "colab": {"gpuType": "T4"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    Path(__file__).with_name("first-run.ipynb").write_text(json.dumps(notebook(), indent=1) + "\n", encoding="utf-8")
