"""Adapters through PEFT: layer names, parameters and files stay PEFT's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ftcli.config import LoraConfig
from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.facts.adapters import AdapterChoice
from ftcli.facts.precision import DtypePlan
from ftcli.model.initial_adapters import remember_initial
from ftcli.model.lora_targets import Targets, chosen, require_possible, resolve_saved, resolve_targets, shortest
from ftcli.model.pretrained import PATTERNS_UNMATCHED

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel


def apply_lora(
    model: PreTrainedModel, lora: LoraConfig, plan: DtypePlan, *, seed: int
) -> tuple[peft.PeftModel, Targets]:
    """Freezes ``model`` and adds adapters of dtype ``plan.adapter``, which modules trained whole are held in, too.

    Returns:
        The model with its adapters, and what they are on.

    Raises:
        FtcliError: FT311 to FT314, FT333 and FT338 (exit 3) for names that mean nothing here or cannot be trained.
    """
    import peft

    targets = chosen(resolve_targets(model, lora.target_modules), lora)
    require_possible(lora, targets)
    config = peft_config(model, lora, targets)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # PEFT looks for the patterns among modules alone, and passes over the parameters that they are applied to.
            warnings.filterwarnings("ignore", message=PATTERNS_UNMATCHED)
            adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=plan.adapter == "float32")
    except ValueError as error:
        raise _refused(error) from error
    _require_adapted(adapted, targets)
    if plan.adapter is not None:
        hold_saved_modules(adapted, getattr(torch, plan.adapter))
    # PEFT keeps names in sets, whose order differs from process to process, and writes them into the adapter's file.
    config.target_modules = sorted(config.target_modules or ())
    if config.target_parameters is not None:
        config.target_parameters = sorted(config.target_parameters)
    if lora.changes_base:
        remember_initial(adapted)
    return adapted, targets


def peft_config(model: PreTrainedModel, lora: LoraConfig, targets: Targets) -> peft.LoraConfig:
    """What PEFT is told. Raises FtcliError as :func:`ftcli.model.lora_targets.resolve_saved` does."""
    import peft

    saved = resolve_saved(model, lora.modules_to_save)
    choice = AdapterChoice(lora)
    transposed = any(not isinstance(model.get_submodule(name), torch.nn.Linear) for name in targets.modules)
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # PEFT annotates int and computes with any number
        lora_dropout=lora.dropout,
        target_modules=[*shortest(model, targets.modules), *targets.by_peft],
        target_parameters=list(targets.parameters) or None,
        modules_to_save=saved or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        rank_pattern={**_of_weights(targets, choice.rank, lora.r), **lora.rank_pattern},
        alpha_pattern={**_of_weights(targets, choice.alpha, lora.alpha), **lora.alpha_pattern},
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )


def _of_weights(targets: Targets, value_of: Callable[[str], float], default: float) -> dict[str, float]:
    """Ranks or alphas of layers that PEFT adapts as parameters: its names for those end in ``.weight``."""
    values = {name: value_of(name.removesuffix(".weight")) for name in targets.weights}
    return {re.escape(name): value for name, value in values.items() if value != default}


def hold_saved_modules(adapted: peft.PeftModel, dtype: torch.dtype) -> None:
    """Holds the modules that are trained whole in ``dtype``; what they hand on stays in the dtype of the base.

    PEFT copies them in the base's dtype, where most updates would be rounded away.
    """
    from peft.utils.other import ModulesToSaveWrapper

    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for module in wrapper.modules_to_save.values():
                module.to(dtype)
                if not isinstance(module, torch.nn.Linear):  # autocast sees to linear layers
                    module.register_forward_hook(partial(_hand_on, wrapper.original_module))


def _hand_on(original: torch.nn.Module, _module: torch.nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
    """The output in the dtype that the frozen module's would have."""
    return output.to(next(original.parameters()).dtype)


def _require_adapted(adapted: peft.PeftModel, targets: Targets) -> None:
    """Holds what PEFT did against what it was asked for."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    found: set[str] = set()
    whole: list[str] = []
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            whole.append(name)
        elif isinstance(module, ParamWrapper):
            found.add(f"{name.replace('.base_layer', '')}.{module.parameter_name}")
        elif isinstance(module, LoraLayer):
            found.add(name)
    wanted = {name for name in (*targets.modules, *targets.parameters) if name.removesuffix(".weight") not in whole}
    problem = next(iter(sorted(wanted - found)), None) or next(iter(sorted(found - wanted)), None)
    if problem is not None and not targets.by_peft:
        said = "got an adapter without being asked to" if problem in found else "got no adapter"
        raise FtcliError.single(
            "FT311",
            f"PEFT did not adapt what lora.target_modules says: {problem} {said}",
            exit_code=ExitCode.PREFLIGHT,
            help="list other names in lora.target_modules, and report this with the model's name",
        )


def _refused(error: ValueError) -> FtcliError:
    return FtcliError.single(
        "FT311",
        f"PEFT cannot adapt what lora.target_modules names: {first_line(error)}",
        exit_code=ExitCode.PREFLIGHT,
        help="use target_modules: all-linear, which leaves out what cannot be adapted",
    )
