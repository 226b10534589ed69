"""Other tools' names for settings, and ours.

Facts about names only, gathered from the settings of axolotl, LLaMA-Factory, TRL and transformers, torchtune, Unsloth
and litgpt. `ftcli check` answers their keys by this table (FT202), and `ftcli recipes convert` translates by it. A test
holds that every key on the left exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

#: The tools by the letters that stand for them below; the names of others are written out.
TOOLS = {
    "A": "axolotl", "C": "torchtune", "F": "LLaMA-Factory", "H": "transformers", "L": "litgpt", "T": "TRL",
    "U": "Unsloth",
}  # fmt: skip

#: ``RULE our key = their key:TOOLS their key:TOOLS(values) | note``; indented lines continue the one above.
#:
#:   (no rule)  our key gets the value; or the one that stands behind our key, where theirs is switched on
#:   steps      our key gets the value, which is a number of optimizer steps
#:   lost       nothing is written: a warning
#:   note       nothing is written, and nothing that is learnt depends on it: a note
#:   differs    our key gets the value that stands behind it, if any; a warning that it means something else
#:   refuse     there is nothing here that such a recipe could become
#:   read       nothing is said: it is so anyway, or it is read with another setting
#:
#: Values in brackets are those that the row is for; the first row that is for a value counts. Those behind ``!`` are
#: what needs no word under `lost` and `note`, in place of what switches a setting off. torchtune's names stand with
#: their sections, and ``x.*`` is all of a section. In square brackets before our key: the section of ours in which that
#: is meant. [convert]: names that are ours, too, so that only a conversion has to know them.
_TABLE = """
# the model
model.name_or_path = base_model:A model_name_or_path:FT model_name:U model_id:H pretrained_model_name_or_path:H
    checkpoint_dir:L checkpointer.checkpoint_dir:C
note = model_type:A tokenizer_type:A base_model_config:A | they are read from the model's files
model.revision = revision_of_model:A model_revision:TF
model.tokenizer = tokenizer_config:A tokenizer_name:H tokenizer_name_or_path:H
model.dtype = torch_dtype:H precision:L mixed_precision:accelerate
model.dtype: bfloat16 = bf16:AFTH(true,full) bfloat16:A
model.dtype: float16 = fp16:AFTH(true,full) float16:A
model.dtype: auto = bf16:H(auto) fp16:H(auto)
model.dtype: float32 = float32:A
note = tf32:ATH | matmul precision is not a setting; remove it
model.attention = attn_implementation:AT
model.attention: flash_attention_2 = flash_attn:F flash_attention:A use_flash_attention_2:H
model.attention: sdpa = sdp_attention:A sdpa_attention:A xformers_attention:A
model.attention: flex_attention = flex_attention:A
model.attention: eager = eager_attention:A
lost = s2_attention:A | shifted sparse attention is not offered; attention is full
note model.kernels = use_liger_kernel:TH enable_liger_kernel:F liger_kernel_config:H use_kernels:H use_v1_kernels:F
    liger_rms_norm:A liger_rope:A liger_glu_activation:A liger_layer_norm:A liger_rms_norm_gated:A
    liger_fused_linear_cross_entropy:A cut_cross_entropy:A chunked_cross_entropy:A chunked_cross_entropy_num_chunks:A
    lora_mlp_kernel:A lora_qkv_kernel:A lora_o_kernel:A lora_embedding_kernel:A fused_attn_kernel:A
    flash_attn_cross_entropy:A flash_attn_rms_norm:A flash_attn_fuse_mlp:A flex_attn_compile_kwargs.*:A
    gemma4_hybrid_attn_impl:A use_scattermoe:A use_sonicmoe:A experts_implementation:A use_unsloth:F use_unsloth_gc:F
    compile:C torch_compile:AH torch_compile_backend:H torch_compile_mode:H
    | ftcli has its own fused kernels, and uses each where it applies: `auto`, `triton`, `reference` or `off`
lost = rope_scaling:FAH rope_theta:AH | the rotary settings are those of the model's config.json
lost = model_config.*:A overrides_of_model_config.*:A model_init_kwargs:T | the model's config.json decides
[convert] lost = trust_remote_code:H | ftcli runs no code from a model's repository; most models need none
note = device_map:H low_cpu_mem_usage:H
    | the GPU is taken when there is one; CUDA_VISIBLE_DEVICES picks another
note = use_cpu:H | the GPU is taken when there is one; CUDA_VISIBLE_DEVICES= hides it
note = special_tokens.pad_token:A pad_token:T
    | padding is never trained nor attended to; the tokenizer's own is used
lost = special_tokens.*:A eos_token:T tokens:A tokens.*:A added_tokens_overrides.*:A resize_vocab:F add_tokens:F
    add_special_tokens:F | tokens are those of the tokenizer: save one that has them, name it in model.tokenizer
note = eot_tokens:A | each trained turn ends with the token that the chat template ends it with
lost = processor_type:A freeze_mm_modules:A skip_prepare_dataset:A model.image_size:C tokenizer.image_size:C
    tokenizer.max_num_tiles:C freeze_vision_tower:F(!true) freeze_multi_modal_projector:F(!true)
    | vision towers are kept, and not trained; rows hold text
