"""What `ftcli recipes convert` says of settings that are lost or changed, and which files it refuses."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.config.conversion.convert import convert
from ftcli.config.load import load_recipe, load_text
from ftcli.config.recipe import Recipe
from ftcli.errors import FtcliError
from tests.foreign_recipes import AXOLOTL, FILES, TORCHTUNE
from tests.unit.config.conversion.conftest import Made

BASE = "base_model: m\nsequence_len: 500_000\nmicro_batch_size: 1\nlearning_rate: 1e-5\n"


def test_numbers_as_yaml_1_1_has_them_and_keys_of_inner_sections(made: Callable[..., Made]) -> None:
    recipe = made("axolotl", BASE + "eval_max_new_tokens: 77\n").recipe
    assert (recipe.data.max_seq_len, recipe.eval.generate.max_new_tokens) == (500_000, 77)


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("special_tokens: {bos_token: x}\n", "FT160", "special_tokens.bos_token"),
        ("unfrozen_parameters: [a]\n", "FT160", "unfrozen_parameters"),
        ("dp_shard_size: 2\n", "FT160", "dp_shard_size"),
        ("save_strategy: epoch\n", "FT160", "save_strategy"),
        ("optimizer: adamw_made_up\n", "FT162", "adamw_made_up"),
        ("adapter: lora\nlora_target_modules: 'model.*proj'\n", "FT162", "a pattern"),
        ("datasets: [{path: a.jsonl, type: alpaca, split: 'train[:20%]'}]\n", "FT162", "train[:20%]"),
    ],
)
def test_what_has_no_counterpart_is_said(line: str, code: str, part: str, made: Callable[..., Made]) -> None:
    assert made("axolotl", BASE + line).heard(code, part)


@pytest.mark.parametrize("line", ["tf32: false\n", "wandb_entity: me\n", "debug:\n", "save_strategy: steps\n"])
def test_what_is_off_or_of_no_weight_is_not_said(line: str, made: Callable[..., Made]) -> None:
    name = line.partition(":")[0]
    assert not any(name in message for _, message, _ in made("axolotl", BASE + line).said)


def test_an_unknown_optimizer_is_not_called_the_tools_default(made: Callable[..., Made]) -> None:
    found = made("axolotl", BASE + "optimizer: adamw_made_up\n")
    assert found.recipe.train.optim == "adamw_torch"
    assert "optim" not in found.text


def test_rows_that_are_trained_on_are_not_held_out(made: Callable[..., Made]) -> None:
    validation = "dataset_val:\n  _component_: torchtune.datasets.alpaca_dataset\n  split: train[95%:]\n"
    training = "dataset:\n  _component_: torchtune.datasets.alpaca_dataset\n  split: train[:95%]\n"
    kept = TORCHTUNE[: TORCHTUNE.index("dataset:")] + training + validation + TORCHTUNE[TORCHTUNE.index("optimizer:") :]
    found = made("torchtune", kept)
    assert found.recipe.data.eval == ()
    assert found.heard("FT161", "would be those that are trained on")


def test_dora_of_torchtune(made: Callable[..., Made]) -> None:
    lora = made("torchtune", TORCHTUNE.replace("lora_llama3_1_8b", "dora_llama3_1_8b")).recipe.lora
    assert lora is not None
    assert lora.use_dora


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "x.yaml",
            'base_model: m\nsequence_len: 8\nunknown_here: "a\\0"\nchat_template_kwargs: {"\\ud800": 1}\n',
        ),
        ("x.py", "m = FastLanguageModel.from_pretrained('m', revision='a\\0')\nd = load_dataset('\\0\\ud800')\n"),
    ],
)
def test_text_that_no_recipe_may_hold_is_told_and_left_out(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    made = convert(tmp_path / file)
    assert [finding.code for finding in made.findings if finding.severity == "error"].count("FT120") == 2
    assert file == "x.py" or any("`unknown_here` has no" in finding.message for finding in made.findings)
    load_text(made.text, tmp_path / "ours.yaml")


@pytest.mark.parametrize(
    ("text", "code", "help"),
    [
        ("base_model: m\nrl: gdpo\nsequence_len: 8\n", "FT163", "smoke-grpo"),
        ("base_model: m\nadapter: oft\nsequence_len: 8\n", "FT163", "LoRA"),
        *((f"model_name_or_path: m\nstage: {stage}\ncutoff_len: 8\n", "FT163", "smoke-grpo") for stage in ("ppo",)),
        ("sequence_len: 8\nmicro_batch_size: 1\n", "FT163", "name the base model"),
        ("model: m\npeft_config: {name: lora}\ncutoff_len: 8\n", "FT163", "model_name_or_path"),
        ("model: {_component_: torchtune.models.a.b}\ntasks: [x]\n", "FT163", "fine-tuning"),
        ("learning_rate: 1\n", "FT164", "--from"),
        ("base_model: m\nmodel_name: m\n", "FT164", "--from axolotl"),
        ("version: 1\nmodel: {name_or_path: m}\n", "FT164", "ftcli check"),
        ("trl sft --model_name_or_path 'm\n", "FT163", "quotes"),
        ("trl bco --model_name_or_path m --dataset_name org/pairs\n", "FT163", "smoke-grpo"),
        ("accelerate launch trl/scripts/bco.py --model_name_or_path m --dataset_name org/r\n", "FT163", "smoke-grpo"),
        ("base_model: m\nprocess_reward_model: true\nsequence_len: 8\n", "FT163", "smoke-grpo"),
        ("model_name_or_path: m\nfinetuning_type: freeze\ncutoff_len: 8\n", "FT163", "LoRA"),
        ("base_model: m\nbase_model: n\nsequence_len: 8\n", "FT113", "keep one"),
        ('base_model: "\\0"\nsequence_len: 8\n', "FT120", "name the base model"),
        ("", "FT105", "recipes list"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    text: str, code: str, help: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    status = main(["recipes", "convert", "x.yaml"])
    out, err = capsys.readouterr()
    if code == "FT113":  # a fault that does not stop the reading is told, and the first value taken
        assert status == 0
    else:
        assert (status, out) == (2, "")
    assert f"[{code}]" in err
    assert help in err
    assert "Traceback" not in err


def test_the_tool_can_be_named(made: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    assert made("x.yaml", "model_name_or_path: m\nlearning_rate: 1e-5\n", "trl").recipe.train.learning_rate == 1e-5
    assert main(["recipes", "convert", "x.yaml", "--from", "keras"]) == 2
    assert "axolotl" in capsys.readouterr().err


def test_stdout_is_the_recipe_and_stderr_what_it_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(AXOLOTL)
    assert main(["recipes", "convert", "a.yml"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["name_or_path"] == "org/base-8b"
    line = AXOLOTL.splitlines().index("val_set_size: 0.1") + 1
    assert f"a.yml:{line}:1: warning[FT160]: `val_set_size` has no counterpart here" in err
    assert main(["recipes", "convert", "a.yml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["result"]["recipe"] == out
    assert {finding["code"] for finding in document["findings"]} >= {"FT160", "FT161"}


def test_secrets_are_not_copied(made: Callable[..., Made]) -> None:
    found = made("axolotl", AXOLOTL + "hub_token: hf_abcdefghijklmnopqrstuvwxyz\nwandb_api_key: 123456\n")
    assert "hf_abc" not in found.text
    assert "123456" not in found.text


JUNK: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1.5,
    1e99,
    "x",
    "",
    "1e-4",
    [],
    {},
    [1, {"a": 2}],
    {"a": [1]},
    "${x}",
    "a" * 300,
]


@pytest.mark.parametrize("name", [name for name in FILES if name != "trl"])
def test_whatever_stands_there_becomes_a_valid_recipe_or_a_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = Recipe.model_json_schema()
    monkeypatch.setattr(Recipe, "model_json_schema", lambda: schema)  # made once, not for each refusal
    chance = random.Random(name)
    values = yaml.safe_load(FILES[name][1].expandtabs())
    valid = 0
    for _ in range(40):
        changed = json.loads(json.dumps(values))
        for _ in range(chance.randint(1, 4)):
            place = changed
            while True:
                key = chance.choice(list(place))
                if isinstance(place[key], dict) and place[key] and chance.random() < 0.8:
                    place = place[key]
                    continue
                place[key] = chance.choice(JUNK)
                break
        Path("x.yaml").write_text(yaml.safe_dump(changed))
        with contextlib.suppress(FtcliError):
            Path("ours.yaml").write_text(convert(Path("x.yaml"), {"notebook": "unsloth"}.get(name, name)).text)
            load_recipe(Path("ours.yaml"))
            valid += 1
    assert valid > 10
