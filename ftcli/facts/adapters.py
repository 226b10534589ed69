"""Chooses the adapters of the layers that ``lora.target_modules`` names, and their ranks. Works on names alone.

The rules are PEFT's (0.21, ``check_target_module_exists`` and ``get_pattern_key``); a test holds them against it. A
setting that would have no effect is reported, not ignored.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from ftcli.config.model import LoraConfig
from ftcli.errors import Finding, Origin, first_line
from ftcli.facts.layers import Linear, means
from ftcli.facts.shape import ModelShape
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.paths import expanded, is_file
from ftcli.time_limit import TookTooLong, limited_time

#: The first number in a path is the layer's; those of experts come later.
_NUMBERED: re.Pattern[str] = re.compile(r".*?\.[^.]*\.(?P<ftcli_index>\d+)\.")

#: Expressions may take so long on the names of a model's modules: an honest one needs a microsecond for each.
SECONDS = 0.25
_SECONDS_A_NAME = 2e-5

#: The key of the section that holds an expression, and the expression.
Expression: TypeAlias = tuple[str, re.Pattern[str]]
#: So many of the patterns that match nothing are named.
_NAMED = 3
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """An adapter of ``rank`` on a linear layer, in so many decoder ``layers``."""

    linear: Linear
    rank: int
    layers: int

    @property
    def elements(self) -> int:
        """Elements of A and B in all layers."""
        return self.rank * (self.linear.in_features + self.linear.out_features) * self.linear.experts * self.layers


@dataclass(frozen=True, slots=True)
class LoraProblem:
    """A setting of the section ``lora`` that cannot be followed: its ``key``, what is wrong, what helps."""

    key: str
    message: str
    help: str
    code: str = "FT338"


class AdapterChoice:
    """The choice of single modules by the section ``lora``, its expressions compiled once. ``lora``: its expressions
    compile: preflight has looked (FT264).
    """

    def __init__(self, lora: LoraConfig) -> None:
        excluded = lora.exclude_modules
        #: Names, or one regular expression for whole paths.
        self.excluded = (re.compile(excluded),) if isinstance(excluded, str) else excluded
        self.layers = tuple(re.compile(before_index(each)) for each in lora.layers_pattern) or (_NUMBERED,)
        self.ranks = _compiled(lora.rank_pattern)
        self.alphas = _compiled(lora.alpha_pattern)
        self._lora = lora

    @property
    def is_uniform(self) -> bool:
        """True if every named layer has an adapter, all of one rank: the section chooses among none."""
        return not self.excluded and self._lora.layers_to_transform is None and not self.ranks

    def adapts(self, name: str) -> bool:
        """True if a layer that ``lora.target_modules`` names is left in by the settings that choose among those."""
        wanted = self._lora.layers_to_transform
        return not any(excludes(each, name) for each in self.excluded) and (
            wanted is None or self.layer_index(name) in wanted
        )

    def layer_index(self, name: str) -> int | None:
        """The number of the layer that a module is in: the first in its path, or that behind a ``layers_pattern``."""
        found = next((match for each in self.layers if (match := each.match(name))), None)
        return int(found["ftcli_index"]) if found else None

    def rank(self, name: str) -> int:
        """The rank of a module's adapter: that of the first pattern that matches, else ``lora.r``."""
        return next((rank for each, rank in self.ranks.values() if each.match(name)), self._lora.r)

    def alpha(self, name: str) -> float:
        """The alpha of a module's adapter, likewise."""
        return next((alpha for each, alpha in self.alphas.values() if each.match(name)), self._lora.alpha)

    def expressions(self) -> Iterator[Expression]:
        """Every regular expression of the recipe."""
        yield from (("exclude_modules", each) for each in self.excluded if isinstance(each, re.Pattern))
        yield from (("layers_pattern", each) for each in self.layers if each is not _NUMBERED)
        yield from (("rank_pattern", each) for each, _ in self.ranks.values())
        yield from (("alpha_pattern", each) for each, _ in self.alphas.values())