note = vision_all_linear:U finetune_vision_layers:U | vision towers are kept, and not trained
# quantization
quantization.method = quantization_config:H
quantization.method: nf4 = load_in_4bit:ATU model.quantize_base:C quantization_bit:F(4)
lost quantization.method = load_in_8bit:ATH
    | the base keeps its dtype, which takes twice the memory; quantization.method: nf4 takes half
lost quantization.method = quantization_bit:F
    | of bitsandbytes' formats there is quantization.method: nf4; the base keeps its dtype
lost quantization.method = quantization_method:F(!bnb) | of its methods there is quantization.method: nf4
lost quantization.method = quantization_type:F(!nf4) bnb_4bit_quant_type:TH(!nf4)
    bnb_config_kwargs.bnb_4bit_quant_type:A(!nf4) | the 4-bit type is nf4
quantization.method = quantize:L | bnb.nf4 is nf4
quantization.double_quant = bnb_4bit_use_double_quant:H use_bnb_nested_quant:T double_quantization:F
    bnb_config_kwargs.bnb_4bit_use_double_quant:A
model.dtype = bnb_4bit_compute_dtype:H
lost = gptq:A | weights that are quantized already are not read; quantization.method: nf4 does it
lost = quantize_moe_experts:A | stacks of experts stay in the compute dtype under quantization.method: nf4
lost = qat.*:A quantizer.*:C | quantization-aware training is not offered
# adapters
read lora = adapter:A(lora) | adapter: qlora is quantization.method: nf4 with a lora section
read lora = finetuning_type:F(lora,full) full_finetuning:U training_type:U
    | leave the section out for full fine-tuning
quantization.method: nf4 = adapter:A(qlora)
refuse lora = adapter:A finetuning_type:F | there are LoRA and QLoRA, and training without adapters
read lora = use_peft:T | a section `lora` turns adapters on; leave it out for full fine-tuning
lora = peft_type:PEFT
lora.r = lora_r:ATLU lora_rank:F model.lora_rank:C rank:C
lora.alpha = lora_alpha:AFTU model.lora_alpha:C
lora.dropout = lora_dropout:AFTU model.lora_dropout:C
lora.target_modules: all-linear = lora_target:F(all) lora_target_linear:A model.apply_lora_to_mlp:C
lora.target_modules = lora_target:F lora_target_modules:AT model.lora_attn_modules:C lora_query:L lora_key:L
    lora_value:L lora_projection:L lora_mlp:L
lost lora.target_modules = lora_target_parameters:AT
    | all-linear adapts experts too; list modules in lora.target_modules
lost lora.target_modules = finetune_language_layers:U(!true) finetune_attention_modules:U(!true)
    finetune_mlp_modules:U(!true) | list the modules that are adapted in lora.target_modules
lost lora.modules_to_save = model.apply_lora_to_output:C
    | the head has no adapter; lora.modules_to_save: [lm_head] trains it whole
lora.modules_to_save = lora_head:L lora_modules_to_save:AT additional_target:F
lora.use_rslora = peft_use_rslora:A
lora.use_dora = peft_use_dora:A
lora.init_lora_weights: pissa = pissa_init:F
lora.init_lora_weights: pissa_niter_16 = pissa_iter:F
note = pissa_convert:F | results are always saved as plain adapters of the base
lora.init_lora_weights = peft_init_lora_weights:A
lost = use_loftq:U loftq_config:U | LoftQ is not offered; adapters begin as zero
[convert] lost = init_lora_weights:U | LoftQ is not offered; adapters begin as zero
lora.layers_to_transform = peft_layers_to_transform:A
lora.layers_pattern = peft_layers_pattern:A
lora.exclude_modules = lora_exclude_modules:T
lora.alpha_pattern = lora_alpha_pattern:T
lora.rank_pattern = lora_rank_pattern:T
train.loraplus_lr_ratio = lora_plus_lr_ratio:H
lost = bias:U(!none) | biases are not trained
lost = lora_task_type:T(!causal_lm,seq_cls) | causal language models are trained
lost = unfrozen_parameters:A | a part of the weights cannot be chosen: LoRA, or all of them
lost run.resume = lora_model_dir:AT adapter_name_or_path:F checkpointer.adapter_checkpoint:C
    | adapters begin anew; a run of ftcli goes on from --resume PATH
# data
[convert] lost = dataset:C dataset_val:C | name each dataset of the list in data.train, or in data.eval
data.train = datasets:A dataset:FC dataset_name:T dataset_path:H train_file:H train_data:H local_dataset:U data_dir:L
read data.train = dataset_dir:F | paths stand in the list itself
data.eval = test_datasets:A eval_dataset:FT dataset_val:C validation_file:H
lost data.eval = val_set_size:A val_size:F test_split_size:T dataset_mixture.test_split_size:T val_split_fraction:L
    test_size:H | nothing is split off silently: name a held-out file in data.eval
