"""`ftcli recipes convert`: recipes of other tools become ours, and what they lose on the way is said.

The recipes are written for these tests, with the keys of the tools' own examples.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.config import Recipe
from ftcli.config.conversion import convert
from ftcli.config.load import load_recipe
from ftcli.errors import FtcliError
from ftcli.tables import dialects

AXOLOTL = """\
base_model: org/base-8b
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
chat_template: chatml
datasets:
  - path: ./rows.jsonl
    type: chat_template
    field_messages: turns
    roles_to_train: ["assistant"]
    split: train[:500]
test_datasets:
  - path: held-out.jsonl
    ds_type: json
    type: chat_template
val_set_size: 0.1
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: "2e-4"
warmup_ratio: 0.1
weight_decay: 0.01
bf16: auto
tf32: false
gradient_checkpointing: offload
flash_attention: true
lora_mlp_kernel: true
wandb_project: mine
wandb_name: first try!
logging_steps: 1
evals_per_epoch: 4
eval_steps: 50
save_steps: 100
save_total_limit: 3
early_stopping_patience: 2
deepspeed: zero3.json
special_tokens:
  pad_token: "<pad>"
made_up_key: 7
output_dir: ./outputs/out
"""

FACTORY = """\
model_name_or_path: org/base-8b
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
quantization_bit: 4
dataset: mine
dataset_dir: corpus
template: qwen
cutoff_len: 1024
max_samples: 100
mask_history: true
val_size: 0.1
packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
fp16: true
flash_attn: fa2
use_dora: true
output_dir: saves/out
"""

TORCHTUNE = """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, k_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 16
  lora_alpha: 32
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/tokenizer.model
  max_seq_len: 2048
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
  output_dir: ${output_dir}
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: rows.json
  column_map: {input: question, output: reply}
  packed: false
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 2e-5
  betas: [0.9, 0.95]
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
seed: null
batch_size: 2
epochs: 1
max_steps_per_epoch: 40
gradient_accumulation_steps: 16
clip_grad_norm: 0.5
enable_activation_checkpointing: true
dtype: bf16
compile: false
metric_logger:
  _component_: torchtune.training.metric_logging.WandBLogger
  project: torchtune
output_dir: /tmp/out
log_every_n_steps: 1
profiler: {enabled: false, wait_steps: 5}
"""

TRL = """\
# how it was started
trl sft --model_name_or_path org/base-1b \\
    --dataset_name org/rows --dataset_test_split test \\
    --use_peft --lora_r 32 --lora-alpha=64 \\
    --learning_rate 2.0e-4 --num_train_epochs 1 --packing \\
    --per_device_train_batch_size 2 --eval_strategy steps --eval_steps 100 \\
    --report_to tensorboard comet_ml --output_dir out
"""

UNSLOTH = """\
model: org/base-1b
data: {local_dataset: [rows.jsonl], format_type: chatml}
training:
  training_type: lora
  max_seq_length: 4096
  load_in_4bit: true
  learning_rate: 1e-4
  max_steps: 60
  save_steps: 0
  train_on_completions: true
  gradient_checkpointing: unsloth
