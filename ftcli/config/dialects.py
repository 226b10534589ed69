"""What other tools call things, and what they are called here.

Facts about names only, gathered from the settings of axolotl, LLaMA-Factory, TRL and transformers, torchtune, Unsloth
and litgpt. A test holds that every key on the right exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of other tools. ``target`` is our key, with its value where that is known; None: there is no such thing.

    ``only`` are the values, in small letters, of which that holds; none: of all.
    """

    tools: str
    target: str | None
    note: str | None = None
    only: tuple[str, ...] = ()

    @property
    def key(self) -> str | None:
        """The target without its value."""
        return self.target.partition(":")[0] if self.target else None


#: The tools by the letters that stand for them below; the names of others are written out.
_TOOLS = {
    "A": "axolotl", "C": "torchtune", "F": "LLaMA-Factory", "H": "transformers", "L": "litgpt", "T": "TRL",
    "U": "Unsloth",
}  # fmt: skip
_NAME = re.compile(r"([\w.]+):(\w+)(?:\(([\w,]+)\))?")

#: ``our key = their key:TOOLS their key:TOOLS(only,these,values) | note``; ``-`` where there is no such thing here. In
#: brackets before our key: the section of ours in which that is meant.
_TABLE = """
# the model
model.name_or_path = base_model:A model_name_or_path:FT model_name:U model_id:H pretrained_model_name_or_path:H
model.name_or_path = checkpoint_dir:LC
- = base_model_config:A | the configuration is read from model.name_or_path
- = model_type:A | the architecture is read from the model's config.json
model.revision = revision_of_model:A model_revision:TF
model.tokenizer = tokenizer_config:A tokenizer_name:H tokenizer_name_or_path:H
- = tokenizer_type:A | the tokenizer's class is read from the model
model.dtype = torch_dtype:H precision:L mixed_precision:accelerate
model.dtype: bfloat16 = bf16:AFT bfloat16:A
model.dtype: float16 = fp16:AFT float16:A
model.dtype: float32 = float32:A
- = tf32:AT | matmul precision is not a setting; remove it
model.attention = attn_implementation:AT
model.attention: flash_attention_2 = flash_attn:F flash_attention:A use_flash_attention_2:H
model.attention: sdpa = sdp_attention:A sdpa_attention:A xformers_attention:A
model.attention: flex_attention = flex_attention:A
model.attention: eager = eager_attention:A
model.kernels = use_liger_kernel:TH | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = enable_liger_kernel:F | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = liger_fused_linear_cross_entropy:A | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = liger_rms_norm:A liger_rope:A | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = liger_glu_activation:A | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = cut_cross_entropy:A lora_mlp_kernel:A | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = lora_qkv_kernel:A lora_o_kernel:A | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
model.kernels = use_unsloth:F compile:C torch_compile:AH | ftcli's own kernels: `auto`, `triton`, `reference` or `off`
- = rope_scaling:FA rope_theta:A | the rotary settings are those of the model's config.json
- = device:C device_map:H | the GPU is taken when there is one; CUDA_VISIBLE_DEVICES picks another
- = use_cpu:H | the GPU is taken when there is one; CUDA_VISIBLE_DEVICES= hides it
- = special_tokens:A pad_token:T eos_token:T | pad, end and turn tokens are those of the tokenizer
- = resize_vocab:F | the vocabulary is that of the model
quantization.method = quantization_config:H
# quantization
quantization.method: nf4 = load_in_4bit:ATU quantize_base:C
quantization.method = load_in_8bit:AT | there is no 8-bit integer method; nf4 is smaller
quantization.method = quantization_bit:F | 4 is nf4
quantization.method = quantization_method:F bnb_4bit_quant_type:TH
quantization.method = quantize:L | bnb.nf4 is nf4
quantization.double_quant = bnb_4bit_use_double_quant:H use_bnb_nested_quant:T double_quantization:F
model.dtype = bnb_4bit_compute_dtype:H
- = gptq:A | quantize the unquantized model with quantization.method
# adapters
lora = adapter:A | adapter: qlora is quantization.method: nf4 with a lora section
lora = finetuning_type:F full_finetuning:U | leave the section out for full fine-tuning
lora = use_peft:T | a section `lora` turns adapters on; leave it out for full fine-tuning
lora = peft_type:PEFT
lora.r = lora_r:ATL lora_rank:FC rank:C
lora.alpha = lora_alpha:AFTC
lora.dropout = lora_dropout:AFTC
lora.target_modules = lora_target:F lora_target_modules:AT lora_attn_modules:C lora_query:L lora_key:L lora_value:L
lora.target_modules = lora_projection:L lora_mlp:L
lora.target_modules: all-linear = lora_target_linear:A apply_lora_to_mlp:C
lora.modules_to_save = apply_lora_to_output:C lora_head:L lora_modules_to_save:AT additional_target:F
lora.use_rslora = peft_use_rslora:A
lora.use_dora = peft_use_dora:A
lora.init_lora_weights: pissa = pissa_init:F
lora.init_lora_weights: pissa_niter_16 = pissa_iter:F
- = pissa_convert:F | results are always saved as plain adapters of the base
lora.init_lora_weights = peft_init_lora_weights:A
lora.layers_to_transform = peft_layers_to_transform:A
lora.layers_pattern = peft_layers_pattern:A
lora.exclude_modules = lora_exclude_modules:T
lora.alpha_pattern = lora_alpha_pattern:T
lora.rank_pattern = lora_rank_pattern:T
train.loraplus_lr_ratio = lora_plus_lr_ratio:H
run.resume = lora_model_dir:A adapter_name_or_path:F | the path of a checkpoint
# data
data.train = datasets:A dataset:FC dataset_name:T dataset_path:H train_file:H train_data:H local_dataset:U data_dir:L
data.train = dataset_dir:F | paths stand in the list itself
data.eval = test_datasets:A eval_dataset:FT dataset_val:C validation_file:H
data.eval = val_set_size:A val_size:F | nothing is split off silently: name a held-out file in data.eval
data.eval = val_split_fraction:L test_size:H | nothing is split off silently: name a held-out file in data.eval
data.max_seq_len = sequence_len:A cutoff_len:F max_length:T max_seq_length:UL max_sequence_length:H model_max_length:F
data.max_seq_len = seq_len:C seq_length:H block_size:L context_length:U
data.max_seq_len = eval_sequence_len:A | evaluation has the same limit
data.overlong = excess_length_strategy:A truncation_mode:T
data.packing = sample_packing:A eval_sample_packing:A eval_packing:T | rows never attend to one another across a pack
data.packing = neat_packing:F packed:C packing_strategy:T | rows never attend to one another across a pack
data.padding_free = padding_free:T
- = pad_to_sequence_len:A | batches are as long as their rows need
train.train_sampling_strategy: group_by_length = group_by_length:AH
data.chat_template = template:F chat_template_path:T prompt_template:C prompt_style:L
data.chat_template = chat_template_jinja:A | the path of a .jinja file
data.loss_on = train_on_inputs:AC train_on_input:C train_on_prompt:F | true is `all`, false is `auto`
data.loss_on: completion = train_on_completions:U completion_only_loss:T
data.loss_on: assistant = assistant_only_loss:T
data.loss_on = mask_prompt:L | true is `auto`, false is `all`
data.loss_on = roles_to_train:A
data.train[].columns = dataset_text_field:T | as in columns: {text: body}
data.train[].columns = column_map:C message_property_mappings:A
data.train[].columns = field_messages:A | as in columns: {messages: conversation}
data.format = format_type:U formatting:F
data.train[].max_rows = max_samples:F max_train_samples:H
data.eval[].max_rows = max_eval_samples:H
- = dataset_prepared_path:A | tokenized data is cached by its content; FTCLI_CACHE says where
data.num_proc = dataset_processes:A dataset_num_proc:T preprocessing_num_workers:F
- = overwrite_cache:F | tokenized data is cached by its content and cannot go stale
data.train[].weight = interleave_probs:F
- = dataloader_num_workers:H | data is in memory; remove it
- = shuffle:C shuffle_dataset:T | training rows are always shuffled, by run.seed
# optimisation
train.per_device_train_batch_size = micro_batch_size:AL batch_size:CU train_batch_size:H per_device_batch_size:H
train.gradient_accumulation_steps = global_batch_size:L | rows per step are this times the batch size
train.gradient_accumulation_steps = gradient_accumulation:U grad_accumulation_steps:H accumulate_grad_batches:L
train.num_train_epochs = num_epochs:AU epochs:CL
train.max_steps = num_train_steps:H max_train_steps:H max_steps_per_epoch:C
train.learning_rate = lr:C
train.lr_scheduler_type = lr_scheduler:AC scheduler:H
train.lr_scheduler_kwargs = min_lr:L | min_lr, with lr_scheduler_type: cosine_with_min_lr
train.lr_scheduler_kwargs = cosine_min_lr_ratio:A | min_lr_rate, with lr_scheduler_type: cosine_with_min_lr
train.lr_scheduler_kwargs = min_lr_ratio:H | min_lr_rate, with lr_scheduler_type: cosine_with_min_lr
train.lr_scheduler_kwargs = num_cycles:C | num_cycles
train.warmup_steps = warmup_ratio:AF lr_warmup_fraction:L | a value below 1 is a share of all steps
train.warmup_steps = num_warmup_steps:C lr_warmup_steps:L
train.optim = optimizer:AC
train.adam_epsilon = adam_eps:H
train.adam_beta1 = betas:C | and train.adam_beta2
train.max_grad_norm = gradient_clipping:DeepSpeed max_norm:L clip_grad_norm:C
train.gradient_checkpointing = use_gradient_checkpointing:U enable_activation_checkpointing:C
train.gradient_checkpointing = activation_checkpointing:AH gradient_checkpointing_kwargs:AT
train.gradient_checkpointing: false = disable_gradient_checkpointing:F
train.gradient_checkpointing: offload = enable_activation_offloading:C activation_offloading:AT
train.neftune_noise_alpha = noisy_embedding_alpha:A neft_alpha:F
- = label_smoothing_factor:H | label smoothing is not offered; remove it
- = auto_find_batch_size:H | `ftcli check` says whether a batch size fits
train.method = stage:F(sft,pt) | GRPO is `ftcli grpo`, with a grpo section
lora = training_type:U | leave the section out for full fine-tuning
- = do_train:F do_eval:F | the command says what is done: `ftcli train`, `ftcli eval`
- = do_predict:F | the command says what is done: `ftcli eval`
# runs, checkpoints, logging
run.name = run_name:H exp_name:H wandb_name:A
run.output_dir = out_dir:L save_dir:H
run.seed = random_state:U random_seed:U data_seed:H
run.resume = resume_from_checkpoint:ATC
run.resume: auto = auto_resume_from_checkpoints:A
run.resume: never = overwrite_output_dir:F | the old run is kept beside the new one
checkpoint.every_steps = save_steps:AFT save_interval:L
checkpoint.every_steps = saves_per_epoch:A save_strategy:H | counted in optimizer steps here, never in epochs
checkpoint.keep_last = save_total_limit:H
- = save_safetensors:H | everything is written as safetensors
- = save_only_model:H | checkpoints always hold what resuming needs
- = load_best_model_at_end:H | the last model is the result; compare runs with `ftcli eval --run DIR`
- = metric_for_best_model:H | the last model is the result; compare runs with `ftcli eval --run DIR`
- = early_stopping_patience:A | set train.max_steps
checkpoint.on_sigterm = enable_jit_checkpoint:H
logging.every_steps = logging_steps:AFT log_interval:L log_every_n_steps:C
logging.every_steps = logging_strategy:H | counted in optimizer steps here, never in epochs
logging.wandb = report_to:H logger_name:L metric_logger:C | or logging.tensorboard: true
logging.tensorboard: true = use_tensorboard:A enable_tensorboard:U
logging.wandb: true = enable_wandb:U
logging.wandb = wandb_project:AU | as in wandb: {project: NAME}
logging.wandb = wandb_entity:A | as in wandb: {entity: NAME}
logging.wandb = wandb_mode:A | WANDB_MODE in the environment says whether it is offline
- = plot_loss:F | report.html in the run directory has the curves
- = push_to_hub:H hub_model_id:AH | `ftcli export --push-to-hub ID` uploads what was trained
# evaluation
eval.every_steps = eval_steps:AFT eval_interval:L
eval.every_steps = evals_per_epoch:A eval_strategy:AH | counted in optimizer steps here, never in epochs
eval.every_steps = evaluation_strategy:H | counted in optimizer steps here, never in epochs
eval.per_device_eval_batch_size = eval_batch_size:A per_device_eval_batch:H
eval.tasks = predict_with_generate:F
eval.generate.max_new_tokens = eval_max_new_tokens:A
eval.generate = generation_config:H
# GRPO
grpo = rl:A(grpo) trl:A | run it with `ftcli grpo`
grpo.rewards = reward_funcs:TA
grpo.rewards = reward_model:F | as in rewards: [{file: my_rewards.py:score}]
grpo.rewards[].weight = reward_weights:TA
grpo.num_generations = num_samples:H group_size:C grpo_samples:C
grpo.max_prompt_length = max_prompt_len:H
grpo.max_completion_length = max_generated_tokens:C max_response_length:verl
grpo.beta = kl_coeff:C kl_coef:T pref_beta:F
grpo.num_iterations = ppo_epochs:C
- = use_vllm:T | an engine of ftcli's own generates completions; remove it
# export
- = export_dir:F | exports go into the run directory
export.formats = export_format:U
export.formats = save_method:U | merged_16bit is safetensors, lora is adapter
export.formats: [safetensors] = merge_lora:A
# machines
launch.engine = deepspeed:AFH tensor_parallel_size:A
launch.engine: fsdp = fsdp:AH fsdp_config:AH fsdp_version:A
launch.dp_replicate_size = data_parallel_replicate_dim:C
- = ddp_timeout:F | a rank that is silent for 60 s ends the run, a collective that hangs after 10 minutes
launch.num_processes = devices:L num_gpus:H nproc_per_node:C
# where the section decides what is meant
[eval] eval.per_device_eval_batch_size = batch_size:C
[eval] eval.every_steps = interval:L steps:H
[checkpoint] checkpoint.keep_last = save_total_limit:H
[data.train] data.format = type:A
[data.train] data.train[].path = data_files:A
[data.eval] data.format = type:A
[model] data.max_seq_len = max_seq_len:C
[model] model.name_or_path = name:U path:H _component_:C
[grpo] grpo.max_completion_length = max_new_tokens:H
[grpo] data.max_seq_len = max_length:T
[grpo] train.learning_rate = learning_rate:T
"""