refuse data.train = pretraining_dataset:A | rows are not read from a stream: name files of text in data.train
lost = dataset_streaming:T | rows are read whole; see data.train[].streaming
[convert] lost = streaming:T dataset_mixture.streaming:T | rows are read whole; see data.train[].streaming
lost = dataset_kwargs:T | rows are prepared by data.format and the chat template
data.max_seq_len = sequence_len:A cutoff_len:F max_length:TU max_seq_length:TUL max_sequence_length:H seq_length:H
    block_size:L context_length:U seq_len:C tokenizer.max_seq_len:C dataset.max_seq_len:C
lost data.max_seq_len = model_max_length:F | cutoff_len is data.max_seq_len
lost data.max_seq_len = eval_sequence_len:A | evaluation has the limit of training
data.overlong = excess_length_strategy:A
lost data.overlong = truncation_mode:T(!keep_start) | data.overlong: truncate keeps the start
data.packing = sample_packing:A dataset.packed:C | rows never attend to one another across a pack
data.packing: true = neat_packing:F | rows never attend to one another across a pack
note data.packing = eval_sample_packing:A eval_packing:T dataset_val.packed:C dataset_val.max_seq_len:C
    | evaluation never packs, and has the length of training
differs data.packing = packing_strategy:T(wrapped,bfd_split,bfd-requeue)
    | it trains all of a long row, in pieces -> here no row sees another, and data.overlong says what becomes of long
    rows: split them in the file
read = packing_strategy:T
lost = dataset.split_across_pack:C | a row is never split over packs
note data.padding_free = padding_free:T | data.padding_free: auto does that wherever attention can
note = pad_to_sequence_len:A pad_to_multiple_of:AT batch_flattening:A
    | batches are as long as their rows need, or packed
train.train_sampling_strategy: group_by_length = group_by_length:AH
data.chat_template = template:F chat_template_path:T prompt_style:L
differs data.chat_template_kwargs: {enable_thinking: false} = enable_thinking:F(false)
    | it moves the empty thought into the prompt there, and here the chat template decides
    -> `ftcli check --show-sample 1` shows what is trained
read = enable_thinking:F(true)
data.chat_template = chat_template_jinja:A | the path of a .jinja file
lost data.chat_template = tokenizer.prompt_template:C tokenizer.prompt_template.*:C
    | rows are written by the chat template alone
lost = default_system_message:A dataset.new_system_prompt:C dataset_val.new_system_prompt:C
    | write the system turn into the rows
lost = dataset.add_eos:C(!true) | each text ends with the token that ends texts
data.loss_on: all = train_on_inputs:A train_on_prompt:F | true is `all`, false is `auto`
read data.loss_on = dataset.train_on_input:C dataset_val.train_on_input:C | true is `all`, false is `auto`
data.loss_on: completion = train_on_completions:U completion_only_loss:TU mask_history:F
data.loss_on: assistant = assistant_only_loss:TU
data.loss_on = mask_prompt:L | true is `auto`, false is `all`
data.loss_on = roles_to_train:A
read data.train[].columns = dataset_text_field:T | as in columns: {text: body}
lost data.train[].columns = dataset_text_field:U(!text) | write columns: {text: NAME} beside its path in data.train
data.train[].columns = column_map:C message_property_mappings:A
data.train[].columns = field_messages:A | as in columns: {messages: conversation}
data.format: alpaca = format_type:U(alpaca)
data.format: sharegpt = format_type:U(sharegpt)
data.format: messages = format_type:U(chatml,conversational)
data.format: text = format_type:U(raw)
read = format_type:U(auto)
lost data.format = format_type:U formatting:F | the columns say it: data.format: auto
lost data.train[].max_rows = max_train_samples:H
lost data.eval[].max_rows = max_eval_samples:H
read data.train[].max_rows = max_samples:F
read = dataset_prepared_path:A overwrite_cache:F | tokenized data is cached by its content; FTCLI_CACHE says where
data.num_proc = dataset_processes:A dataset_num_proc:ATU preprocessing_num_workers:FT
lost data.train[].weight = interleave_probs:F | write `weight` beside the `path` of each source in data.train
lost = mix_strategy:F(!concat)
    | all rows of all sources are mixed, each once an epoch; `weight` beside each source in data.train repeats them
read = dataloader_num_workers:H | data is in memory; remove it
lost = shuffle:C(!true) shuffle_merged_datasets:A(!true) disable_shuffling:F
    | training rows are always shuffled, by run.seed
