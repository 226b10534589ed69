"""Adapters through PEFT: layer names, parameters and files stay PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ftcli.config import LoraConfig
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.facts.precision import DtypePlan

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def apply_lora(model: PreTrainedModel, lora: LoraConfig, plan: DtypePlan, *, seed: int) -> PeftModel:
    """Freezes ``model`` and adds adapters of dtype ``plan.adapter`` to its linear layers.

    Raises FtcliError FT311 when ``lora.target_modules`` matches nothing.
    """
    import peft

    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # PEFT annotates int and computes with any number
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=plan.adapter == "float32")
    except ValueError as error:
        raise FtcliError.single(
            "FT311",
            f"lora.target_modules matches no layer of this model: {first_line(error)}",
            exit_code=ExitCode.PREFLIGHT,
            help="use target_modules: all-linear",
        ) from error
    return adapted


def load_adapter(model: PreTrainedModel, folder: Path, *, trainable: bool = False) -> PeftModel:
    """The model with the adapter saved in ``folder`` attached."""
    import peft

    return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
