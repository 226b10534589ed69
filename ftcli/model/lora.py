"""LoRA adapters through PEFT: added, loaded and merged. Layer names, parameters and files stay PEFT's.

A merged weight is ``W + s · B A``: s is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA; A is (r, in), B is (out, r),
W is (out, in). DoRA's weights are then scaled to the row norms that were trained.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.errors import FtcliError, first_line
from ftcli.facts.adapters import AdapterChoice, Expression, as_text, at_end, before_index, endless
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.model.initial_adapters import remember_initial, remember_start, trained_by_file_name
from ftcli.model.lora_targets import Targets, chosen, require_possible, resolve_saved, resolve_targets, shortest
from ftcli.model.pretrained import IMPOSSIBLE, first_few
from ftcli.model.score_head import TASK_TYPE, has_score_head
from ftcli.model.token_rows import row_indices, use_rows
from ftcli.plain import JsonMap
from ftcli.plan.precision import DtypePlan
from ftcli.tables.images import LANGUAGE, TrainedPart

if TYPE_CHECKING:
    import peft
    from peft import PeftModel
    from transformers import PreTrainedModel

#: PEFT says so of patterns that are meant for parameters, which it applies them to all the same.
PATTERNS_UNMATCHED = r"The following (rank|alpha)_pattern keys did not match"


def apply_lora(
    model: PreTrainedModel,
    lora: LoraConfig,
    plan: DtypePlan,
    *,
    seed: int,
    parts: Sequence[TrainedPart] = LANGUAGE,
    tokens: Sequence[int] = (),
) -> tuple[peft.PeftModel, Targets]:
    """Freezes ``model`` and adds adapters of dtype ``plan.adapter``, which modules trained whole are held in, too, and
    the rows of embedding and head of new ``tokens``.

    Args:
        parts: The parts that are trained (``model.train``).

    Returns:
        The model with its adapters, and what they are on.

    Raises:
        FtcliError: FT311 to FT314, FT333 and FT338 (exit 3) for names that mean nothing here or cannot be trained.
    """
    import peft

    targets = chosen(resolve_targets(model, lora.target_modules, experts=lora.experts, parts=parts), lora)
    require_possible(lora, targets)
    config = peft_config(model, lora, targets, tokens)
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
    use_rows(adapted, None if plan.adapter is None else getattr(torch, plan.adapter))
    # PEFT keeps names in sets, whose order differs from process to process, and writes them into the adapter's file.
    config.target_modules = sorted(config.target_modules or ())
    if config.target_parameters is not None:
        config.target_parameters = sorted(config.target_parameters)
    if lora.changes_base:
        remember_initial(adapted)
    return adapted, targets


def peft_config(
    model: PreTrainedModel, lora: LoraConfig, targets: Targets, tokens: Sequence[int] = ()
) -> peft.LoraConfig:
    """PEFT's config for ``lora``. Raises FtcliError as :func:`ftcli.model.lora_targets.resolve_saved` does."""
    import peft

    saved = resolve_saved(model, lora.modules_to_save)  # to which PEFT adds a score head
    choice = AdapterChoice(lora)
    transposed = any(not isinstance(model.get_submodule(name), torch.nn.Linear) for name in targets.modules)
    return peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # PEFT annotates int and computes with any number
        lora_dropout=lora.dropout,
        target_modules=[*shortest(model, targets.modules), *targets.by_peft],
        target_parameters=list(targets.parameters) or None,
        modules_to_save=saved or None,
        trainable_token_indices=row_indices(model, tokens) if tokens else None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        rank_pattern={**_of_weights(targets, choice.rank, lora.r), **lora.rank_pattern},
        alpha_pattern={**_of_weights(targets, choice.alpha, lora.alpha), **lora.alpha_pattern},
        fan_in_fan_out=transposed,
        task_type=TASK_TYPE if has_score_head(model) else "CAUSAL_LM",
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
            help="list other names in lora.target_modules, and report this with the model's name",
        )


