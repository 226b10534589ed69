"""The grid of a sweep: how values are split, which runs there are, and what their folders are called."""

from __future__ import annotations

import re

import pytest

from ftcli.config.grid import combinations, split_values, value_text
from ftcli.errors import FtcliError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-4,2e-4", ["1e-4", "2e-4"]),
        ("1e-4, 2e-4", ["1e-4", "2e-4"]),
        ("8", ["8"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("[a,[b,c]]", ["[a,[b,c]]"]),
        ("{path: x, weight: 1},{path: y}", ["{path: x, weight: 1}", "{path: y}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"a,b","c\\",d"', ['"a,b"', '"c\\",d"']),
        ("it's,that's", ["it's", "that's"]),
        ("['a]',b],c", ["['a]',b]", "c"]),
        ("", [""]),
        ("8,", ["8", ""]),
    ],
)
def test_values_are_split_at_commas_outside_of_quotes_and_brackets(text: str, parts: list[str]) -> None:
    assert split_values(text) == parts


def test_the_last_key_changes_fastest_and_single_values_are_fixed() -> None:
    grid = combinations(["train.learning_rate=1e-4,2e-4", "train.max_steps=5", "lora.r=8,16"])
    assert [each.name for each in grid] == [
        "train.learning_rate=0.0001,lora.r=8",
        "train.learning_rate=0.0001,lora.r=16",
        "train.learning_rate=0.0002,lora.r=8",
        "train.learning_rate=0.0002,lora.r=16",
    ]
    assert grid[1].settings == {"train.learning_rate": 1e-4, "lora.r": 16}
    texts = [override.text for override in grid[1].overrides]
    assert texts == ["train.max_steps=5", "train.learning_rate=1e-4", "lora.r=16"]


def test_a_list_is_one_value() -> None:
    (one, two) = combinations(["lora.target_modules=[q_proj],[q_proj,v_proj]", "data.train=[a.jsonl,b.jsonl]"])
    assert one.settings == {"lora.target_modules": ["q_proj"]}
    assert two.settings == {"lora.target_modules": ["q_proj", "v_proj"]}
    assert "data.train=[a.jsonl,b.jsonl]" in [override.text for override in one.overrides]


@pytest.mark.parametrize(
    "assignment",
    [
        "data.train=/home/me/a.jsonl,C:\\x\\b.jsonl",
        'data.chat_template=a<b>|c?*,d:e"f',
        "model.name_or_path=org/one,org_one",
        "model.name_or_path=Model,model",
        f"model.name_or_path={'a' * 300},{'a' * 301}",
        "model.name_or_path=.,..",
        "model.name_or_path=漢字,ü",
        "lora.target_modules=[q_proj],[q_proj ]x",
    ],
)
def test_folder_names_are_safe_and_different_on_any_file_system(assignment: str) -> None:
    names = [each.name for each in combinations([assignment.replace("[q_proj ]x", "[q_proj,v_proj]")])]
    assert len({name.casefold() for name in names}) == len(names) == 2
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._=,+-]{1,150}", name)
        assert not name.endswith((".", " "))


def test_a_name_does_not_depend_on_how_a_number_is_written() -> None:
    first, second = (combinations([f"train.learning_rate={text},1"])[0].name for text in ("1e-4", "0.0001"))
    assert first == second == "train.learning_rate=0.0001"
    assert [value_text(value) for value in (1e-05, 0.1 + 0.2, True, None, "x", [1])] == [
        "1e-05", "0.30000000000000004", "true", "null", "x", "[1]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["lora.r=8"], "nothing to compare"),
        ([], "nothing to compare"),
        (["lora.r=8,"], "an empty value"),
        (["lora.r=8,8"], "the value 8 twice"),
        (["train.learning_rate=1e-4,0.0001"], "the value 0.0001 twice"),
        (["lora.r=8,16", "lora.r=4"], "`lora.r` is set twice"),
        (["run.output_dir=a,b"], "a sweep sets itself"),
        (["run.resume=auto,never"], "a sweep sets itself"),
        (["train.learning_rate=" + ",".join(map(str, range(1, 102))), "lora.r=" + ",".join(map(str, range(1, 12)))],
         "1,111 combinations"),
    ],
)  # fmt: skip
def test_what_is_no_grid_is_refused(assignments: list[str], message: str) -> None:
    with pytest.raises(FtcliError) as caught:
        combinations(assignments)
    assert [finding.code for finding in caught.value.findings] == ["FT156"]
    assert message in caught.value.findings[0].message
    assert caught.value.findings[0].help
