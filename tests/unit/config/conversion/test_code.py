"""Notebooks and scripts: what their calls say in numbers and texts becomes a recipe; nothing of them is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.cli.app import main
from tests.unit.config.conversion.conftest import Made

UNSLOTH = """\
from unsloth import FastLanguageModel
open("was-run", "w")
length = 4096
rank = 8
model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/base-3b", max_seq_length=length, dtype=None)
model = FastLanguageModel.get_peft_model(
    model, r=rank, lora_alpha=rank * 2, target_modules=["q_proj", "v_proj"], random_state=7, bias="none"
)
rows = load_dataset("org/rows", split="train[:500]")
args = SFTConfig(learning_rate=2e-4, max_steps=60, warmup_steps=int(60 * 0.1), fp16=not supported(), report_to="none")
trainer = train_on_responses_only(SFTTrainer(model=model, train_dataset=rows, packing=True, args=args), part="a")
"""

TRL = """\
base = "org/m"
model = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
tokenizer = AutoTokenizer.from_pretrained("org/other")
rows = load_dataset("json", data_files="rows.jsonl", split="train")
config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(model, train_dataset=rows, eval_dataset=rows, peft_config=config, args=SFTConfig(max_length=512))
"""


def notebook(*cells: str) -> str:
    """The cells as Jupyter stores them."""
    made = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["# Title"]}, *made], "nbformat": 4})


@pytest.mark.parametrize("form", ["script", "notebook"])
def test_unsloth(form: str, made: Callable[..., Made]) -> None:
    head, tail = UNSLOTH[: UNSLOTH.index("rows =")], UNSLOTH[UNSLOTH.index("rows =") :]
    text = UNSLOTH if form == "script" else notebook("%%capture\n!pip install unsloth", "not ( python", head, tail)
    found = made("x.py" if form == "script" else "x.ipynb", text)
    recipe = found.recipe
    assert found.dialect == "unsloth"
    assert not Path("was-run").exists()
    assert (recipe.model.name_or_path, recipe.data.max_seq_len) == ("org/base-3b", 4096)
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.target_modules) == (8, 16, ("q_proj", "v_proj"))
    assert [(source.path, source.max_rows) for source in recipe.data.train] == [("hub:org/rows", 500)]
    assert (recipe.data.packing, recipe.data.loss_on, recipe.run.seed) == (True, "auto", 7)
    assert (recipe.train.learning_rate, recipe.train.max_steps, recipe.quantization.method) == (2e-4, 60, "nf4")
    assert found.heard("FT162", "`warmup_steps` is computed")
    assert not found.heard("FT162", "`model`")


def test_script_of_trl_has_the_defaults_of_its_classes(made: Callable[..., Made]) -> None:
    found = made("x.py", TRL)
    recipe = found.recipe
    assert found.dialect == "trl"
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (4, 8, 0.0)
    assert recipe.lora.target_modules == "all-linear"
    assert (recipe.model.name_or_path, recipe.quantization.method) == ("org/m", "nf4")
    assert [source.path for source in recipe.data.train] == ["rows.jsonl"]
    assert (recipe.data.max_seq_len, recipe.train.learning_rate, recipe.train.per_device_train_batch_size) == (
        512,
        2e-5,
        8,
    )
    assert found.heard("FT162", "`eval_dataset` is computed")


def test_of_several_data_sets_none_is_guessed(made: Callable[..., Made]) -> None:
    found = made("x.py", UNSLOTH + 'more = load_dataset("org/others")\n')
    assert found.recipe.data.train == ()
    assert found.heard("FT161", "Python code in a notebook")


def test_arguments_without_names_and_models_by_name(made: Callable[..., Made]) -> None:
    rows = "load_dataset('org/rows', 'sub', split='train')"
    script = f"more = dict(packing=True)\nSFTTrainer('org/m', SFTConfig('out', 3, **more), train_dataset={rows})\n"
    found = made("x.py", script)
    (source,) = found.recipe.data.train
    assert (found.recipe.model.name_or_path, found.recipe.run.output_dir) == ("org/m", "out")
    assert (source.path, source.name) == ("hub:org/rows", "sub")
    assert found.heard("FT160", "`argument 2 of SFTConfig`")
    assert found.heard("FT162", "`**more` is computed")


def test_what_is_computed_is_not_called_the_tools_default(made: Callable[..., Made]) -> None:
    text = made("x.py", UNSLOTH.replace("r=rank, lora_alpha=rank * 2", "r=rank(), lora_alpha=rank()")).text
    assert "alpha" not in text
    assert "  r:" not in text


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("x.py", "trainer = GRPOTrainer(model)\n", "GRPOTrainer"),
        ("x.py", "def (\n", "cannot be parsed"),
        ("x.py", "(" * 5000, "cannot be parsed"),
        ("x.py", "print(1)\n", "no model is named"),
        ("x.py", "from_pretrained(model_name=" + "-" * 3000 + "1)\n", "cannot be parsed"),
        ("x.ipynb", "{}", "not a Jupyter notebook"),
        ("x.ipynb", "[" * 5000, "not a Jupyter notebook"),
        ("x.ipynb", json.dumps({"cells": [{"cell_type": "code", "source": 3}]}), "not a Jupyter notebook"),
        ("x.ipynb", notebook("x = 1"), "no model is named"),
    ],
)
def test_code_that_cannot_be_converted_is_refused(
    name: str, text: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["recipes", "convert", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "FT163" in err
    assert part in err
    assert "Traceback" not in err


def test_places_are_those_of_the_cell(made: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    made("x.ipynb", notebook("x = 1", UNSLOTH))
    assert main(["recipes", "convert", "x.ipynb"]) == 0
    assert "x.ipynb:cell 2:10:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "paths", "told"),
    [
        ('["a.jsonl", "b.jsonl"]', ["a.jsonl", "b.jsonl"], ""),
        ('("a.jsonl",)', ["a.jsonl"], ""),
        ('["s3://bucket/a.jsonl", "b.jsonl"]', ["b.jsonl"], "`s3://bucket/a.jsonl` is not read"),
        ('{"train": "a.jsonl", "test": "b.jsonl"}', [], "`data_files` is computed"),
        ("7", [], "`7` is not read"),
    ],
)
@pytest.mark.parametrize("tool", ["trl", "unsloth"])
def test_a_list_of_files_is_read_one_by_one(
    tool: str, files: str, paths: list[str], told: str, made: Callable[..., Made]
) -> None:
    rows = f'rows = load_dataset("json", data_files={files}, split="train")\n'
    base = TRL if tool == "trl" else UNSLOTH
    first = next(line for line in base.splitlines() if line.startswith("rows ="))
    found = made("x.py", base.replace(f"{first}\n", rows))
    assert [source.path for source in found.recipe.data.train] == paths
    assert not told or found.heard("FT162", told)
    assert bool(paths) != (found.heard("FT161", "no dataset is named") or found.heard("FT161", "the dataset is Python"))


def test_of_several_datasets_none_is_taken_and_that_is_said(made: Callable[..., Made]) -> None:
    found = made("x.py", TRL + 'more = load_dataset("org/other")\n')
    assert found.recipe.data.train == ()
    assert found.heard("FT161", "no dataset is named that could be read")
