"""Resolves ``lora.target_modules`` and ``lora.modules_to_save`` to layers of a model, so that PEFT does not.

``all-linear`` means the same in every family: every linear layer of the language model's decoder layers, each expert's
among them, and, where ``model.train`` names them, of the vision tower's layers and of the projector. It never means a
router, the head, or anything of an audio tower. The names are looked up in the model and PEFT is given what was found,
so that it has nothing left to guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn

from ftcli.errors import ExitCode, FtcliError
from ftcli.facts.adapters import (
    AdapterChoice,
    LoraProblem,
    half_of_a_pair_finding,
    head_finding,
    no_module_finding,
    problem_finding,
    problems,
)
from ftcli.facts.layers import means
from ftcli.model.backbone import decoder_layers
from ftcli.plan.trained import PlannedAdapters
from ftcli.tables.images import LANGUAGE, TABLE, TrainedPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftcli.config.model import LoraConfig

_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})
#: transformers' layers for a stack of experts keep their weights as parameters of three dimensions under these names.
_EXPERT_STACKS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")
#: The fused code of a state-space mixer reads these weights itself: an adapter there would not be computed.
_READ_BY_MIXER = frozenset({"out_proj", "dt_proj"})


@dataclass(frozen=True, slots=True)
class Targets:
    """Layers to adapt, by full names in the model.

    Attributes:
        modules: Linear layers.
        experts: Stacks of expert weights: parameters (experts, in, out) or (experts, out, in).
        weights: Weights of linear layers whose names PEFT takes for those of experts: they are adapted as parameters,
            which experts are, too.
        left: Linear layers that ``all-linear`` means and PEFT cannot adapt: such layers where they are quantized.
        by_peft: Names of the recipe that PEFT itself turns into stacks of experts.
    """

    modules: tuple[str, ...]
    experts: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    by_peft: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of weights that PEFT adapts as parameters."""
        return (*self.experts, *self.weights)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Names of all layers and stacks of experts."""
        return (*self.modules, *self.experts, *(name.removesuffix(".weight") for name in self.weights))


def resolve_targets(
    model: PreTrainedModel, wanted: str | Sequence[str], quantized: Collection[str] = frozenset(), *,
    experts: bool = True, parts: Sequence[TrainedPart] = LANGUAGE,
) -> Targets:  # fmt: skip
    """The layers that ``lora.target_modules`` names in ``model``.

    Args:
        quantized: Layers that are to be quantized and are not yet.
        experts: Whether ``all-linear`` means stacks of experts, too.
        parts: The parts that are trained (``model.train``).

    Raises:
        FtcliError: FT311 (exit 3) for a name that matches no linear layer of the decoder, FT312 for the head or the
            embedding.
    """
    linears = {name: module for name, module in _decoder_modules(model) if _is_linear(module)}
    found = tuple(_expert_stacks(model))
    if "language" not in parts:
        linears, found = {}, ()
    seeing, matrices = _of_seeing_parts(model, parts)
    if isinstance(wanted, str):
        targets = _all_linear(model, linears, found, quantized)
        return replace(
            targets,
            modules=(*targets.modules, *seeing),
            weights=(*targets.weights, *matrices),
            experts=targets.experts if experts else (),
        )
    modules: list[str] = []
    stacks: list[str] = []
    weights: list[str] = []
    by_peft: list[str] = []
    for target in wanted:
        if found and not _peft_keeps(model, target):
            by_peft.append(target)
            continue
        matched = [name for name in (*linears, *seeing) if means(target, name)]
        stacked = [name for name in found if means(target, name)]
        lone = [name for name in matrices if means(target, name)]
        if not matched and not stacked and not lone:
            raise _no_such_layer(model, target, [*linears, *seeing, *matrices, *found])
        modules += matched
        stacks += stacked
        weights += lone
    _require_each_part(model, parts, [*modules, *stacks, *weights])
    layers, kept, single = (tuple(dict.fromkeys(names)) for names in (modules, stacks, weights))
    return Targets(layers, kept, single, by_peft=tuple(by_peft))


def _require_each_part(model: PreTrainedModel, parts: Sequence[TrainedPart], names: Sequence[str]) -> None:
    """Raises FtcliError FT311 (exit 3) where ``lora.target_modules`` names nothing of a part that is to be trained."""
    kind = TABLE.get(model.config.model_type)
    if kind is None or set(parts) <= set(LANGUAGE):
        return
    found = {kind.part_of(name) for name in names}
    for part in parts:
        if part not in found and part != "language":
            leaves = sorted({name.rpartition(".")[2] for each in _of_seeing_parts(model, [part]) for name in each})
            raise FtcliError.single(
                "FT311",
                f"lora.target_modules names no layer of the part {part}, which model.train says to train",
                help=f"add some of: {', '.join(leaves)}, or use all-linear",
            )


def _of_seeing_parts(model: PreTrainedModel, parts: Sequence[TrainedPart]) -> tuple[list[str], list[str]]:
    """Linear layers of the tower's layers and of the projector, where these are trained; and the projector's matrices
    that are parameters of no linear layer (Gemma-3).
    """
    kind = TABLE.get(model.config.model_type)
    if kind is None or set(parts) <= set(LANGUAGE):
        return [], []
    linears: list[str] = []
    matrices: list[str] = []
    for name, module in model.named_modules():
        part = kind.part_of(name)
        if part not in parts or part == "language":
            continue
        if _is_linear(module) and (part == "projector" or any(each.isdigit() for each in name.split("."))):
            linears.append(name)
        elif part == "projector" and not _is_linear(module):
            own = module.named_parameters(recurse=False)
            matrices += [f"{name}.{leaf}" for leaf, parameter in own if parameter.dim() == 2]
    return linears, matrices


def _all_linear(
    model: PreTrainedModel, linears: dict[str, nn.Module], experts: tuple[str, ...], quantized: Collection[str]
) -> Targets:
    wanted = [name for name in linears if not is_router(name) and not is_read_by_mixer(model, name)]
    leaves = {name.rpartition(".")[2] for name in wanted}
    lost = {leaf for leaf in leaves if experts and not _peft_keeps(model, leaf)}
    others = [name for name in wanted if name.rpartition(".")[2] in lost]
    left = tuple(name for name in others if name in quantized or not isinstance(linears[name].weight, nn.Parameter))
    return Targets(
        modules=tuple(name for name in wanted if name not in others),
        experts=experts,
        weights=tuple(f"{name}.weight" for name in others if name not in left),
        left=left,
    )


def chosen(targets: Targets, lora: LoraConfig) -> Targets:
    """Layers of ``lora.target_modules`` that the section's other settings leave in.

    Raises:
        FtcliError: FT338 (exit 3) for a setting that chooses nothing, or that cannot choose among experts; FT264 for an
            expression that takes too long.
    """
    found = list(problems(targets.adapted, lora))
    if targets.by_peft and (lora.layers_to_transform is not None or lora.exclude_modules or lora.rank_pattern):
        said = f"{', '.join(targets.by_peft)} stands for stacks of experts, among which no layers can be chosen"
        found.append(LoraProblem("target_modules", said, "use target_modules: all-linear"))
    if found:
        raise FtcliError([problem_finding(problem, None) for problem in found], ExitCode.PREFLIGHT)
    choice = AdapterChoice(lora)
    return replace(
        targets,
        modules=tuple(name for name in targets.modules if choice.adapts(name)),
        experts=tuple(name for name in targets.experts if choice.adapts(name)),
        weights=tuple(name for name in targets.weights if choice.adapts(name.removesuffix(".weight"))),
    )


def shortest(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The last parts of ``names`` where those mean exactly these modules of the whole model; else the full names.

    Adapter files with short names are what people and other programs know.
    """
    leaves = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if meant == set(names) else sorted(names)


