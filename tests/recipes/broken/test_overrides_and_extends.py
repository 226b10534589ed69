"""`--set`, the options that stand for it, and `extends`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.options import overrides
from ftcli.config.load import Override, load_recipe

HEAD = "version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n"

SETS = [
    ("zero", "lora.r=0", "FT206", "at least 1"),
    ("no equals sign", "lora.r", "FT130", "--set section.key=value"),
    ("no key", "=3", "FT130", "--set section.key=value"),
    ("empty part", "lora..r=3", "FT130", "--set section.key=value"),
    ("key within a number", "run.seed.x=3", "FT131", "--set 'run.seed={x: ...}'"),
    ("position outside", "data.train.1.path=b.jsonl", "FT131", "positions are 0 to 0"),
    ("word for a position", "data.train.first=b.jsonl", "FT131", "positions are 0 to 0"),
    ("extends", "extends=base.yaml", "FT132", "recipe file"),
    ("grpo as a method of train", "train.method=grpo", "FT205", "GRPO is `ftcli grpo`, with the section `grpo`"),
    ("reinforcement learning as a method", "train.method=RLHF", "FT205", "GRPO is `ftcli grpo`"),
    ("unclosed list", "data.train=[a", "FT110", "close it"),
    ("duplicate key", "lora={r: 1, r: 2}", "FT113", "keep one"),
    ("tag", "lora.r=!!int 3", "FT117", "remove"),
    ("unknown key", "train.learning_rte=1e-4", "FT201", "`learning_rate`"),
    ("other tool's key", "cutoff_len=512", "FT202", "max_seq_len"),
    ("wrong type", "train.learning_rate=fast", "FT204", "learning rate"),
    ("nothing", "lora.r=", "FT204", "write a value"),
    ("wrong word", "model.dtype=fp32", "FT205", "`float32`"),
    ("value with an equals sign", "run.name=a=b", "FT208", "letters, digits"),
]


@pytest.mark.parametrize(("text", "code", "help"), [pytest.param(*case[1:], id=case[0]) for case in SETS])
def test_override_is_refused_and_named_in_place_of_a_line(
    refused: Callable[..., object], text: str, code: str, help: str
) -> None:
    Path("r.yaml").write_text(HEAD + "run: {seed: 1}\ndata: {train: [{path: a.jsonl}]}\n")
    refused(["check", "r.yaml", "--set", text], code=code, at=f"--set {text}", help=help)


OPTIONS = [
    ("--max-steps", "0", "FT206", "at least 1"),
    ("--max-steps", "many", "FT204", "Optimizer steps"),
    ("--output-dir", "", "FT208", "write some text"),
]


@pytest.mark.parametrize(("option", "value", "code", "help"), OPTIONS)
def test_option_that_sets_a_key(refused: Callable[..., object], option: str, value: str, code: str, help: str) -> None:
    Path("r.yaml").write_text(HEAD)
    refused(["train", "r.yaml", option, value], code=code, at=f"{option} {value}", help=help)


def test_secret_in_an_override_is_not_shown(ftcli: Callable[..., object]) -> None:
    Path("r.yaml").write_text(HEAD)
    outcome = ftcli("train", "r.yaml", "--set", "hub_token=hf_abcdefghijklmnopqrstuvwxyz")
    assert outcome.status == 2
    assert "FT209" in outcome.stderr
    assert "abcdefghijk" not in outcome.stderr


SCHEMES = [
    "run.output_dir=s3://b/x",
    "run.resume=gs://b/x",
    "model.name_or_path=s3://b/m",
    "model.tokenizer=az://b/t",
    "data.train.0.path=az://b/x.jsonl",
    "data.train=[az://b/x.jsonl]",
    "data.eval=[{path: az://b/x.jsonl}]",
    "data.chat_template=https://h/t.jinja",
    'grpo={rewards: [{file: "s3://b/r.py:f"}]}',
    'eval.tasks=[{file: "s3://b/r.py:f"}]',
    "eval.tasks=[{use: json_valid, json_schema: s3://b/s.json}]",
    "eval.tasks=[{use: exact_match, data: [az://b/x.jsonl]}]",
    "eval.lm_eval=[s3://b/task.yaml]",
]


@pytest.mark.parametrize("text", SCHEMES)
def test_storage_that_is_not_served(refused: Callable[..., object], text: str) -> None:
    Path("r.yaml").write_text(HEAD + "data: {train: [{path: a.jsonl}]}\n")
    refused(["train", "r.yaml", "--set", text], code="FT165", at=f"--set {text}", help="mount the storage")
    assert [path.name for path in Path.cwd().iterdir()] == ["r.yaml"]


#: A name is no place, whatever it looks like.
NAMES = [
    'data.train=[{path: a.jsonl, columns: {completion: "s3://"}}]',
    'data.train=[{path: a.jsonl, remove_columns: ["s3://"]}]',
    "data.chat_template_kwargs={mode: s3://b}",
    'eval.tasks=[{use: exact_match, name: "s3://", extract: "s3://(.)", data: [{path: a, columns: {x: "s3://"}}]}]',
    'grpo={rewards: [{use: exact_match, answer: "s3://"}], num_generations: 2, max_prompt_length: 256}',
]


@pytest.mark.parametrize("text", NAMES)
def test_columns_and_names_may_look_like_storage(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(HEAD + "data: {train: [{path: a.jsonl}]}\n")
    load_recipe(recipe, [Override(text, "--set")])


EXTENDS = [
    ("missing base", {"r.yaml": "extends: gone.yaml\n"}, "FT122", "r.yaml:1:10", "relative to the file"),
    ("not a path", {"r.yaml": "version: 1\nextends: 3\n"}, "FT121", "r.yaml:2:10", "base.yaml"),
    ("list of bases", {"r.yaml": "extends: [a, b]\n"}, "FT121", "r.yaml:1:10", "one file"),
    ("nothing", {"r.yaml": "extends:\nversion: 1\n"}, "FT121", "r.yaml:1:1", "base.yaml"),
    ("itself", {"r.yaml": "extends: r.yaml\n"}, "FT123", "r.yaml:1:10", "remove one"),
    ("circle", {"r.yaml": "extends: b.yaml\n", "b.yaml": "extends: r.yaml\n"}, "FT123", "b.yaml:1:10", "remove one"),
    ("base is a folder", {"r.yaml": "extends: sub\n", "sub/x": ""}, "FT102", "sub", "recipe file"),
    ("base is empty", {"r.yaml": "extends: b.yaml\n", "b.yaml": ""}, "FT105", "b.yaml", "recipes list"),
    ("error in the base", {"r.yaml": "extends: sub/b.yaml\n", "sub/b.yaml": HEAD + "lora: {r: 0}\n"}, "FT206",
     "sub/b.yaml:3:11", "at least 1"),
    ("error over the base", {"r.yaml": "extends: b.yaml\nlora: {r: -1}\n", "b.yaml": HEAD + "lora: {r: 8}\n"}, "FT206",
     "r.yaml:2:11", "at least 1"),
    ("secret below", {"r.yaml": "extends: b.yaml\n", "b.yaml": HEAD + "token: abc\n"}, "FT209", "b.yaml:3:1",
     "HF_TOKEN"),
    ("another storage", {"r.yaml": "extends: s3://b/r.yaml\n"}, "FT165", "r.yaml:1:10", "mount the storage"),
    ("no file can be called so", {"r.yaml": 'extends: "a\\0b.yaml"\n'}, "FT120", "r.yaml:1:10", "remove"),
    ("long chain", {"r.yaml": "extends: 0.yaml\n", **{f"{n}.yaml": f"extends: {n + 1}.yaml\n" for n in range(40)}},
     "FT124", "14.yaml:1:10", "merge some"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "code", "at", "help"), [pytest.param(*case[1:], id=case[0]) for case in EXTENDS])
def test_extends_is_refused(
    refused: Callable[..., object], files: dict[str, str], code: str, at: str, help: str
) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    refused(["check", "r.yaml"], code=code, at=at, help=help)


@pytest.mark.parametrize("name", ["loop.yaml", "x" * 300 + ".yaml", "a/" * 3000 + "b.yaml"])
def test_a_base_that_no_path_leads_to(refused: Callable[..., object], name: str) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    Path("r.yaml").write_text(f"extends: {name}\n")
    refused(["check", "r.yaml"], code="FT103", at=name, help="check the path (`ls -l`)")


@pytest.mark.parametrize("escape", ["\\0", "\\ud800"])
def test_a_base_whose_name_no_file_can_have_is_one_error(refused: Callable[..., Any], escape: str) -> None:
    Path("r.yaml").write_text(f'extends: "a{escape}b.yaml"\n')
    outcome = refused(["check", "r.yaml"], code="FT120", at="r.yaml:1:10", help="remove it")
    assert outcome.stderr.count("error[") == 1


def test_a_base_in_the_home_folder(
    refused: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "base.yaml").write_text(HEAD + "lora: {r: 0}\n")
    Path("r.yaml").write_text("extends: ~/base.yaml\n")
    refused(["check", "r.yaml"], code="FT206", at=f"{tmp_path}/home/base.yaml:3:11", help="at least 1")


@pytest.mark.parametrize("name", ["a\nb", "tab\t", 'quote"s\n', "back\\slash\n", "it's", "2024"])
def test_a_name_of_the_command_line_is_taken_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (override,) = overrides((), output_dir=name)
    Path("r.yaml").write_text(HEAD)
    assert load_recipe(Path("r.yaml"), [override]).recipe.run.output_dir == name
