"""What people watch of a run on preferences: margins.json, its part of the report, length and stop tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import User, merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills
from tests.e2e.test_preference import pairs
from tests.tiers import further, telling
from tests.unit.run.test_report import Page


def write_pairs(folder: Path, *, rows: int = 15) -> list[str]:
    """Two files of pairs whose answers differ in length; one prompt looks like markup."""
    rng, paths = random.Random(0), []
    for name in ("one", "two"):
        lines = []
        for number in range(rows):
            answers = {
                key: [{"role": "assistant", "content": "".join(rng.choices("abcd", k=rng.randint(1, 12))) + mark}]
                for key, mark in (("chosen", "x"), ("rejected", "y"))
            }
            asked = [{"role": "user", "content": f"<script>{number}</script>"}]
            lines.append(json.dumps({"prompt": asked, **answers}))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        paths.append(str(path))
    return paths


def margins_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "margins.json").read_text())
    return found


def test_a_run_on_pairs_shows_them_before_and_after_and_so_does_an_evaluation(narrow: User) -> None:
    files = write_pairs(narrow.folder)
    change = pairs(data={"train": files, "eval": files, "max_seq_len": 128}, train={"max_steps": 4})
    recipe, run = narrow.recipe("r", **change), narrow.folder / "r"
    told = narrow.done("train", recipe)["eval"]
    found = margins_of(run)
    assert "step" not in found
    assert set(found["before"]["margins"]) == {0.0}
    after = found["after"]
    assert (after["rows"], len(after["margins"])) == (30, 30)
    assert sum(after["margins"]) / 30 == pytest.approx(told["margin"], rel=1e-4)
    assert after["wrong"] == sum(value < 0 for value in after["margins"])
    assert [row["margin"] for row in after["worst"]] == pytest.approx(
        sorted(value for value in after["margins"] if value < 0)[:8], rel=1e-4
    )
    right = sum(each["pairs"] * each["accuracy"] for each in after["by_length"])
    assert right / 30 == pytest.approx(told["accuracy"])
    assert [each["source"] for each in after["by_source"]] == files
    assert sum(each["rows"] * each["accuracy"] for each in after["by_source"]) / 30 == pytest.approx(told["accuracy"])
    assert {"accuracy_length_controlled", "stop_logp", "stop_change"} <= set(told)
    lines = [line for line in narrow.metrics("r") if "eval_loss" in line]
    assert lines[-1]["eval_stop_change"] == told["stop_change"]
    page = Page((run / "report.html").read_text())
    text = "".join(page.text)
    for part in ("Held-out pairs", "Margins of held-out pairs", "Margin against length", "Accuracy by length",
                 "By source", "Stop token after chosen answers", "Still wrong" if after["worst"] else ""):  # fmt: skip
        assert part in text, part
    assert "script" not in page.names()
    (run / "margins.json").unlink()
    measured = narrow.done("eval", recipe, "--run", str(run))
    again = margins_of(run)
    assert again["after"]["margins"] == pytest.approx(after["margins"], rel=1e-3, abs=1e-4)
    assert again["before"]["by_length"] == found["before"]["by_length"]
    assert measured["run"]["by_length"] == again["after"]["by_length"]
    for name in ("accuracy_length_controlled", "stop_logp", "stop_change"):
        assert measured["run"][name] == pytest.approx(told[name], rel=1e-3, abs=1e-4)


def test_the_table_of_an_evaluation_has_a_row_for_each_length(narrow: User, capsys: pytest.CaptureFixture[str]) -> None:
    from ftcli.cli.app import main

    files = write_pairs(narrow.folder)
    recipe = narrow.recipe("r", **pairs(data={"train": files, "eval": files, "max_seq_len": 128}))
    assert main(["eval", recipe, "--offline", "--quiet"]) == 0
    table = capsys.readouterr().out
    assert "accuracy length controlled" in table
    assert "accuracy, chosen over twice as long, " in table
    assert "accuracy, rejected over twice as long, " in table


@pytest.mark.parametrize("method", ["reward", *further("kto", "simpo")])
def test_other_methods_show_theirs(narrow: User, method: str) -> None:
    files = write_pairs(narrow.folder)
    change = pairs(data={"train": files, "eval": files, "max_seq_len": 128}, train={"method": method, "max_steps": 4})
    told = narrow.done("train", narrow.recipe("r", **change))["eval"]
    found, answers = margins_of(narrow.folder / "r"), method == "kto"
    assert found["after"]["kind"] == ("answers" if answers else "pairs")
    assert found["after"]["rows"] == (60 if answers else 30)
    assert ("labels" in found["after"], "accuracy_length_controlled" in told) == (answers, not answers)
    assert ("stop_logp" in told, "stop_change" in told) == (method != "reward", method == "kto")
    text = "".join(Page((narrow.folder / "r" / "report.html").read_text()).text)
    assert ("Held-out answers" in text, "Held-out pairs" in text) == (answers, not answers)
    assert ("Rewards of held-out answers" if answers else "Accuracy by length") in text


def test_a_resumed_run_keeps_what_was_before(narrow: User) -> None:
    recipe = narrow.recipe("r", **pairs())
    narrow.done("train", recipe)
    run = narrow.cut_off("r")
    whole = margins_of(run)
    narrow.done("train", recipe)
    assert margins_of(run) == whole
    assert whole["before"]["margins"]


@pytest.mark.parametrize("reference", ["off", "auto"])
@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "all weights"))
def test_the_change_of_the_stop_token_does_not_depend_on_how_the_reference_is_computed(
    narrow: User, lora: Any, reference: str
) -> None:
    """Scored ahead, a reference of full fine-tuning gives whole answers only; what was measured before training tells
    the change all the same.
    """
    change = pairs(lora=lora, train={"learning_rate": 1e-3}, preference={"reference_cache": reference})
    told = narrow.done("train", narrow.recipe("r", **change))["eval"]
    base = json.loads((narrow.folder / "r" / "eval.json").read_text())["base"]["measures"]
    change_since = told["stop_logp"] - base["stop_logp"]
    assert ("stop_change" in told) == (lora is not None or reference == "off")
    assert told.get("stop_change", change_since) == pytest.approx(change_since, abs=1e-4)
    assert change_since != 0


def test_a_model_that_forgets_to_stop_is_warned_of(user: User) -> None:
    """It learns to prefer answers that go on, and is measured on those that it should end."""
    files = []
    for name, answers in (("train", ("7 7 7", "7")), ("eval", ("7", "7 7 7"))):
        rows = []
        for number in range(12):
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
            asked = [{"role": "user", "content": f"pick: {number % 7} 7 {number % 5} 1"}]
            rows.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
        files.append(user.folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    change = pairs(
        data={"train": [str(files[0])], "eval": [str(files[1])]},
        train={"learning_rate": 3e-3, "max_steps": 12},
        eval={"every_steps": None, "samples": 0},
    )
    status, document = user.run("train", user.recipe("r", **change))
    assert status == 0
    assert document["result"]["eval"]["stop_change"] < -1
    (warned,) = (each for each in document["findings"] if each["code"] == "FT717")
    assert "the stop token has lost" in warned["message"]


#: 20 pairs and 30 held-out ones, in batches of 4: in the last turn one of two ranks has none.
RANKS = pairs(
    model={"kernels": "reference"},
    train={"max_steps": 3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
    eval={"every_steps": 2, "per_device_eval_batch_size": 4, "samples": 0},
    preference={"reference_cache": "off"},
)


@pytest.mark.long
@pytest.mark.parametrize("launch", telling({"ddp": {"engine": "ddp"}, "fsdp": {"engine": "fsdp"}}, "fsdp"))
def test_two_ranks_write_the_file_of_one(drills: Drills, launch: dict[str, Any]) -> None:
    files = write_pairs(drills.folder, rows=18)
    change = merged(RANKS, {"data": {"train": files, "eval": files, "max_seq_len": 128}, "launch": launch})
    alone = drills.whole(**merged(change, {"train": {"gradient_accumulation_steps": 2}}))
    run_ranks(drills, drills.recipe("two", **change), 2)
    assert (drills.folder / "two" / "margins.json").read_bytes() == (alone / "margins.json").read_bytes()
