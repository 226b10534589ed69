"""No hint leads to what this version refuses: other tools' keys and words, and what a recipe must say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.cli.app import main
from ftcli.config.dialects import FOREIGN, FOREIGN_IN, VALUES
from ftcli.config.findings import suggested_word, unknown_key, usable_values
from ftcli.config.schema import RecipeSchema

SCHEMA = RecipeSchema()
HEAD = (
    "version: 1\nmodel: {name_or_path: 'bundled:tiny-gemma2'}\n"
    "data: {train: ['bundled:smoke-train'], max_seq_len: 64}\n"
)


def test_what_a_hint_says_to_write_is_supported() -> None:
    for path in [*((name,) for name in FOREIGN), *((*s.split("."), n) for s, n in FOREIGN_IN)]:
        known = FOREIGN_IN.get((".".join(path[:-1]), path[-1])) or FOREIGN[path[-1]]
        said = unknown_key(path, SCHEMA, (known.only or (None,))[0])
        if not said.help.startswith("write `") or known.target is None:
            continue
        key, _, value = known.target.partition(": ")
        usable = usable_values(key)
        assert usable is None or (value.strip("[]") in usable if value else len(usable) > 1), (path, said)


@pytest.mark.parametrize("key", [key for key in VALUES if usable_values(key) is not None])
def test_a_word_of_another_tool_leads_to_one_that_is_supported(key: str) -> None:
    choices = SCHEMA.choices(SCHEMA.at(tuple(key.split("."))) or {})
    for given in VALUES[key]:
        help = suggested_word(tuple(key.split(".")), given, choices)
        meant = help.removeprefix("did you mean `").removesuffix("`?")
        assert meant == help or meant in (usable_values(key) or ()), (given, help)


@pytest.mark.parametrize(
    ("line", "told", "never"),
    [
        ("deepspeed: ds.json\n", "write `engine: ...` in section `launch`", "not have yet"),
        ("fsdp: full_shard\n", "write `engine: fsdp` in section `launch`", "remove it"),
        ("num_gpus: 2\n", "write `num_processes: ...` in section `launch`", "not have yet"),
        ("flash_attention: true\n", "`model.attention` may be auto or eager or sdpa", "write `attention"),
        ("rl: dpo\n", "write `method: ...` in section `train`", "ftcli grpo"),
        ("rl: kto\n", "write `method: ...` in section `train`", "ftcli grpo"),
        ("rl: gdpo\n", "`rl: gdpo` (axolotl) has no counterpart here", "ftcli grpo"),
        ("kto_desirable_weight: 0.2\n", "write `desirable_weight: ...` in section `preference`", "not offered"),
        ("rl: grpo\n", "run it with `ftcli grpo`", "no counterpart"),
        ("stage: dpo\n", "write `method: ...` in section `train`", "no counterpart"),
        ("stage: rm\n", "write `method: ...` in section `train`", "no counterpart"),
        ("stage: ppo\n", "`stage: ppo` (LLaMA-Factory) has no counterpart here", "write `method"),
        ("pref_beta: 0.1\n", "write `beta: ...` in section `preference`", "grpo"),
        ("load_in_4bit: true\n", "write `method: nf4` in section `quantization`", "not have yet"),
        (
            "launch: {engine: deepspeed}\n",
            "did you mean `fsdp`",
            "not have yet",
        ),
        ("export: {formats: [merged]}\n", "did you mean `safetensors`?", "did you mean `fp8`"),
    ],
)
def test_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, told: str, never: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(HEAD + line)
    assert main(["check", str(recipe), "--offline"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert never not in said


def test_a_t4_is_told_what_fits_an_8b_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "version: 1\nmodel: {name_or_path: meta-llama/Llama-3.1-8B-Instruct}\nlora: {}\n"
        "data: {train: ['bundled:sample-chat'], max_seq_len: 2048}\n"
    )
    assert main(["check", str(recipe), "--as", "t4", "--offline"]) == 3
    said = capsys.readouterr().err
    assert "--set quantization.method=nf4 --set model.dtype=float16" in said
    changes = ["--set", "quantization.method=nf4", "--set", "model.dtype=float16"]
    assert main(["check", str(recipe), "--as", "t4", "--offline", *changes]) == 0


def test_the_page_of_recipes_says_what_is_not_there_yet() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
    for key in ("launch.engine", "model.attention", "export.formats"):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key.partition('.')[2]}` |"))
        every = SCHEMA.choices(SCHEMA.at(tuple(key.split("."))) or {}) or _items(key)
        usable = usable_values(key)
        missing = [name for name in every if usable is not None and name not in usable]
        assert (f"not yet: {', '.join(missing)}" in row) if missing else ("not yet" not in row), row


def _items(key: str) -> tuple[str, ...]:
    node = SCHEMA.resolve(SCHEMA.at(tuple(key.split("."))) or {})
    return SCHEMA.choices(node["items"])


def test_nobody_is_told_to_write_a_number_that_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    for given, help in (("1e31", "write a whole number within these bounds"), ("100.0", "write 100")):
        recipe.write_text(f"{HEAD}train: {{max_steps: {given}}}\n")
        assert main(["check", str(recipe)]) == 2
        assert help in capsys.readouterr().err
