"""A recipe back to YAML, defaults filled in. Loading the text again gives an equal recipe."""

from __future__ import annotations

from typing import Any

import yaml

from ftcli.config import scalars
from ftcli.config.recipe import Recipe


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that our loader would take for something else."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is not yaml.ScalarNode or not implicit[0]:
            return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        found = scalars.resolve(value)
        if found is None:
            return "tag:yaml.org,2002:null"
        if isinstance(found, bool):
            return "tag:yaml.org,2002:bool"
        if isinstance(found, int | float):
            return "tag:yaml.org,2002:int" if isinstance(found, int) else "tag:yaml.org,2002:float"
        return "tag:yaml.org,2002:str"

    def represent_float(self, data: float) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:float", _float_text(data))

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(float, _Dumper.represent_float)


def dump_recipe(recipe: Recipe) -> str:
    """YAML text of `recipe` in the order of its models."""
    text: str = yaml.dump(recipe.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _float_text(value: float) -> str:
    """The shortest decimal that reads back as the same float, and as a float."""
    text = repr(value)
    if text in ("inf", "-inf", "nan"):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[text]
    return text