def resolve_saved(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Modules that ``lora.modules_to_save`` names, in PEFT's form.

    As in PEFT, a name stands for every module whose path ends in it: ``norm`` for every norm. Towers of other kinds are
    left out.

    Raises:
        FtcliError: FT313 (exit 3) for a name that matches nothing, FT314 for one side of tied embeddings.
    """
    own = {name for name, _ in _decoder_modules(model, whole=True)} | set(_ends(model))
    names: list[str] = []
    for target in wanted:
        everywhere = [name for name, _ in model.named_modules() if name.endswith(target)]
        meant = [name for name in everywhere if name in own]
        if not meant:
            ends = [name.rpartition(".")[2] for name in _ends(model)]
            raise FtcliError([no_module_finding(target, ends)], ExitCode.PREFLIGHT)
        if _is_tied(model) and set(meant) & set(_ends(model)):
            raise FtcliError([half_of_a_pair_finding(target)], ExitCode.PREFLIGHT)
        names += [target] if meant == everywhere else meant
    return names


def require_possible(lora: LoraConfig, targets: Targets) -> None:
    """Raises FtcliError (exit 3): FT311 where nothing is adapted, FT333 for what adapters of experts do not take."""
    if not targets.adapted and not targets.by_peft:
        raise FtcliError.single(
            "FT311",
            "lora.target_modules matches no layer of this model",
            help="fine-tune fully, or choose another model",
        )
    if not targets.experts and not targets.by_peft:
        return
    settings = {
        f"dropout: {lora.dropout:g}": lora.dropout > 0,
        "use_dora": lora.use_dora,
        f"init_lora_weights: {lora.init_lora_weights}": lora.init_lora_weights is not True,
    }
    wanted = [said for said, on in settings.items() if on]
    if wanted:
        raise FtcliError.single(
            "FT333",
            f"lora.{wanted[0]} cannot be applied to adapters on experts: PEFT adds those to the weights of all "
            "experts at once, before it sees a token",
            help="leave it out, or set lora.experts: false",
        )


def planned_adapters(
    model: PreTrainedModel, lora: LoraConfig, quantized: Collection[str] = frozenset()
) -> PlannedAdapters:
    """Counts the layers and parameters that ``lora`` trains in ``model``, which may be on ``meta`` and is not changed.

    Args:
        quantized: Layers that are to be quantized and are not yet.

    Raises:
        FtcliError: FT311 to FT314 (exit 3) for names that mean nothing here or cannot be trained; as
            :func:`require_possible`.
    """
    targets = chosen(resolve_targets(model, lora.target_modules, quantized, experts=lora.experts), lora)
    require_possible(lora, targets)
    saved = resolve_saved(model, lora.modules_to_save)
    trained = {id(p): p.numel() for n, m in model.named_modules() for p in m.parameters() if n.endswith(tuple(saved))}
    names = [name for name in targets.modules if not name.endswith(tuple(saved))]
    shapes = {name: model.get_submodule(name).weight.shape for name in names}
    shapes |= {name.removesuffix(".weight"): model.get_parameter(name).shape for name in targets.parameters}
    rank = AdapterChoice(lora).rank
    adapters = sum(
        rank(name) * (shape[-1] + shape[-2]) * (shape[0] if len(shape) == 3 else 1) + lora.use_dora * shape[0]
        for name, shape in shapes.items()
    )
    return PlannedAdapters(
        layers=dict(Counter(name.rpartition(".")[2] for name in targets.adapted)),
        left=dict(Counter(".".join(name.split(".")[-2:]) for name in targets.left)),
        parameters=None if targets.by_peft else adapters + (sum(trained.values()) if saved else 0),
    )


def freeze_other_parts(model: PreTrainedModel, parts: Sequence[TrainedPart] = LANGUAGE) -> None:
    """Freezes all of a multimodal model but its ``parts``, the head being the language model's; changes nothing in a
    model of text. What of a tower is read by nobody stays frozen (SigLIP's head).
    """
    if model.config.get_text_config() is model.config:
        return
    trained: set[int] = set()
    if "language" in parts:
        head = model.get_output_embeddings()
        owners = [model.get_decoder(), *([] if head is None else [head])]
        trained = {id(p) for owner in owners for p in owner.parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in trained or _is_seeing(model, name, parts))


def _is_seeing(model: PreTrainedModel, name: str, parts: Sequence[TrainedPart]) -> bool:
    """True if a parameter belongs to a tower or projector that is trained whole."""
    kind = TABLE.get(model.config.model_type)
    part = None if kind is None else kind.part_of(name)
    unread = any(name.startswith(f"model.{path}.head.") for path in kind.vision) if kind is not None else False
    return part in parts and part != "language" and not unread


def summary_of_targets(model: Any, targets: Targets) -> str:
    """One line for people: what has adapters, what is trained whole, and how many parameters that is.

    Args:
        model: With its adapters.
    """
    adapted = Counter(name.rpartition(".")[2] for name in targets.adapted)
    parts = [f"{count} {leaf}" for leaf, count in adapted.items()] or [", ".join(targets.by_peft)]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and ".modules_to_save." in n)
    text = f"adapters: {', '.join(parts)}; {trained:,} parameters trained"
    if whole:
        text += f", {whole:,} of them in modules that are trained whole"
    if targets.left:
        leaves = Counter(".".join(name.split(".")[-2:]) for name in targets.left)
        text += f"; not adapted: {', '.join(f'{count} {leaf}' for leaf, count in leaves.items())}"
        text += " (PEFT takes their names for those of the experts, and they are quantized)"
    return text


def _decoder_modules(model: PreTrainedModel, *, whole: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the decoder layers (or of the ``whole`` decoder) with their full names."""
    root = model.get_decoder() if whole else decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is root)
    ends = _ends(model)
    for name, module in root.named_modules(prefix=prefix):
        if name not in ends or whole:
            yield name, module


def _ends(model: PreTrainedModel) -> list[str]:
    """Names of embedding and head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def is_router(name: str) -> bool:
    """True if a layer of this name says which experts a token goes to, or how much of a shared one it gets."""
    return not _ROUTER_NAMES.isdisjoint(name.split("."))


def is_read_by_mixer(model: PreTrainedModel, name: str) -> bool:
    """True if the fused code of a state-space mixer reads this layer's weight itself, and never calls the layer."""
    parent, _, leaf = name.rpartition(".")
    mixer = model.get_submodule(parent)
    return leaf in _READ_BY_MIXER and hasattr(mixer, "A_log") and hasattr(mixer, "D")


def _expert_stacks(model: PreTrainedModel) -> Iterator[str]:
    for name, module in _decoder_modules(model):
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf in _EXPERT_STACKS and parameter.dim() == 3:
                yield f"{name}.{leaf}"


def _peft_keeps(model: PreTrainedModel, target: str) -> bool:
    """True if PEFT takes ``target`` for a module's name.

    In some families it takes the names that experts had in transformers 4 (``gate_proj``, ``w1``, ``gate``) for today's
    stacks of experts, wherever in the model they stand: a shared expert's layers cannot be named there.
    """
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(target_modules=[target])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of a pair that it fuses
        return False
    return target in (config.target_modules or ())


def _no_such_layer(model: PreTrainedModel, target: str, names: Sequence[str]) -> FtcliError:
    if any(means(target, end) for end in _ends(model)):
        return FtcliError([head_finding(target)], ExitCode.PREFLIGHT)
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    close = get_close_matches(target, leaves, 1)
    listed = f"the parts of this {model.config.model_type} that are trained have: {', '.join(leaves)}"
    return FtcliError.single(
        "FT311",
        f"lora.target_modules: no linear layer of a part that is trained is named {target}",
        help=f"did you mean {close[0]}? {listed}" if close else f"use all-linear; {listed}",
    )