def excludes(excluded: str | re.Pattern[str], name: str) -> bool:
    """True if one of ``lora.exclude_modules`` means a module."""
    if isinstance(excluded, re.Pattern):
        return excluded.fullmatch(name) is not None
    return means(excluded, name)


def before_index(pattern: str) -> str:
    """The expression that finds a layer's number behind one of ``lora.layers_pattern``."""
    return rf"(?:^|.*?\.)(?:{pattern})\.(?P<ftcli_index>\d+)\."


def at_end(pattern: str) -> str:
    """The expression that finds a key of ``lora.rank_pattern`` or ``alpha_pattern`` at the end of a path."""
    return rf"(.*\.)?({pattern})$"


def _compiled(patterns: Mapping[str, _Number]) -> dict[str, tuple[re.Pattern[str], _Number]]:
    return {key: (re.compile(at_end(key)), value) for key, value in patterns.items()}


def endless(expressions: Iterable[Expression], names: Sequence[str]) -> Expression | None:
    """The expression at which all of them took too long on the names of modules, or None. PEFT matches the same names
    without a limit, and so does the memory estimate.
    """
    waiting = list(expressions)
    tried = None
    try:
        with limited_time(SECONDS + _SECONDS_A_NAME * len(names) * len(waiting)):
            for tried in waiting:
                for name in names:
                    tried[1].match(name)
                    tried[1].fullmatch(name)
    except TookTooLong:
        return tried
    return None


def adapters(shape: ModelShape, lora: LoraConfig) -> tuple[LinearAdapter, ...]:
    """Every adapter of a model whose shape is known, equal ones of all layers together."""
    choice, named = AdapterChoice(lora), shape.adapted(lora.target_modules, experts=lora.experts)
    if choice.is_uniform:  # the estimate asks many times; 80 layers have 560 names
        return tuple(LinearAdapter(linear, lora.r, shape.layers_with(linear)) for linear in named)
    found: Counter[tuple[Linear, int]] = Counter()
    for linear, name in _named_in(shape, named):
        if choice.adapts(name):
            found[linear, choice.rank(name)] += 1
    return tuple(LinearAdapter(linear, rank, layers) for (linear, rank), layers in found.items())


#: Initialisations of PEFT that take something out of the base weights.
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def start_folder(path: str) -> Path:
    """The folder of the adapter that ``lora.start_from`` names: itself, or that of a run."""
    folder = expanded(path)
    of_run = folder / "adapter"
    return of_run if is_file(of_run / ADAPTER_CONFIG) else folder


