"""What a run was made of: its settings, changed ones first, its data in tokens, its versions and fingerprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config.grid import PLACES
from ftcli.config.recipe import Recipe
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.report.values import as_text, count, map_in, maps, number_or_none
from ftcli.tables import methods

#: Columns of the token counts after the name, by their keys in tokens.json.
_COUNTS = {
    "rows": "Rows",
    "rows_kept": "kept",
    "rows_dropped": "dropped",
    "rows_truncated": "truncated",
    "tokens_kept": "Tokens kept",
    "tokens_masked": "masked",
    "tokens_cut": "cut",
    "longest": "Longest row",
}
#: Of the manifest, what is shown in a table of its own or not at all.
_ELSEWHERE = ("kernels", "processes", "format", "data", "libraries", "inputs")
#: Of the inputs' identity; the digests of its blocks are for programs.
_SHOWN_INPUTS = ("tokens_sha256", "commit")


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows. ``numeric`` are the columns set to the right, ``code`` those set in a fixed width."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    code: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """A dataset's tokens as a bar: class, width in percent and number of each part."""

    name: str
    trained: str
    parts: Sequence[tuple[str, str, str]]

    @property
    def label(self) -> str:
        """The bar in words."""
        names = {"s0": "trained"}
        return f"{self.name}: {', '.join(f'{number} {names.get(kind, kind)}' for kind, _, number in self.parts)}"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What became of the data: a bar for each dataset, and the counts."""

    bars: Sequence[Bar]
    table: Table


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the recipe with its value, and the default's."""

    key: str
    value: str
    default: str

    @property
    def changed(self) -> bool:
        """Whether it is not the default."""
        return self.value != self.default


def tokens(counts: JsonMap) -> TokenCounts | None:
    """Tokens trained, masked and cut of each dataset."""
    datasets = maps(counts.get("datasets"))
    if not datasets:
        return None
    rows = [[f"{d.get('name')} ({d.get('split')})", *(count(d.get(c)) for c in _COUNTS)] for d in datasets]
    table = Table(["Dataset", *_COUNTS.values()], rows, numeric=range(1, 1 + len(_COUNTS)))
    return TokenCounts([_bar(dataset) for dataset in datasets], table)


def _bar(dataset: JsonMap) -> Bar:
    kept, masked, cut = (number_or_none(dataset.get(f"tokens_{k}")) or 0.0 for k in ("kept", "masked", "cut"))
    total = max(1.0, kept + cut)
    shares = (("s0", kept - masked), ("masked", masked), ("cut", cut))
    parts = [(kind, f"{100 * value / total:.2f}", f"{value:,.0f}") for kind, value in shares if value > 0]
    return Bar(str(dataset.get("name", "")), f"{(kept - masked) / total:.1%}", parts)


def settings_by_section(recipe: JsonMap) -> dict[str, list[Setting]]:
    """Every setting by section."""
    defaults = _defaults()
    return {
        str(section): [
            Setting(key, as_text(value), as_text(known.get(key)))
            for known in [dict(_flat(map_in(defaults, section)))]
            for key, value in _flat(values)
        ]
        for section, values in recipe.items()
        if isinstance(values, dict)
    }


def changed(every: Mapping[str, Sequence[Setting]]) -> list[Setting]:
    """The settings that are not the default, by their full names; what the run is called is none of them."""
    found = [Setting(f"{section}.{one.key}", one.value, one.default) for section, rows in every.items() for one in rows]
    return [one for one in found if one.changed and one.key not in PLACES]


def _defaults() -> JsonObject:
    """The recipe that says nothing, as plain values: the defaults of every section."""
    sections: dict[str, JsonObject] = {row.section: {} for row in methods.TABLE.values() if row.section is not None}
    nothing = {"version": 1, "model": {"name_or_path": "-"}, "lora": {}, **sections}
    return Recipe.model_validate(nothing).model_dump(mode="json")


def provenance(manifest: JsonMap) -> dict[str, Table]:
    """Device, versions, plan, seeds, data, the layers' kernels: tables by title."""
    if not manifest:
        return {}
    shown = {key: value for key, value in manifest.items() if key not in _ELSEWHERE}
    shown |= {key: value for key, value in map_in(manifest, "inputs").items() if key in _SHOWN_INPUTS and value}
    tables = {"Device, dtypes and seeds": Table([], [(key, as_text(value)) for key, value in _flat(shown)])}
    libraries = map_in(manifest, "libraries")
    if libraries:
        tables["Libraries"] = Table([], [(key, str(value)) for key, value in libraries.items()])
    data, kernels, processes = (maps(manifest.get(key)) for key in ("data", "kernels", "processes"))
    if data:
        rows = [(str(d.get("name")), count(d.get("bytes")), str(d.get("sha256"))) for d in data]
        tables["Data fingerprints"] = Table(["File", "Bytes", "SHA-256"], rows, numeric=(1,), code=(2,))
    if kernels:
        columns = list(dict.fromkeys(str(key) for layer in kernels for key in layer))
        body = [[as_text(layer.get(column)) for column in columns] for layer in kernels]
        tables[f"Kernels, {len(kernels):,} layer{'s' * (len(kernels) > 1)}"] = Table(columns, body)
    if len(processes) > 1:
        tables["Processes of this run"] = _processes(processes)
    return tables


def _processes(processes: Sequence[JsonMap]) -> Table:
    facts = ((p.get("started"), p.get("from_step"), map_in(p, "device").get("name"), p.get("ftcli")) for p in processes)
    return Table(["Started", "From step", "Device", "ftcli"], [[str(fact) for fact in row] for row in facts])


def _flat(value: JsonMap, prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        pairs += _flat(item, name) if isinstance(item, dict) and item else [(name, item)]
    return pairs