note = shuffle_dataset:T shuffle_before_merging_datasets:A | training rows are always shuffled, by run.seed
lost = dataloader_drop_last:H | the last batch of an epoch is trained, however small
note = image_max_pixels:F image_min_pixels:F video_max_pixels:F video_fps:F video_maxlen:F media_dir:F | rows hold text
# optimisation
train.per_device_train_batch_size = micro_batch_size:AL batch_size:CU train_batch_size:H per_device_batch_size:H
train.gradient_accumulation_steps = global_batch_size:L | rows per step are this times the batch size
train.gradient_accumulation_steps = gradient_accumulation:U grad_accumulation_steps:H accumulate_grad_batches:L
train.num_train_epochs = num_epochs:AU epochs:CL
train.max_steps = num_train_steps:H max_train_steps:H max_steps_per_epoch:C
read = max_steps:H(-1,0)
train.learning_rate = lr:C optimizer.lr:C
train.lr_scheduler_type = lr_scheduler:AC scheduler:H
train.lr_scheduler_kwargs = min_lr:L | min_lr, with lr_scheduler_type: cosine_with_min_lr
lost train.lr_scheduler_kwargs = cosine_min_lr_ratio:A min_lr_ratio:H
    | min_lr_rate, with lr_scheduler_type: cosine_with_min_lr
lost train.lr_scheduler_kwargs = num_cycles:C | num_cycles
[convert] read = lr_scheduler.num_cycles:C(0.5)
[convert] train.lr_scheduler_kwargs.num_cycles = lr_scheduler.num_cycles:C
train.warmup_steps = warmup_ratio:AF lr_warmup_fraction:L | a value below 1 is a share of all steps
train.warmup_steps = num_warmup_steps:C lr_scheduler.num_warmup_steps:C lr_warmup_steps:L
train.optim = optimizer:AC
train.optim: muon = use_muon:F
lost = optim_args:H | train.adam_beta1, adam_beta2 and adam_epsilon are here
train.adam_epsilon = adam_eps:H optimizer.eps:C
lost train.adam_beta1 = betas:C | and train.adam_beta2
train.weight_decay = optimizer.weight_decay:C
train.max_grad_norm = gradient_clipping:DeepSpeed max_norm:L clip_grad_norm:C
train.gradient_checkpointing = use_gradient_checkpointing:U enable_activation_checkpointing:C
train.gradient_checkpointing = activation_checkpointing:AH
note train.gradient_checkpointing = gradient_checkpointing_kwargs:ATH | ftcli recomputes layers in its own way
train.gradient_checkpointing: false = disable_gradient_checkpointing:F
train.gradient_checkpointing: offload = enable_activation_offloading:C activation_offloading:ATH
train.neftune_noise_alpha = noisy_embedding_alpha:A neft_alpha:F
train.early_stopping.patience = early_stopping_patience:A
lost = label_smoothing_factor:H | label smoothing is not offered: labels are as they stand
lost = auto_find_batch_size:H | `ftcli check` says whether a batch size fits
note = average_tokens_across_devices:H | the loss is weighted by token over all ranks
# methods
read train.method = stage:F(sft,pt,dpo,kto,rm) rl:A(dpo,ipo,kto,orpo,simpo) reward_model:A(true)
refuse grpo = rl:A(grpo) | run it with `ftcli grpo`; begin with `ftcli recipes copy smoke-grpo`
refuse = rl:A stage:F
    | by preferences there are dpo, kto, orpo, simpo and reward (train.method), and by rewards
    `ftcli recipes copy smoke-grpo` begins
[convert] refuse = reward_funcs:TU num_generations:TU reward_model_path:TU num_iterations:TU scale_rewards:TU
    vllm_mode:TU
    | `trl sft`, dpo, kto, orpo, cpo and reward are converted; for GRPO begin with `ftcli recipes copy smoke-grpo`
lost = model_class:F train_dataset:F peft_config.*:F dist_config.*:F kernel_config.*:F
    | recipes of version 1 are not read: write it in the form that has model_name_or_path and finetuning_type
refuse = process_reward_model:A command:T(grpo,ppo,rloo,online_dpo,bco,gkd,nash_md,xpo,prm)
    trainer:TU(grpotrainer,ppotrainer,rlootrainer,onlinedpotrainer,bcotrainer,gkdtrainer)
    | by preferences there are dpo, kto, orpo, simpo and reward (train.method), and by rewards
    `ftcli recipes copy smoke-grpo` begins
read = do_train:FH do_eval:FH | the command says what is done: `ftcli train`, `ftcli eval`
read = do_predict:FH | the command says what is done: `ftcli eval`
read = command:TU trainer:TU(sfttrainer,unslothtrainer,dpotrainer,ktotrainer,orpotrainer,cpotrainer,rewardtrainer)
# preferences
[convert] reward.center_rewards_coefficient = center_rewards_coefficient:TUA
read = num_labels:TUA(1)
lost = num_labels:TUA | a reward model gives one number
preference.loss = pref_loss:F dpo_loss_type:A
preference.loss[].weight = loss_weights:TU dpo_loss_weights:A | as in loss: [{name: sigmoid, weight: 0.8}]
preference.beta = pref_beta:F rl_beta:A orpo_alpha:A
preference.gamma = simpo_gamma:TUFA
preference.label_smoothing = dpo_label_smoothing:AF
preference.sft_weight = pref_ftx:F rpo_alpha:TUA cpo_alpha:TUA
preference.use_weighting = use_weighting:TU dpo_use_weighting:A
preference.reference = reference_free:TU
preference.reference = ref_model:TUF ref_model_name_or_path:TU
preference.reference_revision = ref_model_revision:TU
lost preference.reference = ref_model_adapters:F ref_model_quantization_bit:F model_adapter_name:TU ref_adapter_name:TU
    force_use_ref_model:TU ref_model_init_kwargs:TU
    | a reference is a whole model, held as the trained one is; the model as training begins unless one is named
