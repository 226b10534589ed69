"""What bfloat16 parameters cost: the same full fine-tuning with float32 masters, and with updates that are rounded.

    python kernels/bench/rounding.py tiny --steps 200 --rates 1e-5 1e-4
    python kernels/bench/rounding.py 1b --steps 200 --rates 1e-5

Whole runs of `ftcli train`, same seed and data: `tiny` is the bundled model on its smoke task, `1b` the Llama of
`loss_curves.py` on generated text. For each learning rate and precision it prints the mean loss of the last tenth of
the steps, and of the way that masters went from the first weights to the last ones how much bfloat16 parameters went as
well (arrived: the projection on it) and how far they ended from it (off), both in units of its length.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import torch
from loss_curves import ONE_BILLION
from safetensors.torch import load_file
from torch import Tensor

from ftcli.cli.app import main as ftcli

PRECISIONS = {
    "float32 masters": "",
    "float32 masters, bfloat16 gradients": ", bf16_gradients: true",
    "bfloat16, nearest": ", pure_bf16: true",
    "bfloat16, stochastic": ", pure_bf16: true, bf16_stochastic_round: true",
}
RECIPES = {
    "tiny": """
version: 1
model: {{name_or_path: "bundled:tiny-gemma2", dtype: bfloat16, kernels: {kernels}}}
data: {{train: ["bundled:smoke-train"], max_seq_len: 64}}
train: {{max_steps: {steps}, per_device_train_batch_size: 16, learning_rate: {rate}{precision}}}
checkpoint: {{every_steps: null}}
logging: {{every_steps: 1}}
""",
    "1b": """
version: 1
model: {{name_or_path: "{folder}", init: random, tokenizer: bytes, dtype: bfloat16, kernels: {kernels}}}
data: {{train: ["bundled:tiny-pretrain"], max_seq_len: 96}}
train: {{max_steps: {steps}, per_device_train_batch_size: 32, learning_rate: {rate}{precision}}}
checkpoint: {{every_steps: null}}
logging: {{every_steps: 1}}
""",
}


def train(model: str, precision: str, rate: float, steps: int, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of the last steps of one run, and its weights."""
    (folder / "config.json").write_text(json.dumps(ONE_BILLION))
    kernels = "auto" if torch.cuda.is_available() else "reference"
    recipe, run = folder / "recipe.yaml", folder / "run"
    given = {"kernels": kernels, "steps": steps, "rate": rate, "folder": folder, "precision": precision}
    recipe.write_text(RECIPES[model].format(**given))
    with contextlib.redirect_stdout(io.StringIO()):
        status = ftcli(["train", str(recipe), "--output-dir", str(run), "--offline", "--quiet", "--resume", "never"])
    if status:
        raise SystemExit(f"ftcli train {recipe} exited {status}")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    last = losses[-max(1, steps // 10) :]
    weights: dict[str, Tensor] = {}
    for path in (run / "model").glob("*.safetensors"):
        weights |= load_file(path)
    return sum(last) / len(last), weights


def compare(start: dict[str, Tensor], masters: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """(arrived, off) over all weights together."""
    along = length = apart = 0.0
    for name, first in start.items():
        way = masters[name].double() - first.double()
        went = other[name].double() - first.double()
        along, length = along + float((way * went).sum()), length + float((way * way).sum())
        apart += float((went - way).square().sum())
    return along / length, (apart / length) ** 0.5


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5])
    given = parser.parse_args()
    print("| learning rate | | loss | arrived | off |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        _, start = train(given.model, "", 1e-30, 1, Path(folder))  # the weights that all begin with
        for rate in given.rates:
            masters: dict[str, Tensor] = {}
            for name, settings in PRECISIONS.items():
                loss, weights = train(given.model, settings, rate, given.steps, Path(folder))
                masters = masters or weights
                arrived, off = compare(start, masters, weights)
                print(f"| {rate:g} | {name} | {loss:.4f} | {arrived:.3f} | {off:.3f} |", flush=True)


if __name__ == "__main__":
    main()