def start_problems(lora: LoraConfig, path: str) -> list[str]:
    """Reasons why training cannot begin from the adapter at ``path`` under these settings."""
    folder = start_folder(path)
    try:
        if not is_file(folder / ADAPTER_CONFIG):
            return [f"there is no {ADAPTER_CONFIG} in {folder}"]
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        stored = {name: config.get(name) for name in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        return [f"{ADAPTER_CONFIG} cannot be read: {first_line(error)}"]
    if not any(folder.glob("adapter_model*.safetensors")):
        return [f"{folder} holds no adapter_model.safetensors; save the adapter as safetensors"]
    if stored["peft_type"] != "LORA":
        return [f"it is of the kind {stored['peft_type']!r}, not LORA"]
    begun = str(config.get("init_lora_weights")).lower()
    if begun.startswith(_CHANGING_THE_BASE):
        return [
            f"it began as {begun} and belongs to base weights without that beginning; save it as plain LoRA (PEFT's "
            "path_initial_model_for_weight_conversion)"
        ]
    if config.get("alora_invocation_tokens"):
        return ["it is an activated LoRA (alora_invocation_tokens), which works on a part of each text"]
    ours = {"r": lora.r, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "use_dora": lora.use_dora}
    return [
        f"lora.{name.removeprefix('lora_')} is {as_text(value)} there and {as_text(ours[name])} here"
        for name, value in stored.items()
        if name in ours and (value or 0) != ours[name]
    ]


def as_text(value: object) -> str:
    """A number or a switch as a recipe writes it."""
    return str(bool(value)).lower() if isinstance(value, bool) or value is None else f"{value:g}"


def targets_of(shape: ModelShape, lora: LoraConfig) -> list[str]:
    """Paths of the modules that ``lora.target_modules`` names, before a choice is made among them."""
    return [name for _, name in _named_in(shape, shape.adapted(lora.target_modules, experts=lora.experts))]


def _named_in(shape: ModelShape, linears: Sequence[Linear]) -> Iterator[tuple[Linear, str]]:
    """Each of these with its path, in each layer that has it."""
    for index, layer in enumerate(shape.layers):
        yield from ((linear, f"model.layers.{index}.{linear.name}") for linear in linears if linear in layer.linears)


def problems(names: Sequence[str], lora: LoraConfig) -> Iterator[LoraProblem]:
    """Settings that choose nothing among the modules ``names``, and expressions that take for ever on those. ``names``:
    what ``lora.target_modules`` names in the model.
    """
    choice = AdapterChoice(lora)
    slow = endless(choice.expressions(), names)
    if slow is not None:
        said = f"the expression {slow[1].pattern} takes too long on the names of {len(names):,} modules"
        yield LoraProblem(slow[0], said, "name the end of a path, or avoid nested repetitions", "FT264")
        return
    left = [name for name in names if choice.adapts(name)]
    for each in choice.excluded:
        if not any(excludes(each, name) for name in names):
            said = each if isinstance(each, str) else each.pattern
            yield LoraProblem("exclude_modules", f"no module that would have an adapter is excluded by {said}", _NAMES)
    present = {index for name in names if (index := choice.layer_index(name)) is not None}
    missing = sorted(set(lora.layers_to_transform or ()) - present)
    if missing:
        there = f"those are {min(present)} to {max(present)}" if present else "lora.layers_pattern matches no layer"
        said = ", ".join(map(str, missing))
        yield LoraProblem("layers_to_transform", f"no layer with adapters has the number {said}", there)
    elif names and not left:
        yield LoraProblem("exclude_modules", "every module is excluded: nothing would be trained", "exclude fewer")
    for key, patterns in (("rank_pattern", choice.ranks), ("alpha_pattern", choice.alphas)):
        idle = [each for each, (compiled, _) in patterns.items() if not any(compiled.match(name) for name in left)]
        if left and idle:
            more = f" or {len(idle) - _NAMED:,} others" if len(idle) > _NAMED else ""
            yield LoraProblem(key, f"no module with an adapter matches {', '.join(idle[:_NAMED])}{more}", _NAMES)


_NAMES = "use the end of a module's path, such as q_proj or layers.0.self_attn.q_proj; a regular expression may be one"


def problem_finding(problem: LoraProblem, origin: Origin | None) -> Finding:
    """FT338 for a setting that means nothing for a model, FT264 for an expression that takes too long."""
    return Finding(problem.code, f"lora.{problem.key}: {problem.message}", origin, problem.help)


def head_finding(target: str, origin: Origin | None = None) -> Finding:
    """FT312 for a name in ``lora.target_modules`` that is the head's or the embedding's."""
    message = f"adapters on {target} are not supported: the loss reads the head's weight itself"
    return Finding("FT312", message, origin, "train it whole with lora.modules_to_save")


def no_module_finding(name: str, ends: Sequence[str], origin: Origin | None = None) -> Finding:
    """FT313 for a name in ``lora.modules_to_save``; ``ends`` are the names of embedding and head."""
    message = f"lora.modules_to_save: no module of the language model has a name that ends in {name}"
    return Finding("FT313", message, origin, f"use some of: {', '.join(ends)}, norm")


def half_of_a_pair_finding(name: str, origin: Origin | None = None) -> Finding:
    """FT314 for one side of tied embeddings in ``lora.modules_to_save``."""
    message = f"the model shares one matrix between embedding and head: {name} cannot be trained alone"
    return Finding("FT314", message, origin, "remove it from lora.modules_to_save, or fine-tune fully")
