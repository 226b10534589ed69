"""Files that are text but not YAML as recipes want it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)

CASES = [
    ("tab as indentation", "lora:\n\tr: 8\n", "FT111", "r.yaml:2:1", "spaces"),
    ("tab after a colon", "version:\t1\n", "FT111", "r.yaml:1:9", "spaces"),
    ("unclosed list", "data:\n  train: [a.jsonl\n", "FT110", "r.yaml:2:10", "close it with `]`"),
    ("unclosed map", "lora: {r: 8\n", "FT110", "r.yaml:1:7", "close it with `}`"),
    ("unclosed quote", "run:\n  name: 'abc\n", "FT110", "r.yaml:2:9", "close it"),
    ("colon in a value", "run:\n  name: a: b\n", "FT110", "r.yaml:2:10", "quotes"),
    ("wrong indentation", "lora:\n  r: 8\n alpha: 3\n", "FT110", "r.yaml:3:2", "align"),
    ("key after a list", "- a\nb: c\n", "FT110", "r.yaml:2:1", "align"),
    ("item on the key's line", "data:\n  train: - a\n", "FT110", "r.yaml:2:10", "line of its own"),
    ("line without a colon", "version: 1\nmodel\nlora: 2\n", "FT110", "r.yaml:2:1", "key: value"),
    ("backslash in quotes", 'run: {name: "a\\qb"}\n', "FT110", "r.yaml:1:16", "single quotes"),
    ("escape of no character", 'run: {name: "a\\uD800"}\n', "FT120", "r.yaml:1:13", "write the character"),
    ("at sign", "run: {name: @me}\n", "FT110", "r.yaml:1:13", "quotes"),
    ("undefined alias", "lora: *base\n", "FT110", "r.yaml:1:7", "quotes"),
    ("two documents", "version: 1\n---\nversion: 1\n", "FT112", "r.yaml:2:1", "---"),
    ("duplicate key", "version: 1\nlora:\n  r: 8\n  alpha: 1\n  r: 16\n", "FT113", "r.yaml:5:3", "line 3"),
    ("duplicate section", "version: 1\nlora: {r: 8}\nlora: {r: 9}\n", "FT113", "r.yaml:3:1", "line 2"),
    ("number as key", "version: 1\n7: x\n", "FT114", "r.yaml:2:1", '"7"'),
    ("true as key", "version: 1\ntrue: x\n", "FT114", "r.yaml:2:1", '"true"'),
    ("list as key", "version: 1\n[a, b]: x\n", "FT114", "r.yaml:2:1", "quotes"),
    ("no key", "version: 1\n: x\n", "FT110", "r.yaml:2:1", "align"),
    ("deep nesting", "version: 1\nlora: " + "[" * 4000, "FT115", "r.yaml:2:38", "five deep"),
    ("deep blocks", "".join(" " * n + "a:\n" for n in range(200)), "FT115", "r.yaml:32:32", "five deep"),
    ("alias bomb", BOMB, "FT116", "r.yaml:5:10", "write the values out"),
    ("alias of itself", "version: 1\nlora: &a [*a]\n", "FT116", "r.yaml:2:11", "write the values out"),
    ("too many values", "data:\n  train:\n" + "  - a\n" * 12_000, "FT116", "r.yaml:9998:5", "data files"),
    ("python tag", "version: 1\nrun: !!python/object/apply:os.system ['id']\n", "FT117", "r.yaml:2:6", "remove"),
    ("standard tag", "version: !!int 1\n", "FT117", "r.yaml:1:10", "remove"),
    ("merge key", "version: 1\nlora: &a {r: 8}\ntrain:\n  <<: *a\n", "FT118", "r.yaml:4:3", "extends"),
    ("list at the top", "- version: 1\n", "FT119", "r.yaml:1:1", "version: 1"),
    ("text at the top", "gemma\n", "FT119", "r.yaml:1:1", "version: 1"),
    ("colon without a space", "version:1\n", "FT119", "r.yaml:1:1", "space follows each colon"),
    ("yaml directive", "%YAML 3.0\n---\nversion: 1\n", "FT110", "r.yaml:1:1", "remove"),
]


@pytest.mark.parametrize(("text", "code", "at", "help"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_yaml_is_refused(refused: Callable[..., object], text: str, code: str, at: str, help: str) -> None:
    Path("r.yaml").write_text(text)
    refused(["check", "r.yaml"], code=code, at=at, help=help)


def test_problems_that_do_not_stop_the_reading_are_told_together(ftcli: Callable[..., object]) -> None:
    Path("r.yaml").write_text(
        "version: 1\nversion: 1\n7: x\nmodel: {name_or_path: m, nope: 1}\ntrain: {max_steps: -1}\n"
    )
    outcome = ftcli("check", "r.yaml")
    codes = [line.split("error[")[1][:5] for line in outcome.stderr.splitlines() if "error[" in line]
    assert codes == ["FT113", "FT114", "FT201", "FT206"]