def _refused(error: ValueError) -> FtcliError:
    return FtcliError.single(
        "FT311",
        f"PEFT cannot adapt what lora.target_modules names: {first_line(error)}",
        help="use target_modules: all-linear, which leaves out what cannot be adapted",
    )


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the adapter saved in ``folder`` attached, not trainable.

    Modules that were trained whole are in the dtype that they are stored in.

    Raises:
        FtcliError: FT334 (exit 3) when the adapter is damaged, is not this model's, lacks a tensor (PEFT would go on
            with random numbers in its place), or names modules by an expression that takes for ever.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _require_expressions(model, folder)
    try:
        stored = {name: tensor for path in _weights(folder) for name, tensor in load_file(path).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # refused below, with their names
            warnings.filterwarnings("ignore", message=PATTERNS_UNMATCHED)
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except torch.OutOfMemoryError:
        raise
    except (OSError, ImportError, *IMPOSSIBLE, SafetensorError) as error:
        raise _unusable(folder, [first_line(error)]) from error
    held = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    problems = [f"it lacks {name}" for name in sorted(set(held) - set(stored))]
    problems += [f"{name} belongs to nothing in this model" for name in sorted(set(stored) - set(held))]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)} and must have {tuple(tensor.shape)}"
        for name, tensor in held.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if problems:
        raise _unusable(folder, problems)
    _take_saved_modules(adapted, stored)
    use_rows(adapted)
    return adapted


@torch.no_grad()
def take_adapter(model: peft.PeftModel, folder: Path) -> None:
    """Gives the model's fresh adapters the values stored in ``folder``, whichever tool wrote them.

    Raises:
        FtcliError: FT334 (exit 3) when a tensor is missing there, belongs to nothing here, has another shape or is not
            finite, or a file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wanted = trained_by_file_name(model)
    try:
        stored = {name: tensor for path in _weights(folder) for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise _unusable(folder, [first_line(error)]) from error
    problems = [f"it lacks {name}" for name in sorted(set(wanted) - set(stored))]
    problems += [f"{name} belongs to nothing that is trained here" for name in sorted(set(stored) - set(wanted))]
    for name in wanted.keys() & stored.keys():
        if stored[name].shape != wanted[name].shape:
            sizes = f"{tuple(stored[name].shape)} and must have {tuple(wanted[name].shape)}"
            problems.append(f"{name} has shape {sizes}")
        elif not bool(torch.isfinite(stored[name]).all()):
            problems.append(f"{name} is not finite")
    problems += _other_scales(model, folder)
    if problems:
        raise _unusable(folder, sorted(problems))
    for name, tensor in wanted.items():
        tensor.copy_(stored[name])


def _other_scales(model: peft.PeftModel, folder: Path) -> list[str]:
    """Modules to which the adapter in ``folder`` gives another alpha (``alpha_pattern``) than the model has: its
    tensors would fit, and weigh more or less.
    """
    from peft.utils.other import get_pattern_key

    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    theirs, active = config.get("alpha_pattern") or {}, str(model.active_adapter)
    if theirs == model.peft_config[active].alpha_pattern:
        return []
    found = []
    for name, layer in model.base_model.model.named_modules():
        ours = getattr(layer, "lora_alpha", {}).get(active)
        parameter = getattr(layer, "parameter_name", None)  # of experts that are one tensor
        path = name.replace(".base_layer", "") + (f".{parameter}" if parameter else "")
        wanted = theirs.get(get_pattern_key(list(theirs), path), config["lora_alpha"])
        if ours is not None and ours != wanted:
            found.append(f"alpha of {path} is {as_text(wanted)} there and {as_text(ours)} here (lora.alpha_pattern)")
    return found


@torch.no_grad()
def compare_with_start(model: peft.PeftModel, folder: Path) -> None:
    """Notes the adapter in ``folder``, from which the frozen one that is loaded was trained, as the model's start.

    Raises FtcliError FT334 as :func:`take_adapter`.
    """
    model.set_adapter(str(model.active_adapter))  # which says what of it is trained
    loaded = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if parameter.requires_grad]
    take_adapter(model, folder)
    remember_start(model)
    for parameter, value in loaded:
        parameter.copy_(value)
        parameter.requires_grad_(False)


def _require_expressions(model: PreTrainedModel, folder: Path) -> None:
    """Refuses an adapter whose expressions are none, or take for ever on this model's names (FT334)."""
    try:
        if not (folder / ADAPTER_CONFIG).is_file():  # a pipe would be waited for
            raise ValueError("it is missing, or no regular file")
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        slow = endless(_expressions(config), [name for name, _ in model.named_modules()])
    except (OSError, ValueError, TypeError, AttributeError, re.error, OverflowError, RecursionError) as error:
        raise _unusable(folder, [f"{ADAPTER_CONFIG}: {first_line(error)}"]) from error
    if slow is not None:
        raise _unusable(folder, [f"{slow[0]}: the expression {slow[1].pattern} takes too long on its modules' names"])


