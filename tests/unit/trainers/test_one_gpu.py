"""A machine with two GPUs trains on one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from ftcli.reporting import SilentReporter
from ftcli.trainers.arguments import use_one_gpu
from tests.small_models import build


class Heard(SilentReporter):
    text = ""

    def info(self, text: str) -> None:
        self.text += text


def test_one_of_two_visible_gpus_is_used_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = SFTConfig(output_dir=str(tmp_path), bf16=False, max_length=None, report_to="none",
                     dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
    assert args.n_gpu == 2
    heard = Heard()
    use_one_gpu(args, heard)
    assert heard.text.startswith("2 GPUs are visible; the first is used")
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]]})
    model = build("llama")
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, data_collator=list, processing_class=_tokenizer())
    assert trainer._wrap_model(model) is model
    assert args.train_batch_size == args.per_device_train_batch_size


def _tokenizer() -> object:
    from transformers import AutoTokenizer

    from ftcli.assets import asset

    return AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
