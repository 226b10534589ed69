"""`ftcli recipes convert`: recipes of other tools become ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.tables import dialects
from tests.foreign_recipes import FILES, TORCHTUNE
from tests.unit.config.conversion.conftest import Made


@pytest.mark.parametrize("name", FILES)
def test_the_tool_is_recognised_and_the_result_is_one_of_ours(name: str, made: Callable[..., Made]) -> None:
    found = made(name)
    assert found.dialect == {"notebook": "unsloth"}.get(name, name)
    assert found.recipe.model.name_or_path


def test_axolotl(made: Callable[..., Made]) -> None:
    found = made("axolotl")
    recipe = found.recipe
    assert (recipe.model.name_or_path, recipe.quantization.method) == ("org/base-8b", "nf4")
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (32, 16, 0.05)
    assert recipe.lora.target_modules == "all-linear"
    (source,) = recipe.data.train
    assert (source.path, source.max_rows, source.columns) == ("./rows.jsonl", 500, {"messages": "turns"})
    assert [each.path for each in recipe.data.eval] == ["held-out.jsonl"]
    assert (recipe.data.format, recipe.data.max_seq_len, recipe.data.overlong) == ("messages", 4096, "drop")
    assert (recipe.data.packing, recipe.data.chat_template) == (True, "chatml")
    train = recipe.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps, train.num_train_epochs) == (2, 4, 3)
    assert (train.learning_rate, train.lr_scheduler_type, train.warmup_steps) == (2e-4, "cosine_with_min_lr", 0.1)
    assert (train.optim, train.lr_scheduler_kwargs) == ("adamw_8bit", {"min_lr_rate": 0.1})
    assert train.gradient_checkpointing == "offload"
    assert train.early_stopping is not None
    assert train.early_stopping.patience == 2
    assert (recipe.eval.every_steps, recipe.checkpoint.every_steps, recipe.checkpoint.keep_last) == (50, 100, 3)
    assert (recipe.logging.every_steps, recipe.logging.loggers) == (1, ("wandb",))
    assert (recipe.run.name, recipe.run.output_dir) == ("first-try-", "./outputs/out")
    for code, part in (
        ("FT160", "`val_set_size`"),
        ("FT160", "`flash_attention`"),
        ("FT160", "`evals_per_epoch`"),
        ("FT160", "`deepspeed`"),
        ("FT160", "`made_up_key`"),
        ("FT161", "template `chatml`"),
    ):
        assert found.heard(code, part), part
    assert not any("lora_fan_in_fan_out" in message for _, message, _ in found.said)


def test_axolotls_defaults_are_written_out(made: Callable[..., Made]) -> None:
    recipe = made(
        "axolotl", "base_model: org/m\nlearning_rate: 1e-5\ndatasets: [{path: org/rows, type: completion}]\n"
    ).recipe
    assert (recipe.data.max_seq_len, recipe.data.overlong, recipe.data.format) == (512, "drop", "text")
    assert (recipe.train.lr_scheduler_type, recipe.train.warmup_steps) == ("cosine", 0.03)
    assert recipe.lora is None
    assert [source.path for source in recipe.data.train] == ["hub:org/rows"]


def test_llama_factory(made: Callable[..., Made]) -> None:
    Path("corpus").mkdir()
    entry = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "chat"}}
    Path("corpus/dataset_info.json").write_text(json.dumps({"mine": entry}))
    found = made("llama-factory")
    recipe = found.recipe
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.quantization.method) == (16, 32, "nf4")
    (source,) = recipe.data.train
    assert (source.path, source.max_rows, source.columns) == ("corpus/a.json", 100, {"conversations": "chat"})
    assert (recipe.data.format, recipe.data.loss_on, recipe.data.packing) == ("sharegpt", "completion", True)
    assert (recipe.data.max_seq_len, recipe.data.overlong) == (1024, "truncate")
    assert (recipe.train.num_train_epochs, recipe.train.learning_rate, recipe.model.dtype) == (3, 1e-4, "float16")
    assert found.heard("FT162", "template `qwen`")
    assert found.heard("FT161", "see one another")
    assert found.heard("FT160", "`val_size`")


def test_a_data_set_that_llama_factory_knows_by_name_alone(made: Callable[..., Made]) -> None:
    found = made("llama-factory")
    assert found.heard("FT162", "`mine` is a name in LLaMA-Factory's list")


def test_torchtune(made: Callable[..., Made]) -> None:
    found = made("torchtune")
    recipe = found.recipe
    assert recipe.model.name_or_path == "/models/llama"
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.target_modules) == (16, 32, "all-linear")
    (source,) = recipe.data.train
    assert (source.path, source.columns) == ("rows.json", {"prompt": "question", "completion": "reply"})
    assert (recipe.data.max_seq_len, recipe.data.overlong) == (2048, "truncate")
    train = recipe.train
    assert (train.learning_rate, train.adam_beta2, train.weight_decay, train.max_grad_norm) == (2e-5, 0.95, 0.01, 0.5)
    assert (train.max_steps, train.warmup_steps, train.gradient_checkpointing) == (40, 100, True)
    assert train.optim == "paged_adamw_8bit"
    assert recipe.logging.loggers == ("wandb",)
    assert not any("profiler" in message for _, message, _ in found.said)


def test_torchtune_neither_clips_nor_schedules_unless_told(made: Callable[..., Made]) -> None:
    kept = TORCHTUNE.replace("clip_grad_norm: 0.5\n", "")
    kept = kept[: kept.index("lr_scheduler:")] + kept[kept.index("seed:") :]
    train = made("torchtune", kept).recipe.train
    assert (train.max_grad_norm, train.lr_scheduler_type) == (1e9, "constant")


def test_trl_command_line(made: Callable[..., Made]) -> None:
    found = made("trl")
    recipe = found.recipe
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (32, 64, 0.05)
    assert recipe.lora.target_modules == ("q_proj", "v_proj")
    assert [source.path for source in recipe.data.train] == ["hub:org/rows"]
    assert [(source.path, source.split) for source in recipe.data.eval] == [("hub:org/rows", "test")]
    assert (recipe.data.max_seq_len, recipe.data.overlong, recipe.data.packing) == (1024, "truncate", True)
    assert (recipe.train.learning_rate, recipe.train.per_device_train_batch_size) == (2e-4, 2)
    assert (recipe.eval.every_steps, recipe.logging.loggers) == (100, ("tensorboard",))
    assert found.heard("FT160", "`report_to`")
    assert found.heard("FT161", "every token of `messages` rows")


def test_a_word_for_all_modules_is_no_list_of_one(made: Callable[..., Made]) -> None:
    text = "model_name_or_path: m\nuse_peft: true\nmax_length: 8\ndataset_name: r.jsonl\nlora_target_modules: "
    for words, ours in (
        ("all-linear", "all-linear"),
        ("[q_proj]", ("q_proj",)),
        ("q_proj, v_proj", ("q_proj", "v_proj")),
    ):
        lora = made("trl.yaml", text + words + "\n").recipe.lora
        assert lora is not None
        assert lora.target_modules == ours


def test_trl_without_adapters_has_its_own_defaults(made: Callable[..., Made]) -> None:
    text = (
        "model_name_or_path: org/m\ndataset_name: rows.jsonl\nmax_length: 128\nassistant_only_loss: true\nlora_r: 8\n"
    )
    recipe = made("trl.yaml", text).recipe
    assert recipe.lora is None
    assert (recipe.train.learning_rate, recipe.train.per_device_train_batch_size) == (2e-5, 8)
    assert (recipe.train.num_train_epochs, recipe.data.loss_on) == (3, "assistant")


def test_unsloth(made: Callable[..., Made]) -> None:
    recipe = made("unsloth").recipe
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.target_modules, recipe.lora.use_rslora) == (8, ("q_proj", "v_proj"), True)
    assert (recipe.quantization.method, recipe.data.format, recipe.data.loss_on) == ("nf4", "messages", "auto")
    assert (recipe.run.seed, recipe.train.weight_decay, recipe.train.max_steps) == (3407, 0.01, 60)
    assert recipe.logging.loggers == ("tensorboard",)


def test_arguments_of_a_notebook(made: Callable[..., Made]) -> None:
    found = made("notebook")
    assert found.recipe.lora is not None
    assert found.recipe.lora.target_modules == "all-linear"
    assert (found.recipe.train.max_steps, found.recipe.quantization.method) == (60, "nf4")
    assert found.heard("FT161", "Python code in a notebook")


def test_every_row_of_the_table_has_rules_and_is_named_in_the_tables_of_names() -> None:
    from ftcli.config.conversion.rules import Rules
    from ftcli.config.dialects import FOREIGN
    from ftcli.tables import code_of

    tools = " ".join(entry.tools for entry in FOREIGN.values())
    for name in dialects.names():
        assert isinstance(code_of(dialects.row(name).code), Rules)
        assert dialects.row(name).title in tools
