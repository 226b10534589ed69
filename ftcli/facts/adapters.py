"""Which of the layers that ``lora.target_modules`` names have adapters, and of which rank. Pure: names go in.

The rules are PEFT's (0.21, ``check_target_module_exists`` and ``get_pattern_key``); a test holds them against it. What
is said here and would change nothing is a problem, and not passed over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftcli.config import LoraConfig
from ftcli.errors import Finding, Origin
from ftcli.facts.shape import Linear, ModelShape

#: The first number in a path is the layer's; those of experts come later.
_NUMBERED = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of ``rank`` on a linear layer, in so many decoder ``layers``."""

    linear: Linear
    rank: int
    layers: int

    @property
    def elements(self) -> int:
        """Elements of A and B in all layers."""
        return self.rank * (self.linear.in_features + self.linear.out_features) * self.layers


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting of the section ``lora`` that means nothing for a model: its ``key``, what is wrong, what helps."""

    key: str
    message: str
    help: str


def has_adapter(name: str, lora: LoraConfig) -> bool:
    """Whether a layer that ``lora.target_modules`` names is left in by the settings that choose among those."""
    return not any(_excludes(each, name) for each in exclusions(lora)) and (
        lora.layers_to_transform is None or layer_index(name, lora) in lora.layers_to_transform
    )


def exclusions(lora: LoraConfig) -> tuple[str | re.Pattern[str], ...]:
    """What ``lora.exclude_modules`` says: names, or one regular expression for whole paths."""
    excluded = lora.exclude_modules
    return (re.compile(excluded),) if isinstance(excluded, str) else excluded


def _excludes(excluded: str | re.Pattern[str], name: str) -> bool:
    if isinstance(excluded, re.Pattern):
        return excluded.fullmatch(name) is not None
    return name == excluded or name.endswith(f".{excluded}")


def layer_index(name: str, lora: LoraConfig) -> int | None:
    """The number of the layer that a module is in: the first in its path, or the one behind ``lora.layers_pattern``."""
    if not lora.layers_pattern:
        match = _NUMBERED.match(name)
        return int(match["index"]) if match else None
    found = next((match for each in lora.layers_pattern if (match := re.match(before_index(each), name))), None)
    return int(found["ftcli_index"]) if found else None


def before_index(pattern: str) -> str:
    """The expression that finds a layer's number behind one of ``lora.layers_pattern``."""
    return rf"(?:^|.*?\.)(?:{pattern})\.(?P<ftcli_index>\d+)\."


def at_end(pattern: str) -> str:
    """The expression that finds a key of ``lora.rank_pattern`` or ``alpha_pattern`` at the end of a path."""
    return rf"(.*\.)?({pattern})$"


def rank_of(name: str, lora: LoraConfig) -> int:
    """The rank of a module's adapter: that of the first pattern that matches, else ``lora.r``."""
    return next((rank for key, rank in lora.rank_pattern.items() if _matches(key, name)), lora.r)


def alpha_of(name: str, lora: LoraConfig) -> float:
    """The alpha of a module's adapter, likewise."""
    return next((alpha for key, alpha in lora.alpha_pattern.items() if _matches(key, name)), lora.alpha)


def _matches(key: str, name: str) -> bool:
    return re.match(at_end(key), name) is not None


def adapters(shape: ModelShape, lora: LoraConfig) -> tuple[Adapter, ...]:
    """Every adapter of a model whose shape is known, equal ones of all layers together."""
    found: Counter[tuple[Linear, int]] = Counter()
    for linear in shape.adapted(lora.target_modules):
        for index in range(shape.num_layers):
            name = f"model.layers.{index}.{linear.name}"
            if has_adapter(name, lora):
                found[linear, rank_of(name, lora)] += 1
    return tuple(Adapter(linear, rank, layers) for (linear, rank), layers in found.items())


def targets_of(shape: ModelShape, lora: LoraConfig) -> list[str]:
    """Paths of the modules that ``lora.target_modules`` names, before a choice is made among them."""
    named = shape.adapted(lora.target_modules)
    return [f"model.layers.{index}.{linear.name}" for index in range(shape.num_layers) for linear in named]


def problems(names: Sequence[str], lora: LoraConfig) -> Iterator[Problem]:
    """Settings that choose nothing among the modules ``names``.

    Args:
        names: What ``lora.target_modules`` names in the model.
    """
    left = [name for name in names if has_adapter(name, lora)]
    for each in exclusions(lora):
        if not any(_excludes(each, name) for name in names):
            said = each if isinstance(each, str) else each.pattern
            yield Problem("exclude_modules", f"no module that would have an adapter is excluded by {said}", _NAMES)
    present = {index for name in names if (index := layer_index(name, lora)) is not None}
    missing = sorted(set(lora.layers_to_transform or ()) - present)
    if missing:
        there = f"those are {min(present)} to {max(present)}" if present else "lora.layers_pattern matches no layer"
        said = ", ".join(map(str, missing))
        yield Problem("layers_to_transform", f"no layer with adapters has the number {said}", there)
    elif names and not left:
        yield Problem("exclude_modules", "every module is excluded: nothing would be trained", "exclude fewer")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            if left and not any(_matches(pattern, name) for name in left):
                yield Problem(key, f"no module with an adapter matches {pattern}", _NAMES)


_NAMES = "use the end of a module's path, such as q_proj or layers.0.self_attn.q_proj; a regular expression may be one"


def problem_finding(problem: Problem, origin: Origin | None) -> Finding:
    """FT338 for a setting that means nothing for a model."""
    return Finding("FT338", f"lora.{problem.key}: {problem.message}", origin, problem.help)
