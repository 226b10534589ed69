"""The JSON Schema and what is said from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.schema import RecipeSchema, _words, published
from ftcli.config.secrets import is_secret_key, mask
from ftcli.errors import FtcliError
from ftcli.tables import (
    engines,
    exports,
    gguf,
    judges,
    layouts,
    loggers,
    methods,
    optimizers,
    policies,
    preference_losses,
    quantizations,
    schedules,
)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("lora.r", "a whole number from 1 to 4096"),
        ("train.learning_rate", "a number greater than 0 and at most 10"),
        ("train.weight_decay", "a number of at least 0"),
        ("train.max_steps", "a whole number from 1 to 1000000000"),
        ("data.packing", "true or false"),
        ("data.overlong", "one of error, drop, truncate, split"),
        ("lora.target_modules", "all-linear or a list of text"),
        ("data.train", "a list of text or sections (path, columns, max_rows, ...)"),
        ("data.train.0.max_rows", "a whole number from 1 to 1000000000"),
        ("grpo.rewards", "a list of sections (use, file, extract, ...)"),
        ("run.name", "text"),
        ("version", "1"),
    ],
)
def test_a_value_in_words(path: str, words: str) -> None:
    schema = RecipeSchema()
    node = schema.at(path.split("."))
    assert node is not None
    assert schema.describe(node) == words


def test_it_is_made_once_for_what_the_tables_hold_and_again_when_a_row_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of a word asks its own table."""
    first = RecipeSchema().root
    assert RecipeSchema().root is first
    asked = _words()
    tables = (engines, exports, judges, methods, optimizers, policies, preference_losses, quantizations, schedules)
    expected = {*(table.names() for table in tables), layouts.formats(), gguf.type_names()}
    assert {word.names() for word in asked} == {tuple(names) for names in expected}
    for word in asked:
        words = (*word.names(), "a-made-up-row")
        monkeypatch.setattr(word, "_names", lambda words=words: words)
        made = RecipeSchema().root
        assert made == Recipe.model_json_schema()
        assert made != first
        monkeypatch.undo()
        assert RecipeSchema().root == first
    monkeypatch.setattr("ftcli.tables.loggers.TABLE", {**loggers.TABLE, "made-up": next(iter(loggers.TABLE.values()))})
    assert "made-up" in RecipeSchema().root["$defs"]["LoggingConfig"]["properties"]


def test_keys_reach_into_lists() -> None:
    keys = set(RecipeSchema().keys())
    assert {"data.train[].path", "grpo.rewards[].weight", "eval.generate.max_new_tokens", "lora"} <= keys


def test_no_schema_where_there_is_no_key() -> None:
    assert RecipeSchema().at(("lora", "nope")) is None
    assert RecipeSchema().at(("lora", "r", "deeper")) is None


def test_published_schema_refuses_unknown_keys_and_describes_every_key() -> None:
    schema = published()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert "extends" in schema["properties"]
    assert {"required": ["extends"]} in schema["anyOf"]
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        for key, value in section["properties"].items():
            assert value.get("description"), f"{name}.{key}"


def test_published_schema_is_a_copy() -> None:
    published()["properties"].clear()
    assert RecipeSchema().root["properties"]


@pytest.mark.parametrize("key", ["hf_token", "token", "hub_token", "wandb_api_key", "PASSWORD", "auth-token"])
def test_secret_keys(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize("key", ["tokenizer", "pad_token", "eos_token", "max_new_tokens", "key", "token_type"])
def test_keys_that_only_sound_like_secrets(key: str) -> None:
    assert not is_secret_key(key)


@pytest.mark.parametrize(
    "line",
    ["hub_token: abc", "a: {wandb_api_key: abc, b: 1}", "--set hub_token=abc", 'token: "abc"', "x: hf_" + "a" * 30],
)
def test_masking_keeps_the_columns(line: str) -> None:
    masked = mask(line)
    assert len(masked) == len(line)
    assert "abc" not in masked
    assert "aaaa" not in masked


def test_masking_leaves_other_lines_alone() -> None:
    line = "model: {name_or_path: google/gemma-2-9b, tokenizer: bytes, revision: " + "0a" * 20 + "}"
    assert mask(line) == line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tensorboard: {project: x}", "logging.tensorboard must be true or false, not a section"),
        ("wandb: {projct: x}", "unknown key `projct` in logging.wandb"),
        ("wandb: {project: ''}", "logging.wandb.project must not be empty"),
    ],
)
def test_settings_of_loggers_that_cannot_be(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"version: 1\nmodel: {{name_or_path: m}}\nlogging:\n  {line}\n")
    with pytest.raises(FtcliError) as refused:
        load_recipe(file)
    assert message in refused.value.findings[0].message
