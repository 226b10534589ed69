"""A recipe of ours in the making: values with their places in the other tool's file, and what has to be said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ftcli.config.conversion.source import ForeignSetting
from ftcli.config.dialects import VALUES
from ftcli.config.recipe import Recipe
from ftcli.config.schema import Node, RecipeSchema
from ftcli.config.secrets import mask
from ftcli.config.yaml import flow_text, plain_scalar
from ftcli.errors import ExitCode, Finding, FtcliError, Origin, Severity

#: Words for which the tables have the nearest that there is. All others are names of the same thing.
_APPROXIMATE = frozenset(("one_cycle", "paged_lion_32bit", "fp4", "adamw_torch_npu_fused"))
#: Keys whose value is a place, or a part of one.
_PLACES = frozenset(
    ("run.output_dir", "model.name_or_path", "model.revision", "model.tokenizer", "data.chat_template",
     "preference.reference")
)  # fmt: skip
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_TRUE = frozenset(("true", "yes", "on", "y", "1"))
_FALSE = frozenset(("false", "no", "off", "n", "0"))


@dataclass(frozen=True, slots=True)
class DraftValue:
    """A value of the new recipe. ``comment`` stands behind it; ``origin`` is where the other file says it."""

    value: Any
    comment: str | None = None
    origin: Origin | None = None


@dataclass
class Draft:
    """A recipe in the making.

    Attributes:
        given: The other tool's settings by dotted name, those that say nothing left out.
        findings: What has no counterpart (FT160), means something else (FT161) or could not be used (FT162).
        left_out: Our keys whose value in the file cannot be used, so that the tool's default is not what it meant.
        full: All weights are trained: what the file says of adapters has no effect there.
    """

    tool: str
    file: Path
    given: Mapping[str, ForeignSetting]
    blank: Mapping[str, ForeignSetting] = field(default_factory=dict)
    schema: RecipeSchema = field(default_factory=RecipeSchema)
    values: dict[str, DraftValue] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    full: bool = False

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.schema.keys())

    def put(self, key: str, value: Any, given: ForeignSetting | None = None, comment: str | None = None) -> None:
        """Sets one of our keys. Keys of a section inside of a section make that section."""
        if given is not None and key in _PLACES and is_url(str(value)):
            self.unusable(given, f"`{value}` is not a path here", f"write a local path into {key}")
            return
        if self.full and key.startswith(("lora.", "quantization.")):
            if given is not None:
                why = f"without adapters all weights are trained, in {self.tool} and here, and none is quantized"
                self.lost(given, why, harmless=key.startswith("lora."))
            return
        outer, _, inner = key.rpartition(".")
        if outer.count(".") == 1:
            key, value = outer, {**(self.get(outer) or {}), inner: value}
        origin = None if given is None else given.origin
        known = self.values.get(key)
        refines = known is None or known.value in (True, value) or isinstance(value, dict)
        if given is not None and known is not None and known.origin not in (None, origin) and not refines:
            self.unusable(given, f"`{given.name}` and another setting say {key}: this one counts", "keep one of them")
        self.values[key] = DraftValue(value, comment, origin)

    def default(self, key: str, value: Any, whose: str | None = None) -> None:
        """A default of the tool that is not ours, where the file says nothing."""
        if key not in self.values and key not in self.left_out:
            self.put(key, value, comment=f"{whose or self.tool}'s default")

    def get(self, key: str) -> Any:
        """One of our keys as drafted so far; None where it is not."""
        drafted = self.values.get(key)
        return None if drafted is None else drafted.value

    def switched(self, given: ForeignSetting) -> bool:
        """True if the setting is switched on. Raises FT162 for a value that is no switch."""
        if truth(given.value) is None:
            self.unusable(given, f"`{given.name}: {given.value}` is no switch", "write true or false")
        return bool(truth(given.value))

    def said(self, name: str) -> Any:
        """The value of the tool's setting; None where the file does not have it."""
        given = self.given.get(name)
        return None if given is None else given.value

    def lost(self, given: ForeignSetting, why: str, *, harmless: bool = False) -> None:
        """FT160: a setting without a counterpart. A harmless one changes nothing of what is learnt."""
        self._find("FT160", given, f"`{given.name}` has no counterpart here", why, "note" if harmless else "warning")

    def differs(self, given: ForeignSetting, what: str, help: str) -> None:
        """FT161: it is converted, and does not mean quite the same."""
        self._find("FT161", given, what, help, "warning")

    def unusable(self, given: ForeignSetting, what: str, help: str) -> None:
        """FT162: a value that cannot be used here; the setting is left out."""
        self._find("FT162", given, what, help, "warning")

    def leave_out(self, key: str, code: str, what: str, help: str | None = None) -> None:
        """Takes one of our keys out again, and says so at the setting that it came from."""
        self.findings.append(Finding(code, what, self.values.pop(key).origin, help, "warning"))

    def remark(self, what: str, help: str) -> None:
        """FT161 about what the file does not say."""
        self.findings.append(Finding("FT161", what, None, help, "warning"))

    def refuse(self, given: ForeignSetting | None, why: str, help: str) -> FtcliError:
        """FT163: there is nothing here that the recipe could become."""
        origin = Origin(str(self.file)) if given is None else given.origin
        return FtcliError([*self.findings, Finding("FT163", why, origin, help)], ExitCode.RECIPE)

    def _find(self, code: str, given: ForeignSetting, message: str, help: str, severity: Severity) -> None:
        self.findings.append(Finding(code, mask(message), given.origin, help, severity))

    def take(self, given: ForeignSetting, key: str) -> None:
        """Sets our key from a setting whose value means the same, in our words and types."""
        value = coerced(given.value, self.schema.at(key.split(".")), self.schema)
        if key == "model.name_or_path":
            value = (value.rstrip("/") or "/") if isinstance(value, str) else value
        words = VALUES.get(key, {})
        choices = self.schema.choices(self.schema.at(key.split(".")) or {})
        if isinstance(value, str) and choices and value not in choices:
            ours = words.get(value) or words.get(value.lower())
            if ours is None:
                self.left_out.add(key)
                there_are = f"choose from: {', '.join(choices)}"
                self.unusable(given, f"`{given.name}: {value}` is unknown here", there_are)
                return
            resolved = plain_scalar(ours)
            self.put(key, resolved if isinstance(resolved, bool) else ours, given, f"{self.tool}: {value}")
            if value.lower() in _APPROXIMATE:
                what = f"`{given.name}: {value}` became `{key}: {ours}`"
                self.differs(given, what, "check whether that is what you want")
            return
        self.put(key, value, given)


