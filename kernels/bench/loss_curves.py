"""Train the same recipe twice, with the kernels and without, from the same seed, and draw both losses.

    python kernels/bench/loss_curves.py tiny --dtype float32 --kernels reference --svg docs/curves/tiny-float32.svg
    python kernels/bench/loss_curves.py 1b --dtype bfloat16 --svg docs/curves/1b-bfloat16.svg

`tiny` is the bundled model on its smoke task, `1b` a Llama of 1.2 billion random weights on generated text. Both are
whole runs of `ftcli train`; `--kernels` names what is compared with `off`. Prints the largest and the mean relative
difference of the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ftcli.cli.app import main as ftcli

ONE_BILLION = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.02, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": True,
    "vocab_size": 128256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
RECIPES = {
    "tiny": """
version: 1
model: {{name_or_path: "bundled:tiny-gemma2", dtype: {dtype}, kernels: "{kernels}"}}
lora: {{r: 16, alpha: 32, target_modules: all-linear}}
data: {{train: ["bundled:smoke-train"], max_seq_len: 64}}
train: {{max_steps: {steps}, per_device_train_batch_size: 16, learning_rate: 1e-3, warmup_steps: 10}}
logging: {{every_steps: 1}}
""",
    "1b": """
version: 1
model: {{name_or_path: "{folder}", init: random, tokenizer: bytes, dtype: {dtype}, kernels: "{kernels}"}}
lora: {{r: 16, alpha: 32, target_modules: all-linear}}
data: {{train: ["bundled:tiny-pretrain"], max_seq_len: 96}}
train: {{max_steps: {steps}, per_device_train_batch_size: 32, learning_rate: 5e-4, warmup_steps: 10}}
logging: {{every_steps: 1}}
""",
}
WIDTH, HEIGHT, MARGIN = 640, 200, 56


def losses(model: str, dtype: str, kernels: str, steps: int, folder: Path) -> list[float]:
    """The loss of every step of one run."""
    (folder / "config.json").write_text(json.dumps(ONE_BILLION))
    recipe = folder / f"{kernels}.yaml"
    recipe.write_text(RECIPES[model].format(dtype=dtype, kernels=kernels, steps=steps, folder=folder))
    with contextlib.redirect_stdout(io.StringIO()):
        status = ftcli(["train", str(recipe), "--output-dir", str(folder / kernels), "--offline", "--quiet"])
    if status:
        raise SystemExit(f"ftcli train {recipe} exited {status}")
    lines = (folder / kernels / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def polyline(values: Sequence[float], low: float, high: float, top: int, style: str) -> str:
    """One line of the drawing; ``top`` is the upper edge of its panel."""
    across = (WIDTH - 2 * MARGIN) / max(1, len(values) - 1)
    points = (
        f"{MARGIN + i * across:.1f},{top + HEIGHT * (1 - (v - low) / (high - low or 1.0)):.1f}"
        for i, v in enumerate(values)
    )
    return f'<polyline fill="none" {style} points="{" ".join(points)}"/>'


def panel(title: str, low: float, high: float, top: int, lines: Sequence[str]) -> list[str]:
    """A frame with its title and its lowest and highest value."""
    return [
        f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{MARGIN}" y="{top - 8}">{title}</text>',
        f'<text x="{MARGIN - 4}" y="{top + 10}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{MARGIN - 4}" y="{top + HEIGHT}" text-anchor="end">{low:.3g}</text>',
        *lines,
    ]


def drawing(title: str, off: Sequence[float], on: Sequence[float]) -> str:
    """An SVG of both losses, and of their relative difference below."""
    difference = [(b - a) / a for a, b in zip(off, on, strict=True)]
    low, high = min(*off, *on), max(*off, *on)
    widest = max(map(abs, difference)) or 1e-12
    first, second = 28, HEIGHT + 76
    body = [
        *panel(
            f"{title}: loss by step; grey unpatched, blue with the kernels", low, high, first,
            [
                polyline(off, low, high, first, 'stroke="#999" stroke-width="4"'),
                polyline(on, low, high, first, 'stroke="#0b62a8" stroke-width="1.2"'),
            ],
        ),
        *panel(
            "relative difference", -widest, widest, second,
            [polyline(difference, -widest, widest, second, 'stroke="#0b62a8" stroke-width="1"')],
        ),
        f'<text x="{WIDTH - MARGIN}" y="{second + HEIGHT + 16}" text-anchor="end">step {len(off)}</text>',
    ]  # fmt: skip
    height = second + HEIGHT + 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def main() -> None:
    """Run both, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(RECIPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--kernels", default="triton", choices=["triton", "auto", "reference"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        off, on = (
            losses(options.model, options.dtype, kernels, options.steps, Path(folder))
            for kernels in ("off", options.kernels)
        )
    apart = [abs(b - a) / abs(a) for a, b in zip(off, on, strict=True)]
    print(
        f"{options.model} {options.dtype} {options.kernels} against off, {len(off)} steps: "
        f"loss {off[0]:.4f} -> {off[-1]:.4f} and {on[-1]:.4f}; "
        f"relative difference at most {max(apart):.2e}, mean {sum(apart) / len(apart):.2e}"
    )
    if options.svg:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(drawing(f"{options.model}, {options.dtype}", off, on))


if __name__ == "__main__":
    main()