refuse = sync_ref_model:TU | a reference that follows the policy is not offered: the reference stays as it is
read = ref_model_mixup_alpha:TU ref_model_sync_steps:TU
note = precompute_ref_log_probs:TUA precompute_ref_batch_size:TU precompute_ref_eval_batch_size:TU
    | preference.reference_cache: auto does so where pairs are seen more than once, and in full fine-tuning
[convert] differs = max_prompt_length:TU max_completion_length:TU max_target_length:TU max_prompt_len:A
    | it cuts a part of a row there -> here data.max_seq_len holds for prompt and answer together, and data.overlong
    keeps both answers of a pair or none
lost = f_divergence_type:TU(!reverse_kl,fdivergencetype.reverse_kl) | the divergence is the reverse KL
read = f_alpha_divergence_coef:TU discopop_tau:TU(0.05)
lost = discopop_tau:TU | it is 0.05
[convert] lost = alpha:TU(!0) | AlphaPO is not offered: simpo is its form with alpha 0
lost = dpo_norm_loss:A | loss: sigmoid_norm with a beta around 5 divides by length
lost = pref_bco_weight:F | loss: [{name: sigmoid}, {name: bco_pair, weight: W}] is the nearest
preference.desirable_weight = kto_desirable_weight:A kto_chosen_weight:F
preference.undesirable_weight = kto_undesirable_weight:A kto_rejected_weight:F
[convert] preference.desirable_weight = desirable_weight:TU
[convert] preference.undesirable_weight = undesirable_weight:TU
note = generate_during_eval:TU dpo_generate_during_eval:A | eval.tasks judge what is generated
note = dpo_padding_free:A | data.padding_free: auto does that wherever attention can
read = disable_dropout:TU use_logits_to_keep:TU dpo_use_logits_to_keep:A label_pad_token_id:TU padding_value:TU
    is_encoder_decoder:TU
read = ref_checkpointer.*:C
# runs, checkpoints, logging
run.name = run_name:H exp_name:H wandb_name:A
run.output_dir = out_dir:L save_dir:H
[convert] model.dtype = dtype:CU
[convert] run.output_dir = output_dir:CH
run.seed = random_state:U random_seed:U
[convert] run.seed = seed:CH
note run.seed = data_seed:H | run.seed decides the order of rows
lost run.resume = resume_from_checkpoint:CH | a run goes on by itself; --resume PATH takes a checkpoint of ftcli
run.resume: auto = auto_resume_from_checkpoints:A
note run.resume: never = overwrite_output_dir:FH | `ftcli train --resume never` starts over, and keeps the old run
read = save_steps:U(-1,0)
steps checkpoint.every_steps = save_steps:AFTH save_every_n_steps:C save_interval:L
note checkpoint.every_steps = saves_per_epoch:A save_every_n_epochs:C
    | write checkpoint.every_steps: counted in optimizer steps here, never in epochs
lost checkpoint.every_steps = save_strategy:H(epoch) | counted in optimizer steps here, never in epochs
checkpoint.every_steps: null = save_strategy:H(no)
checkpoint.keep_best: true = save_strategy:H(best)
checkpoint.keep_last = save_total_limit:H keep_last_n_checkpoints:C
note = save_safetensors:H save_only_model:H | checkpoints are safetensors, and hold what resuming needs
differs checkpoint.keep_best: true = load_best_model_at_end:H
    | the best checkpoint is kept, the last weights are the result -> ftcli export --checkpoint best
note = metric_for_best_model:H greater_is_better:H
    | the best checkpoint is that of the lowest held-out loss; train.metric_for_best_model names another measure
checkpoint.on_sigterm = enable_jit_checkpoint:H
steps logging.every_steps = logging_steps:AFTH log_interval:L log_every_n_steps:C
lost logging.every_steps = logging_strategy:H(epoch) | counted in optimizer steps here, never in epochs
lost logging.wandb = report_to:H logger_name:L metric_logger:C | or logging.tensorboard: true
logging.tensorboard: true = use_tensorboard:A enable_tensorboard:U
logging.wandb: true = enable_wandb:U
logging.wandb = wandb_project:AU | as in wandb: {project: NAME}
read logging.wandb = wandb_entity:A | as in wandb: {entity: NAME}
read logging.wandb = wandb_mode:A | WANDB_MODE in the environment says whether it is offline
read = plot_loss:F | report.html in the run directory has the curves
note = push_to_hub:H hub_model_id:AH | `ftcli export --push-to-hub ID` uploads what was trained
note = loss_watchdog_threshold:A | a loss that is not finite ends the run (exit 6)
# evaluation
steps eval.every_steps = eval_steps:AFTH run_val_every_n_steps:C eval_interval:L
lost eval.every_steps = evals_per_epoch:A | counted in optimizer steps here, never in epochs
lost eval.every_steps = eval_strategy:AH(epoch) evaluation_strategy:H(epoch)
    | counted in optimizer steps here, never in epochs
