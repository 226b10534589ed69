"""A training step on rows with images, by ftcli and by TRL's SFTTrainer, on the same machine and the same rows.

    python kernels/bench/vision.py                     # Qwen3-VL-8B, 8 rows of one image of 1024 x 1024 and 200 tokens
    python kernels/bench/vision.py --tower             # the tower and the projector are trained as well
    python kernels/bench/vision.py --only ours --rows 4 --side 512
    python kernels/bench/vision.py --device cpu        # does it run at all

``ours`` is `ftcli train` itself: image files are read, resized and cut into patches beside the steps. ``trl`` is given
what the image processor makes of them beforehand, in memory; transformers' model with torch's attention and PEFT's
adapters on the language model, without gradient checkpointing, or with it where that does not fit. Weights are random.
Every contender has a process of its own; a row is its median step after the first four.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import GIB, Table, ftcli, in_own_process, parser, require_device, settings
from peers import now

CONTENDERS = ("ours", "trl", "trl-checkpointed")
#: Tokenizer and pictures of the bundled model that sees: one token a byte.
_TINY = "bundled:tiny-qwen3-vl"
#: Tokens of a row that its chat template writes.
_OF_TEMPLATE = 23
#: What is trained with ``--tower``.
_PARTS = ("language", "projector", "vision")
#: Pixels of the side of a token of Qwen3-VL.
_TOKEN = 32
#: Steps that are not counted.
_FIRST = 4


def write_rows(folder: Path, options: argparse.Namespace) -> Path:
    """Rows of an image, a question and an answer, of so many tokens beside the image."""
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(0)
    lines = []
    for number in range(options.rows * options.gpus * (options.steps + _FIRST)):
        coarse = chance.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        name = f"{number}.jpg"
        Image.fromarray(coarse).resize((options.side, options.side), Image.Resampling.BICUBIC).save(folder / name)
        words = "".join(map(chr, chance.integers(97, 123, options.text - _OF_TEMPLATE)))
        asked = {"role": "user", "content": f"<image>{words[:40]}"}
        turns = [asked, {"role": "assistant", "content": words[40:]}]
        lines.append(json.dumps({"images": [name], "messages": turns}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def settings_of(path: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """What the recipe is changed in."""
    tiny = options.device == "cpu"
    return settings(
        f"model.name_or_path={_TINY if tiny else options.model}",
        f"model.tokenizer={_TINY}",
        "model.init=random",
        f"model.train=[{', '.join(_PARTS if options.tower else _PARTS[:1])}]",
        f"model.dtype={'float32' if tiny else 'bfloat16'}",
        f"data.train=[{path}]",
        "data.eval=[]",
        "eval.tasks=[]",
        f"lora={{r: {options.rank}, alpha: {options.rank}, target_modules: all-linear}}",
        f"train.per_device_train_batch_size={options.rows}",
        f"train.max_steps={options.steps + _FIRST}",
        "train.gradient_accumulation_steps=1",
        "train.gradient_checkpointing=auto",
        "train.learning_rate=1e-5",
        f"data.max_seq_len={1024 if tiny else -(-((options.side // _TOKEN) ** 2 + options.text) // 64) * 64}",
        "logging.every_steps=1",
        f"run.output_dir={folder / 'run'}",
    )


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """The row of `ftcli train`, from its metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_rows(folder, options)
        words = ["train", str(options.recipe), "--json", *settings_of(path, folder, options)]
        words += ["--gpus", str(options.gpus)] if options.gpus > 1 else []
        answer = ftcli(words, log=options.log)
        if answer.status != 0:
            return {"note": f"exit {answer.status}: {answer.said[:300]}"}
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if "tokens_per_second" in line][_FIRST:]
    tokens = [after["tokens"] - before["tokens"] for before, after in pairwise([lines[_FIRST - 1], *counted])]
    seconds = [each / line["tokens_per_second"] for each, line in zip(tokens, counted, strict=True)]
    waited = sum(line.get("image_wait_seconds", 0.0) for line in counted) / sum(seconds)
    middle = statistics.median(seconds)
    return {
        "step ms": 1e3 * middle,
        "tokens/s": statistics.median(tokens) / middle,
        "peak GiB": counted[-1]["peak_memory_bytes"] / GIB,
        "waits": waited,
    }


