"""Changes between the recipe of a run and the recipe that it is resumed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ftcli.config.recipe import Recipe
from ftcli.config.yaml import undumped
from ftcli.plain import JsonObject
from ftcli.run.atomic import read_text
from ftcli.tables import methods

#: Sections and keys that may differ when a run is resumed, because no weight depends on them. Everything else decides
#: what is learnt; so do `train.max_steps` and `train.num_train_epochs`, through the learning rate of every step.
#: Every checkpointing policy gives the same bits, and another machine may need another one. On another number of
#: processes a step still learns from as many micro-batches as the run began with.
HARMLESS = (
    "run.name",
    "run.output_dir",
    "run.resume",
    "run.mirror",
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
#: goes on with the same. Tasks of `ftcli train` show a course, and may be changed.
_MEASURED = {"train": ("data.eval",), "grpo": ("data.eval", "eval.tasks", "eval.generate")}

#: What the tensors of a checkpoint depend on, whatever the training method.
_STRUCTURAL = ("model", "quantization", "lora", "train.optim", "train.loraplus_lr_ratio", "train.method")

#: Changes within one list that are named.
_NAMED = 6

_ABSENT, _NONE = "(absent)", "[]"


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """One key with its old and its new value, as people write them. ``parts``: of a list of maps what has changed
    within it; its values would be read for one word among fifty.
    """

    key: str
    old: str
    new: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = [f"{len(self.parts) - _NAMED} more"] if len(self.parts) > _NAMED else []
        return "; ".join([*self.parts[:_NAMED], *more]) or f"{self.key}: {self.old} -> {self.new}"

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

    A key that is missing from the old recipe, because an older ftcli wrote it, counts as having today's default. Raises
    ValueError: ``old_yaml`` is not the YAML of a map.
    """
    old, new = (leaves(_with_defaults(map_of(text))) for text in (old_yaml, new_yaml))
    if repr(old) == repr(new):  # as when a run is resumed: seldom does anybody have to read them
        return ()
    before, after = ({key: _show(value) for key, value in values.items()} for values in (old, new))
    keys = [*new, *(key for key in old if key not in new)]
    shown = [(key, before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys]
    changed = (each for each in shown if each[1] != each[2])
    return tuple(ChangedKey(*each, _parts(each[0], old.get(each[0]), new.get(each[0]))) for each in changed)


def _parts(key: str, old: Any, new: Any) -> tuple[str, ...]:
    """Changes in a list of maps, such as the sources of ``data.train``: values of its items, or items that
    have come and gone; nothing for other values.
    """
    if not all(isinstance(each, list) and each and all(isinstance(i, Mapping) for i in each) for each in (old, new)):
        return ()
    if len(old) != len(new):
        gone, come = ([item for item in one if item not in other] for one, other in ((old, new), (new, old)))
        said = [*(f"without {_name(item)}" for item in gone), *(f"with {_name(item)}" for item in come)]
        return tuple(f"{key}: {each}" for each in said) or (f"{key}: {len(old)} items -> {len(new)}",)
    found = []
    for index, items in enumerate(zip(old, new, strict=True)):
        before, after = ({name: _show(value) for name, value in leaves(item).items()} for item in items)
        for name in dict.fromkeys([*before, *after]):
            values = before.get(name, _ABSENT), after.get(name, _ABSENT)
            if values[0] != values[1]:
                found.append(f"{key}.{index}.{name}: {values[0]} -> {values[1]}")
    return tuple(found)


def _name(item: Mapping[str, Any]) -> str:
    """The name that people know an item of a list by."""
    return next((str(item[name]) for name in ("path", "name", "use") if item.get(name)), _show(dict(item)))


def settings_of(recipe_yaml: str) -> dict[str, str]:
    """The values of a resolved recipe by dotted key, as people write them; missing keys have today's defaults. Raises
    ValueError: It is not the YAML of a map.
    """
    return {key: _show(value) for key, value in leaves(_with_defaults(map_of(recipe_yaml))).items()}


def map_of(text: str) -> JsonObject:
    """The map that a run's recipe.yaml is. Raises ValueError for anything else, however deeply nested."""
    try:
        value = undumped(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a map")
    return value


def recipe_in(path: Path) -> JsonObject:
    """The recipe.yaml of a run as a map; empty where it cannot be read."""
    try:
        return map_of(read_text(path))
    except (OSError, ValueError):
        return {}


def _with_defaults(raw: JsonObject) -> JsonObject:
    try:
        return Recipe.model_validate(raw).model_dump(mode="json")
    except ValidationError:
        return raw  # written by an ftcli with other keys: compared as it stands


def leaves(value: Any, prefix: str = "") -> JsonObject:
    """Leaves by dotted key. A list is one leaf: an item more in it is one change, not one for every later item."""
    if not (isinstance(value, Mapping) and value):
        return {prefix: value}
    inside = (leaves(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
    return {key: leaf for each in inside for key, leaf in each.items()}


def _show(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=True)
    return text.removesuffix("\n").removesuffix("\n...")
