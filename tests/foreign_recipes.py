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

# -- preferences --------------------------------------------------------------------------------------------------

AXOLOTL_DPO = """\
base_model: org/base-8b
adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
rl: dpo
rl_beta: 0.2
dpo_loss_type: [sigmoid, bco_pair, sft]
dpo_loss_weights: [0.8, 0.2, 1.0]
dpo_label_smoothing: 0.1
precompute_ref_log_probs: true
datasets:
  - {path: org/pairs, type: chatml.intel, split: train}
  - {path: pairs.jsonl, type: chat_template.default, field_messages: asked, field_chosen: good, field_rejected: bad}
sequence_len: 2048
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
learning_rate: 5e-6
"""

FACTORY_DPO = """\
model_name_or_path: org/base-8b
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
lora_dropout: 0.1
pref_beta: 0.3
pref_ftx: 0.5
dpo_label_smoothing: 0.1
ld_alpha: 0.5
ref_model: org/other
adapter_name_or_path: saves/sft
dataset: pairs
cutoff_len: 2048
per_device_train_batch_size: 1
learning_rate: 5.0e-6
"""

#: As alignment-handbook has them.
TRL_DPO = """\
model_name_or_path: org/sft-7b
torch_dtype: bfloat16
use_peft: true
load_in_4bit: true
lora_r: 16
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
dataset_mixer: {org/pairs: 1.0}
dataset_splits: [train_prefs, test_prefs]
preprocessing_num_workers: 12
bf16: true
beta: 0.01
do_eval: true
evaluation_strategy: steps
eval_steps: 100
learning_rate: 5.0e-6
lr_scheduler_type: cosine
max_length: 1024
max_prompt_length: 512
num_train_epochs: 1
optim: paged_adamw_32bit
output_dir: data/sft-7b-dpo
per_device_train_batch_size: 4
warmup_ratio: 0.1
"""

TORCHTUNE_DPO = """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.1
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /models/tokenizer.model, max_seq_len: 1024}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /models/llama/}
dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, fused: true, weight_decay: 0.05, lr: 5e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05, label_smoothing: 0.1}
epochs: 1
max_steps_per_epoch: 1000
gradient_accumulation_steps: 8
dtype: bf16
"""

UNSLOTH_DPO = """\
from unsloth import FastLanguageModel, PatchDPOTrainer
PatchDPOTrainer()
model, tokenizer = FastLanguageModel.from_pretrained("org/base-3b", max_seq_length=4096, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=64, lora_alpha=64, lora_dropout=0)
args = DPOConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_ratio=0.1, num_train_epochs=3,
    learning_rate=5e-6, optim="adamw_8bit", output_dir="outputs", loss_type="ipo",
)
trainer = DPOTrainer(
    model=model, ref_model=AutoModelForCausalLM.from_config(other), args=args, beta=0.5, tokenizer=tokenizer,
    train_dataset=rows["train"], max_length=1024, max_prompt_length=512,
)
"""

#: Recipes that learn from pairs, of every tool.
PREFERENCES = {
    "axolotl": ("axolotl-dpo.yml", AXOLOTL_DPO),
    "llama-factory": ("factory-dpo.yaml", FACTORY_DPO),
    "torchtune": ("tune-dpo.yaml", TORCHTUNE_DPO),
    "trl": ("trl-dpo.yaml", TRL_DPO),
    "unsloth": ("unsloth-dpo.py", UNSLOTH_DPO),
}