def _rows() -> Iterator[tuple[str, str, ForeignKey]]:
    """Section (empty: any), name and meaning of every line of the table."""
    for line in _TABLE.strip().splitlines():
        if line.startswith("#"):
            continue
        left, _, right = line.partition(" = ")
        section, _, target = left.rpartition("] ")
        names, _, note = right.partition(" | ")
        for name, tools, only in _NAME.findall(names):
            known = ", ".join(_TOOLS[letter] for letter in tools) if set(tools) <= set(_TOOLS) else tools
            values = tuple(only.split(",")) if only else ()
            yield section[1:], name, ForeignKey(known, None if target == "-" else target, note or None, values)


#: Tools that write `_component_` under every key.
_COMPONENT = ForeignKey("torchtune", None, "recipes name no Python classes; see docs/recipes.md for the keys")

FOREIGN: Mapping[str, ForeignKey] = MappingProxyType({name: key for section, name, key in _rows() if not section})
#: Foreign names by section.
FOREIGN_IN: Mapping[tuple[str, str], ForeignKey] = MappingProxyType(
    {(section, name): key for section, name, key in _rows() if section}
)


def foreign(section: str, name: str) -> ForeignKey | None:
    """What other tools mean by this key, in this section (dotted, list positions left out)."""
    if name == "_component_" and section != "model":
        return _COMPONENT
    return FOREIGN_IN.get((section, name)) or FOREIGN.get(name)
