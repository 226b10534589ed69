"""Recipes that learn from pairs: method, loss and scale are those of the other tool, and what differs is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.cli.app import main
from ftcli.config.conversion.convert import convert
from ftcli.errors import FtcliError
from ftcli.tables import preference_losses
from tests.foreign_recipes import PREFERENCES, TORCHTUNE_DPO, UNSLOTH_DPO
from tests.unit.config.conversion.conftest import Made

Make = Callable[..., Made]
BASES = {
    "axolotl": "base_model: m\nsequence_len: 64\nmicro_batch_size: 1\nlearning_rate: 1e-5\n",
    "llama-factory": "model_name_or_path: m\nfinetuning_type: lora\ncutoff_len: 64\nstage: dpo\n",
    "trl": "model_name_or_path: m\ndataset_name: org/rows\n",
    "torchtune": TORCHTUNE_DPO[: TORCHTUNE_DPO.index("loss:")],
}
_LOSS = "loss: {_component_: torchtune.rlhf.loss."


def convertible(made: Make, tool: str, lines: str) -> Made:
    return made("theirs.yaml", BASES[tool] + lines, tool)


def at(found: Made, key: str) -> Any:
    value: Any = found.recipe
    for part in key.split("."):
        value = getattr(value, part, None)
    return tuple((one.name, one.weight) for one in value) if key == "preference.loss" and _is_list(value) else value


def _is_list(value: object) -> bool:
    return isinstance(value, tuple | list)


@pytest.mark.parametrize("name", PREFERENCES)
def test_it_passes_check_on_pairs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, text = PREFERENCES[name]
    Path(file).write_text(text)
    ours = yaml.safe_load(convert(Path(file)).text)
    assert ours["train"]["method"] == "dpo"
    ours["model"]["name_or_path"] = "bundled:tiny-gemma2"
    ours["data"] |= {"train": ["bundled:smoke-dpo-train"], "eval": ["bundled:smoke-dpo-eval"], "max_seq_len": 512}
    ours["train"]["optim"] = "adamw_torch"  # bitsandbytes is not installed everywhere
    ours["data"].pop("chat_template", None)
    ours.get("lora", {}).pop("start_from", None)  # which is not there
    if "reference" in ours["preference"]:
        ours["preference"]["reference"] = "bundled:tiny-gemma2"
    Path("ours.yaml").write_text(yaml.safe_dump(ours))
    status = main(["check", "ours.yaml", "--offline", "--as", "rtx4090"])
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "lines", "expected"),
    [
        ("axolotl", "rl: dpo\n", {"train.method": "dpo", "preference.loss": None, "preference.beta": None}),
        ("axolotl", "rl: ipo\n", {"train.method": "dpo", "preference.loss": "ipo", "preference.beta": 0.1}),
        ("axolotl", "rl: ipo\nrl_beta: 0.5\n", {"preference.loss": "ipo", "preference.beta": 0.5}),
        ("axolotl", "rl: orpo\norpo_alpha: 0.2\n", {"train.method": "orpo", "preference.beta": 0.2}),
        ("axolotl", "rl: orpo\nrl_beta: 0.3\norpo_alpha: 0.2\n", {"preference.beta": 0.3}),
        (
            "axolotl",
            "rl: simpo\nrl_beta: 2.5\nsimpo_gamma: 1.2\ncpo_alpha: 0\n",
            {
                "train.method": "simpo",
                "preference.beta": 2.5,
                "preference.gamma": 1.2,
                "preference.sft_weight": 0.0,
            },
        ),
        ("axolotl", "rl: simpo\n", {"preference.beta": 0.1, "preference.sft_weight": 1.0}),
        ("axolotl", "rl: dpo\nrpo_alpha: 0.5\n", {"preference.sft_weight": 0.5}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [apo_zero]\n", {"preference.loss": "apo_zero"}),
        ("axolotl", "rl: dpo\ndpo_label_smoothing: 0.2\n", {"preference.label_smoothing": 0.2}),
        ("axolotl", "rl: dpo\nadapter: lora\nlora_dropout: 0.1\n", {"lora.dropout": 0.0}),
        ("axolotl", "rl: dpo\nsample_packing: true\n", {"data.packing": False}),
        ("axolotl", "rl: dpo\nfp16: true\n", {"model.dtype": "auto"}),
        ("axolotl", "rl: dpo\ntrain_on_inputs: true\n", {"data.loss_on": "auto"}),
        ("llama-factory", "", {"train.method": "dpo", "preference.beta": None, "train.learning_rate": 5e-5}),
        ("llama-factory", "", {"train.num_train_epochs": 3, "train.warmup_steps": 0, "data.max_seq_len": 64}),
        ("llama-factory", "pref_loss: hinge\npref_beta: 0.4\n", {"preference.loss": "hinge", "preference.beta": 0.4}),
        ("llama-factory", "pref_loss: ipo\n", {"preference.loss": "ipo", "preference.beta": 0.1}),
        ("llama-factory", "pref_loss: orpo\n", {"train.method": "orpo", "preference.beta": None}),
        (
            "llama-factory",
            "pref_loss: simpo\nsimpo_gamma: 1\n",
            {"train.method": "simpo", "preference.beta": 0.1, "preference.gamma": 1.0, "preference.sft_weight": 0},
        ),
        ("llama-factory", "pref_ftx: 0.2\n", {"preference.sft_weight": 0.2}),
        ("llama-factory", "dpo_label_smoothing: 0.2\n", {"preference.label_smoothing": 0.2}),
        ("trl", "command: dpo\n", {"train.method": "dpo", "train.learning_rate": 1e-6, "data.max_seq_len": 1024}),
        ("trl", "command: dpo\n", {"train.num_train_epochs": 3, "train.warmup_steps": 0, "data.loss_on": "auto"}),
        ("trl", "beta: 0.3\n", {"train.method": "dpo", "preference.beta": 0.3}),
        ("trl", "beta: 0.3\noutput_dir: out/zephyr-orpo\n", {"train.method": "orpo", "preference.beta": 0.3}),
        ("trl", "loss_type: apo_zero\nbeta: 0.05\n", {"train.method": "dpo", "preference.loss": "apo_zero"}),
        ("trl", "loss_type: nca_pair\n", {"preference.loss": "nca_pair", "preference.beta": 0.1}),
        ("trl", "loss_type: sigmoid_norm\nbeta: 5\n", {"preference.loss": "sigmoid_norm", "preference.beta": 5}),
        (
            "trl",
            "loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n",
            {"preference.loss": (("sigmoid", 0.8), ("bco_pair", 0.2)), "preference.sft_weight": 1.0},
        ),
        ("trl", "loss_type: [sigmoid, sft]\n", {"preference.loss": "sigmoid", "preference.sft_weight": 1.0}),
        ("trl", "beta: 1\nrpo_alpha: 0.7\nld_alpha: 0.5\n", {"preference.sft_weight": 0.7, "preference.ld_alpha": 0.5}),
        ("trl", "beta: 1\nlabel_smoothing: 0.1\n", {"preference.label_smoothing": 0.0}),
        ("trl", "loss_type: robust\nlabel_smoothing: 0.1\n", {"preference.label_smoothing": 0.1}),
        (
            "trl",
            "loss_type: sigmoid\nreference_free: true\n",
            {"preference.loss": "cpo", "preference.reference": "none"},
        ),
        ("trl", "command: cpo\n", {"train.method": "dpo", "preference.loss": "cpo", "preference.sft_weight": 1.0}),
        ("trl", "command: cpo\nlabel_smoothing: 0.1\n", {"preference.label_smoothing": 0.1}),
        ("trl", "command: cpo\ncpo_alpha: 0.5\n", {"preference.loss": "cpo", "preference.sft_weight": 0.5}),
        (
            "trl",
            "loss_type: simpo\nsimpo_gamma: 1.5\nbeta: 2\ncpo_alpha: 0\n",
            {"train.method": "simpo", "preference.gamma": 1.5, "preference.beta": 2, "preference.sft_weight": 0.0},
        ),
        ("trl", "loss_type: simpo\n", {"train.method": "simpo", "preference.beta": 0.1, "preference.sft_weight": 1.0}),
        ("trl", "loss_type: alphapo\n", {"train.method": "simpo", "preference.sft_weight": 0.0}),
        ("trl", "command: orpo\n", {"train.method": "orpo", "train.learning_rate": 1e-6, "preference.beta": None}),
        ("trl", "beta: 1\nuse_peft: true\n", {"lora.dropout": 0.0}),
        ("trl", "beta: 1\nuse_peft: true\nlora_dropout: 0.2\n", {"lora.dropout": 0.0}),
        ("trl", "beta: 1\nuse_peft: true\ndisable_dropout: false\n", {"lora.dropout": 0.05}),
        ("axolotl", "rl: kto\n", {"train.method": "kto", "preference.loss": None, "data.format": "labelled"}),
        (
            "axolotl",
            "rl: kto\nrl_beta: 0.2\nkto_desirable_weight: 0.2\nkto_undesirable_weight: 1.0\n",
            {"preference.beta": 0.2, "preference.desirable_weight": 0.2, "preference.undesirable_weight": 1.0},
        ),
        ("axolotl", "rl: dpo\nkto_desirable_weight: 0.2\n", {"preference": None}),
        ("axolotl", "rl: kto\nadapter: lora\nlora_dropout: 0.1\n", {"lora.dropout": 0.0}),
        ("trl", "command: kto\n", {"train.method": "kto", "train.learning_rate": 1e-6, "data.loss_on": "auto"}),
        ("trl", "trainer: KTOTrainer\n", {"train.method": "kto"}),
        ("trl", "beta: 1\noutput_dir: out/mine-kto\n", {"train.method": "kto", "preference.beta": 1}),
        ("trl", "desirable_weight: 1.5\n", {"train.method": "kto", "preference.desirable_weight": 1.5}),
        ("trl", "loss_type: kto\nundesirable_weight: 0.5\n", {"preference.undesirable_weight": 0.5}),
        ("trl", "loss_type: apo_zero_unpaired\n", {"train.method": "kto", "preference.loss": "apo_zero_unpaired"}),
        ("torchtune", _LOSS + "DPOLoss}\n", {"train.method": "dpo", "preference.beta": None}),
        (
            "torchtune",
            _LOSS + "DPOLoss}\nref_checkpointer: {checkpoint_dir: /o/other}\n",
            {"preference.reference": "/o/other"},
        ),
        ("llama-factory", "ref_model: org/other\n", {"preference.reference": "org/other"}),
        ("trl", "beta: 1\nref_model: org/other\n", {"preference.reference": "org/other"}),
        (
            "trl",
            "beta: 1\nref_model_name_or_path: org/other\nref_model_revision: v2\n",
            {"preference.reference": "org/other", "preference.reference_revision": "v2"},
        ),
        ("torchtune", _LOSS + "DPOLoss, beta: 0.2, label_smoothing: 0.1}\n", {"preference.label_smoothing": 0.1}),
        ("torchtune", _LOSS + "RSOLoss, gamma: 0.2}\n", {"preference.loss": "hinge", "preference.beta": 0.2}),
        ("torchtune", _LOSS + "SimPOLoss, gamma: 0.3}\n", {"train.method": "simpo", "preference.gamma": 0.3}),
        ("torchtune", _LOSS + "SimPOLoss}\n", {"preference.beta": None, "lora.dropout": 0.1}),
    ],
)
def test_what_is_learnt(tool: str, lines: str, expected: dict[str, Any], made: Make) -> None:
    found = convertible(made, tool, lines)
    assert {key: at(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("tool", "lines", "code", "part"),
    [
        ("axolotl", "rl: ipo\n", "FT161", "beta 0.1 asks for 5"),
        ("axolotl", "rl: orpo\n", "FT161", "axolotl's ORPO trains the prompt's tokens"),
        ("axolotl", "rl: orpo\norpo_alpha: 0.2\n", "FT161", "`orpo_alpha` is preference.beta"),
        ("axolotl", "rl: simpo\n", "FT161", "adds the chosen answers' cross-entropy"),
        ("axolotl", "rl: dpo\ndpo_label_smoothing: 0.2\n", "FT161", "conservative DPO"),
        ("axolotl", "rl: ipo\ndpo_label_smoothing: 0.2\n", "FT162", "no meaning for ipo"),
        ("axolotl", "rl: dpo\nprecompute_ref_log_probs: true\n", "FT160", "`precompute_ref_log_probs`"),
        ("axolotl", "rl: dpo\ndpo_loss_type: [sigmoid, hinge]\ndpo_loss_weights: [1]\n", "FT162", "the weights [1]"),
        ("axolotl", "rl: dpo\nsample_packing: true\n", "FT162", "`data.packing: True` is not offered with DPO"),
        ("axolotl", "rl: dpo\nfp16: true\n", "FT162", "float16"),
        ("axolotl", "rl: dpo\nadapter: lora\nlora_dropout: 0.1\n", "FT161", "switches dropout off"),
        ("axolotl", "rl: dpo\ndatasets: [{path: a.jsonl, type: chatml.icr}]\n", "FT161", "type `chatml.icr`"),
        ("axolotl", "rl: dpo\ndatasets: [{path: a.jsonl, type: {field_prompt: q}}]\n", "FT162", "a prompt of its own"),
        ("axolotl", "rl: dpo\ndatasets: [{path: a.jsonl, type: llama3.ultra}]\n", "FT161", "the template `llama3`"),
        ("axolotl", "rl: dpo\ndatasets: [{path: a.jsonl, type: zephyr.nectar}]\n", "FT162", "zephyr.nectar"),
        ("axolotl", "rl: dpo\ndatasets: [{path: a.jsonl, type: chat_template.default}]\n", "FT162", "one message"),
        ("axolotl", "rl: dpo\nadapter: lora\nlora_model_dir: a\n", "FT161", "the adapter as it was loaded"),
        ("llama-factory", "adapter_name_or_path: a\n", "FT161", "with the raw base, which preference.reference names"),
        ("llama-factory", "adapter_name_or_path: a,b\n", "FT160", "`adapter_name_or_path`"),
        ("llama-factory", "pref_loss: simpo\nadapter_name_or_path: a\n", "FT161", "goes on from the adapter in `a`"),
        ("axolotl", "rl_beta: 0.1\n", "FT160", "`preference.beta` is left out"),
        ("llama-factory", "pref_ftx: 0.2\n", "FT161", "`pref_ftx` weighs"),
        ("llama-factory", "ld_alpha: 0.5\n", "FT161", "there the policy's alone"),
        ("llama-factory", "ref_model: other\n", "FT162", "`ref_model: other` is no OWNER/NAME and no path"),
        ("llama-factory", "pref_loss: simpo\nref_model: org/other\n", "FT160", "`ref_model`"),
        ("llama-factory", "pref_bco_weight: 0.2\n", "FT160", "`pref_bco_weight`"),
        ("llama-factory", "lora_dropout: 0.1\n", "FT161", "switches dropout off"),
        ("trl", "beta: 1\n", "FT161", "taken for DPO"),
        ("trl", "beta: 1\nlabel_smoothing: 0.1\n", "FT162", "TRL 1.16 ignores `label_smoothing: 0.1` with sigmoid"),
        ("trl", "loss_type: simpo\nlabel_smoothing: 0.1\n", "FT162", "no meaning for simpo"),
        ("trl", "loss_type: simpo\n", "FT161", "CPO and SimPO alike"),
        ("trl", "loss_type: ipo\nbeta: 0.01\n", "FT161", "beta 0.01 asks for 50"),
        ("trl", "beta: 1\nmax_prompt_length: 512\n", "FT161", "`max_prompt_length: 512`"),
        ("trl", "beta: 1\nmax_completion_length: 512\n", "FT161", "`max_completion_length: 512`"),
        ("trl", "beta: 1\nref_model_name_or_path: s3://a/b\n", "FT162", "is not a path here"),
        ("trl", "beta: 1\nref_model_revision: v2\n", "FT160", "`ref_model_revision`"),
        ("trl", "beta: 1\nprecompute_ref_log_probs: true\n", "FT160", "`precompute_ref_log_probs`"),
        ("trl", "beta: 1\nf_divergence_type: js_divergence\n", "FT160", "`f_divergence_type`"),
        ("trl", "beta: 1\ncpo_alpha: 1\ncommand: dpo\n", "FT160", "`cpo_alpha`"),
        ("trl", "loss_type: sigmoid\nreference_free: true\n", "FT161", "became preference.loss: cpo"),
        ("axolotl", "rl: kto\n", "FT161", "estimates KTO's KL in each micro-batch"),
        ("axolotl", "rl: kto\nsimpo_gamma: 1\n", "FT160", "`simpo_gamma`"),
        ("axolotl", "rl: dpo\nkto_desirable_weight: 0.2\n", "FT160", "DPO does not read it"),
        ("axolotl", "rl: kto\ndatasets: [{path: a.jsonl, type: chatml.intel}]\n", "FT161", "type `chatml.intel`"),
        ("axolotl", "rl: kto\ndatasets: [{path: a.jsonl, type: zephyr.nectar}]\n", "FT162", "zephyr.nectar"),
        ("trl", "command: kto\nld_alpha: 0.5\n", "FT160", "KTO does not read it"),
    ],
)
def test_what_means_something_else_is_told(tool: str, lines: str, code: str, part: str, made: Make) -> None:
    found = convertible(made, tool, lines)
    assert found.heard(code, part), found.said


@pytest.mark.parametrize(
    ("tool", "lines", "part"),
    [
        ("axolotl", "rl: gdpo\n", "`rl: gdpo`"),
        ("axolotl", "rl: dpo\ndpo_loss_type: [exo_pair]\n", "the loss `exo_pair`"),
        ("axolotl", "rl: dpo\ndpo_loss_type: [sft]\n", "no loss compares"),
        ("llama-factory", "pref_loss: kto_pair\n", "the loss `kto_pair`"),
        ("trl", "beta: 1\nsync_ref_model: true\n", "sync_ref_model"),
        ("trl", "beta: 1\nnum_generations: 4\n", "num_generations"),
        ("trl", "beta: 1\noutput_dir: out/mine-ppo\n", "PPO"),
        ("trl", "command: bco\n", "`command: bco`"),
        ("trl", "command: kto\nloss_type: sigmoid\n", "the loss `sigmoid`"),
        ("trl", "command: cpo\nloss_type: hinge\n", "CPO with the loss `hinge`"),
        ("trl", "loss_type: alphapo\nalpha: 0.5\n", "AlphaPO"),
        ("trl", "loss_type: aot\ncommand: dpo\n", "the loss `aot`"),
        ("trl", "loss_type: hinge\nreference_free: true\n", "takes it away"),
        ("torchtune", _LOSS + "PPOLoss}\n", "`PPOLoss`"),
        ("torchtune", _LOSS + "IPOLoss}\n", "`IPOLoss`"),
        ("torchtune", "ref_checkpointer: {checkpoint_dir: /o}\n", "rewards and distillation"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    tool: str, lines: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(BASES[tool] + lines)
    with pytest.raises(FtcliError) as refused:
        convert(Path("theirs.yaml"), tool)
    assert [f.code for f in refused.value.findings if part in f.message] == ["FT163"], refused.value.findings


def test_a_recipe_of_torchtune_whose_reference_is_its_model_says_nothing_of_it(made: Make) -> None:
    same = _LOSS + "DPOLoss}\nref_checkpointer: {checkpoint_dir: /models/llama/, model_type: LLAMA3}\n"
    assert not convertible(made, "torchtune", same).heard("FT161", "reference")


def test_columns_of_pairs(made: Make) -> None:
    found = made("axolotl-dpo.yml", PREFERENCES["axolotl"][1], "axolotl")
    strings, messages = found.recipe.data.train
    assert strings.columns == {"prompt": "question"}
    assert messages.columns == {"prompt": "asked", "chosen": "good", "rejected": "bad"}
    (paired,) = made("tune-dpo.yaml", TORCHTUNE_DPO, "torchtune").recipe.data.train
    assert paired.columns == {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert "format" not in found.text


def test_rows_of_messages_need_no_word(made: Make) -> None:
    rows = "datasets: [{path: a.jsonl, type: chat_template.argilla}]\n"
    found = convertible(made, "axolotl", "rl: orpo\n" + rows)
    assert found.recipe.data.train[0].columns == {}
    assert not any("chat_template.argilla" in message for _, message, _ in found.said)


@pytest.mark.parametrize(
    ("entry", "columns", "part"),
    [
        ('"columns": {"prompt": "asked", "chosen": "good"}', {"prompt": "asked", "chosen": "good"}, "plain text"),
        ('"columns": {"query": "more"}', {"prompt": "instruction"}, "`query: more`"),
        ('"formatting": "sharegpt"', {"prompt": "conversations"}, "turns of `pairs`"),
    ],
)
def test_pairs_that_llama_factory_has_registered(entry: str, columns: dict[str, str], part: str, made: Make) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(f'{{"pairs": {{"file_name": "p.json", "ranking": true, {entry}}}}}')
    found = convertible(made, "llama-factory", "dataset: pairs\n")
    (source,) = found.recipe.data.train
    assert (source.path, source.columns) == ("data/p.json", columns)
    assert any(part in message for _, message, _ in found.said)


@pytest.mark.parametrize(("stage", "ranking"), [("dpo", "false"), ("sft", "true")])
def test_rows_that_the_stage_does_not_train_on_are_refused(stage: str, ranking: str, made: Make) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(f'{{"rows": {{"file_name": "p.json", "ranking": {ranking}}}}}')
    with pytest.raises(FtcliError, match="pairs"):
        made("theirs.yaml", BASES["llama-factory"].replace("dpo", stage) + "dataset: rows\n", "llama-factory")


@pytest.mark.parametrize(
    ("trainer", "method", "beta"), [("DPO", "dpo", 0.5), ("ORPO", "orpo", 0.5), ("CPO", "dpo", 0.5)]
)
def test_scripts_of_unsloth(trainer: str, method: str, beta: float, made: Make) -> None:
    text = UNSLOTH_DPO.replace(', loss_type="ipo"', "").replace("DPO", trainer).replace(f"Patch{trainer}", "PatchDPO")
    recipe = made("x.py", text).recipe
    assert recipe.preference is not None
    assert (recipe.train.method, recipe.preference.beta, recipe.data.max_seq_len) == (method, beta, 1024)
    assert (recipe.train.learning_rate, recipe.train.num_train_epochs) == (5e-6, 3)
    assert recipe.preference.loss == ("cpo" if trainer == "CPO" else None)


def test_a_script_of_trl_has_the_defaults_of_its_config(made: Make) -> None:
    found = made("x.py", 'trainer = DPOTrainer("org/m", args=DPOConfig("out"), train_dataset=load_dataset("org/r"))\n')
    train = found.recipe.train
    assert (train.method, train.learning_rate, train.per_device_train_batch_size) == ("dpo", 1e-6, 8)
    assert not found.heard("FT161", "taken for")


def test_code_that_trains_twice_is_refused(made: Make) -> None:
    with pytest.raises(FtcliError, match="trains several times"):
        made("x.py", UNSLOTH_DPO + "SFTTrainer(model=model)\n")


def test_every_loss_that_trl_shares_is_taken_by_its_name(made: Make) -> None:
    for name in preference_losses.names():
        if name in ("simpo", "cpo", "orpo"):
            continue
        found = convertible(made, "trl", f"loss_type: {name}\nbeta: 0.7\n")
        assert (at(found, "preference.loss"), at(found, "preference.beta")) == (name, 0.7)


def test_an_sft_recipe_stays_one(made: Make) -> None:
    assert convertible(made, "trl", "loss_type: chunked_nll\n").recipe.train.method == "sft"
    assert convertible(made, "trl", "command: sft\n").recipe.preference is None


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("type: chatml.argilla", {"prompt": "instruction"}),
        ("type: llama3.intel", {"prompt": "question"}),
        ("type: chatml.ultra", {}),
        ("type: chatml.argilla_chat", {"messages": "completion"}),
        (
            "type: {field_prompt: asked, field_completion: said, field_label: good}",
            {"prompt": "asked", "completion": "said", "label": "good"},
        ),
    ],
)
def test_labelled_answers_of_axolotl(kind: str, columns: dict[str, str], made: Make) -> None:
    found = convertible(made, "axolotl", f"rl: kto\ndatasets: [{{path: a.jsonl, {kind}}}]\n")
    assert found.recipe.data.train[0].columns == columns


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        ('"columns": {"kto_tag": "good"}', {"kto_tag": "good"}),
        ('"columns": {"prompt": "asked", "response": "said", "kto_tag": "kto_tag"}', {"instruction": "asked"}),
        ('"formatting": "sharegpt", "columns": {"messages": "turns", "kto_tag": "label"}', {"conversations": "turns"}),
        ('"formatting": "openai", "columns": {"messages": "messages", "kto_tag": "label"}', {"kto_tag": "label"}),
    ],
)
def test_labelled_answers_that_llama_factory_has_registered(entry: str, columns: dict[str, str], made: Make) -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(f'{{"rows": {{"file_name": "p.json", {entry}}}}}')
    base = BASES["llama-factory"].replace("stage: dpo", "stage: kto")
    lines = "dataset: rows\nkto_chosen_weight: 1.5\nkto_rejected_weight: 0.5\npref_beta: 0.3\n"
    found = made("theirs.yaml", base + lines, "llama-factory")
    recipe = found.recipe
    assert columns.items() <= recipe.data.train[0].columns.items()
    settings = recipe.preference
    assert settings is not None
    assert (recipe.train.method, recipe.data.format, settings.beta) == ("kto", "labelled", 0.3)
    assert (settings.desirable_weight, settings.undesirable_weight) == (1.5, 0.5)


def test_a_converted_recipe_of_kto_passes_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        "trl kto --model_name_or_path m --dataset_name org/rows --beta 0.2 --desirable_weight 1.1 "
        "--per_device_train_batch_size 8 --use_peft --lora_target_modules all-linear\n"
    )
    ours = yaml.safe_load(convert(Path("run.sh")).text)
    ours["model"]["name_or_path"] = "bundled:tiny-gemma2"
    ours["data"] |= {"train": ["bundled:smoke-dpo-train"], "max_seq_len": 64}
    Path("ours.yaml").write_text(yaml.safe_dump(ours))
    status = main(["check", "ours.yaml", "--offline", "--as", "rtx4090"])
    assert status == 0, capsys.readouterr().err
    assert ours["preference"] == {"beta": 0.2, "desirable_weight": 1.1}
