"""Loading: positions, extends, overrides, defaults, and back to YAML."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ftcli.config.load import LoadedRecipe, Override, dump_recipe, load_recipe
from ftcli.config.yaml import undumped
from ftcli.errors import ExitCode, FtcliError

HEAD = "version: 1\nmodel: {name_or_path: m}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def sets(*texts: str) -> list[Override]:
    return [Override(text, f"--set {text}") for text in texts]


def where(loaded: LoadedRecipe, path: str) -> tuple[str, int | None, int | None]:
    origin = loaded.origins.at(path)
    assert origin is not None
    return Path(origin.source).name, origin.line, origin.column


def test_every_value_knows_its_line_and_column(tmp_path: Path) -> None:
    text = (
        HEAD + "lora:\n  r:   8\n  target_modules:\n    - q_proj\n    - v_proj\ndata:\n  train:\n    - path: a.jsonl\n"
        "      max_rows: 3\n    - b.jsonl\n  eval: [c.jsonl, {path: d.jsonl}]\n"
    )
    loaded = load_recipe(write(tmp_path, "r.yaml", text))
    assert where(loaded, "model.name_or_path") == ("r.yaml", 2, 23)
    assert where(loaded, "lora.r") == ("r.yaml", 4, 8)
    assert where(loaded, "lora.target_modules") == ("r.yaml", 5, 3)
    assert where(loaded, "lora.target_modules.1") == ("r.yaml", 7, 7)
    assert where(loaded, "data.train.0.path") == ("r.yaml", 10, 13)
    assert where(loaded, "data.train.0.max_rows") == ("r.yaml", 11, 17)
    assert where(loaded, "data.train.1") == ("r.yaml", 12, 7)
    assert where(loaded, "data.eval.1.path") == ("r.yaml", 13, 26)


def test_a_default_stands_where_its_section_stands(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, "r.yaml", HEAD + "lora:\n  r: 8\n"))
    assert where(loaded, "lora.alpha") == ("r.yaml", 3, 1)
    assert where(loaded, "train.learning_rate") == ("r.yaml", None, None)
    assert loaded.origins.explicit("lora.r")
    assert not loaded.origins.explicit("lora.alpha")


def test_positions_count_characters_after_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + (HEAD + "# caf\u00e9 \u6f22\nlora: {r: 8}\n").replace("\n", "\r\n").encode())
    assert where(load_recipe(path), "lora.r") == ("r.yaml", 4, 11)


def test_maps_merge_and_lists_replace(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", HEAD + "lora: {r: 8, alpha: 4}\ndata: {train: [a.jsonl, b.jsonl], max_seq_len: 64}\n")
    path = write(tmp_path, "sub/r.yaml", "extends: ../base.yaml\nlora: {r: 2}\ndata: {train: [c.jsonl]}\n")
    loaded = load_recipe(path)
    assert loaded.recipe.lora is not None
    assert (loaded.recipe.lora.r, loaded.recipe.lora.alpha) == (2, 4.0)
    assert [source.path for source in loaded.recipe.data.train] == ["c.jsonl"]
    assert loaded.recipe.data.max_seq_len == 64
    assert where(loaded, "lora.r") == ("r.yaml", 2, 11)
    assert where(loaded, "lora.alpha") == ("base.yaml", 3, 21)
    assert where(loaded, "data.train.0") == ("r.yaml", 3, 16)


def test_a_chain_of_three(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", HEAD + "run: {seed: 1}\ntrain: {max_steps: 1}\nlora: {r: 1}\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\nrun: {seed: 2}\ntrain: {max_steps: 2}\n")
    recipe = load_recipe(write(tmp_path, "c.yaml", "extends: b.yaml\nrun: {seed: 3}\n")).recipe
    assert recipe.lora is not None
    assert (recipe.run.seed, recipe.train.max_steps, recipe.lora.r) == (3, 2, 1)


def test_two_recipes_may_share_a_base_that_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", HEAD)
    write(tmp_path, "b.yaml", "extends: base.yaml\n")
    assert load_recipe(write(tmp_path, "c.yaml", "extends: ./b.yaml\n")).recipe.model.name_or_path == "m"


def test_null_removes_a_section_of_the_base(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", HEAD + "lora: {r: 8}\n")
    assert load_recipe(write(tmp_path, "r.yaml", "extends: base.yaml\nlora: null\n")).recipe.lora is None


def test_overrides_are_read_as_yaml_and_win_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", HEAD + "lora: {r: 8}\ndata: {train: [{path: a.jsonl}, b.jsonl]}\n")
    changes = sets(
        "train.learning_rate=1e-4", "lora.r=1", "lora.r=2", "data.train.0.path=x=y.jsonl", "data.train.1=c.jsonl",
        "run.output_dir=", "run.output_dir=/tmp/a b", "grpo.num_generations=4", "lora.target_modules=[q_proj, v_proj]",
    )  # fmt: skip
    loaded = load_recipe(path, changes)
    recipe = loaded.recipe
    assert recipe.lora is not None
    assert recipe.grpo is not None
    assert recipe.train.learning_rate == 1e-4
    assert (recipe.lora.r, recipe.lora.target_modules) == (2, ("q_proj", "v_proj"))
    assert [source.path for source in recipe.data.train] == ["x=y.jsonl", "c.jsonl"]
    assert recipe.run.output_dir == "/tmp/a b"
    assert recipe.grpo.num_generations == 4
    assert where(loaded, "lora.r") == ("--set lora.r=2", None, None)
    assert where(loaded, "lora.alpha") == ("r.yaml", 3, 7)


def test_an_override_may_build_a_section_out_of_null(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", HEAD + "lora: null\n")
    recipe = load_recipe(path, sets("lora.r=3")).recipe
    assert recipe.lora is not None
    assert recipe.lora.r == 3


def test_an_override_can_repair_what_the_file_has_wrong(tmp_path: Path) -> None:
    path = write(tmp_path, "r.yaml", HEAD + "lora: {r: 0}\n")
    assert load_recipe(path, sets("lora.r=4")).recipe.lora is not None


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("my recipe", "my-recipe"),
        (".hidden", "hidden"),
        ("gemma2-9b", "gemma2-9b"),
        ("漢字", "run"),
        ("x" * 200, "x" * 100),
    ],
)
def test_name_and_directory_follow_from_the_file(tmp_path: Path, stem: str, name: str) -> None:
    run = load_recipe(write(tmp_path, f"{stem}.yaml", HEAD)).recipe.run
    assert run.name == name
    assert run.output_dir == f"runs/{name}"


def test_directory_follows_from_the_name(tmp_path: Path) -> None:
    run = load_recipe(write(tmp_path, "r.yaml", HEAD + "run: {name: mine}\n")).recipe.run
    assert (run.name, run.output_dir) == ("mine", "runs/mine")


def test_resolved_recipe_loads_again_as_the_same(tmp_path: Path) -> None:
    text = (
        HEAD + "run: {name: '1e-4', seed: 7}\nlora: {r: 3, alpha: 0.1, target_modules: [q_proj]}\n"
        "data: {train: [a.jsonl, {path: '010', columns: {text: 'no', messages: '# x: y'}}], overlong: drop}\n"
        "train: {learning_rate: 1e-4, adam_epsilon: 1e-9, warmup_steps: 0.03, max_grad_norm: 1e22}\n"
        "grpo: {rewards: [{use: regex, pattern: '^\\s*yes: \\\"no\\\"$', weight: .5}, {file: 'a.py:f', "
        "args: {k: [1, 1.5, 'true', null, 2020-01-01, {deep: off}]}}]}\neval: {tasks: [{use: contains}]}\n"
    )
    first = load_recipe(write(tmp_path, "r.yaml", text)).recipe
    resolved = dump_recipe(first)
    assert load_recipe(write(tmp_path, "resolved.yaml", resolved)).recipe == first
    assert dump_recipe(load_recipe(tmp_path / "resolved.yaml").recipe) == resolved


def test_resolved_recipe_means_the_same_to_a_reader_of_yaml_1_1(tmp_path: Path) -> None:
    import yaml

    text = HEAD + "run: {name: 'off', output_dir: '1:30'}\ntrain: {adam_epsilon: 1e-9}\n"
    recipe = load_recipe(write(tmp_path, "r.yaml", text)).recipe
    plain = yaml.safe_load(dump_recipe(recipe))
    assert plain["run"]["name"] == "off"
    assert plain["run"]["output_dir"] == "1:30"
    assert plain["train"]["adam_epsilon"] == 1e-9


def test_random_scalars_survive_dumping(tmp_path: Path) -> None:
    generator = random.Random(0)
    alphabet = "0123456789.eE+-_:xXoOnNaAyYtTfFrRuUlLsS#'\"\\ \t{}[],&*!|>%@`~é漢"
    words = ["".join(generator.choices(alphabet, k=generator.randint(1, 8))) for _ in range(400)]
    numbers = [generator.uniform(-1, 1) * 10 ** generator.randint(-300, 300) for _ in range(200)]
    recipe = load_recipe(write(tmp_path, "r.yaml", HEAD + "grpo: {rewards: [{file: 'a.py:f'}]}\n")).recipe
    assert recipe.grpo is not None
    reward = recipe.grpo.rewards[0].model_copy(update={"args": {"words": words, "numbers": numbers}})
    changed = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"rewards": (reward,)})})
    assert load_recipe(write(tmp_path, "again.yaml", dump_recipe(changed))).recipe == changed


def test_what_libyaml_would_escape_stays_readable(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "r.yaml", HEAD + "run: {output_dir: 'é漢 😀'}\n")).recipe
    resolved = dump_recipe(recipe)
    assert "  output_dir: é漢 😀\n" in resolved
    assert load_recipe(write(tmp_path, "again.yaml", resolved)).recipe == recipe


def test_what_was_read_of_a_dumped_recipe_may_be_changed() -> None:
    first = undumped("a: [1, {b: 2}]\n")
    first["a"][1]["b"] = 3
    assert undumped("a: [1, {b: 2}]\n") == {"a": [1, {"b": 2}]}


def test_random_damage_is_always_an_error_of_the_recipe(tmp_path: Path) -> None:
    """Whatever a file holds, the answer is a recipe or findings, never another exception."""
    generator = random.Random(1)
    whole = HEAD + "lora: &a {r: 8, alpha: 1e-4}\ndata:\n  train:\n    - path: 'a'\n      max_rows: 3\n  format: text\n"
    pieces = [*"\t\n :-{}[],&*!|>'\"%@`#?<=~\x00é漢\ufeff", "---", "<<: ", "!!int ", "*a", "1e5", "\r\n", "  "]
    refused = 0
    for _ in range(400):
        text = whole
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(text))
            text = text[:at] + generator.choice([*pieces, ""]) + text[at + generator.randint(0, 3) :]
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8", newline="")
        error = _refusal(path)
        if error is not None:
            refused += 1
            assert error.exit_code == ExitCode.RECIPE
            assert error.findings
            assert all(finding.origin is not None for finding in error.findings)
    assert refused > 200


def _refusal(path: Path) -> FtcliError | None:
    try:
        load_recipe(path)
    except FtcliError as error:
        return error
    return None