read = save_strategy:H(steps) eval_strategy:H(steps,no) evaluation_strategy:H(steps,no) logging_strategy:H(steps,no)
eval.per_device_eval_batch_size = eval_batch_size:A per_device_eval_batch:H batch_size_val:C
lost eval.tasks = predict_with_generate:F | write eval.tasks: {use: exact_match}, and others, judge what is generated
eval.generate.max_new_tokens = eval_max_new_tokens:A
eval.generate = generation_config:H
[convert] note = do_sample:F temperature:F top_p:F max_new_tokens:F | it concerns the other tool's process
# GRPO
grpo = trl:A | run it with `ftcli grpo`
grpo.rewards = reward_funcs:TA
lost grpo.rewards = reward_model:F | as in rewards: [{file: my_rewards.py:score}]
grpo.rewards[].weight = reward_weights:TA
grpo.num_generations = num_samples:H group_size:C grpo_samples:C
grpo.max_prompt_length = max_prompt_len:H
grpo.max_completion_length = max_generated_tokens:C max_response_length:verl
grpo.beta = kl_coeff:C kl_coef:T
grpo.num_iterations = ppo_epochs:C
lost = use_vllm:T | an engine of ftcli's own generates completions; remove it
# export
note = export_dir:F | exports go into the run directory
note = infer_backend:F export_size:F export_device:F export_legacy_format:F | `ftcli export` exports
export.formats = export_format:U
lost export.formats = save_method:U | merged_16bit is safetensors, lora is adapter
export.formats: [safetensors] = merge_lora:A
# machines
lost launch.engine = deepspeed:AFH
    | with `--gpus N`, of as many GPUs as it was meant for, a step has the same rows, and launch.engine: fsdp shards
    the weights; on fewer GPUs multiply train.gradient_accumulation_steps
lost launch.engine: fsdp = fsdp:AH fsdp_config:AH fsdp_version:AH(!1) fsdp_transformer_layer_cls_to_wrap:H
    dp_shard_size:H(!0,1) custom_sharded_layers:C fsdp_cpu_offload:C data_parallel_shard_dim:C(!-1,0,1)
    | with `--gpus N`, of as many GPUs as it was meant for, a step has the same rows, and launch.engine: fsdp shards
    the weights; on fewer GPUs multiply train.gradient_accumulation_steps
lost launch.engine = tensor_parallel_size:AH(!0,1) expert_parallel_size:H(!0,1) tensor_parallel_dim:C(!0,1)
    tensor_parallel_plan:C tensor_parallel_plan.*:C
    | one layer is not split over GPUs; launch.engine: fsdp shards the weights (--gpus N)
lost launch.dp_replicate_size = data_parallel_replicate_dim:C(!0,1)
    | under `fsdp` it is launch.dp_replicate_size, with --gpus N
[convert] lost = dp_replicate_size:H(!0,1) | under `fsdp` it is launch.dp_replicate_size, with --gpus N
lost launch.context_parallel_size = sequence_parallel_degree:H(!0,1) context_parallel_dim:C(!0,1)
    | it is launch.context_parallel_size, which divides launch.num_processes (--gpus N)
[convert] lost = context_parallel_size:H(!0,1)
    | it is launch.context_parallel_size, which divides launch.num_processes (--gpus N)
note = ddp_timeout:FH | a rank that is silent for 60 s ends the run, a collective that hangs after 10 minutes
note = ddp_find_unused_parameters:H ddp_bucket_cap_mb:H ddp_broadcast_buffers:H | ranks are connected by ftcli
launch.num_processes = devices:L num_gpus:H nproc_per_node:C
# what concerns the other tool's process alone, or is read with other settings
note = lora_fan_in_fan_out:A lora_on_cpu:A qlora_sharded_model_loading:A | it concerns the other tool's process
read = is_llama_derived_model:A is_mistral_derived_model:A is_falcon_derived_model:A is_qwen_derived_model:A
    dataset_shard_num:A dataset_keep_in_memory:A hf_use_auth_token:A strict:A eval_table_size:A
    loss_watchdog_patience:A otel_metrics_host:A otel_metrics_port:A
    wandb_group:A wandb_watch:A wandb_log_model:A wandb_run_id:A use_wandb:A
read = use_reentrant_gc:F use_fast_tokenizer:F include_effective_tokens_per_second:F data_shared_file_system:F
read = config:T bnb_4bit_quant_storage:T dataset_config:T dataset_configs:T dataset_train_split:T dataset_test_split:T
    dataset_splits:T dataset_mixture.seed:T ignore_bias_buffers:T
read = hub_split:U hub_subset:U tensorboard_dir:U fast_inference:U gpu_memory_utilization:U float8_kv_cache:U
    unsloth_tiled_mlp:U use_exact_model_name:U load_in_16bit:U max_lora_rank:U device_map:U fix_tokenizer:U
    label_names:U prediction_loss_only:U