lora: {lora_r: 8, lora_alpha: 8, target_modules: "q_proj,v_proj", use_rslora: true}
logging: {enable_wandb: false, wandb_token: null, enable_tensorboard: true}
"""

NOTEBOOK = """\
{
\t"from_pretrained": {"model_name": "org/base-3b", "max_seq_length": 2048, "dtype": null, "load_in_4bit": true},
\t"get_peft_model": {"r": 16, "lora_alpha": 16, "bias": "none", "use_gradient_checkpointing": "unsloth",
\t\t"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
\t"SFTConfig": {"per_device_train_batch_size": 2, "warmup_steps": 5, "max_steps": 60, "learning_rate": 2e-4}
}
"""

FILES = {
    "axolotl": ("axolotl.yml", AXOLOTL),
    "llama-factory": ("factory.yaml", FACTORY),
    "torchtune": ("tune.yaml", TORCHTUNE),
    "trl": ("train.sh", TRL),
    "unsloth": ("unsloth.yaml", UNSLOTH),
    "notebook": ("notebook.json", NOTEBOOK),
}


@dataclass(frozen=True)
class Made:
    """A converted recipe, what our loader makes of it, and what was said: code and message of each finding."""

    dialect: str
    text: str
    recipe: Recipe
    said: list[tuple[str, str, str]]

    def heard(self, code: str, part: str) -> bool:
        return any(found == code and part in message for found, message, _ in self.said)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    monkeypatch.chdir(tmp_path)

    def make(name: str, text: str | None = None, dialect: str | None = None) -> Made:
        file, whole = FILES.get(name, (name, ""))
        Path(file).write_text(whole if text is None else text)
        found = convert(Path(file), dialect)
        Path("ours.yaml").write_text(found.text)
        said = [(finding.code, finding.message, str(finding.help)) for finding in found.findings]
        return Made(found.dialect, found.text, load_recipe(Path("ours.yaml")).recipe, said)

    return make


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


@pytest.mark.parametrize(
    ("text", "code", "help"),
    [
        ("base_model: m\nrl: dpo\nsequence_len: 8\n", "FT163", "smoke-grpo"),
        ("base_model: m\nadapter: oft\nsequence_len: 8\n", "FT163", "LoRA"),
        ("model_name_or_path: m\nstage: dpo\ncutoff_len: 8\n", "FT163", "smoke-grpo"),
        ("sequence_len: 8\nmicro_batch_size: 1\n", "FT163", "name the base model"),
        ("learning_rate: 1\n", "FT164", "--from"),
        ("base_model: m\nmodel_name: m\n", "FT164", "--from axolotl"),
        ("version: 1\nmodel: {name_or_path: m}\n", "FT164", "ftcli check"),
        ("trl sft --model_name_or_path 'm\n", "FT163", "quotes"),
        ("base_model: m\nbase_model: n\nsequence_len: 8\n", "FT113", "keep one"),
        ("", "FT105", "recipes list"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    text: str, code: str, help: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    status = main(["recipes", "convert", "x.yaml"])
    out, err = capsys.readouterr()
    if code == "FT113":  # a fault that does not stop the reading is told, and the first value taken
        assert status == 0
    else:
        assert (status, out) == (2, "")
    assert f"[{code}]" in err
    assert help in err
    assert "Traceback" not in err


def test_the_tool_can_be_named(made: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    assert made("x.yaml", "model_name_or_path: m\nlearning_rate: 1e-5\n", "trl").recipe.train.learning_rate == 1e-5
    assert main(["recipes", "convert", "x.yaml", "--from", "keras"]) == 2
    assert "axolotl" in capsys.readouterr().err


def test_stdout_is_the_recipe_and_stderr_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(AXOLOTL)
    assert main(["recipes", "convert", "a.yml"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["name_or_path"] == "org/base-8b"
    line = AXOLOTL.splitlines().index("val_set_size: 0.1") + 1
    assert f"a.yml:{line}:1: warning[FT160]: `val_set_size` has no counterpart here" in err
    assert main(["recipes", "convert", "a.yml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["result"]["recipe"] == out
    assert {finding["code"] for finding in document["findings"]} >= {"FT160", "FT161"}


def test_secrets_are_not_copied(made: Callable[..., Made]) -> None:
    found = made("axolotl", AXOLOTL + "hub_token: hf_abcdefghijklmnopqrstuvwxyz\nwandb_api_key: 123456\n")
    assert "hf_abc" not in found.text
    assert "123456" not in found.text


JUNK: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1.5,
    1e99,
    "x",
    "",
    "1e-4",
    [],
    {},
    [1, {"a": 2}],
    {"a": [1]},
    "${x}",
    "a" * 300,
]


@pytest.mark.parametrize("name", [name for name in FILES if name != "trl"])
def test_whatever_stands_there_becomes_a_valid_recipe_or_a_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(name)
    values = yaml.safe_load(FILES[name][1].expandtabs())
    valid = 0
    for _ in range(40):
        changed = json.loads(json.dumps(values))
        for _ in range(chance.randint(1, 4)):
            place = changed
            while True:
                key = chance.choice(list(place))
                if isinstance(place[key], dict) and place[key] and chance.random() < 0.8:
                    place = place[key]
                    continue
                place[key] = chance.choice(JUNK)
                break
        Path("x.yaml").write_text(yaml.safe_dump(changed))
        with contextlib.suppress(FtcliError):
            Path("ours.yaml").write_text(convert(Path("x.yaml"), {"notebook": "unsloth"}.get(name, name)).text)
            load_recipe(Path("ours.yaml"))
            valid += 1
    assert valid > 10


def test_every_row_of_the_table_has_rules_and_is_named_in_the_tables_of_names() -> None:
    from ftcli.config.conversion.rules import Rules
    from ftcli.config.dialects import FOREIGN
    from ftcli.tables import code_of

    tools = " ".join(entry.tools for entry in FOREIGN.values())
    for name in dialects.names():
        assert isinstance(code_of(dialects.row(name).code), Rules)
        assert dialects.row(name).title in tools