def by_trl(options: argparse.Namespace, *, checkpointed: bool) -> dict[str, Any]:
    """The row of TRL's SFTTrainer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForImageTextToText, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from ftcli.assets import asset
    from ftcli.config.data import DataConfig
    from ftcli.config.model import ModelConfig
    from ftcli.data.pixels import PixelReader
    from ftcli.data.prepare import prepare
    from ftcli.data.vision import load_vision
    from ftcli.model.tokenizer import load_tokenizer

    tiny = options.device == "cpu"
    source = asset("models", "tiny-qwen3-vl") if tiny else asset("configs", options.model.replace("/", "--"))
    dtype = torch.float32 if tiny else torch.bfloat16
    config = AutoConfig.from_pretrained(source)
    named = ModelConfig(name_or_path=_TINY if tiny else options.model, tokenizer=_TINY, init="random")
    tokenizer = load_tokenizer(named, offline=True)
    vision = load_vision(named, config.to_dict(), tokenizer, None, offline=True)
    assert not isinstance(vision, str), vision
    config.image_token_id = vision.token_id
    ends: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now(options.device))

    with tempfile.TemporaryDirectory() as name:
        path = write_rows(Path(name), options)
        data = DataConfig.model_validate({"train": [str(path)], "max_seq_len": 4096})
        rows = prepare(data.train, data, tokenizer, (int(tokenizer.eos_token_id),), vision=vision).sequences
        reader = PixelReader(vision, dtype)
        read = [(row, reader.of([row])) for row in rows]

        def collate(items: list[dict[str, int]]) -> dict[str, torch.Tensor]:
            chosen = [read[item["index"]] for item in items]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.input_ids) for row, _ in chosen], batch_first=True)
            labels = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row.labels) for row, _ in chosen], batch_first=True, padding_value=-100
            )
            lengths = torch.tensor([len(row.input_ids) for row, _ in chosen])
            pixels = {key: torch.cat([one[key] for _, one in chosen]) for key in chosen[0][1]}
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            kinds = (ids == vision.token_id).int()
            return {"input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": kinds, **pixels}

        torch.manual_seed(0)
        with torch.device(options.device):
            model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        adapted = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
        if options.tower:
            adapted += r"|.*visual\.(blocks|merger|deepstack).*\.(qkv|proj|linear_fc1|linear_fc2)"
        model = get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=adapted))
        if checkpointed:
            model.enable_input_require_grads()
        from datasets import Dataset

        arguments = SFTConfig(
            output_dir=name, max_length=None, use_cpu=tiny, optim="adamw_torch_fused", save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, per_device_train_batch_size=options.rows, max_grad_norm=1.0,
            max_steps=options.steps + _FIRST, bf16=not tiny, gradient_checkpointing=checkpointed,
            remove_unused_columns=False, dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )  # fmt: skip
        trainer = SFTTrainer(
            model, args=arguments, data_collator=collate, processing_class=tokenizer, callbacks=[Ends()],
            train_dataset=Dataset.from_dict({"index": list(range(len(read)))}),
        )  # fmt: skip
        trainer.train()
    seconds = [after - before for before, after in pairwise(ends)][_FIRST - 1 :]
    middle = statistics.median(seconds)
    tokens = options.rows * statistics.mean(len(row.input_ids) for row, _ in read)
    peak = None if tiny else torch.cuda.max_memory_allocated() / GIB
    return {"step ms": 1e3 * middle, "tokens/s": tokens / middle, "peak GiB": peak}


def main() -> None:
    """A row a contender; what is not installed, or fails, is said in its row."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--model", default="Qwen/Qwen3-VL-8B-Instruct", help="one whose config.json ships with ftcli"
    )
    arguments.add_argument("--recipe", type=Path, default=Path(__file__).parents[2] / "recipes" / "smoke-vision.yaml")
    arguments.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--side", type=int, default=1024)
    arguments.add_argument("--text", type=int, default=200, help="tokens of a row beside its image")
    arguments.add_argument("--tower", action="store_true", help="adapters on tower and projector as well")
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--gpus", type=int, default=1, help="of ours, as many rows on each")
    arguments.add_argument("--log", type=Path, help="where ftcli's messages go")
    arguments.add_argument("--work", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    require_device(options.device)
    if options.device == "cpu":
        options.rows, options.side, options.steps = 2, 64, 2
    if options.work:
        print(json.dumps(by_trl(options, checkpointed=options.work != "trl")))
        return
    columns = {"by": "", "tokens/s": ",.0f", "step ms": ".1f", "peak GiB": ".2f", "waits": ".2%", "note": ""}
    table = Table(columns)
    for contender in options.only:
        if contender != "ours" and importlib.util.find_spec("trl") is None:
            table.add(by=contender, note="not installed")
            continue
        table.add(by=contender, **(ours(options) if contender == "ours" else in_own_process("--work", contender)))
    table.save(options.json)


if __name__ == "__main__":
    main()
