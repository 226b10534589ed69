"""What other tools call things, and what they are called here.

Facts about names only, gathered from the settings of axolotl, LLaMA-Factory, TRL and transformers, torchtune, Unsloth
and litgpt. A test holds that every key on the right exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias


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


_AXOLOTL = "axolotl"
_FACTORY = "LLaMA-Factory"
_TRL = "TRL"
_TUNE = "torchtune"
_UNSLOTH = "Unsloth"
_LITGPT = "litgpt"
_HF = "transformers"

_LENGTH = "data.max_seq_len"
_BATCH = "train.per_device_train_batch_size"
_NO_SPLIT = "nothing is split off silently: name a held-out file in data.eval"
_ALL_LINEAR = "lora.target_modules: all-linear"
_SCHEDULE_ARGUMENTS = "train.lr_scheduler_kwargs"
_STEPS_ONLY = "counted in optimizer steps here, never in epochs"
_WANDB = "its account and project come from `wandb login` and WANDB_PROJECT"
_PACKING_NOTE = "rows never attend to one another across a pack"
_FUSED = "ftcli's own kernels: `auto`, `triton`, `reference` or `off`"

_Parts: TypeAlias = tuple[str, str | None] | tuple[str, str | None, str] | tuple[str, str | None, str, tuple[str, ...]]

_TABLE: dict[str, _Parts] = {
    # the model
    "base_model": (_AXOLOTL, "model.name_or_path"),
    "model_name_or_path": (f"{_FACTORY}, {_TRL}", "model.name_or_path"),
    "model_name": (_UNSLOTH, "model.name_or_path"),
    "model_id": (_HF, "model.name_or_path"),
    "pretrained_model_name_or_path": (_HF, "model.name_or_path"),
    "checkpoint_dir": (f"{_LITGPT}, {_TUNE}", "model.name_or_path"),
    "base_model_config": (_AXOLOTL, None, "the configuration is read from model.name_or_path"),
    "model_type": (_AXOLOTL, None, "the architecture is read from the model's config.json"),
    "revision_of_model": (_AXOLOTL, "model.revision"),
    "model_revision": (f"{_TRL}, {_FACTORY}", "model.revision"),
    "tokenizer_config": (_AXOLOTL, "model.tokenizer"),
    "tokenizer_name": (_HF, "model.tokenizer"),
    "tokenizer_name_or_path": (_HF, "model.tokenizer"),
    "tokenizer_type": (_AXOLOTL, None, "the tokenizer's class is read from the model"),
    "torch_dtype": (_HF, "model.dtype"),
    "bf16": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}", "model.dtype: bfloat16"),
    "fp16": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}", "model.dtype: float16"),
    "bfloat16": (_AXOLOTL, "model.dtype: bfloat16"),
    "float16": (_AXOLOTL, "model.dtype: float16"),
    "float32": (_AXOLOTL, "model.dtype: float32"),
    "precision": (_LITGPT, "model.dtype"),
    "mixed_precision": ("accelerate", "model.dtype"),
    "tf32": (f"{_AXOLOTL}, {_TRL}", None, "matmul precision is not a setting; remove it"),
    "attn_implementation": (f"{_AXOLOTL}, {_TRL}", "model.attention"),
    "flash_attn": (_FACTORY, "model.attention: flash_attention_2"),
    "flash_attention": (_AXOLOTL, "model.attention: flash_attention_2"),
    "use_flash_attention_2": (_HF, "model.attention: flash_attention_2"),
    "sdp_attention": (_AXOLOTL, "model.attention: sdpa"),
    "sdpa_attention": (_AXOLOTL, "model.attention: sdpa"),
    "flex_attention": (_AXOLOTL, "model.attention: flex_attention"),
    "eager_attention": (_AXOLOTL, "model.attention: eager"),
    "xformers_attention": (_AXOLOTL, "model.attention: sdpa"),
    "use_liger_kernel": (f"{_TRL}, {_HF}", "model.kernels", _FUSED),
    "enable_liger_kernel": (_FACTORY, "model.kernels", _FUSED),
    "liger_fused_linear_cross_entropy": (_AXOLOTL, "model.kernels", _FUSED),
    "liger_rms_norm": (_AXOLOTL, "model.kernels", _FUSED),
    "liger_rope": (_AXOLOTL, "model.kernels", _FUSED),
    "liger_glu_activation": (_AXOLOTL, "model.kernels", _FUSED),
    "cut_cross_entropy": (_AXOLOTL, "model.kernels", _FUSED),
    "lora_mlp_kernel": (_AXOLOTL, "model.kernels", _FUSED),
    "lora_qkv_kernel": (_AXOLOTL, "model.kernels", _FUSED),
    "lora_o_kernel": (_AXOLOTL, "model.kernels", _FUSED),
    "use_unsloth": (_FACTORY, "model.kernels", _FUSED),
    "compile": (_TUNE, "model.kernels", _FUSED),
    "torch_compile": (f"{_AXOLOTL}, {_HF}", "model.kernels", _FUSED),
    "rope_scaling": (f"{_FACTORY}, {_AXOLOTL}", None, "the rotary settings are those of the model's config.json"),
    "rope_theta": (_AXOLOTL, None, "the rotary settings are those of the model's config.json"),
    "device": (_TUNE, None, "the GPU is taken when there is one; CUDA_VISIBLE_DEVICES picks another"),
    "device_map": (_HF, None, "the GPU is taken when there is one; CUDA_VISIBLE_DEVICES picks another"),
    "use_cpu": (_HF, None, "the GPU is taken when there is one; CUDA_VISIBLE_DEVICES= hides it"),
    "special_tokens": (_AXOLOTL, None, "pad, end and turn tokens are those of the tokenizer"),
    "pad_token": (_TRL, None, "pad, end and turn tokens are those of the tokenizer"),
    "eos_token": (_TRL, None, "pad, end and turn tokens are those of the tokenizer"),
    "resize_vocab": (_FACTORY, None, "the vocabulary is that of the model"),
    "quantization_config": (_HF, "quantization.method"),
    # quantization
    "load_in_4bit": (f"{_AXOLOTL}, {_TRL}, {_UNSLOTH}", "quantization.method: nf4"),
    "load_in_8bit": (f"{_AXOLOTL}, {_TRL}", "quantization.method", "there is no 8-bit integer method; nf4 is smaller"),
    "quantization_bit": (_FACTORY, "quantization.method", "4 is nf4"),
    "quantization_method": (_FACTORY, "quantization.method"),
    "quantize": (_LITGPT, "quantization.method", "bnb.nf4 is nf4"),
    "quantize_base": (_TUNE, "quantization.method: nf4"),
    "bnb_4bit_quant_type": (f"{_TRL}, {_HF}", "quantization.method"),
    "bnb_4bit_use_double_quant": (_HF, "quantization.double_quant"),
    "use_bnb_nested_quant": (_TRL, "quantization.double_quant"),
    "double_quantization": (_FACTORY, "quantization.double_quant"),
    "bnb_4bit_compute_dtype": (_HF, "model.dtype"),
    "gptq": (_AXOLOTL, None, "quantize the unquantized model with quantization.method"),
    # adapters
    "adapter": (_AXOLOTL, "lora", "adapter: qlora is quantization.method: nf4 with a lora section"),
    "finetuning_type": (_FACTORY, "lora", "leave the section out for full fine-tuning"),
    "use_peft": (_TRL, "lora", "a section `lora` turns adapters on; leave it out for full fine-tuning"),
    "full_finetuning": (_UNSLOTH, "lora", "leave the section out for full fine-tuning"),
    "peft_type": ("PEFT", "lora"),
    "lora_r": (f"{_AXOLOTL}, {_TRL}, {_LITGPT}", "lora.r"),
    "lora_rank": (f"{_FACTORY}, {_TUNE}", "lora.r"),
    "rank": (_TUNE, "lora.r"),
    "lora_alpha": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}, {_TUNE}", "lora.alpha"),
    "lora_dropout": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}, {_TUNE}", "lora.dropout"),
    "lora_target": (_FACTORY, "lora.target_modules"),
    "lora_target_modules": (f"{_AXOLOTL}, {_TRL}", "lora.target_modules"),
    "lora_target_linear": (_AXOLOTL, _ALL_LINEAR),
    "lora_attn_modules": (_TUNE, "lora.target_modules"),
    "apply_lora_to_mlp": (_TUNE, _ALL_LINEAR),
    "apply_lora_to_output": (_TUNE, "lora.modules_to_save"),
    "lora_query": (_LITGPT, "lora.target_modules"),
    "lora_key": (_LITGPT, "lora.target_modules"),
    "lora_value": (_LITGPT, "lora.target_modules"),
    "lora_projection": (_LITGPT, "lora.target_modules"),
    "lora_mlp": (_LITGPT, "lora.target_modules"),
    "lora_head": (_LITGPT, "lora.modules_to_save"),
    "lora_modules_to_save": (f"{_AXOLOTL}, {_TRL}", "lora.modules_to_save"),
    "additional_target": (_FACTORY, "lora.modules_to_save"),
    "peft_use_rslora": (_AXOLOTL, "lora.use_rslora"),
    "peft_use_dora": (_AXOLOTL, "lora.use_dora"),
    "pissa_init": (_FACTORY, "lora.init_lora_weights: pissa"),
    "pissa_iter": (_FACTORY, "lora.init_lora_weights: pissa_niter_16"),
    "pissa_convert": (_FACTORY, None, "results are always saved as plain adapters of the base"),
    "peft_init_lora_weights": (_AXOLOTL, "lora.init_lora_weights"),
    "peft_layers_to_transform": (_AXOLOTL, "lora.layers_to_transform"),
    "peft_layers_pattern": (_AXOLOTL, "lora.layers_pattern"),
    "lora_exclude_modules": (_TRL, "lora.exclude_modules"),
    "lora_alpha_pattern": (_TRL, "lora.alpha_pattern"),
    "lora_rank_pattern": (_TRL, "lora.rank_pattern"),
    "lora_plus_lr_ratio": (_HF, "train.loraplus_lr_ratio"),
    "lora_model_dir": (_AXOLOTL, "run.resume", "the path of a checkpoint"),
    "adapter_name_or_path": (_FACTORY, "run.resume", "the path of a checkpoint"),
    # data
    "datasets": (_AXOLOTL, "data.train"),
    "dataset": (f"{_FACTORY}, {_TUNE}", "data.train"),
    "dataset_name": (_TRL, "data.train"),
    "dataset_path": (_HF, "data.train"),
    "train_file": (_HF, "data.train"),
    "train_data": (_HF, "data.train"),
    "local_dataset": (_UNSLOTH, "data.train"),
    "data_dir": (_LITGPT, "data.train"),
    "dataset_dir": (_FACTORY, "data.train", "paths stand in the list itself"),
    "test_datasets": (_AXOLOTL, "data.eval"),
    "eval_dataset": (f"{_FACTORY}, {_TRL}", "data.eval"),
    "dataset_val": (_TUNE, "data.eval"),
    "validation_file": (_HF, "data.eval"),
    "val_set_size": (_AXOLOTL, "data.eval", _NO_SPLIT),
    "val_size": (_FACTORY, "data.eval", _NO_SPLIT),
    "val_split_fraction": (_LITGPT, "data.eval", _NO_SPLIT),
    "test_size": (_HF, "data.eval", _NO_SPLIT),
    "sequence_len": (_AXOLOTL, _LENGTH),
    "cutoff_len": (_FACTORY, _LENGTH),
    "max_length": (_TRL, _LENGTH),
    "max_seq_length": (f"{_UNSLOTH}, {_LITGPT}", _LENGTH),
    "max_sequence_length": (_HF, _LENGTH),
    "model_max_length": (_FACTORY, _LENGTH),
    "eval_sequence_len": (_AXOLOTL, _LENGTH, "evaluation has the same limit"),
    "seq_len": (_TUNE, _LENGTH),
    "seq_length": (_HF, _LENGTH),
    "block_size": (_LITGPT, _LENGTH),
    "context_length": (_UNSLOTH, _LENGTH),
    "excess_length_strategy": (_AXOLOTL, "data.overlong"),
    "truncation_mode": (_TRL, "data.overlong"),
    "sample_packing": (_AXOLOTL, "data.packing", _PACKING_NOTE),
    "eval_sample_packing": (_AXOLOTL, "data.packing", _PACKING_NOTE),
    "eval_packing": (_TRL, "data.packing", _PACKING_NOTE),
    "neat_packing": (_FACTORY, "data.packing", _PACKING_NOTE),
    "packed": (_TUNE, "data.packing", _PACKING_NOTE),
    "packing_strategy": (_TRL, "data.packing", _PACKING_NOTE),
    "padding_free": (_TRL, "data.padding_free"),
    "pad_to_sequence_len": (_AXOLOTL, None, "batches are as long as their rows need"),
    "group_by_length": (f"{_AXOLOTL}, {_HF}", "train.train_sampling_strategy: group_by_length"),
    "template": (_FACTORY, "data.chat_template"),
    "chat_template_jinja": (_AXOLOTL, "data.chat_template", "the path of a .jinja file"),
    "chat_template_path": (_TRL, "data.chat_template"),
    "prompt_template": (_TUNE, "data.chat_template"),
    "prompt_style": (_LITGPT, "data.chat_template"),
    "train_on_inputs": (f"{_AXOLOTL}, {_TUNE}", "data.loss_on", "true is `all`, false is `auto`"),
    "train_on_input": (_TUNE, "data.loss_on", "true is `all`, false is `auto`"),
    "train_on_prompt": (_FACTORY, "data.loss_on", "true is `all`, false is `auto`"),
    "train_on_completions": (_UNSLOTH, "data.loss_on: completion"),
    "completion_only_loss": (_TRL, "data.loss_on: completion"),
    "assistant_only_loss": (_TRL, "data.loss_on: assistant"),
    "mask_prompt": (_LITGPT, "data.loss_on", "true is `auto`, false is `all`"),
    "roles_to_train": (_AXOLOTL, "data.loss_on"),
    "dataset_text_field": (_TRL, "data.train[].columns", "as in columns: {text: body}"),
    "column_map": (_TUNE, "data.train[].columns"),
    "field_messages": (_AXOLOTL, "data.train[].columns", "as in columns: {messages: conversation}"),
    "message_property_mappings": (_AXOLOTL, "data.train[].columns"),
    "format_type": (_UNSLOTH, "data.format"),
    "formatting": (_FACTORY, "data.format"),
    "max_samples": (_FACTORY, "data.train[].max_rows"),
    "max_train_samples": (_HF, "data.train[].max_rows"),
    "max_eval_samples": (_HF, "data.eval[].max_rows"),
    "dataset_prepared_path": (_AXOLOTL, None, "tokenized data is cached by its content; FTCLI_CACHE says where"),
    "dataset_processes": (_AXOLOTL, "data.num_proc"),
    "dataset_num_proc": (_TRL, "data.num_proc"),
    "preprocessing_num_workers": (_FACTORY, "data.num_proc"),
    "overwrite_cache": (_FACTORY, None, "tokenized data is cached by its content and cannot go stale"),
    "interleave_probs": (_FACTORY, "data.train[].weight"),
    "dataloader_num_workers": (_HF, None, "data is in memory; remove it"),
    "shuffle": (_TUNE, None, "training rows are always shuffled, by run.seed"),
    "shuffle_dataset": (_TRL, None, "training rows are always shuffled, by run.seed"),
    # optimisation
    "micro_batch_size": (f"{_AXOLOTL}, {_LITGPT}", _BATCH),
    "batch_size": (f"{_TUNE}, {_UNSLOTH}", _BATCH),
    "train_batch_size": (_HF, _BATCH),
    "per_device_batch_size": (_HF, _BATCH),
    "global_batch_size": (_LITGPT, "train.gradient_accumulation_steps", "rows per step are this times the batch size"),
    "gradient_accumulation": (_UNSLOTH, "train.gradient_accumulation_steps"),
    "grad_accumulation_steps": (_HF, "train.gradient_accumulation_steps"),
    "accumulate_grad_batches": (_LITGPT, "train.gradient_accumulation_steps"),
    "num_epochs": (f"{_AXOLOTL}, {_UNSLOTH}", "train.num_train_epochs"),
    "epochs": (f"{_TUNE}, {_LITGPT}", "train.num_train_epochs"),
    "num_train_steps": (_HF, "train.max_steps"),
    "max_train_steps": (_HF, "train.max_steps"),
    "max_steps_per_epoch": (_TUNE, "train.max_steps"),
    "lr": (_TUNE, "train.learning_rate"),
    "lr_scheduler": (f"{_AXOLOTL}, {_TUNE}", "train.lr_scheduler_type"),
    "scheduler": (_HF, "train.lr_scheduler_type"),
    "min_lr": (_LITGPT, _SCHEDULE_ARGUMENTS, "min_lr, with lr_scheduler_type: cosine_with_min_lr"),
    "cosine_min_lr_ratio": (_AXOLOTL, _SCHEDULE_ARGUMENTS, "min_lr_rate, with lr_scheduler_type: cosine_with_min_lr"),
    "min_lr_ratio": (_HF, _SCHEDULE_ARGUMENTS, "min_lr_rate, with lr_scheduler_type: cosine_with_min_lr"),
    "num_cycles": (_TUNE, _SCHEDULE_ARGUMENTS, "num_cycles"),
    "warmup_ratio": (f"{_AXOLOTL}, {_FACTORY}", "train.warmup_steps", "a value below 1 is a share of all steps"),
    "num_warmup_steps": (_TUNE, "train.warmup_steps"),
    "lr_warmup_steps": (_LITGPT, "train.warmup_steps"),
    "lr_warmup_fraction": (_LITGPT, "train.warmup_steps", "a value below 1 is a share of all steps"),
    "optimizer": (f"{_AXOLOTL}, {_TUNE}", "train.optim"),
    "adam_eps": (_HF, "train.adam_epsilon"),
    "betas": (_TUNE, "train.adam_beta1", "and train.adam_beta2"),
    "gradient_clipping": ("DeepSpeed", "train.max_grad_norm"),
    "max_norm": (_LITGPT, "train.max_grad_norm"),
    "clip_grad_norm": (_TUNE, "train.max_grad_norm"),
    "use_gradient_checkpointing": (_UNSLOTH, "train.gradient_checkpointing"),
    "enable_activation_checkpointing": (_TUNE, "train.gradient_checkpointing"),
    "activation_checkpointing": (f"{_AXOLOTL}, {_HF}", "train.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": (f"{_AXOLOTL}, {_TRL}", "train.gradient_checkpointing"),
    "disable_gradient_checkpointing": (_FACTORY, "train.gradient_checkpointing: false"),
    "enable_activation_offloading": (_TUNE, "train.gradient_checkpointing: offload"),
    "activation_offloading": (f"{_AXOLOTL}, {_TRL}", "train.gradient_checkpointing: offload"),
    "noisy_embedding_alpha": (_AXOLOTL, "train.neftune_noise_alpha"),
    "neft_alpha": (_FACTORY, "train.neftune_noise_alpha"),
    "label_smoothing_factor": (_HF, None, "label smoothing is not offered; remove it"),
    "auto_find_batch_size": (_HF, None, "`ftcli check` says whether a batch size fits"),
    "stage": (_FACTORY, "train.method", "GRPO is `ftcli grpo`, with a grpo section", ("sft", "pt")),
    "training_type": (_UNSLOTH, "lora", "leave the section out for full fine-tuning"),
    "do_train": (_FACTORY, None, "the command says what is done: `ftcli train`, `ftcli eval`"),
    "do_eval": (_FACTORY, None, "the command says what is done: `ftcli train`, `ftcli eval`"),
    "do_predict": (_FACTORY, None, "the command says what is done: `ftcli eval`"),
    # runs, checkpoints, logging
    "run_name": (_HF, "run.name"),
    "exp_name": (_HF, "run.name"),
    "out_dir": (_LITGPT, "run.output_dir"),
    "save_dir": (_HF, "run.output_dir"),
    "random_state": (_UNSLOTH, "run.seed"),
    "random_seed": (_UNSLOTH, "run.seed"),
    "data_seed": (_HF, "run.seed"),
    "resume_from_checkpoint": (f"{_AXOLOTL}, {_TRL}, {_TUNE}", "run.resume"),
    "auto_resume_from_checkpoints": (_AXOLOTL, "run.resume: auto"),
    "overwrite_output_dir": (_FACTORY, "run.resume: never", "the old run is kept beside the new one"),
    "save_steps": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}", "checkpoint.every_steps"),
    "save_interval": (_LITGPT, "checkpoint.every_steps"),
    "saves_per_epoch": (_AXOLOTL, "checkpoint.every_steps", _STEPS_ONLY),
    "save_strategy": (_HF, "checkpoint.every_steps", _STEPS_ONLY),
    "save_total_limit": (_HF, "checkpoint.keep_last"),
    "save_safetensors": (_HF, None, "everything is written as safetensors"),
    "save_only_model": (_HF, None, "checkpoints always hold what resuming needs"),
    "load_best_model_at_end": (_HF, None, "the last model is the result; compare runs with `ftcli eval --run DIR`"),
    "metric_for_best_model": (_HF, None, "the last model is the result; compare runs with `ftcli eval --run DIR`"),
    "early_stopping_patience": (_AXOLOTL, None, "set train.max_steps"),
    "enable_jit_checkpoint": (_HF, "checkpoint.on_sigterm"),
    "logging_steps": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}", "logging.every_steps"),
    "log_interval": (_LITGPT, "logging.every_steps"),
    "log_every_n_steps": (_TUNE, "logging.every_steps"),
    "logging_strategy": (_HF, "logging.every_steps", _STEPS_ONLY),
    "report_to": (_HF, "logging.wandb", "or logging.tensorboard: true"),
    "logger_name": (_LITGPT, "logging.wandb", "or logging.tensorboard: true"),
    "metric_logger": (_TUNE, "logging.wandb", "or logging.tensorboard: true"),
    "use_tensorboard": (_AXOLOTL, "logging.tensorboard: true"),
    "enable_tensorboard": (_UNSLOTH, "logging.tensorboard: true"),
    "enable_wandb": (_UNSLOTH, "logging.wandb: true", _WANDB),
    "wandb_project": (f"{_AXOLOTL}, {_UNSLOTH}", "logging.wandb: true", _WANDB),
    "wandb_entity": (_AXOLOTL, "logging.wandb: true", _WANDB),
    "wandb_name": (_AXOLOTL, "run.name"),
    "wandb_mode": (_AXOLOTL, "logging.wandb", _WANDB),
    "plot_loss": (_FACTORY, None, "report.html in the run directory has the curves"),
    "push_to_hub": (_HF, None, "upload the run's adapter/ or model/ with `hf upload`"),
    "hub_model_id": (f"{_AXOLOTL}, {_HF}", None, "upload the run's adapter/ or model/ with `hf upload`"),
    # evaluation
    "eval_steps": (f"{_AXOLOTL}, {_FACTORY}, {_TRL}", "eval.every_steps"),
    "eval_interval": (_LITGPT, "eval.every_steps"),
    "evals_per_epoch": (_AXOLOTL, "eval.every_steps", _STEPS_ONLY),
    "eval_strategy": (f"{_AXOLOTL}, {_HF}", "eval.every_steps", _STEPS_ONLY),
    "evaluation_strategy": (_HF, "eval.every_steps", _STEPS_ONLY),
    "eval_batch_size": (_AXOLOTL, "eval.per_device_eval_batch_size"),
    "per_device_eval_batch": (_HF, "eval.per_device_eval_batch_size"),
    "predict_with_generate": (_FACTORY, "eval.tasks"),
    "eval_max_new_tokens": (_AXOLOTL, "eval.generate.max_new_tokens"),
    "generation_config": (_HF, "eval.generate"),
    # GRPO
    "rl": (_AXOLOTL, "grpo", "run it with `ftcli grpo`", ("grpo",)),
    "trl": (_AXOLOTL, "grpo", "run it with `ftcli grpo`"),
    "reward_funcs": (f"{_TRL}, {_AXOLOTL}", "grpo.rewards"),
    "reward_model": (_FACTORY, "grpo.rewards", "as in rewards: [{file: my_rewards.py:score}]"),
    "reward_weights": (f"{_TRL}, {_AXOLOTL}", "grpo.rewards[].weight"),
    "num_samples": (_HF, "grpo.num_generations"),
    "group_size": (_TUNE, "grpo.num_generations"),
    "grpo_samples": (_TUNE, "grpo.num_generations"),
    "max_prompt_len": (_HF, "grpo.max_prompt_length"),
    "max_generated_tokens": (_TUNE, "grpo.max_completion_length"),
    "max_response_length": ("verl", "grpo.max_completion_length"),
    "kl_coeff": (_TUNE, "grpo.beta"),
    "kl_coef": (_TRL, "grpo.beta"),
    "pref_beta": (_FACTORY, "grpo.beta"),
    "ppo_epochs": (_TUNE, "grpo.num_iterations"),
    "use_vllm": (_TRL, None, "an engine of ftcli's own generates completions; remove it"),
    # export
    "export_dir": (_FACTORY, None, "exports go into the run directory"),
    "export_format": (_UNSLOTH, "export.formats"),
    "save_method": (_UNSLOTH, "export.formats", "merged_16bit is safetensors, lora is adapter"),
    "merge_lora": (_AXOLOTL, "export.formats: [safetensors]"),
    # machines
    "deepspeed": (f"{_AXOLOTL}, {_FACTORY}, {_HF}", "launch.engine"),
    "fsdp": (f"{_AXOLOTL}, {_HF}", "launch.engine: fsdp"),
    "fsdp_config": (f"{_AXOLOTL}, {_HF}", "launch.engine: fsdp"),
    "fsdp_version": (_AXOLOTL, "launch.engine: fsdp"),
    "data_parallel_replicate_dim": (_TUNE, "launch.dp_replicate_size"),
    "ddp_timeout": (_FACTORY, "launch.engine: ddp"),
    "devices": (_LITGPT, "launch.num_processes"),
    "num_gpus": (_HF, "launch.num_processes"),
    "nproc_per_node": (_TUNE, "launch.num_processes"),
    "tensor_parallel_size": (_AXOLOTL, "launch.engine"),
}

#: Foreign names by section, where the section decides what is meant.
_IN_SECTION: dict[tuple[str, str], _Parts] = {
    ("eval", "batch_size"): (_TUNE, "eval.per_device_eval_batch_size"),
    ("eval", "interval"): (_LITGPT, "eval.every_steps"),
    ("eval", "steps"): (_HF, "eval.every_steps"),
    ("checkpoint", "save_total_limit"): (_HF, "checkpoint.keep_last"),
    ("data.train", "type"): (_AXOLOTL, "data.format"),
    ("data.train", "data_files"): (_AXOLOTL, "data.train[].path"),
    ("data.eval", "type"): (_AXOLOTL, "data.format"),
    ("model", "max_seq_len"): (_TUNE, _LENGTH),
    ("model", "name"): (_UNSLOTH, "model.name_or_path"),
    ("model", "path"): (_HF, "model.name_or_path"),
    ("model", "_component_"): (_TUNE, "model.name_or_path"),
    ("grpo", "max_new_tokens"): (_HF, "grpo.max_completion_length"),
    ("grpo", "max_length"): (_TRL, _LENGTH),
    ("grpo", "learning_rate"): (_TRL, "train.learning_rate"),
}

#: Tools that write `_component_` under every key.
_COMPONENT = ForeignKey(_TUNE, None, "recipes name no Python classes; see docs/recipes.md for the keys")

FOREIGN: Mapping[str, ForeignKey] = MappingProxyType({name: ForeignKey(*parts) for name, parts in _TABLE.items()})
FOREIGN_IN: Mapping[tuple[str, str], ForeignKey] = MappingProxyType(
    {where: ForeignKey(*parts) for where, parts in _IN_SECTION.items()}
)


def foreign(section: str, name: str) -> ForeignKey | None:
    """What other tools mean by this key, in this section (dotted, list positions left out)."""
    if name == "_component_" and section != "model":
        return _COMPONENT
    return FOREIGN_IN.get((section, name)) or FOREIGN.get(name)