def _expressions(config: JsonMap) -> Iterator[Expression]:
    """Adapter-config fields that PEFT interprets as regular expressions."""
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), str):
            yield key, re.compile(config[key])
    layers = config.get("layers_pattern") or ()
    for each in (layers,) if isinstance(layers, str) else layers:
        yield "layers_pattern", re.compile(before_index(each))
    for key in ("rank_pattern", "alpha_pattern"):
        for each in config.get(key) or ():
            yield key, re.compile(at_end(each))
    for each in config.get("modules_to_save") or ():
        yield "modules_to_save", re.compile(rf"(^|.*\.){each}($|\..*)")


def _take_saved_modules(adapted: PeftModel, stored: Mapping[str, torch.Tensor]) -> None:
    """Modules that were trained whole as they are stored: PEFT rounds them to the base's dtype."""
    marker = f".modules_to_save.{adapted.active_adapter}"
    trained = {name.replace(marker, ""): p for name, p in adapted.named_parameters() if marker in name}
    if not trained:
        return
    hold_saved_modules(adapted, next(stored[name].dtype for name in trained))
    for name, parameter in trained.items():
        parameter.data.copy_(stored[name])


def _weights(folder: Path) -> list[Path]:
    found = sorted(folder.glob("adapter_model*.safetensors"))
    if not found:
        raise OSError("adapter_model.safetensors is not there")
    return found


def _unusable(folder: Path, problems: list[str]) -> FtcliError:
    return FtcliError.single(
        "FT334",
        f"the adapter in {folder} cannot be put on this model: {first_few(problems)}",
        help="name the recipe that it was trained with, or train it again",
    )


def merged_weight(module: Any, weight: Tensor) -> Tensor:
    """``weight``, the base's of a PEFT LoRA layer, with the layer's only active adapter, in float32.

    A weight of fewer bits is added as it is: no copy of it in float32 is made.
    """
    summed, magnitude = delta_weight(module).add_(weight), magnitude_of(module)
    if magnitude is None:
        return summed
    factor = magnitude.data / row_norms(module, summed)
    return summed.mul_(factor if module.fan_in_fan_out else factor[:, None])


def delta_weight(module: Any) -> Tensor:
    """s B A of a layer with an adapter, in float32."""
    delta: Tensor = module.get_delta_weight(module.active_adapters[0])
    return delta.float()


def magnitude_of(module: Any) -> torch.nn.Parameter | None:
    """The lengths of the rows (out,) that DoRA has trained; None for another adapter."""
    name = module.active_adapters[0]
    if not module.use_dora.get(name):
        return None
    found: torch.nn.Parameter = module.lora_magnitude_vector[name].weight
    return found


def row_norms(module: Any, weight: Tensor) -> Tensor:
    """The length of each row (out,); of each column where the weight is stored as (in, out)."""
    found: Tensor = torch.linalg.vector_norm(weight, dim=0 if module.fan_in_fan_out else 1)
    return found
