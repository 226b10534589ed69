"""What other tools train otherwise than it looks is converted as they train it, or told: never passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.dialects import TOOLS, rows_of
from ftcli.config.schema import RecipeSchema
from tests.foreign_recipes import TORCHTUNE
from tests.unit.config.conversion.conftest import Made

Make = Callable[..., Made]
BASES = {
    "axolotl": "base_model: m\nsequence_len: 64\nmicro_batch_size: 1\nlearning_rate: 1e-5\n",
    "llama-factory": "model_name_or_path: m\nfinetuning_type: lora\ncutoff_len: 64\n",
    "torchtune": TORCHTUNE,
    "trl": "model_name_or_path: m\ndataset_name: org/rows\n",
    "unsloth": "model: m\ntraining_type: lora\nmax_seq_length: 64\n",
}


def converted(made: Make, tool: str, more: str) -> Made:
    return made("theirs.yaml", BASES[tool] + more, tool)


def at(found: Made, key: str) -> Any:
    value: Any = found.recipe
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("tool", "lines", "key", "value"),
    [
        ("axolotl", "adapter:\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n", "lora", None),
        ("axolotl", "adapter: qlora\n", "quantization.method", "nf4"),
        ("axolotl", "max_grad_norm: 0\n", "train.max_grad_norm", 1e9),
        ("axolotl", "max_grad_norm: null\n", "train.max_grad_norm", 1.0),
        ("llama-factory", "pissa_init: true\n", "lora.init_lora_weights", "pissa_niter_16"),
        ("llama-factory", "pissa_init: true\npissa_iter: -1\n", "lora.init_lora_weights", "pissa"),
        ("llama-factory", "pissa_iter: 8\n", "lora.init_lora_weights", True),
        ("axolotl", "bf16: false\nfp16: false\n", "model.dtype", "float32"),
        ("axolotl", "warmup_steps: 0\nwarmup_ratio: 0.1\n", "train.warmup_steps", 0),
        (
            "axolotl",
            "datasets: [{path: a.jsonl, type: chat_template, chat_template: gemma}]\n",
            "data.chat_template",
            "gemma",
        ),
        ("llama-factory", "enable_thinking: false\n", "data.chat_template_kwargs", {"enable_thinking": False}),
        ("llama-factory", "stage: pt\ndataset: a\n", "data.packing", True),
        ("llama-factory", "stage: pt\ndataset: a\n", "data.overlong", "error"),
        ("llama-factory", "stage: pt\ndataset: a\npacking: false\n", "data.overlong", "truncate"),
        ("trl", "max_length: null\n", "data.overlong", "error"),
        ("trl", "max_grad_norm: null\n", "train.max_grad_norm", 1e9),
        ("trl", "warmup_ratio: 0.1\nwarmup_steps: 0\n", "train.warmup_steps", 0.1),
        ("trl", "use_peft: false\nlora_r: 8\n", "lora", None),
        ("trl", "bf16: false\n", "model.dtype", "float32"),
        ("torchtune", "clip_grad_norm:\n", "train.max_grad_norm", 1e9),
        ("unsloth", "train_on_completions: false\n", "data.loss_on", "all"),
    ],
)
def test_it_is_trained_as_the_tool_trains_it(tool: str, lines: str, key: str, value: Any, made: Make) -> None:
    if tool == "torchtune":
        lines = TORCHTUNE.replace("clip_grad_norm: 0.5\n", lines)
        assert at(made("theirs.yaml", lines, tool), key) == value
    else:
        assert at(converted(made, tool, lines), key) == value


def item(text: str) -> str:
    return f"datasets: [{{path: a.jsonl, type: chat_template, {text}}}]\n"


@pytest.mark.parametrize(
    ("tool", "lines", "part"),
    [
        ("axolotl", item("message_field_training: train"), "`message_field_training` of a dataset"),
        ("axolotl", item("roles: {assistant: [bot]}"), "roles: "),
        ("axolotl", item("roles_to_train: [assistant, user]"), "roles_to_train"),
        ("axolotl", item("roles_to_train: []"), "roles_to_train"),
        ("axolotl", item("train_on_eos: all"), "train_on_eos"),
        ("axolotl", item("message_property_mappings: {role: who, content: says}"), "message_property_mappings"),
        ("axolotl", item("made_up: false"), "`made_up` of a dataset"),
        (
            "axolotl",
            item("chat_template: gemma") + "test_datasets: []\nchat_template: chatml\n",
            "the template `gemma`",
        ),
        (
            "axolotl",
            "datasets: [{path: a.jsonl, type: alpaca, chat_template: gemma}, {path: b.jsonl, type: alpaca}]\n",
            "templates of their own",
        ),
        ("axolotl", "shuffle_merged_datasets: false\n", "`shuffle_merged_datasets`"),
        ("axolotl", "datasets: [{path: a.jsonl, type: completion}]\n", "splits texts that are longer"),
        ("axolotl", "plugins: [axolotl.integrations.kd.KDPlugin]\n", "`plugins`"),
        ("axolotl", 'added_tokens_overrides: {128041: "<x>"}\n', "`added_tokens_overrides.128041`"),
        ("axolotl", "label_smoothing_factor: 0.1\n", "`label_smoothing_factor`"),
        ("axolotl", "eval_sequence_len: 32\n", "`eval_sequence_len`"),
        ("axolotl", "quantize_moe_experts: true\n", "`quantize_moe_experts`"),
        ("axolotl", "rope_scaling: {type: linear, factor: 2}\n", "`rope_scaling.factor`"),
        ("axolotl", "load_in_4bit: true\n", "`load_in_4bit`"),
        ("axolotl", "output_dir: s3://bucket/out\n", "s3://bucket/out"),
        ("axolotl", "revision_of_model: s3://bucket/x\n", "s3://bucket/x"),
        ("axolotl", item("path: 's3://bucket/rows.jsonl'").replace("path: a.jsonl, ", ""), "s3://bucket/rows.jsonl"),
        ("axolotl", "trust_remote_code: true\n", "`trust_remote_code`"),
        ("axolotl", "bf16: true\n", "in bf16, ftcli in float32"),
        ("llama-factory", "mix_strategy: interleave_under\n", "`mix_strategy`"),
        ("llama-factory", "dataset: s3://bucket/rows\n", "s3://bucket/rows"),
        ("llama-factory", "rope_scaling: linear\n", "`rope_scaling`"),
        ("llama-factory", "quantization_bit: 4\nquantization_type: fp4\n", "`quantization_type`"),
        ("llama-factory", "freeze_vision_tower: false\n", "`freeze_vision_tower`"),
        ("trl", "load_in_4bit: true\nuse_peft: true\nbnb_4bit_quant_type: fp4\n", "`bnb_4bit_quant_type`"),
        ("trl", "chat_template_path: org/other\n", "the tokenizer `org/other`"),
        ("trl", "max_length: null\n", "cuts nothing in TRL"),
        ("trl", "eos_token: <|im_end|>\n", "`eos_token`"),
        ("trl", "loss_type: dft\n", "`loss_type`"),
        ("trl", "packing: true\npacking_strategy: wrapped\n", "packing_strategy: wrapped"),
        ("trl", "dataloader_drop_last: true\n", "`dataloader_drop_last`"),
        ("unsloth", "finetune_mlp_modules: false\n", "`finetune_mlp_modules`"),
    ],
)
def test_what_would_be_trained_otherwise_is_a_warning(tool: str, lines: str, part: str, made: Make) -> None:
    found = converted(made, tool, lines)
    assert any(part in message for _, message, _ in found.warned), found.said


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (
            "  path: /models",
            "  prompt_template: {user: ['Q: ', '']}\n  path: /models",
            "`tokenizer.prompt_template.user`",
        ),
        ("seed: null", "shuffle: false", "`shuffle`"),
        ("  packed: false", "  add_eos: false", "`dataset.add_eos`"),
        ("  packed: false", "  filter_fn: mine", "`dataset.filter_fn`"),
        ("  betas: [0.9, 0.95]", "  momentum: 0.9", "`optimizer.momentum`"),
        ("bitsandbytes.optim.PagedAdamW8bit", "torch.optim.Adam\n  weight_decay: 0.1", "Adam adds the decay"),
        ("dtype: bf16", "loss: {_component_: my.FocalLoss}", "FocalLoss"),
    ],
)
def test_what_torchtune_would_train_otherwise_is_a_warning(old: str, new: str, part: str, made: Make) -> None:
    assert old in TORCHTUNE
    found = made("theirs.yaml", TORCHTUNE.replace(old, new))
    assert any(part in message for _, message, _ in found.warned), found.said


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("  lr: 2e-5\n", "", "train.learning_rate", 1e-3),
        ("bitsandbytes.optim.PagedAdamW8bit", "torch.optim.SGD", "train.weight_decay", 0.0),
        ("bitsandbytes.optim.PagedAdamW8bit", "torch.optim.SGD", "train.optim", "sgd"),
        ("  num_warmup_steps: 100\n", "  num_cycles: 1.5\n", "train.lr_scheduler_kwargs", {"num_cycles": 1.5}),
    ],
)
def test_defaults_of_torchs_optimizers_and_schedules(old: str, new: str, key: str, value: Any, made: Make) -> None:
    assert old in TORCHTUNE
    assert at(made("theirs.yaml", TORCHTUNE.replace(old, new)), key) == value


def test_a_number_beyond_every_float_is_no_number_of_steps(made: Make) -> None:
    found = made("theirs.yaml", TORCHTUNE + "save_every_n_steps: 1e999\n")
    assert any("save_every_n_steps" in message for _, message, _ in found.said), found.said


@pytest.mark.parametrize("value", ["false", "null", "0", "''", "[]", "{}", "true", "3"])
@pytest.mark.parametrize("tool", BASES)
def test_a_key_that_is_not_known_is_always_told(tool: str, value: str, made: Make) -> None:
    found = converted(made, tool, f"made_up_switch: {value}\n")
    assert found.heard("FT160", "`made_up_switch`")


@pytest.mark.parametrize("rule", ["steps", "lost", "note", "differs", "refuse", "read", ""])
def test_every_rule_of_the_table_of_names_has_rows(rule: str) -> None:
    assert any(row.rule == rule for tool in TOOLS.values() for rows in rows_of(tool).values() for row in rows)


def test_every_line_of_the_table_of_names_is_a_row() -> None:
    names = [name for tool in TOOLS.values() for name in rows_of(tool)]
    assert len(names) > 500
    assert not [name for name in names if "|" in name or "(" in name]
    keys = set(RecipeSchema().keys())
    for rows in (rows for tool in TOOLS.values() for rows in rows_of(tool).values()):
        for row in rows:
            outer = str(row.key).rpartition(".")[0]
            assert row.key is None or {row.key, outer, f"{outer}.lr_scheduler_kwargs"} & keys, row
            assert row.rule not in ("lost", "note", "differs", "refuse") or row.note or row.target, row


#: Values that no switch, number or strategy has.
ODD = [("xyzzy", "xyzzy"), ("[q]", "q")]


@pytest.mark.parametrize(("value", "word"), ODD)
@pytest.mark.parametrize(
    ("tool", "name"),
    [
        *((tool, name) for tool in ("axolotl", "trl") for name in ("bf16", "eval_strategy", "save_steps", "seed")),
        ("axolotl", "max_steps"),
        ("llama-factory", "packing"),
        ("llama-factory", "pissa_init"),
        ("llama-factory", "enable_thinking"),
        ("trl", "completion_only_loss"),
        ("trl", "datasets"),
        ("unsloth", "enable_wandb"),
        ("unsloth", "seed"),
    ],
)
def test_a_value_that_the_setting_cannot_have_is_told(tool: str, name: str, value: str, word: str, made: Make) -> None:
    found = converted(made, tool, f"{name}: {value}\n")
    said = [message for _, message, _ in found.warned]
    assert any(name in message or word in message for message in said), found.said


@pytest.mark.parametrize(
    ("tool", "lines", "part"),
    [
        ("axolotl", "max_sequence_length: 32\n", "`max_sequence_length` and another setting say data.max_seq_len"),
        ("axolotl", "bnb_config_kwargs: {made_up: false}\n", "`bnb_config_kwargs.made_up`"),
        ("axolotl", "data_files: 3\ntasks: [x]\n", "eval.tasks"),
        ("unsloth", "training: {lora_r: 8}\nlora: {lora_r: 16}\n", "`lora_r` stands in two sections"),
    ],
)
def test_what_stands_twice_or_within_is_told(tool: str, lines: str, part: str, made: Make) -> None:
    found = converted(made, tool, lines)
    assert any(part in message for _, message, _ in found.warned), found.said


def test_a_dataset_of_torchtune_without_a_builder_is_told(made: Make) -> None:
    found = made("theirs.yaml", TORCHTUNE + "dataset_val: {source: held-out.json}\n", "torchtune")
    assert found.heard("FT160", "`dataset_val.source`")


def test_double_quantization_of_axolotl_is_kept(made: Make) -> None:
    lines = "adapter: qlora\nbnb_config_kwargs: {bnb_4bit_use_double_quant: false}\n"
    assert at(converted(made, "axolotl", lines), "quantization.double_quant") is False


def test_texts_of_llama_factory_keep_their_column(made: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    entry = {"c4": {"file_name": "c4.jsonl", "columns": {"prompt": "body"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(entry))
    recipe = converted(made, "llama-factory", "stage: pt\ndataset: c4\n").recipe
    assert (recipe.data.format, recipe.data.train[0].columns) == ("text", {"text": "body"})


def test_datasets_of_llama_factory_whose_turns_have_other_names_are_told(made: Make, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "asker"}
    entry = {"a": {"file_name": "a.json", "formatting": "sharegpt", "tags": tags, "images": "pictures"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(entry))
    found = converted(made, "llama-factory", "dataset: a\n")
    assert found.heard("FT162", "user_tag: asker, images")


HANDBOOK = """\
model_name_or_path: org/base
torch_dtype: bfloat16
chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: org/chats, config: default, split: train_sft, columns: [messages], weight: 0.5}
    - {id: org/more, columns: [messages], weight: 1.0}
  test_split_size: 1000
  seed: 0
