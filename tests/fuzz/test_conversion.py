"""Other tools' recipes with odd values under every key that is known of them, scripts, and files that are hardly any.

What comes out is a recipe that the schema takes, or a refusal; it holds no secret and no address; and a key that nobody
knows is told, whatever its value.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ftcli.config.conversion.rules import Rules
from ftcli.config.dialects import rows_of
from ftcli.config.load import load_recipe
from ftcli.config.secrets import is_secret_value
from ftcli.tables import code_of, dialects
from tests.foreign_recipes import FILES, PREFERENCES
from tests.fuzz import values
from tests.fuzz.budget import examples
from tests.fuzz.contract import Outcome, hold, run
from tests.fuzz.recipes import _edits, edited

#: A word that no tool has.
_UNKNOWN = "xyzzy_made_up"
_TOOLS = dialects.names()
_BASES: Mapping[str, Any] = {
    name: yaml.safe_load(text.expandtabs()) if name != "trl" else {"model_name_or_path": "m", "use_peft": True}
    for name, (_, text) in FILES.items()
    if name in _TOOLS
}
_PAIRED: Mapping[str, Any] = {
    name: yaml.safe_load(text) for name, (file, text) in PREFERENCES.items() if not file.endswith(".py")
}
_ALL = {**FILES, **{f"{name} of pairs": recipe for name, recipe in PREFERENCES.items()}}
_odd = values.nested(
    values.scalars
    | st.sampled_from(
        ["s3://b/x", "hf://a/b", "adamw", "cosine", "alpaca", "nf4", "a.jsonl", "org/rows", "dpo", "simpo", "ipo"]
    )
)
#: Of a section that only groups settings nothing can be told.
_plain = values.scalars | st.lists(values.scalars, max_size=2) | st.just({})
_CODE = (
    "from unsloth import F\n", "model = F.from_pretrained('m', max_seq_length={})\n", "x = {}\n", "args = SFTConfig(r=x, max_steps={})\n",
    "model = get_peft_model(model, r={}, target_modules={})\n", "rows = load_dataset({}, split={})\n", "x = x * x\n", "if {}:\n", "  y\n",
    "TrainingArguments(learning_rate={}, report_to={})\n", "LoraConfig(r={})\n", "DPOTrainer(beta={}, ref_model={})\n", "CPOConfig(loss_type={}, cpo_alpha={})\n", "'''\n", "train_on_responses_only(t)\n",
)  # fmt: skip


def _names(tool: str) -> list[str]:
    row = dialects.row(tool)
    rules: Rules = code_of(row.code)
    shared = rows_of("transformers") if rules.trainer else {}
    return [name.replace(".*", ".x") for name in (*rows_of(row.title), *rules.computed, *shared)]


def _with(recipe: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with values at dotted names."""
    made: dict[str, Any] = json.loads(json.dumps(recipe))
    for name, value in changes.items():
        place = made
        *outer, last = name.split(".")
        for part in outer:
            inner = place.get(part)
            place[part] = place = inner if isinstance(inner, dict) else {}
        place[last] = value
    return made


_recipes = st.sampled_from(_TOOLS).flatmap(
    lambda tool: st.tuples(
        st.just(tool),
        st.sampled_from([_BASES[tool], _PAIRED.get(tool, _BASES[tool])]),
        st.dictionaries(st.sampled_from(_names(tool)), _odd, max_size=6),
        _plain,
    )
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        run(Path(name), "recipes", "convert", "x.yaml")  # what is imported at the first call is not counted
        yield Path(name)


def judged(folder: Path, *words: str) -> Outcome:
    """The outcome of a conversion, and that what it wrote is a recipe of ours without secrets."""
    outcome = run(folder, "recipes", "convert", *words, "--json")
    hold(outcome)
    if outcome.status == 0:
        text = outcome.document["result"]["recipe"]
        assert not is_secret_value(text), text
        (folder / "ours.yaml").write_text(text, encoding="utf-8")
        load_recipe(folder / "ours.yaml")
    return outcome


@examples(5)
@given(drawn=_recipes)
def test_odd_values_under_known_keys(folder: Path, drawn: tuple[str, dict[str, Any], dict[str, Any], Any]) -> None:
    tool, base, changes, unknown = drawn
    made = {**_with(base, changes), _UNKNOWN: unknown}
    (folder / "x.yaml").write_text(yaml.safe_dump(made, allow_unicode=False), encoding="utf-8")
    outcome = judged(folder, "x.yaml", "--from", tool)
    if outcome.status == 0 and not is_secret_value(str(unknown)):
        assert any(_UNKNOWN in finding["message"] for finding in outcome.document["findings"]), outcome.stdout


@examples(3)
@given(name=st.sampled_from(list(_ALL)), edits=_edits)
def test_files_that_were_recipes(folder: Path, name: str, edits: Any) -> None:
    file, text = _ALL[name]
    (folder / file).write_bytes(edited(text.encode(), edits))
    judged(folder, file)


@examples(3)
@given(lines=st.lists(st.tuples(st.sampled_from(_CODE), _odd, _odd), max_size=8), kind=st.sampled_from(["py", "ipynb"]))
def test_scripts_and_notebooks(folder: Path, lines: list[tuple[str, Any, Any]], kind: str) -> None:
    code = "".join(line.replace("{}", repr(one), 1).replace("{}", repr(two), 1) for line, one, two in lines)
    content = code if kind == "py" else json.dumps({"cells": [{"cell_type": "code", "source": [code]}]})
    (folder / f"x.{kind}").write_text(content, encoding="utf-8", errors="replace")
    judged(folder, f"x.{kind}")
