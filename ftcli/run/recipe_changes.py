"""Changes between the recipe of a run and the recipe that it is resumed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from ftcli.config.dump import undumped
from ftcli.config.recipe import Recipe
from ftcli.plain import JsonObject
from ftcli.tables import methods

#: Sections and keys that may differ when a run is resumed, because no weight depends on them. Everything else decides
#: what is learnt; so do `train.max_steps` and `train.num_train_epochs`, through the learning rate of every step.
#: Every checkpointing policy gives the same bits, and another machine may need another one. On another number of
#: processes a step still learns from as many micro-batches as the run began with.
HARMLESS = (
    "run.name",
    "run.output_dir",
    "run.resume",
    "logging",
    "eval",
    "export",
    "checkpoint",
    "data.eval",
    "train.gradient_checkpointing",
    "train.uncheckpointed_layers",
    "train.memory_budget_gib",
    "launch",
)

#: What results before and after training are of, by the command that measures them: once something was measured, a run
#: goes on with the same. `ftcli train` asks no tasks.
_MEASURED = {"train": ("data.eval",), "grpo": ("data.eval", "eval.tasks", "eval.generate")}

#: What the tensors of a checkpoint depend on, whatever the training method.
_STRUCTURAL = ("model", "quantization", "lora", "train.optim", "train.loraplus_lr_ratio", "train.method")

_ABSENT, _NONE = "(absent)", "[]"


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """One key with its old and its new value, as people write them."""

    key: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"

    @property
    def in_both(self) -> bool:
        """True if both recipes have the key; otherwise one of them has no such section."""
        return _ABSENT not in (self.old, self.new)

    def is_in(self, keys: tuple[str, ...]) -> bool:
        """True if the key is one of ``keys`` or lies below one of them."""
        return any(self.key == key or self.key.startswith(key + ".") for key in keys)


def matters(change: ChangedKey, command: str) -> bool:
    """True if a run of ``command`` with this change would learn something else, or be measured on something else.

    Where nothing was held out so far, nothing was measured.
    """
    if change.old != _NONE and change.is_in(_MEASURED.get(command, ())):
        return True
    return not change.is_in(HARMLESS)


def structural_keys() -> tuple[str, ...]:
    """Keys that the tensors of a checkpoint depend on: they may never differ, not even with ``--resume PATH``."""
    return (*_STRUCTURAL, *(key for method in methods.TABLE.values() for key in method.structural))


def recipe_changes(old_yaml: str, new_yaml: str) -> tuple[ChangedKey, ...]:
    """All keys whose values differ between two resolved recipes.

    A key that is missing from the old recipe, because an older ftcli wrote it, counts as having today's default.

    Raises:
        ValueError: ``old_yaml`` is not the YAML of a map.
    """
    old, new = (_flatten(_with_defaults(map_of(text))) for text in (old_yaml, new_yaml))
    if repr(old) == repr(new):  # as when a run is resumed: seldom does anybody have to read them
        return ()
    before, after = ({key: _show(value) for key, value in values.items()} for values in (old, new))
    keys = [*new, *(key for key in old if key not in new)]
    shown = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys]
    return tuple(ChangedKey(*each) for each in shown if each[1] != each[2])


def settings_of(recipe_yaml: str) -> dict[str, str]:
    """The values of a resolved recipe by dotted key, as people write them; missing keys have today's defaults.

    Raises:
        ValueError: It is not the YAML of a map.
    """
    return {key: _show(value) for key, value in _flatten(_with_defaults(map_of(recipe_yaml))).items()}


def map_of(text: str) -> JsonObject:
    """The map that a run's recipe.yaml is. Raises ValueError for anything else, however deeply nested."""
    try:
        value = undumped(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a map")
    return value


def _with_defaults(raw: JsonObject) -> JsonObject:
    try:
        return Recipe.model_validate(raw).model_dump(mode="json")
    except ValidationError:
        return raw  # written by an ftcli with other keys: compared as it stands


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key. A list is one leaf: an item more in it is one change, not one for every later item."""
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(_flatten(item, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    return {prefix: value}


def _show(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=True)
    return text.removesuffix("\n").removesuffix("\n...")
