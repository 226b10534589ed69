"""Options of sources that cannot mean anything are refused; what is not looked at is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.facts.model import read_facts
from ftcli.preflight.checks import data
from ftcli.preflight.checks.context import NotMade

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("section", "codes"),
    [
        ("train: [{path: a.jsonl, revision: v1}]", ["FT257"]),
        ("train: [{path: a.jsonl, streaming: true, max_rows: 5}]", ["FT257"]),
        ("train: [{path: 'hub:org/name', streaming: true}]", ["FT258"]),
        ("train: [{path: 'hub:org/name', streaming: true, max_rows: 5, split: test, name: en}]", []),
        ("train: [{path: 'bundled:smoke-train', split: train}]", ["FT257"]),
        ("train: [{path: a.jsonl, weight: 1}, b.jsonl]", ["FT257"]),
        ("train: [{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 0.5}]", []),
        ("train: [a.jsonl]\n  eval: [{path: b.jsonl, weight: 2}]", ["FT257"]),
    ],
)
def test_options_that_do_not_apply(context: Make, section: str, codes: list[str]) -> None:
    assert [finding.code for finding in data.check_sources(context(f"data:\n  {section}\n"))] == codes


def test_packing_and_weights_in_grpo(context: Make) -> None:
    text = "data: {train: [{path: a.jsonl, weight: 2}], packing: true}\ngrpo: {rewards: [{use: exact_match}]}\n"
    found = list(data.check_sources(context(text, command="grpo")))
    assert [(finding.code, finding.severity) for finding in found] == [("FT257", "error"), ("FT259", "warning")]


def test_hub_rows_are_reported_as_not_looked_at_offline(load: Make, context: Make) -> None:
    ready = context("data: {train: ['hub:org/name']}\n")
    facts = read_facts(ready.recipe.model, offline=True, origins=ready.origins)
    (found,) = data.check(ready, facts, offline=True)
    assert isinstance(found, NotMade)
    assert found.check == "rows of hub:org/name"


def test_broken_rows_are_warnings_where_some_may_be_skipped(context: Make, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\nnope\n')
    for allowed, severity in ((0, "error"), (0.5, "warning")):
        ready = context(f"data: {{train: [{path}], max_bad_rows: {allowed}}}\n")
        facts = read_facts(ready.recipe.model, offline=True, origins=ready.origins)
        found = list(data.check(ready, facts, offline=True))
        assert {(finding.code, finding.severity) for finding in found} == {("FT403", severity), ("FT412", severity)}
