"""A recipe back to YAML, defaults filled in. Loading the text again gives an equal recipe."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import yaml

from ftcli.config.recipe import Recipe
from ftcli.config.yaml import plain_scalar

_TAG = "tag:yaml.org,2002:"


if TYPE_CHECKING:
    _Base = yaml.SafeDumper
else:
    _Base = object


class _Rules(_Base):
    """Quotes text that our loader would take for something else, and text that a YAML 1.1 reader would."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        found = plain_scalar(value) if kind is yaml.ScalarNode and implicit[0] else ""
        if found is None:
            return _TAG + "null"
        if isinstance(found, str):
            return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return _TAG + type(found).__name__

    def represent_float(self, data: float) -> yaml.ScalarNode:
        return self.represent_scalar(_TAG + "float", _float_text(data))

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Dumper(_Rules, yaml.SafeDumper):
    """Written by PyYAML itself."""


class _QuickDumper(_Rules, getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Written by libyaml where PyYAML has it, in a quarter of the time."""


_Dumper.add_representer(float, _Rules.represent_float)
_QuickDumper.add_representer(float, _Rules.represent_float)

#: libyaml escapes what stands beyond the first 65,536 characters (emoji), which people would no longer read.
_ESCAPED = "\\U"

#: Levels of a recipe that was dumped, far beyond what there are.
_DEEPEST = 100


def dump_recipe(recipe: Recipe) -> str:
    """YAML text of `recipe` in the order of its models."""
    values = recipe.model_dump()
    text = _dumped(values, _QuickDumper)
    return _dumped(values, _Dumper) if _ESCAPED in text else text


def _dumped(values: Any, dumper: type[_Rules]) -> str:
    text: str = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def undumped(text: str) -> Any:
    """The values of a recipe that was dumped, read by libyaml where PyYAML has it (it takes a seventh of the time).

    Raises yaml.YAMLError, or ValueError, for what is no YAML, or nested deeper than any recipe: libyaml's bindings go
    down by recursion, without a limit.
    """
    return deepcopy(_undumped(text))


@lru_cache(maxsize=2)
def _undumped(text: str) -> Any:
    """Kept, as the report and the card of a run ask for its recipe each time that they are written."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias, which no dumped recipe has")
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")
    return yaml.load(text, Loader=loader)  # noqa: S506 - both are safe


def flow_text(value: Any) -> str:
    """One value as YAML in a single line, as it may stand behind a key."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _float_text(value: float) -> str:
    """The shortest decimal that reads back as the same float, here and in YAML 1.1 (which wants a point: 1.0e-08)."""
    text = repr(value)
    if text in ("inf", "-inf", "nan"):
        return text.replace("inf", ".inf").replace("nan", ".nan")
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
