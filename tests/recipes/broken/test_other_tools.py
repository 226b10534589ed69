"""Keys of other tools: each is refused, and named as it is called here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.config.dialects import FOREIGN, FOREIGN_IN, VALUES
from ftcli.config.schema import RecipeSchema

HEAD = "version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n"

CASES = [
    ("axolotl", "sequence_len: 2048\n", "data.max_seq_len"),
    ("axolotl", "micro_batch_size: 2\n", "train.per_device_train_batch_size"),
    ("axolotl", "base_model: google/gemma-2-9b\n", "model.name_or_path"),
    ("axolotl", "load_in_4bit: true\n", "quantization.method: nf4"),
    ("axolotl", "lora_target_linear: true\n", "lora.target_modules: all-linear"),
    ("axolotl", "val_set_size: 0.05\n", "data.eval"),
    ("axolotl", "num_epochs: 3\n", "train.num_train_epochs"),
    ("LLaMA-Factory", "cutoff_len: 2048\n", "data.max_seq_len"),
    ("LLaMA-Factory", "lora_rank: 8\n", "lora.r"),
    ("LLaMA-Factory", "finetuning_type: lora\n", "lora"),
    ("TRL", "max_length: 2048\n", "data.max_seq_len"),
    ("TRL", "bf16: true\n", "model.dtype: bfloat16"),
    ("torchtune", "batch_size: 2\n", "train.per_device_train_batch_size"),
    ("torchtune", "enable_activation_checkpointing: true\n", "train.gradient_checkpointing"),
    ("Unsloth", "max_seq_length: 2048\n", "data.max_seq_len"),
    ("litgpt", "global_batch_size: 16\n", "train.gradient_accumulation_steps"),
]


@pytest.mark.parametrize(("tool", "line", "ours"), CASES, ids=lambda part: part.split(":")[0].strip())
def test_top_level_key_of_another_tool(refused: Callable[..., object], tool: str, line: str, ours: str) -> None:
    Path("r.yaml").write_text(HEAD + line)
    outcome = refused(["check", "r.yaml"], code="FT202", at="r.yaml:3:1", help="write ")
    name = line.partition(":")[0]
    told = next(text for text in outcome.stderr.splitlines() if "FT202" in text)
    assert f"`{name}`" in told
    assert tool in told
    assert f"is `{ours}` here" in told


def test_key_of_another_tool_inside_our_section(refused: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + "eval:\n  batch_size: 4\n")
    outcome = refused(["check", "r.yaml"], code="FT202", at="r.yaml:4:3", help="write ")
    assert "eval.per_device_eval_batch_size" in outcome.stderr


def test_key_without_counterpart(refused: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + "label_smoothing_factor: 0.1\n")
    refused(["check", "r.yaml"], code="FT202", at="r.yaml:3:1", help="not offered")


def test_a_whole_axolotl_file_is_answered_key_by_key(ftcli: Callable[..., object]) -> None:
    Path("axolotl.yaml").write_text(
        "base_model: google/gemma-2-9b\nload_in_4bit: true\nadapter: qlora\nlora_r: 16\nlora_alpha: 32\n"
        "lora_target_linear: true\ndatasets:\n  - path: data.jsonl\n    type: chat_template\nsequence_len: 4096\n"
        "sample_packing: true\nmicro_batch_size: 2\nnum_epochs: 1\noptimizer: adamw_torch\nlr_scheduler: cosine\n"
        "learning_rate: 2e-4\nbf16: auto\ngradient_checkpointing: true\nlogging_steps: 1\nflash_attention: true\n"
    )
    outcome = ftcli("check", "axolotl.yaml")
    assert outcome.status == 2
    assert outcome.stderr.count("FT202") == 16
    assert "did you mean `train.learning_rate`?" in outcome.stderr
    assert "did you mean `train.gradient_checkpointing`?" in outcome.stderr
    assert outcome.stderr.count("`ftcli recipes convert axolotl.yaml` makes a recipe of the whole file") == 1


def test_every_counterpart_exists() -> None:
    keys = set(RecipeSchema().keys())
    for name, entry in [*FOREIGN.items(), *FOREIGN_IN.items()]:
        assert entry.key is None or entry.key in keys, name
        assert entry.key is not None or entry.note, name


def test_no_foreign_name_is_one_of_ours() -> None:
    """But where it is the same key: a file of another tool's is converted by this table."""
    leaves = {key.rpartition(".")[2] for key in RecipeSchema().keys()}  # noqa: SIM118
    named = {name: FOREIGN[name].target for name in leaves & set(FOREIGN)}
    # transformers' metric_for_best_model is ours with other values, of which the note speaks.
    assert {name for name, target in named.items() if target is None} <= {"metric_for_best_model"}
    # `epochs` is of one source here, and of the run there: in `train` it is told as train.num_train_epochs.
    others = {name for name, target in named.items() if target is not None and target.rpartition(".")[2] != name}
    assert others == {"epochs"}


def test_every_foreign_value_leads_to_an_allowed_word() -> None:
    schema = RecipeSchema()
    for key, words in VALUES.items():
        node = schema.at(key.split("."))
        assert node is not None
        if schema.resolve(node).get("type") == "array":
            node = schema.resolve(node)["items"]
        switch = {"true", "false"} if any(part.get("type") == "boolean" for part in schema.variants(node)) else set()
        assert set(words.values()) <= switch | set(schema.choices(node)), key
