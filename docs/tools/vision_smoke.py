"""Makes the bundled model that sees and its pictures: coloured shapes on grey, of which a question asks.

`python docs/tools/vision_smoke.py` writes `ftcli/assets/models/tiny-qwen3-vl` and `ftcli/assets/data/smoke-vision-*`.
What is asked cannot be told from the text: the same questions have every answer as often.
"""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

from bytes_tokenizer import write_tokenizer
from PIL import Image, ImageDraw

from ftcli.assets import asset

#: Ids 0 to 7 of the tokenizer; the others are bytes, as in the bundled tokenizer of bytes.
SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
#: Turns as Qwen writes them. A system turn shows text alone, as in Qwen's own template.
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- elif message['role'] != 'system' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
#: A model in the layout of Qwen3-VL, small enough for a minute on two cores.
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 7,
    "video_token_id": 2,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 264,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 1024,
        "bos_token_id": 2,
        "eos_token_id": 4,
        "pad_token_id": 0,
        "initializer_range": 0.05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 96,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.1,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
COLOURS = {
    "red": (200, 30, 30),
    "green": (30, 160, 40),
    "blue": (40, 60, 210),
    "yellow": (230, 210, 40),
}
SIDE = 32


def picture(chance: random.Random, colour: str) -> bytes:
    """A PNG of a square or a disc of about this colour, somewhere on grey."""
    grey = chance.randrange(70, 190)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    shade = tuple(max(0, min(255, value + chance.randrange(-25, 26))) for value in COLOURS[colour])
    size = chance.randrange(18, 27)
    left, top = chance.randrange(SIDE - size), chance.randrange(SIDE - size)
    draw = ImageDraw.Draw(image)
    shape = chance.choice((draw.rectangle, draw.ellipse))
    shape((left, top, left + size, top + size), fill=shade)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Rows of a picture, a question, and the name of its colour; every colour as often."""
    chance = random.Random(seed)
    names = [name for name in COLOURS for _ in range(count // len(COLOURS))]
    chance.shuffle(names)
    made: list[dict[str, object]] = []
    for name in names:
        text = base64.b64encode(picture(chance, name)).decode()
        question = [{"type": "image"}, {"type": "text", "text": "colour?"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": name}]
        made.append({"images": [f"data:image/png;base64,{text}"], "messages": messages})
    return made


def main() -> None:
    """Writes model and pictures."""
    folder = asset("models", "tiny-qwen3-vl")
    write_tokenizer(folder, TEMPLATE, SPECIAL_TOKENS, eos="<|im_end|>")
    for name, content in (("config.json", CONFIG), ("preprocessor_config.json", PROCESSOR)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, count, seed in (("train", 256, 1), ("eval", 64, 2)):
        lines = "".join(json.dumps(row) + "\n" for row in rows(count, seed))
        Path(asset("data", f"smoke-vision-{name}.jsonl")).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
