"""What comes of a small random model of each family: the rows of docs/models.md.

``PYTHONPATH=docs/tools python -m tests.family_outcomes [MODEL_TYPE ...]`` finds it out and writes the page anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from models_page import PAGE, Outcome, page, stated
from transformers import AutoTokenizer

from ftcli.assets import asset
from ftcli.cli.app import main
from tests.small_models import MULTIMODAL, TEXT, build

_RECIPE: dict[str, Any] = {
    "version": 1,
    "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 24}], "max_seq_len": 64},
    "train": {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3},
    "export": {"formats": ["safetensors"]},
}


def outcome_of(model_type: str, folder: Path) -> Outcome:
    """Trains, packs, quantizes and exports a model of this family in an empty folder."""
    base = folder / "base"
    build(model_type).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", "bytes"))
    tokenizer.unk_token = tokenizer.pad_token  # else Qwen2's class adds a token, which the model has no row for (FT315)
    tokenizer.save_pretrained(base)

    def train(name: str, kernels: str = "auto", **sections: Any) -> str:
        run = {"output_dir": str(folder / name)}
        model = {"name_or_path": str(base), "dtype": "float32", "kernels": kernels}
        values = {**_RECIPE, "run": run, "model": model, **sections}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return _said("train", str(path))

    lora = train("lora", lora={"r": 4})
    return Outcome(
        lora=lora,
        qlora=train("qlora", lora={"r": 4}, quantization={"method": "nf4"}),
        full=train("full"),
        export=_said("export", str(folder / "lora")) if lora == "yes" else lora,
        packing=train("packing", "reference", lora={"r": 4}, data={**_RECIPE["data"], "packing": True}),
    )


def _said(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main([*words, "--json", "--quiet", "--offline"])
    findings = json.loads(out.getvalue())["findings"]
    return "yes" if status == 0 else str(findings[-1]["code"])


def write_page(chosen: list[str]) -> None:
    """Finds out about the chosen families, all of them where none is chosen, and writes the page."""
    outcomes = stated(PAGE.read_text(encoding="utf-8")) if chosen else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FTCLI_CACHE"] = f"{folder}/cache"
        for name in chosen or [*MULTIMODAL, *TEXT]:
            (Path(folder) / name).mkdir()
            outcomes[name] = outcome_of(name, Path(folder) / name)
            sys.stdout.write(f"{name}: {outcomes[name]}\n")
            sys.stdout.flush()
    PAGE.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    write_page(sys.argv[1:])