read = device:C | the GPU is taken when there is one; CUDA_VISIBLE_DEVICES picks another
read = collate_fn:C(torchtune.data.padded_collate_sft,torchtune.data.padded_collate_dpo)
lost = collate_fn:C | rows are read as they are: prepare the file so
read = model._component_:C model.use_dora:C profiler.*:C checkpointer.*:C dataloader.*:C metric_logger.*:C
    tokenizer._component_:C tokenizer.path:C tokenizer.merges_file:C tokenizer.merges_path:C tokenizer.vocab_path:C
    loss.num_output_chunks:C loss.ignore_index:C log_peak_memory_stats:C log_level:C low_cpu_ram:C
    save_adapter_weights_only:C save_last_epoch_only:C base_model_path:C model_type:C cudnn_deterministic_mode:C
    enable_async_checkpointing:C enable_kv_cache:C optimizer.fused:C optimizer.foreach:C optimizer_in_bwd:C
read = remove_unused_columns:H include_tokens_per_second:H include_num_input_tokens_seen:H log_level:H disable_tqdm:H
    hub_strategy:H hub_private_repo:H logging_first_step:H logging_dir:H dataloader_pin_memory:H
    dataloader_prefetch_factor:H dataloader_persistent_workers:H torch_empty_cache_steps:H local_rank:H debug:H
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


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Our name for a key of other tools, for some of its values or for all.

    Attributes:
        tools: Their names.
        target: Our key, with its value where that is known; None: there is no such thing.
        note: What else has to be said.
        only: The values, in small letters, of which that holds; none: of all.
        usual: The values that need no word; none: those that switch a setting off.
        rule: What `recipes convert` does, as the table says above; empty: it writes our key.
    """

    tools: str
    target: str | None
    note: str | None = None
    only: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    rule: str = ""

    @property
    def key(self) -> str | None:
        """The target without its value."""
        return self.target.partition(":")[0] if self.target else None


_ROW = re.compile(
    r"(?:\[(?P<section>[\w.]+)\] )?(?P<rule>(?:steps|lost|note|differs|refuse|read)\b)? ?(?P<target>[^=|\s][^=|]*?)?"
    r" ?= (?P<names>[^|]*?)(?: \| (?P<note>.*))?"
)
_NAME = re.compile(r"([\w.*]+):(\w+)(?:\((!?)([\w.,-]+)\))?")


def _rows() -> Iterator[tuple[str, str, ForeignKey]]:
    """Section (empty: any), name and meaning of every name in the table."""
    for line in re.sub(r"\n +", " ", _TABLE).strip().splitlines():
        if line.startswith("#"):
            continue
        row = _ROW.fullmatch(line)
        assert row is not None, line  # a slip in the table, which would be passed over
        names = [_NAME.fullmatch(name) for name in row["names"].split()]
        assert all(names), line
        for name, tools, usual, words in (name.groups() for name in names if name):
            known = ", ".join(TOOLS[letter] for letter in tools) if set(tools) <= set(TOOLS) else tools
            values = tuple(words.split(",")) if words else ()
            only, usual = ((), values) if usual else (values, ())
            yield (
                row["section"] or "",
                name,
                ForeignKey(known, row["target"], row["note"], only, usual, row["rule"] or ""),
            )


_ROWS = tuple(_rows())


@lru_cache
def rows_of(tool: str) -> Mapping[str, Sequence[ForeignKey]]:
    """The rows of a tool by the name of the setting: the first that is for its value counts."""
    found: dict[str, list[ForeignKey]] = {}
    for section, name, row in _ROWS:
        if section in ("", "convert") and tool in row.tools.split(", "):
            found.setdefault(name, []).append(row)
    return found


def _foreign() -> dict[str, ForeignKey]:
    """By the last part of the name: the first row of each, with the tools of all rows that say the same."""
    found: dict[str, list[ForeignKey]] = {}
    for section, dotted, row in _ROWS:
        if not section and (row.target or row.note):
            found.setdefault(dotted.removesuffix(".*").rpartition(".")[2], []).append(row)
    return {name: _first(rows) for name, rows in found.items()}


def _first(rows: Sequence[ForeignKey]) -> ForeignKey:
    """The row that `ftcli check` cites: the one for all values. A key with rows for some values only has none for the
    others.
    """
    kept = [row for row in rows if row.rule != "refuse"] or rows[:1]
    first = next((row for row in kept if not row.only), kept[0])
    tools = dict.fromkeys(tool for row in rows if row.target == first.target for tool in row.tools.split(", "))
    refused = len(rows) > 1 and all(row.rule == "refuse" for row in rows if row is not first)
    note = None if first.note is None else first.note.replace(" -> ", "; ")
    return replace(first, tools=", ".join(tools), only=first.only if refused else (), note=note)


#: Tools that write `_component_` under every key.
_COMPONENT = ForeignKey("torchtune", None, "recipes name no Python classes; see docs/recipes.md for the keys")

FOREIGN: Mapping[str, ForeignKey] = MappingProxyType(_foreign())
#: Foreign names by section.
FOREIGN_IN: Mapping[tuple[str, str], ForeignKey] = MappingProxyType(
    {(section, name): key for section, name, key in _ROWS if section not in ("", "convert")}
)
#: Words that have a meaning of their own, where the key has another or none with other words.
_BY_VALUE: Mapping[tuple[str, str], ForeignKey] = MappingProxyType(
    {
        (name, word): row
        for section, name, row in reversed(_ROWS)
        if not section and row.target and row.key == row.target and "." not in name
        for word in row.only
        if FOREIGN[name].only
    }
)


def foreign(section: str, name: str, value: object = None) -> ForeignKey | None:
    """The meaning of another tool's key in this section (dotted, list positions left out) with this value; None if
    unknown.
    """
    if name == "_component_" and section != "model":
        return _COMPONENT
    return FOREIGN_IN.get((section, name)) or _BY_VALUE.get((name, str(value).lower())) or FOREIGN.get(name)


#: Values of other tools, by our key: what they are called here.
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "model.dtype": {
            "bf16": "bfloat16", "bf16-true": "bfloat16", "bf16-mixed": "bfloat16", "torch.bfloat16": "bfloat16",
            "fp16": "float16", "half": "float16", "16-true": "float16", "torch.float16": "float16",
            "fp32": "float32", "float": "float32", "full": "float32", "32-true": "float32", "torch.float32": "float32",
        },
        "model.attention": {
            "flash": "flash_attention_2", "fa2": "flash_attention_2", "flash_attn": "flash_attention_2",
            "flash_attention": "flash_attention_2", "flash_attention_3": "flash_attention_2", "flex": "flex_attention",
            "sdp": "sdpa", "xformers": "sdpa", "disabled": "eager",
        },
        "model.kernels": {"liger": "triton", "none": "off", "false": "off", "true": "auto", "torch": "reference"},
        "quantization.method": {
            "4bit": "nf4", "int4": "nf4", "bnb": "nf4", "bitsandbytes": "nf4", "bnb_nf4": "nf4", "bnb.nf4": "nf4",
            "bnb.nf4-dq": "nf4", "qlora": "nf4", "fp4": "nf4", "float8": "fp8", "off": "none", "no": "none",
        },
        "data.format": {
            "chat_template": "messages", "chat": "messages", "openai": "messages", "chatml": "messages",
            "completion": "text", "pretrain": "text", "raw": "text", "instruct": "alpaca",
        },
        "data.overlong": {"raise": "error", "keep_start": "truncate", "cut": "truncate", "skip": "drop"},
        "data.loss_on": {"completions": "completion", "prompt": "all", "everything": "all"},
        "train.optim": {
            "adamw": "adamw_torch", "adam": "adamw_torch", "adamw_hf": "adamw_torch",
            "torch.optim.AdamW": "adamw_torch", "AdamW": "adamw_torch", "fused_adamw": "adamw_torch_fused",
            "adamw_apex_fused": "adamw_torch_fused", "adamw_torch_npu_fused": "adamw_torch_fused",
            "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit", "adamw8bit": "adamw_8bit",
            "bitsandbytes.optim.AdamW8bit": "adamw_8bit", "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
            "PagedAdamW8bit": "paged_adamw_8bit", "paged_adamw": "paged_adamw_32bit", "PagedAdamW": "paged_adamw_32bit",
            "lion": "lion_32bit", "lion_pytorch": "lion_32bit", "paged_lion_32bit": "paged_lion_8bit",
            "schedule_free": "schedule_free_adamw", "schedulefree": "schedule_free_adamw",
        },
        "train.lr_scheduler_type": {
            "cosine_annealing": "cosine", "cosine_with_warmup": "cosine", "one_cycle": "cosine", "none": "constant",
            "wsd": "warmup_stable_decay", "cosine_with_hard_restarts": "cosine_with_restarts",
            "reduce_on_plateau": "reduce_lr_on_plateau",
        },
        "train.gradient_checkpointing": {
            "unsloth": "offload", "offload_disk": "offload", "cpu": "offload", "offloaded": "offload",
            "yes": "true", "on": "true", "full": "true", "no": "false", "off": "false", "none": "false",
        },
        "train.method": {"lora": "sft", "qlora": "sft", "full": "sft", "supervised": "sft"},
        "grpo.loss_type": {"dr-grpo": "dr_grpo", "drgrpo": "dr_grpo"},
        "export.dtype": {
            "bf16": "bfloat16", "torch.bfloat16": "bfloat16", "fp16": "float16", "half": "float16",
            "torch.float16": "float16", "fp32": "float32", "float": "float32", "torch.float32": "float32",
        },
        "export.formats": {
            "merged": "safetensors", "merged_16bit": "safetensors", "hf": "safetensors", "lora": "adapter",
            "peft": "adapter", "llama.cpp": "gguf",
        },
        "launch.engine": {"deepspeed": "fsdp", "torchrun": "ddp", "none": "single"},
    }
)  # fmt: skip
