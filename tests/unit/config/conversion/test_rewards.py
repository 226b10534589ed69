"""Recipes of reward models: the method, settings and rows are those of the other tool, and what differs is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.config.conversion.convert import convert
from tests.unit.config.conversion.conftest import Made
from tests.unit.config.conversion.test_preferences import BASES, at

Make = Callable[..., Made]
AXOLOTL = BASES["axolotl"] + "reward_model: true\nmodel_type: AutoModelForSequenceClassification\nnum_labels: 1\n"
TRL = "command: reward\n" + BASES["trl"]
FACTORY = BASES["llama-factory"].replace("stage: dpo", "stage: rm")
SCRIPT = """\
from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

model = AutoModelForSequenceClassification.from_pretrained("org/m", num_labels=1)
peft_config = LoraConfig(task_type=TaskType.SEQ_CLS, r=32, lora_alpha=16, modules_to_save=["score"])
args = RewardConfig("out", center_rewards_coefficient=0.01, max_length=2048, learning_rate=2e-5)
trainer = RewardTrainer(model, args=args, peft_config=peft_config, train_dataset=load_dataset("org/pairs"))
"""


@pytest.mark.parametrize(
    ("tool", "text", "expected"),
    [
        ("axolotl", AXOLOTL, {"train.method": "reward", "reward": None, "train.warmup_steps": 0.03}),
        (
            "axolotl",
            AXOLOTL + "center_rewards_coefficient: 0.01\n",
            {"reward.center_rewards_coefficient": 0.01, "data.format": "preference"},
        ),
        ("axolotl", AXOLOTL + "sample_packing: true\n", {"data.packing": False}),
        (
            "axolotl",
            AXOLOTL + "adapter: lora\nlora_modules_to_save: [score, classifier]\n",
            {"lora.modules_to_save": ()},
        ),
        (
            "axolotl",
            BASES["axolotl"] + "reward_model: false\ncenter_rewards_coefficient: 0.1\n",
            {"train.method": "sft", "reward": None},
        ),
        (
            "trl",
            TRL,
            {
                "train.method": "reward", "train.learning_rate": 1e-4, "data.max_seq_len": 1024,
                "data.overlong": "drop", "train.num_train_epochs": 3, "train.warmup_steps": 0, "reward": None,
            },
        ),
        ("trl", TRL + "center_rewards_coefficient: 0.01\n", {"reward.center_rewards_coefficient": 0.01}),
        ("trl", BASES["trl"] + "center_rewards_coefficient: 0.01\n", {"train.method": "reward"}),
        ("trl", BASES["trl"] + "trainer: RewardTrainer\n", {"train.method": "reward"}),
        ("trl", TRL + "use_peft: true\nlora_task_type: SEQ_CLS\n", {"lora.dropout": 0.0}),
        ("trl", TRL + "beta: 0.1\n", {"train.method": "reward", "preference": None}),
        (
            "llama-factory",
            FACTORY + "lora_dropout: 0.1\n",
            {"train.method": "reward", "train.learning_rate": 5e-5, "lora.dropout": 0.1, "data.overlong": "truncate"},
        ),
    ],
)  # fmt: skip
def test_what_is_learnt(tool: str, text: str, expected: dict[str, Any], made: Make) -> None:
    found = made("theirs.yaml", text, tool)
    assert {key: at(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("tool", "text", "code", "part"),
    [
        ("trl", TRL, "FT161", "a margin wherever rows have the column"),
        ("trl", TRL + "beta: 0.1\n", "FT160", "`preference.beta` is left out"),
        ("trl", TRL + "num_labels: 2\n", "FT160", "`num_labels`"),
        ("trl", TRL + "ref_model_name_or_path: other\n", "FT160", "`ref_model_name_or_path`"),
        ("trl", TRL + "use_peft: true\nlora_dropout: 0.1\n", "FT161", "switches dropout off"),
        ("axolotl", AXOLOTL + "sample_packing: true\n", "FT162", "not offered with reward modelling"),
        ("llama-factory", FACTORY + "adapter_name_or_path: a\n", "FT161", "goes on from the adapter in `a`"),
        ("llama-factory", FACTORY + "pref_beta: 0.1\n", "FT160", "`preference.beta` is left out"),
        (
            "axolotl",
            BASES["axolotl"] + "rl: dpo\ncenter_rewards_coefficient: 0.1\n",
            "FT160",
            "`reward.center_rewards_coefficient` is left out",
        ),
    ],
)
def test_what_means_something_else_is_told(tool: str, text: str, code: str, part: str, made: Make) -> None:
    found = made("theirs.yaml", text, tool)
    assert found.heard(code, part), found.said


def test_what_a_reward_model_always_has_needs_no_word(made: Make) -> None:
    found = made("theirs.yaml", AXOLOTL + "adapter: lora\nlora_modules_to_save: [score]\n", "axolotl")
    assert not [message for _, message, _ in found.warned if "score" in message or "num_labels" in message]
    assert not made("t.yaml", TRL + "use_peft: true\nlora_task_type: SEQ_CLS\n", "trl").heard("FT160", "task_type")


@pytest.mark.parametrize(
    ("kind", "columns", "part"),
    [
        ("bradley_terry.chat_template", {"prompt": "input"}, "plain text"),
        ("bradley_terry.icr", {"prompt": "input"}, "plain text"),
        ("bradley_terry.nectar", {}, "rows of type"),
    ],
)
def test_pairs_of_axolotl(kind: str, columns: dict[str, str], part: str, made: Make) -> None:
    found = made("theirs.yaml", f"{AXOLOTL}datasets: [{{path: a.jsonl, type: {kind}}}]\n", "axolotl")
    assert found.recipe.data.train[0].columns == columns
    assert any(part in message for _, message, _ in found.said), found.said


def test_pairs_that_llama_factory_has_registered(made: Make) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"pairs": {"file_name": "p.json", "ranking": true}}')
    (source,) = made("theirs.yaml", FACTORY + "dataset: pairs\n", "llama-factory").recipe.data.train
    assert (source.path, source.columns) == ("data/p.json", {"prompt": "instruction"})


@pytest.mark.parametrize("tool", ["trl", "unsloth"])
def test_scripts(tool: str, made: Make) -> None:
    found = made("x.py", SCRIPT if tool == "trl" else "import unsloth\n" + SCRIPT)
    recipe = found.recipe
    assert (recipe.train.method, recipe.train.learning_rate, recipe.data.max_seq_len) == ("reward", 2e-5, 2048)
    assert recipe.reward is not None
    assert recipe.reward.center_rewards_coefficient == 0.01
    assert recipe.lora is not None
    assert (recipe.lora.r, recipe.lora.modules_to_save) == (32, ())
    assert not [message for code, message, _ in found.warned if code == "FT162" and "num_labels" in message]


def test_settings_of_a_script_of_kto_are_read(made: Make) -> None:
    text = (
        'KTOTrainer("org/m", args=KTOConfig("out", beta=0.3, learning_rate=2e-6), train_dataset=load_dataset("o/r"))\n'
    )
    recipe = made("x.py", text).recipe
    assert recipe.preference is not None
    assert (recipe.train.method, recipe.train.learning_rate, recipe.preference.beta) == ("kto", 2e-6, 0.3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "run.sh",
            "trl reward --model_name_or_path m --dataset_name o/r --use_peft --center_rewards_coefficient .01",
        ),
        ("reward.yaml", AXOLOTL + "adapter: lora\ndatasets: [{path: a.jsonl, type: bradley_terry.chat_template}]\n"),
        ("rm.yaml", FACTORY),
    ],
)
def test_what_is_converted_passes_check(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    ours = yaml.safe_load(convert(Path(name)).text)
    assert ours["train"]["method"] == "reward"
    ours["model"]["name_or_path"] = "bundled:tiny-gemma2"
    ours["data"] |= {"train": ["bundled:smoke-dpo-train"], "max_seq_len": 64}
    Path("ours.yaml").write_text(yaml.safe_dump(ours))
    status = main(["check", "ours.yaml", "--offline", "--as", "rtx4090"])
    assert status == 0, capsys.readouterr().err
