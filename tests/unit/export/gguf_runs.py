"""Runs of small models that GGUF files are written of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import peft
import torch

from ftcli.config.evaluation import ExportConfig
from ftcli.export.clean.process import CleanProcess
from ftcli.export.gguf.file import ExpectedFile, prepare_gguf
from ftcli.export.source import resolve_source
from ftcli.export.writing import ExportResult, export_run
from tests.unit.export.conftest import Heard, Trained, tokenizer, write_run

#: Checkpoints whose language model stands in the table, by their own ``model_type``.
MULTIMODAL = {"qwen2_vl_text": "qwen2_vl", "qwen2_5_vl_text": "qwen2_5_vl", "qwen3_vl_text": "qwen3_vl"}
#: What llama.cpp builds of a family, where small models are otherwise.
AS_BUILT: dict[str, dict[str, Any]] = {
    "bitnet": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "cohere2": {"tie_word_embeddings": True, "num_hidden_layers": 4, "layer_types": None},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None, "layer_types": None},
    "olmo3": {"num_hidden_layers": 4, "layer_types": None},
}
LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def adapt(folder: Path, model: Any, **options: Any) -> Trained:
    """A run with an adapter on ``model`` that changes its answers."""
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    targets = LANGUAGE if hasattr(model.model, "language_model") else "all-linear"
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM", **options}
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter += torch.randn(parameter.shape) * 0.3 / parameter.shape[-1] ** 0.5
    run = write_run(folder / "run", folder / "base", lora={"r": 4})
    adapted.save_pretrained(run.adapter_dir, save_embedding_layers=False)
    tokenizer().save_pretrained(run.adapter_dir)
    return Trained(folder / "base", run)


def export(
    made: Trained, *types: str, heard: Heard | None = None, lora: bool = False, force: bool = False
) -> ExportResult:
    settings = ExportConfig.model_validate({"gguf": {"types": types, "lora_adapter": lora}})
    (result,) = export_run(made.run, ["gguf"], reporter=heard or Heard(), offline=True, settings=settings, force=force)
    return result


def prepared_of(made: Trained, clean: CleanProcess) -> ExpectedFile:
    source = dataclasses.replace(resolve_source(made.run), reload=clean.ask, offline=True)
    return prepare_gguf(source, lambda _: None)


def changed(family: str, **values: Any) -> Any:
    """A small model whose config says something else."""
    from transformers import AutoModelForCausalLM

    from tests.small_models import config_of

    config = config_of(family)
    for key, value in values.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict()), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 32}},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "embeddings trained whole": {"modules_to_save": ["embed_tokens"]},
    "dora": {"use_dora": True},
}