bf16: true
learning_rate: 2.0e-05
max_seq_length: 2048
hub_strategy: every_save
push_to_hub: true
ddp_timeout: 18000
"""


def test_mixtures_of_the_alignment_handbook(made: Make) -> None:
    found = made("sft.yaml", HANDBOOK)
    data = found.recipe.data
    assert found.dialect == "trl"
    assert [(each.path, each.name, each.split) for each in data.train] == [
        ("hub:org/chats", "default", "train_sft"),
        ("hub:org/more", None, None),
    ]
    assert (data.loss_on, data.max_seq_len, data.chat_template) == ("all", 2048, None)
    assert found.heard("FT162", "the share 0.5")
    assert found.heard("FT162", "a template inside of the recipe")
    assert found.heard("FT160", "`dataset_mixture.test_split_size`")
    helps = " ".join(help for _, _, help in found.said)
    assert "--push-to-hub" in helps
    assert "one process trains here" not in helps


def test_older_mixtures_of_the_alignment_handbook(made: Make) -> None:
    text = "model_name_or_path: m\ndataset_mixer: {org/a: 1.0, org/b: 0.1}\ndataset_splits: [train_sft, test_sft]\n"
    data = made("sft.yaml", text).recipe.data
    assert [(each.path, each.split) for each in data.train] == [("hub:org/a", "train_sft"), ("hub:org/b", "train_sft")]
    assert [(each.path, each.split) for each in data.eval] == [("hub:org/a", "test_sft"), ("hub:org/b", "test_sft")]


SECRET = "hf_" + "aB3" * 8


@pytest.mark.parametrize(
    "line",
    [
        f"lr_scheduler_kwargs: {{token: {SECRET}}}\n",
        f"run_name: {SECRET}\n",
        f"wandb_project: {SECRET}\n",
        f"{SECRET}: true\n",
        f"datasets: [{{path: 'https://me:{SECRET}@host/rows.jsonl', type: alpaca}}]\n",
        f"hub_token: {SECRET}\n",
        f"output_dir: out-{SECRET}\n",
    ],
)
def test_no_secret_goes_on(line: str, made: Make) -> None:
    found = converted(made, "axolotl", line)
    assert SECRET not in found.text
    assert SECRET not in str(found.said)
    assert found.heard("FT160", "a secret is not copied")


SCRIPT = """\
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("org/base", max_seq_length=64)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8)
trainer = SFTTrainer(model, args={}, train_dataset=rows)
"""


def test_a_script_that_trains_prompts_becomes_a_recipe_that_does(made: Make) -> None:
    found = made("x.py", SCRIPT.format("SFTConfig(max_steps=3, warmup_steps=int(3))"))
    train = found.recipe.train
    assert (found.recipe.data.loss_on, train.learning_rate, train.optim) == ("all", 5e-5, "adamw_8bit")
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (4, 2)
    assert "warmup_steps" not in found.text


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("rows = rows.map(by_prompt, batched=True)", "`map` makes other rows"),
        ("rows = standardize(rows).shuffle(seed=1).select(range(9))", "`select` makes other rows"),
        ("rows = concatenate_datasets([rows, rows])", "`concatenate_datasets` makes other rows"),
        (
            "SFTTrainer(model=m, args=SFTConfig(), formatting_func=lambda row: row['a'])",
            "`formatting_func` makes other",
        ),
        ("tokenizer = get_chat_template(tokenizer, chat_template='llama-3.1')", "no template `llama-3.1`"),
        ("tokenizer = get_chat_template(tokenizer, 'chatml')", "the template `chatml` is ftcli's"),
        ("tokenizer = get_chat_template(tokenizer, chat_template=mine())", "`chat_template` is computed"),
    ],
)
def test_rows_and_templates_that_a_script_makes_are_told(line: str, part: str, made: Make) -> None:
    script = SCRIPT.format("SFTConfig()")
    assert not [message for _, message, _ in made("x.py", script).warned if "other rows" in message]
    found = made("x.py", f"{script}\n{line}\n")
    assert any(part in message for _, message, _ in found.warned), found.said


def test_plugins_that_compute_the_same_are_only_noted(made: Make) -> None:
    found = converted(made, "axolotl", "plugins: [axolotl.integrations.liger.LigerPlugin]\n")
    assert found.heard("FT160", "`plugins`")
    assert not any("plugins" in message for _, message, _ in found.warned)


def test_a_script_with_arguments_of_transformers_has_their_defaults(made: Make) -> None:
    train = made("x.py", SCRIPT.format("TrainingArguments(max_steps=3)")).recipe.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (8, 1)
    assert (train.learning_rate, train.warmup_steps, train.optim) == (5e-5, 0, "adamw_torch_fused")


@pytest.mark.parametrize(
    ("tool", "lines", "words"),
    [
        ("axolotl", "fsdp_version: 2\n", "--gpus N"),
        ("axolotl", "context_parallel_size: 2\n", "launch.context_parallel_size"),
        ("axolotl", "dp_replicate_size: 2\n", "launch.dp_replicate_size"),
        ("trl", "deepspeed: zero3.json\n", "launch.engine: fsdp"),
        ("trl", "hub_model_id: me/mine\n", "ftcli export --push-to-hub"),
    ],
)
def test_what_is_said_of_several_gpus_and_the_hub_is_so(tool: str, lines: str, words: str, made: Make) -> None:
    name = lines.partition(":")[0]
    assert any(name in message and words in help for _, message, help in converted(made, tool, lines).said)


def test_projects_of_weights_and_biases(made: Make) -> None:
    lines = "wandb_project: p\nwandb_entity: e\n"
    logging = converted(made, "axolotl", lines).recipe.model_dump(mode="json")["logging"]
    assert logging["wandb"] == {"project": "p", "entity": "e", "group": None}
    assert converted(made, "axolotl", lines + "wandb_mode: disabled\n").recipe.logging.loggers == ()


def test_the_column_of_texts_is_heard_wherever_it_stands(made: Make) -> None:
    recipe = made("x.yaml", "dataset_text_field: body\n" + BASES["trl"], "trl").recipe
    assert recipe.data.train[0].columns == {"text": "body"}
