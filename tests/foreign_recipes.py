"""Recipes of other tools, written for the tests with the keys of the tools' own examples."""

from __future__ import annotations

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
