"""The bundled tokenizer, and rows prepared in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.config.data import DataConfig
from ftcli.data.prepare import PreparedData, prepare


@pytest.fixture(scope="session")
def bytes_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, with Gemma's template."""
    return AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))


@pytest.fixture
def prepared(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Callable[..., PreparedData]:
    """``prepared(rows, ..., data options)``: each list of rows is a file; ``cache_dir`` and the like go to prepare."""

    def _prepared(*files: list[Any], tokenizer: Any = None, **options: Any) -> PreparedData:
        own = {name: options.pop(name) for name in ("cache_dir", "reporter") if name in options}
        sources = options.pop("sources", [{} for _ in files])
        for number, rows in enumerate(files):
            text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
            (tmp_path / f"d{number}.jsonl").write_text(text, encoding="utf-8")
            sources[number] = {"path": str(tmp_path / f"d{number}.jsonl"), **sources[number]}
        data = DataConfig.model_validate({"train": sources, "max_seq_len": 200, **options})
        chosen = tokenizer or bytes_tokenizer
        return prepare(data.train, data, chosen, (int(bytes_tokenizer.eos_token_id),), **own)

    return _prepared
