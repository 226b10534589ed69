"""Data as a user meets it: packed runs, mixtures, samples on the terminal, a cache that makes the second run start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from tests.e2e.conftest import User

PACKED = {"data": {"packing": True, "max_seq_len": 128}}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def ledger(user: User, name: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((user.folder / name / "tokens.json").read_text(encoding="utf-8"))
    return found


def test_packed_training_gives_the_loss_of_the_same_rows_unpacked(user: User) -> None:
    """All rows in one step: the sum over their tokens does not depend on who shares a sequence."""
    rows = {"data": {"train": [{"path": "bundled:smoke-train", "max_rows": 24}], "max_seq_len": 128}}
    one = {"train": {"max_steps": 1, "per_device_train_batch_size": 24}}
    user.done("train", user.recipe("plain", **rows, **one))
    user.done("train", user.recipe("packed", data={**rows["data"], "packing": True}, **one))
    plain, packed = user.metrics("plain")[0], user.metrics("packed")[0]
    assert packed["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert packed["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert packed["tokens"] == plain["tokens"]
    epoch = ledger(user, "packed")["epoch"]
    assert epoch["packed"] is True
    assert epoch["rows"] == 24
    assert epoch["sequences"] == 8  # three of 35 to 44 tokens fit into 128
    assert epoch["tokens"] == plain["tokens"]


def test_a_packed_run_resumes_in_the_middle_of_an_epoch_to_the_bit(user: User) -> None:
    change: dict[str, Any] = {
        **PACKED,
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        "train": {"per_device_train_batch_size": 2, "max_steps": None, "num_train_epochs": 2},
    }
    recipe = user.recipe("part", **change)
    user.done("train", recipe)
    whole = user.losses("part")
    run = user.folder / "part"
    shutil.rmtree(run / "adapter")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "running", "exit_code": None}))
    for folder in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    user.done("train", recipe)
    assert len(whole) // 2 > 4  # step 4 lies within the first of two epochs
    assert user.losses("part") == whole


def test_a_second_run_finds_its_tokens(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_CACHE", str(user.folder / "cache"))
    recipe = user.recipe(train={"max_steps": 1})
    user.done("train", recipe)
    assert len(list((user.folder / "cache" / "tokens").iterdir())) == 2

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("rows were read again")

    monkeypatch.setattr("ftcli.data.prepare.iterate", refuse)
    user.done("train", recipe, "--resume", "never")
    assert user.losses("r") == user.losses("r.previous-1")
    monkeypatch.setenv("FTCLI_CACHE", "off")
    assert main(["train", recipe, "--resume", "never", "--quiet", "--offline"]) == 1


def test_mixtures_and_every_count_stand_in_tokens_json(user: User) -> None:
    (user.folder / "more.csv").write_text("instruction,output\n" + "".join(f"say {n},{n}\n" for n in range(5)) + "x,\n")
    sources = [
        {"path": "bundled:smoke-train", "max_rows": 30, "weight": 3},
        {"path": str(user.folder / "more.csv"), "weight": 1},
    ]
    user.done("train", user.recipe(data={"train": sources, "max_bad_rows": 1}, train={"max_steps": 1}))
    first, second, held_out = ledger(user)["datasets"]
    assert (first["rows"], first["rows_kept"], first["rows_skipped"]) == (30, 30, 0)
    assert (second["rows"], second["rows_kept"], second["rows_skipped"]) == (6, 5, 1)
    assert second["skipped_by_code"] == {"FT412": 1}
    assert (held_out["split"], held_out["layout"]) == ("eval", "messages")
    assert first["length_quantiles"]["max"] == first["longest"]
    assert first["tokens_kept"] == first["tokens_masked"] + first["tokens_trained"]
    epoch = ledger(user)["epoch"]
    assert epoch["rows"] == 40  # 30 of the first, and the five others twice
    assert epoch["tokens_padded"] > 0


def test_check_shows_rows_with_what_is_trained(user: User) -> None:
    recipe = user.recipe()
    samples = user.done("check", recipe, "--show-sample", "2")["samples"]
    assert [sample["origin"] for sample in samples] == ["bundled:smoke-train:1", "bundled:smoke-train:2"]
    row = json.loads(bundled("smoke-train.jsonl").read_text().splitlines()[0])
    tokens = samples[0]["tokens"]
    assert (
        "".join(token["text"] for token in tokens if token["trained"])
        == row["messages"][1]["content"] + "<end_of_turn>"
    )
    assert samples[0]["trained"] == sum(token["trained"] for token in tokens)
    assert all(isinstance(token["id"], int) for token in tokens)


def test_marks_without_colours_and_colours_where_they_are_wanted(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    (user.folder / "d.jsonl").write_text(
        '{"prompt": "1+\\u001b[31m1=", "completion": "2 ü漢\\nend"}\n', encoding="utf-8"
    )
    recipe = user.recipe(data={"train": [str(user.folder / "d.jsonl")]})
    assert main(["check", recipe, "--show-sample", "1", "--offline"]) == 0
    out = user.capture.readouterr().out
    assert "[[2 ü漢\\n\nend<end_of_turn>]]" in out
    assert "\x1b" not in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["check", recipe, "--show-sample", "1", "--offline"]) == 0
    out = user.capture.readouterr().out
    assert "\x1b[1;32m2 ü漢\\n\x1b[0m\n\x1b[1;32mend<end_of_turn>\x1b[0m" in out
    assert "\x1b[31m" not in out


def test_samples_of_bad_rows_and_of_prompts(user: User) -> None:
    (user.folder / "d.jsonl").write_text('{"messages": [{"role": "system", "content": "s"}]}\n')
    status, document = user.run(
        "check", user.recipe(data={"train": [str(user.folder / "d.jsonl")]}), "--show-sample", "1"
    )
    assert (status, document["findings"][-1]["code"]) == (4, "FT412")
    rewards = [{"use": "exact_match"}]
    grpo = {"rewards": rewards, "num_generations": 4, "max_prompt_length": 32, "max_completion_length": 16}
    source = {"data": {"train": ["bundled:smoke-grpo-train"], "eval": []}}
    samples = user.done("check", user.recipe("g", grpo=grpo, **source), "--show-sample", "1")["samples"]
    assert samples[0]["layout"] == "prompt"
    assert samples[0]["trained"] == 0


def test_a_folder_of_parquet_trains(user: User) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in bundled("smoke-train.jsonl").read_text().splitlines()[:8]]
    (user.folder / "rows").mkdir()
    for part in range(2):
        pq.write_table(
            pa.Table.from_pylist(rows[4 * part : 4 * part + 4]), user.folder / "rows" / f"part-{part}.parquet"
        )
    user.done("train", user.recipe(data={"train": [str(user.folder / "rows")]}, train={"max_steps": 1}))
    assert ledger(user)["datasets"][0]["rows_kept"] == 8


def test_the_saved_tokenizer_renders_as_training_did(user: User) -> None:
    user.done("train", user.recipe(data={"chat_template": "gemma-system"}, train={"max_steps": 1}))
    saved = (user.folder / "r" / "adapter" / "chat_template.jinja").read_text(encoding="utf-8")
    assert saved == bundled("gemma-system.jinja", "templates").read_text(encoding="utf-8")


def bundled(name: str, folder: str = "data") -> Path:
    from ftcli.assets import asset

    return asset(folder, name)
