"""Recipes whose keys or values the models refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = "version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n"

# (name, what follows the two lines of HEAD, code, place, help)
CASES = [
    # unknown keys
    ("misspelt key", "train:\n  learning_rte: 1e-4\n", "FT201", "4:3", "did you mean `learning_rate`?"),
    ("misspelt section", "trian: {}\n", "FT201", "3:1", "did you mean `train`?"),
    ("capitals", "lora:\n  R: 8\n", "FT201", "4:3", "did you mean `r`?"),
    ("hyphen", "data: {max-seq-len: 8}\n", "FT201", "3:8", "did you mean `max_seq_len`?"),
    ("wrong section", "lora:\n  learning_rate: 1e-4\n", "FT201", "4:3", "`train.learning_rate`"),
    ("no section", "learning_rate: 1e-4\n", "FT201", "3:1", "`train.learning_rate`"),
    ("two homes", "lora:\n  temperature: 1.0\n", "FT201", "4:3", "`grpo.temperature` or `distill.temperature`"),
    ("section in a section", "train:\n  lora: {r: 8}\n", "FT201", "4:3", "section of its own"),
    ("nothing alike", "train:\n  zzz: 1\n", "FT201", "4:3", "keys of train: method, num_train_epochs"),
    ("in a list", "data:\n  train:\n    - path: a.jsonl\n      max_row: 3\n", "FT201", "6:7", "`max_rows`"),
    # required keys and empty sections
    ("no model name", "lora: {r: 8}\nmodel:\n  dtype: auto\n", "FT203", "4:1", "Hub id"),
    ("empty section", "lora:\n", "FT210", "3:1", "lora: {}"),
    ("empty section of defaults", "train:\n", "FT210", "3:1", "train: {}"),
    # types
    ("text for a number", "train:\n  learning_rate: fast\n", "FT204", "4:18", "learning rate"),
    ("quoted number", 'train:\n  learning_rate: "1e-4"\n', "FT204", "4:18", "1e-4 without quotes"),
    ("number for text", "run: {name: 2024}\n", "FT204", "3:13", '"2024"'),
    ("fraction for a count", "lora:\n  r: 8.5\n", "FT204", "4:6", "whole number"),
    ("float for a count", "train: {max_steps: 1e3}\n", "FT204", "3:20", "write 1000"),
    ("true for a count", "lora: {r: true}\n", "FT204", "3:11", "Rank"),
    ("yes for a boolean", "data: {packing: yes}\n", "FT204", "3:17", "write true"),
    ("off for a boolean", "data:\n  packing: off\n", "FT204", "4:12", "write false"),
    ("one for a boolean", "data: {packing: 1}\n", "FT204", "3:17", "write true"),
    ("sexagesimal", "train: {max_steps: 1:30}\n", "FT204", "3:20", "not a number here"),
    ("leading zero", "lora: {r: 010}\n", "FT204", "3:11", "write 10 without the leading zero"),
    ("underscores", "train: {max_steps: 1_000}\n", "FT204", "3:20", "write 1000"),
    ("suffix", "data: {max_seq_len: 4k}\n", "FT204", "3:21", "write the number out"),
    ("date for a count", "train: {max_steps: 2024-01-01}\n", "FT204", "3:20", "Optimizer steps"),
    ("nothing for a count", "lora:\n  r:\n", "FT204", "4:3", "write a value"),
    ("null for a count", "lora: {r: null}\n", "FT204", "3:11", "write a value"),
    ("text for a list", "data:\n  train: a.jsonl\n", "FT204", "4:10", "[a.jsonl]"),
    ("number in a list of paths", "data: {train: [a.jsonl, 7]}\n", "FT204", "3:25", "indented"),
    ("list for text", "run: {name: [a]}\n", "FT204", "3:13", "brackets"),
    ("list for a section", "lora: [r, 8]\n", "FT204", "3:7", "brackets"),
    ("text for a section", "lora: true\n", "FT204", "3:7", "lines of their own"),
    ("section for a number", "train:\n  max_steps: {a: 1}\n", "FT204", "4:14", "overrides"),
    ("number for modules", "lora: {target_modules: 5}\n", "FT204", "3:24", "[5]"),
    ("number among modules", "lora: {target_modules: [q_proj, 5]}\n", "FT204", "3:33", '"5"'),
    ("no type of file", "export: {gguf: {types: []}}\n", "FT208", "3:24", "write at least one"),
    ("no format", "export: {formats: []}\n", "FT208", "3:19", "write at least one"),
    # words
    ("other tool's dtype", "train: {}\nmodel: {name_or_path: m, dtype: bf16}\n", "FT205", "4:33", "`bfloat16`"),
    ("misspelt optimizer", "train: {optim: adamw_torchh}\n", "FT205", "3:16", "`adamw_torch`"),
    ("4bit", "quantization: {method: 4bit}\n", "FT205", "3:24", "`nf4`"),
    ("merged export", "export: {formats: [merged]}\n", "FT205", "3:20", "`safetensors`"),
    ("word of no meaning", "data: {overlong: zzz}\n", "FT205", "3:18", "choose one"),
    ("unknown modules word", "lora: {target_modules: all_linear}\n", "FT205", "3:24", "`all-linear`"),
    # ranges
    ("zero rank", "lora: {r: 0}\n", "FT206", "3:11", "at least 1"),
    ("negative rate", "train:\n  learning_rate: -1e-4\n", "FT206", "4:18", "more than 0"),
    ("zero batch", "train: {per_device_train_batch_size: 0}\n", "FT206", "3:38", "at least 1"),
    ("dropout over one", "lora: {dropout: 1.5}\n", "FT206", "3:17", "at most 1"),
    ("huge rank", "lora: {r: 99999}\n", "FT206", "3:11", "at most 4096"),
    ("huge length", f"data: {{max_seq_len: {10**30}}}\n", "FT206", "3:21", "at most 1000000000"),
    ("digits without end", f"data: {{max_seq_len: {'9' * 5000}}}\n", "FT204", "3:21", "whole number"),
    ("negative seed", "run: {seed: -1}\n", "FT206", "3:13", "at least 0"),
    ("one completion", "grpo: {num_generations: 1}\n", "FT206", "3:25", "at least 2"),
    ("NaN", "train: {weight_decay: .nan}\n", "FT207", "3:23", "NaN"),
    ("infinity", "train: {max_grad_norm: .inf}\n", "FT207", "3:24", "infinity"),
    ("overflow", "train: {learning_rate: 1e999}\n", "FT207", "3:24", "infinity"),
    # text
    ("slash in a name", "run: {name: a/b}\n", "FT208", "3:13", "letters, digits"),
    ("empty path", 'run: {output_dir: ""}\n', "FT208", "3:19", "write some text"),
    ("reward without a function", "grpo: {rewards: [{file: r.py}]}\n", "FT208", "3:25", "rewards.py:function_name"),
]

# Recipes that do not begin with HEAD.
WHOLE = [
    ("no version", "model: {name_or_path: m}\n", "FT203", "r.yaml", "version: 1"),
    ("no model", "version: 1\n", "FT203", "r.yaml", "section"),
    ("later version", "version: 2\nmodel: {name_or_path: m}\n", "FT211", "r.yaml:1:10", "version: 1"),
    ("quoted version", 'version: "1"\nmodel: {name_or_path: m}\n', "FT205", "r.yaml:1:10", "did you mean `1`?"),
]


@pytest.mark.parametrize(("text", "code", "at", "help"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_values_are_refused(refused: Callable[..., object], text: str, code: str, at: str, help: str) -> None:
    head = "version: 1\n\n" if "model:" in text else HEAD
    Path("r.yaml").write_text(head + text)
    refused(["check", "r.yaml"], code=code, at=f"r.yaml:{at}", help=help)


@pytest.mark.parametrize(("text", "code", "at", "help"), [pytest.param(*case[1:], id=case[0]) for case in WHOLE])
def test_whole_recipes_are_refused(refused: Callable[..., object], text: str, code: str, at: str, help: str) -> None:
    Path("r.yaml").write_text(text)
    refused(["check", "r.yaml"], code=code, at=at, help=help)


def test_all_problems_of_a_recipe_are_told_at_once_from_top_to_bottom(ftcli: Callable[..., object]) -> None:
    text = HEAD + "lora: {r: 0, alpha: -1}\ntrain:\n  epochs: 3\n  optim: adam\ndata:\n  packing: yes\n"
    Path("r.yaml").write_text(text)
    outcome = ftcli("train", "r.yaml", "--set", "run.seed=x")
    places = [line.partition(": error[")[0] for line in outcome.stderr.splitlines() if ": error[" in line]
    assert places == ["r.yaml:3:11", "r.yaml:3:21", "r.yaml:5:3", "r.yaml:6:10", "r.yaml:8:12", "--set run.seed=x"]


def test_a_flood_of_problems_is_cut_for_people_and_whole_for_scripts(ftcli: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + "data:\n  train:\n" + "    - 7\n" * 250)
    outcome = ftcli("check", "r.yaml")
    assert outcome.stderr.count("error[FT204]") == 100
    assert outcome.stderr.endswith("ftcli: 150 more; --json has them all\n")
    assert len(json.loads(ftcli("check", "r.yaml", "--json").stdout)["findings"]) == 250


def test_a_union_that_fails_is_one_finding(ftcli: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD + "lora: {target_modules: 5}\n")
    assert ftcli("check", "r.yaml").stderr.count("error[") == 1


SECRETS = [
    ("token", "hub_token: abc123\n"),
    ("api key in a section", "logging: {wandb_api_key: 0123456789abcdef}\n"),
    ("token by its form", "run: {output_dir: hf_abcdefghijklmnopqrstuvwxyz}\n"),
    ("password", "run:\n  password: 'abc123'\n"),
]


@pytest.mark.parametrize("text", [pytest.param(case[1], id=case[0]) for case in SECRETS])
def test_secrets_are_refused_and_never_shown(ftcli: Callable[..., object], text: str) -> None:
    Path("r.yaml").write_text(HEAD + text)
    for extra in ((), ("--json",)):
        outcome = ftcli("check", "r.yaml", *extra)
        said = outcome.stdout + outcome.stderr
        assert outcome.status == 2
        assert "FT209" in said
        assert "HF_TOKEN" in said
        assert not any(secret in said for secret in ("abc123", "0123456789abcdef", "hf_abcdefghijklmn"))