def is_url(path: str) -> bool:
    """True for an address such as ``s3://bucket/rows``."""
    return _URL.match(path) is not None


def truth(value: object) -> bool | None:
    """The truth value of a switch, in YAML 1.1's and command lines' words as well; None for other values."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    return True if word in _TRUE else False if word in _FALSE else None


def is_off(value: object) -> bool:
    """True if a value switches its setting off."""
    return truth(value) is False or value in (None, "", 0, "none", "None", "null", [], {})


def coerced(value: object, node: Node | None, schema: RecipeSchema) -> Any:
    """``value`` in the type that our key has, where it is the same otherwise written: ``"1e-4"``, ``yes``."""
    kinds = set() if node is None else {variant.get("type") for variant in schema.variants(node)}
    if isinstance(value, str) and kinds & {"integer", "number"}:
        number = plain_scalar(value.strip().replace("_", ""))  # YAML 1.1 reads 500_000 as a number
        value = number if isinstance(number, int | float) and not isinstance(number, bool) else value
    if isinstance(value, float) and "integer" in kinds and "number" not in kinds and value.is_integer():
        return int(value)
    if "boolean" in kinds and kinds <= {"boolean", "null"}:
        switch = truth(value)
        return value if switch is None else switch
    if "array" in kinds and isinstance(value, str) and value not in schema.choices(node or {}):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


_COMMENT_COLUMN = 46


def recipe_text(values: Mapping[str, DraftValue], tool: str, name: str, order: Sequence[str]) -> str:
    """The recipe, with a header that says where it came from and what to do next."""
    head = [
        f"# Converted from {tool}'s {' '.join(name.split())} by `ftcli recipes convert`,",
        "# which has said what has no counterpart here, and what means something else.",
        "#",
        "#   ftcli check THIS-FILE     # before anything is downloaded or built",
        "#   ftcli train THIS-FILE",
    ]
    if "data.train" not in values:
        head += ["#", "# Name your rows in data.train, and held-out ones in data.eval."]
    elif "data.eval" not in values:
        head += ["#", "# Name held-out rows in data.eval: without them nothing is measured."]
    return "\n".join([*head, "version: 1", *body(values, order)]) + "\n"


def body(values: Mapping[str, DraftValue], order: Sequence[str]) -> list[str]:
    """The sections, with their keys in the ``order`` of all keys."""
    ranked = sorted(values, key=lambda key: order.index(key) if key in order else len(order))
    lines: list[str] = []
    for section in Recipe.model_fields:
        keys = [key for key in ranked if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"{section}:"]
        for key in keys:
            lines += _entry(key.partition(".")[2], values[key])
    return lines


def _entry(name: str, drafted: DraftValue) -> list[str]:
    comment = "" if drafted.comment is None else " ".join(drafted.comment.split())
    if isinstance(drafted.value, list | tuple) and any(isinstance(item, Mapping) for item in drafted.value):
        first = _commented(f"  {name}:", comment)
        return [first, *(f"    - {flow_text(item)}" for item in drafted.value)]
    return [_commented(f"  {name}: {flow_text(drafted.value)}", comment)]


def _commented(line: str, comment: str) -> str:
    return f"{line.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else line
