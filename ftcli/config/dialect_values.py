"""Values of other tools' settings, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
